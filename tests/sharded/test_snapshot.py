"""While a thread copies pieces, whoever wants one waits; nobody else does, and afterwards nobody."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.sharded import snapshot as snapshots
from shardwise.sharded.parameter import ShardedParameter
from shardwise.sharded.snapshot import HeldParameter, Snapshot, is_sole
from tests.sharded.threads import ThreadGroup, _Meeting, cut, randn

Pair = tuple[ShardedParameter, ShardedParameter]


def _fused(held: ShardedParameter, other: ShardedParameter) -> None:
    options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "lr": 0.1, "maximize": False}
    states = [[held], [torch.zeros_like(other)]]
    torch._fused_adamw_([other], [other.clone()], *states, [], [torch.ones(())], weight_decay=0.1, **options)


WRITES: dict[str, Callable[[ShardedParameter, ShardedParameter], object]] = {
    "fill": lambda held, other: held.fill_(9),
    "data": lambda held, other: held.data.mul_(2),
    "assigned": lambda held, other: setattr(held, "data", other),
    "out": lambda held, other: torch.add(other, other, out=held),
    "foreach": lambda held, other: torch._foreach_lerp_([other, held], [held, other], 0.5),
    "fused": _fused,
    "mask": lambda held, other: held.__setitem__(other > -9, 5.0),
    "torch's load": lambda held, other: held.__create_chunk_list__() and held.local.view(-1)[:1].fill_(3),
    "local": lambda held, other: held.local.fill_(9),
    "numpy": lambda held, other: held.local.numpy().fill(9),
    "local's data": lambda held, other: held.local.data.fill_(9),
    "another local": lambda held, other: setattr(held, "local", torch.zeros_like(other.local)),
}
READS: dict[str, Callable[[ShardedParameter, ShardedParameter], object]] = {
    "sum": lambda held, other: held + other,
    "alias": lambda held, other: held.without_autograd(),
    "foreach": lambda held, other: torch._foreach_add([other], [held]),
    "norm": lambda held, other: torch.linalg.vector_norm(held),
    "repr": lambda held, other: repr(held),
    "full": lambda held, other: held.full_tensor(),
}
OTHERS: dict[str, Callable[[ShardedParameter, ShardedParameter], object]] = {
    "new": lambda held, other: other + other,
    "foreach": lambda held, other: torch._foreach_mul_([other], 2.0),
    "shape": lambda held, other: (held.shape, held.numel(), held.fqn, isinstance(held, ShardedParameter)),
    "plain": lambda held, other: torch.ones(3).mul_(2),
}


def faces() -> Pair:
    """Each with memory of its own."""
    first, second = (cut(ThreadGroup(_Meeting(1), 0), randn((4, 3)))[0] for _ in range(2))
    return torch.clone(first), torch.neg(second)  # type: ignore[return-value]


def nothing() -> None:
    """To be reminded of."""


@pytest.fixture
def held() -> Iterator[tuple[Snapshot, Pair]]:
    """The first of two is being copied."""
    pair = faces()
    snapshot = Snapshot(pair[:1], nothing)
    snapshot.begin()
    yield snapshot, pair
    snapshot.end()


def begin(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("use", [*WRITES.values(), *READS.values()], ids=[*WRITES, *READS])
def test_who_wants_the_piece_waits(use: Any, held: tuple[Snapshot, Pair]) -> None:
    snapshot, (first, second) = held
    piece: Tensor = first.__dict__["local"]
    before = piece.clone()
    thread, errors = begin(lambda: use(first, second))
    thread.join(0.1)
    assert thread.is_alive()
    assert torch.equal(piece, before)
    snapshot.end()
    thread.join(20)
    assert not thread.is_alive()
    assert not errors
    assert torch.equal(first.local, before) == (use in READS.values())
    assert type(first) is ShardedParameter


@pytest.mark.parametrize("use", OTHERS.values(), ids=OTHERS)
def test_nobody_else_waits(use: Any, held: tuple[Snapshot, Pair]) -> None:
    thread, errors = begin(lambda: use(*held[1]))
    thread.join(20)
    assert not thread.is_alive()
    assert not errors


def test_afterwards_nobody_waits_and_types_are_as_before() -> None:
    first, second = faces()
    for _ in range(2):
        snapshot = Snapshot([first], nothing)
        snapshot.begin()
        assert type(first) is HeldParameter
        snapshot.end()
        snapshot.end()
        with torch.no_grad():
            alias = first.fill_(1).detach()
            assert {type(each) for each in (first, alias, first + second)} == {ShardedParameter}


def test_one_that_has_not_begun_ends() -> None:
    Snapshot(faces(), nothing).end()
    assert type(faces()[0]) is ShardedParameter


def test_one_at_a_time(held: tuple[Snapshot, Pair]) -> None:
    again = Snapshot(faces(), nothing)
    with pytest.raises(AssertionError, match="another snapshot"):
        again.begin()
    again.end()
    assert type(held[1][0]) is HeldParameter


def test_a_forked_process_has_no_such_thread(held: tuple[Snapshot, Pair]) -> None:
    first = held[1][0]
    child = os.fork()
    if not child:
        try:
            threading.Timer(20, os._exit, (1,)).start()
            with torch.no_grad():
                first.local.fill_(2)
                first.fill_(1)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_who_waits_reminds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_LOOK_S", 0.01)
    first, _ = faces()
    reminded: list[int] = []

    def remind() -> None:
        reminded.append(1)
        if len(reminded) == 3:
            snapshot.end()

    snapshot = Snapshot([first], remind)
    snapshot.begin()
    with torch.no_grad():
        first.fill_(1)
    assert len(reminded) == 3


def test_what_is_over_keeps_nothing() -> None:
    first, _ = faces()
    snapshot, gone = Snapshot([first], nothing), weakref.ref(first)
    snapshot.begin()
    snapshot.end()
    del first
    assert gone() is None


def test_ranks_that_still_wait_take_the_way_of_those_that_do_not(held: tuple[Snapshot, Pair]) -> None:
    """torch asks for the types of tensors to choose between one call for all of them and one for each."""
    snapshot, pair = held
    threading.Timer(0.2, snapshot.end).start()
    seen: list[str] = []
    original = ShardedParameter.__torch_dispatch__

    def watching(func: Any, *arguments: Any) -> Any:
        seen.append(func._schema.name)
        return original(func, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedParameter, "__torch_dispatch__", watching)
        torch.nn.utils.get_total_norm(pair)
    assert seen[0] == "aten::_foreach_norm"


ALIASES: dict[str, Callable[[ShardedParameter], object]] = {
    "the piece": lambda face: face.local,
    "detached": lambda face: face.local.detach(),
    "data": lambda face: face.local.data,
    "view": lambda face: face.local[1:],
    "numpy": lambda face: face.local.numpy(),
    "storage": lambda face: face.local.untyped_storage(),
    "dlpack": lambda face: torch.from_dlpack(face.local),
    "capsule": lambda face: face.local.__dlpack__(),
    "face": lambda face: face.detach(),
    "complex": lambda face: torch.view_as_complex(face.local.view(-1, 2)),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_who_else_has_the_memory_is_seen(alias: Callable[[ShardedParameter], object]) -> None:
    face = faces()[0]
    assert is_sole(face)
    kept = alias(face)
    assert not is_sole(face)
    del kept
    assert is_sole(face)
    assert face.local.sum() is not None  # looking leaves nothing behind
    assert is_sole(face)


def test_memory_that_processes_share_is_nobodys_alone(tmp_path: Path) -> None:
    face = faces()[0]
    (tmp_path / "memory").write_bytes(bytes(48))
    mapped = torch.from_file(str(tmp_path / "memory"), shared=True, size=12)
    for piece in (face.local.clone().share_memory_(), mapped):
        other = ShardedParameter(piece, face.placement)
        del piece
        assert not is_sole(other)


@pytest.mark.parametrize("count", [None, lambda storage: 1])
def test_a_torch_that_does_not_count(count: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if count is None:
        monkeypatch.delattr(torch._C, "_storage_Use_Count")
    else:
        monkeypatch.setattr(torch._C, "_storage_Use_Count", count)
    assert snapshots._references_of_one_alone() is None
    monkeypatch.setattr(snapshots, "_alone", None)
    assert not is_sole(faces()[0])


def test_pieces_of_one_flat_buffer_are_nobodys_alone() -> None:
    flat, placements = torch.zeros(24), [face.placement for face in faces()]
    first, second = (ShardedParameter(flat[12 * i :][:12], placement) for i, placement in enumerate(placements))
    del flat
    assert not is_sole(first)
    assert not is_sole(second)
