"""Whatever goes wrong, and wherever: every rank hears of it, and what was there before is still there."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.checkpoint import latest, verify
from shardwise.checkpoint.publish import writing
from shardwise.engine.lookup import require_engine
from shardwise.errors import CheckpointError, MismatchError, UsageError
from tests.checkpoint.states import build, everything, same, step
from tests.engine.cases import Case
from tests.engine.rig import batch, events, on_ranks, recording
from tests.ranks import RankPools, RanksHung

CASE = Case("full_shard", 2)


def save_twice(run: Path, monkeypatch: pytest.MonkeyPatch, rank: int, function: str, call: int) -> None:
    """The second save fails on `rank` at the given call of a function of `os`; everybody hears of it."""
    model, optimizer = build(CASE)
    step(model, optimizer, 0)
    sw.checkpoint.save(run / "step-000001", model, optimizer, step=1)
    before = everything(model, optimizer)
    step(model, optimizer, 1)
    if dist.get_rank() == rank:
        fail(monkeypatch, function, call)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        sw.checkpoint.save(run / "step-000002", model, optimizer, step=2)
    monkeypatch.undo()
    assert str(caught.value).startswith(f"rank {rank} failed: ") == (dist.get_rank() != rank)
    dist.barrier()  # rank 0 may still be clearing up
    assert [path.name for path in run.iterdir()] == ["step-000001"]
    verify(run / "step-000001")
    sw.checkpoint.load(run / "step-000001", model, optimizer)
    same(everything(model, optimizer), before)
    sw.checkpoint.save(run / "step-000002", model, optimizer, step=2)
    assert latest(run) == run / "step-000002"


def fail(monkeypatch: pytest.MonkeyPatch, function: str, call: int) -> None:
    calls = iter(range(10_000))
    original = getattr(os, function)

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments, **options)

    monkeypatch.setattr(os, function, failing)


MOMENTS = [
    (0, "posix_fallocate", 1),
    (0, "pwrite", 0),
    (0, "pwrite", 9),
    (1, "pwrite", 5),
    (0, "fsync", 0),
    (1, "fsync", 1),
    (0, "fsync", 3),
    (0, "rename", 0),
]


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_an_error_on_one_rank_is_everybodys(moment: tuple[int, str, int], ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(_patched, tmp_path, moment)


def _patched(run: Path, moment: tuple[int, str, int]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        save_twice(run, monkeypatch, *moment)


@pytest.mark.parametrize(
    ("function", "call", "committed"),
    [("pwrite", 0, False), ("pwrite", 1, False), ("fsync", 2, False), ("rename", 0, False), ("fsync", -1, True)],
)
def test_a_kill_leaves_the_checkpoint_before(
    function: str, call: int, committed: bool, ranks: RankPools, tmp_path: Path
) -> None:
    with pytest.raises(RanksHung, match="is gone"):
        ranks(1).run(_die, tmp_path, function, call)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000001", "step-000002" if committed else "step-000002.partial"]
    newest = latest(tmp_path)
    assert newest == tmp_path / ("step-000002" if committed else "step-000001")
    verify(newest)
    ranks(1).run(_resume, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]
    verify(tmp_path / "step-000002")


def _die(run: Path, function: str, call: int) -> None:
    model, optimizer = build(CASE)
    step(model, optimizer, 0)
    sw.checkpoint.save(run / "step-000001", model, optimizer, step=1)
    step(model, optimizer, 1)
    calls = iter(range(10_000))
    original = getattr(os, function)

    def dying(*arguments: Any) -> Any:
        renamed = call < 0 and (run / "step-000002").exists()
        if renamed or next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    setattr(os, function, dying)
    sw.checkpoint.save(run / "step-000002", model, optimizer, step=2)


def _resume(run: Path) -> None:
    model, optimizer = build(CASE, seed=3)
    found = latest(run)
    assert found is not None
    reached = sw.checkpoint.load(found, model, optimizer).step
    if reached == 1:
        step(model, optimizer, 1)
        sw.checkpoint.save(run / "step-000002", model, optimizer, step=2)


@on_ranks(2)
def test_ranks_that_do_not_see_the_same_files_are_told(tmp_path: Path) -> None:
    model, optimizer = build(CASE)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(writing, "_SIGHT_S", 0.1)
        with pytest.raises(CheckpointError, match=r"rank 1 does not see what rank 0 wrote .* share"):
            sw.checkpoint.save(tmp_path / str(dist.get_rank()) / "c", model, optimizer)


@on_ranks(2)
def test_ranks_that_want_different_things_are_told(tmp_path: Path) -> None:
    model, optimizer = build(CASE)
    with pytest.raises(MismatchError, match="same path, step"):
        sw.checkpoint.save(tmp_path / "c", model, optimizer, step=dist.get_rank())
    with pytest.raises(MismatchError, match="same path, step"):
        sw.checkpoint.save(tmp_path / "c", model, optimizer if dist.get_rank() else None)
    with pytest.raises(MismatchError, match="same path, step, asynchronous"):
        sw.checkpoint.save(tmp_path / "c", model, optimizer, asynchronous=bool(dist.get_rank()))
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_mistakes_of_one_rank_are_everybodys(tmp_path: Path) -> None:
    model, optimizer = build(CASE)
    first = dist.get_rank() == 0
    with pytest.raises(UsageError if first else CheckpointError, match="extra cannot be saved as JSON"):
        sw.checkpoint.save(tmp_path / "c", model, optimizer, extra={"a": object()} if first else None)
    with pytest.raises(UsageError, match=r"inside .* sw\.unsharded"), sw.unsharded(model):
        sw.checkpoint.save(tmp_path / "c", model, optimizer)
    sw.checkpoint.save(tmp_path / "c", model, optimizer)
    with pytest.raises(CheckpointError, match="exists already"):
        sw.checkpoint.save(tmp_path / "c", model, optimizer)
    verify(tmp_path / "c")
    for name, reason in (
        ("c.partial", "names that end in .partial for unfinished"),
        ("step-000001.damaged", "names that end in .partial for unfinished"),
        ("a\0b", "null character"),
        ("/", "root of the file system"),
    ):
        with pytest.raises(UsageError, match=f"cannot be a checkpoint's name: .*{reason}"):
            sw.checkpoint.save(tmp_path / name, model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_what_json_cannot_hold_is_named(tmp_path: Path) -> None:
    model = sw.shard(nn.Linear(3, 3))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(model.parameters()), [2, 3])
    endless: dict[str, Any] = {}
    endless["a"] = endless
    cases: list[tuple[dict[Any, Any], str]] = [
        ({"best": math.nan}, r"\['best'\] is NaN;"),
        ({"schedule": scheduler.state_dict()}, r"\['schedule'\]\['milestones'\] is a dict with the key 2;"),
        ({"a": [1, {"b": (1, 2)}]}, r"\['a'\]\[1\]\['b'\] is of type tuple;"),
        ({1: 2}, "it is a dict with the key 1;"),
        (endless, r"\['a'\]"),
    ]
    for extra, said in cases:
        with pytest.raises(UsageError, match=rf"^extra cannot be saved as JSON: {said}"):
            sw.checkpoint.save(tmp_path / "c", model, extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_the_order_of_arguments_is_told() -> None:
    model: Any = sw.shard(nn.Linear(3, 3))
    for call in (sw.checkpoint.save, sw.checkpoint.load, sw.checkpoint.load_pretrained):
        said = rf"sw\.checkpoint\.{call.__name__}\(path, model.*\): the path must come first, .* not a Linear$"
        with pytest.raises(TypeError, match=said):
            call(model, "c")


@on_ranks(2)
def test_files_go_along(tmp_path: Path) -> None:
    model, optimizer = build(CASE)
    own = {"tokenizer.json": b"{}", "empty.txt": b""}
    first = dist.get_rank() == 0
    sw.checkpoint.save(tmp_path / "c", model, optimizer, files=own if first else None)
    assert {name: (tmp_path / "c" / name).read_bytes() for name in own} == own
    verify(tmp_path / "c")
    reserved = "manifest.json", "training.json", "names.json", "model.safetensors", "rank-00000.bin"
    for name in ("../x", "", ".x", "a/b", "a\\b", *reserved):
        with pytest.raises(UsageError, match=r"files: .* cannot be the name of a file"):
            sw.checkpoint.save(tmp_path / "d", model, optimizer, files={name: b""})
    wrong: Any = {"x": "text"}
    with pytest.raises(UsageError, match="'x' must be bytes, not a str"):
        sw.checkpoint.save(tmp_path / "d", model, optimizer, files=wrong)
    assert not (tmp_path / "d").exists()


@on_ranks(2)
def test_no_collective_carries_weights(tmp_path: Path) -> None:
    with recording():
        model, optimizer = build(CASE)
    step(model, optimizer, 0)
    engine = require_engine(model)
    before = len(events(engine))
    sw.checkpoint.save(tmp_path / "c", model, optimizer)
    sw.checkpoint.load(tmp_path / "c", model, optimizer)
    told = [event for event in events(engine)[before:] if event.op not in {"release", "claim"}]
    assert {event.op for event in told} == {"exchange"}
    assert sum(event.bytes_sent for event in told) < 512


@on_ranks(2)
def test_ranks_that_load_different_things_are_told(tmp_path: Path) -> None:
    model, optimizer = build(CASE)
    step(model, optimizer, 0)
    for number in range(2):
        sw.checkpoint.save(tmp_path / str(number), model, optimizer, step=number)
        step(model, optimizer, number + 1)
    before = everything(model, optimizer)
    mine, first = tmp_path / str(dist.get_rank()), dist.get_rank() == 0
    said = r"ranks disagree about what to load: call sw\.checkpoint\.load on every rank with the same checkpoint"
    with pytest.raises(MismatchError, match=said):
        sw.checkpoint.load(mine, model)
    with pytest.raises(MismatchError, match=said):
        sw.checkpoint.load(tmp_path / "0", model, optimizer if first else None)
    with pytest.raises(MismatchError, match=said):
        sw.checkpoint.load(tmp_path / "0", model, optimizer, strict=first)
    with pytest.raises(MismatchError, match=r"call sw\.checkpoint\.load_pretrained on every rank with the same path"):
        sw.checkpoint.load_pretrained(mine, model)
    same(everything(model, optimizer), before)


@on_ranks(2)
def test_copies_of_one_checkpoint_may_lie_elsewhere(tmp_path: Path) -> None:
    model, optimizer = build(CASE)
    before = everything(model, optimizer)
    sw.checkpoint.save(tmp_path / "0", model, optimizer)
    if dist.get_rank() == 0:
        shutil.copytree(tmp_path / "0", tmp_path / "1")
    dist.barrier()
    step(model, optimizer, 0)
    sw.checkpoint.load(tmp_path / str(dist.get_rank()), model, optimizer)
    same(everything(model, optimizer), before)


def save_around_a_backward(run: Path) -> None:
    """Saving inside a backward is refused, which ends that backward; after it, the weights of before are saved."""
    model, optimizer = build(CASE)
    step(model, optimizer, 0)
    before = everything(model, optimizer)
    output = model(batch(1))
    output.register_hook(lambda grad: sw.checkpoint.save(run / "inside", model, optimizer))
    with pytest.raises(UsageError, match="inside a forward, a backward"):
        output.sum().backward()
    assert not (run / "inside").exists()
    sw.checkpoint.save(run / "after", model, optimizer, step=1)
    step(model, optimizer, 1)
    sw.checkpoint.load(run / "after", model, optimizer)
    same(everything(model, optimizer), before)


def test_after_a_backward_that_raised_the_weights_of_before_are_saved(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(save_around_a_backward, tmp_path)
