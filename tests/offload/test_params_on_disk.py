"""Shards on disk: the same bits whatever lies where, in little memory, and what happens when the disk fails."""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.extensions.offloaded import shard_stores
from shardwise.engine.lookup import require_engine
from shardwise.errors import UsageError
from shardwise.files.scratch_file import ScratchFile
from shardwise.offload.offloaded_slice import OffloadedSlice, SliceState
from shardwise.offload.shard_store import BUFFERS, ShardStore
from shardwise.offload.tiers.disk import Disk, OnThread
from shardwise.sharded.extensions.few_bits import FewBitsParameter
from shardwise.sharded.extensions.offloaded import slices_of
from tests.engine.rig import Net, Twins, batch, on_ranks, seeded, squares
from tests.offload.rig import LEAST, Adapted, resident, shared_folder

_M_MMAP_THRESHOLD = -3
PLACES: list[dict[str, Any]] = [{"params": "nvme"}, {"params": "nvme", "optimizer": "nvme", "ring_bytes": LEAST}]


def places(of: dict[str, Any]) -> sw.Offload:
    return sw.Offload(path=shared_folder(), **of)


def store(twins: Twins) -> ShardStore:
    (found,) = shard_stores(twins.engine)
    return found


def fused(parameters: Any) -> torch.optim.Optimizer:
    """Torch's own function, which bumps no version."""
    return torch.optim.AdamW((p for p in parameters if p.requires_grad), lr=0.05, fused=True)


@pytest.mark.parametrize("of", PLACES, ids=["params", "both"])
@pytest.mark.parametrize("bits", ["nf4", "int8"])
@on_ranks(2)
def test_a_base_in_few_bits_is_on_disk_as_well(bits: str, of: dict[str, Any]) -> None:
    offload = places(of)
    options = {"precision": sw.Precision(frozen=bits), "optimizer": fused}
    kept, usual = Twins(Adapted, offload=offload, **options), Twins(Adapted, **options)  # type: ignore[arg-type]
    frozen = [p for p in kept.sharded.parameters() if isinstance(p, FewBitsParameter)]
    assert len(frozen) == 5
    assert all(p.slice is not None for p in frozen)
    alike(kept, usual, 2)
    sw.checkpoint.save(f"{offload.path}/one", kept.sharded, kept.optimizers[1])
    whole = sw.full_state_dict(usual.sharded, rank0_only=False)
    replica = copy.deepcopy(kept.sharded)
    for twins in (kept, usual):
        for parameter in twins.sharded.parameters():
            with torch.no_grad():
                parameter.mul_(1.5)
    alike(kept, usual, 2)
    for twins in (kept, usual):
        sw.checkpoint.load(f"{offload.path}/one", twins.sharded, twins.optimizers[1])
    alike(kept, usual, 2)
    kept.sharded.load_state_dict(whole)
    store(kept).finish()
    for model in (kept.sharded, replica):
        found = sw.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(found[name], value) for name, value in whole.items())


def alike(kept: Twins, usual: Twins, steps: int) -> None:
    """Losses and weights of both, step by step."""
    for index in range(steps):
        losses = []
        for each in (kept, usual):
            loss = squares(each.sharded, batch(index))
            loss.backward()
            each.optimizers[1].step()
            each.optimizers[1].zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    for p, q in zip(kept.sharded.parameters(), usual.sharded.parameters(), strict=True):
        assert torch.equal(p.local, q.local), p.fqn


@on_ranks(1)
def test_users_read_and_write_it_like_any_other() -> None:
    twins, usual = Twins(offload=places(PLACES[0])), Twins()
    kept = dict(twins.sharded.named_parameters())["blocks.1.up.weight"]
    piece = kept.local  # type: ignore[attr-defined]
    piece[3] = 5.0
    assert kept.device.type == "cpu"
    assert kept.dtype == torch.float32
    for each in (twins, usual):
        parameters = dict(each.sharded.named_parameters())
        with torch.no_grad():
            parameters["enter.weight"].mul_(2.0)
            parameters["blocks.0.up.bias"].copy_(torch.arange(13.0))
            torch._foreach_add_(list(each.sharded.parameters()), 0.5)
        state = {name: value + 1.0 for name, value in each.sharded.state_dict().items()}
        each.sharded.load_state_dict(state)
        with sw.unsharded(each.sharded, writeback=True), torch.no_grad():
            each.sharded.leave.weight.mul_(3.0)  # type: ignore[union-attr, operator]
    assert piece[3] == 6.5, "as long as there is a view, it is the parameter's memory"
    with torch.no_grad():
        piece[3] = usual_piece(usual)[3]
    del piece
    full = [sw.full_state_dict(each.sharded, rank0_only=False) for each in (twins, usual)]
    assert all(torch.equal(full[0][name], full[1][name]) for name in full[1])
    replica = copy.deepcopy(twins.sharded)
    assert len(slices_of([*replica.parameters(), *twins.sharded.parameters()])) == 2 * len(slices(twins))
    expected = squares(usual.sharded, batch(0))
    for model in (twins.sharded, replica):
        loss = squares(model, batch(0))
        assert torch.equal(loss, expected)
        loss.backward()
    sw.release(twins.sharded)
    assert store(twins).ring_bytes == 0 or any(each.state is SliceState.RESIDENT for each in slices(twins))
    assert torch.equal(squares(twins.sharded, batch(0)), expected)


def usual_piece(usual: Twins) -> Tensor:
    found: Tensor = dict(usual.sharded.named_parameters())["blocks.1.up.weight"].local  # type: ignore[attr-defined]
    return found


def slices(twins: Twins) -> list[OffloadedSlice]:
    return [g.slice for unit in twins.engine.units for g in unit.groups if g.slice is not None]


@on_ranks(1)
def test_the_ring_is_all_that_is_in_memory_and_is_read_ahead() -> None:
    path = shared_folder()
    # What is freed goes back to the system, so that what is resident is what is held.
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)
    train_large(2, f"{path}/small")  # what is imported and allocated once
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    begun = []
    read_ahead = OffloadedSlice.read_ahead

    def watched(self: OffloadedSlice) -> None:
        was = self.state
        read_ahead(self)
        begun.append(was is SliceState.OFFLOADED and self.state is SliceState.READING)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OffloadedSlice, "read_ahead", watched)
        model = train_large(32, f"{path}/large")
    assert sum(begun) > 24, "all but the first units are, in each pass"
    (ring,) = shard_stores(require_engine(model))
    assert ring.ring_bytes == BUFFERS * 4 * 2**20
    assert sw.memory(model).now["param_shards"] == ring.ring_bytes
    # Rings of 16 and 32 MiB, 20 of slots, what is made of a unit and freed again, chunks of the checkpoint: 68 MiB, and
    # 152 beside much other work.
    used = resident("VmHWM") - before
    assert used < 200 * 2**20, f"{used / 2**20:.0f} MiB, and weights and state are 384"


def train_large(depth: int, path: str) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(depth)])
    offload = sw.Offload(params="nvme", optimizer="nvme", path=path, ring_bytes=32 * 2**20)
    sw.shard(model, units={nn.Linear}, offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    sw.optimizer_in_backward(model, optimizer)
    for _ in range(2):
        model(torch.ones(1, 1024)).sum().backward()
    sw.checkpoint.save(f"{path}/one", model, optimizer)
    sw.checkpoint.load(f"{path}/one", model, optimizer)
    return model


@on_ranks(1)
def test_a_full_disk_is_told_by_shard_and_errors_until_a_checkpoint_is_loaded() -> None:
    offload = places(PLACES[1])

    def full(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.files.scratch_file.allocate", full)
        with pytest.raises(UsageError, match=r"no room for \d+ bytes of this rank's weights .*No space left"):
            sw.shard(Net(), offload=offload)
    for broken in ("read", "write"):
        twins = Twins(offload=sw.Offload(params="nvme", path=offload.path))
        twins.train(2)
        sw.checkpoint.save(f"{offload.path}/{broken}", twins.sharded, twins.optimizers[1])

        def fails(self: ScratchFile, start: int, data: memoryview) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ScratchFile, broken, fails)
            with pytest.raises(UsageError, match=r"weights in .* is lost, .*Input/output error") as caught:
                two_steps(twins)
        assert str(offload.path) in str(caught.value)
        for call in (
            lambda: squares(twins.sharded, twins.batch()),  # noqa: B023
            lambda: sw.checkpoint.save(f"{offload.path}/no", twins.sharded, twins.optimizers[1]),  # noqa: B023
        ):
            with pytest.raises(UsageError, match=r"Load the last checkpoint with sw.checkpoint.load"):
                call()
        sw.checkpoint.load(f"{offload.path}/{broken}", twins.sharded, twins.optimizers[1])
        twins.optimizers[1].zero_grad()
        twins.train(2)


def two_steps(twins: Twins) -> None:
    for _ in range(2):
        squares(twins.sharded, twins.batch()).backward()
        twins.optimizers[1].step()


@on_ranks(1)
def test_optimizers_of_whole_matrices_are_refused() -> None:
    model = sw.shard(Net(), offload=places(PLACES[0]))
    muon = sw.optim.whole_matrix(torch.optim.Muon, model, lr=0.1, adamw={"lr": 0.1})
    squares(model, batch(0)).backward()
    with pytest.raises(UsageError, match="keeps the state of whole matrices on their owners"):
        muon.step()


RUN = """
import os, signal, sys
import torch
import shardwise as sw
from shardwise.files.scratch_file import ScratchFile
from tests.engine.rig import Net, squares

path, kind, dies = sys.argv[1], sys.argv[2], sys.argv[3] == "dies"
places = {"params": "nvme", "optimizer": "nvme", "path": path} if kind == "disk" else {}
torch.manual_seed(7)
model = sw.shard(Net(), offload=sw.Offload(**places))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
done = sorted(int(name[5:]) for name in os.listdir(path) if name.startswith("step-") and name[5:].isdigit())
if done:
    sw.checkpoint.load(f"{path}/step-{done[-1]}", model, optimizer)
write = ScratchFile.write

def half(self, start, data):
    if dies and os.path.isdir(f"{path}/step-2"):
        write(self, start, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, start, data)

ScratchFile.write = half
for step in range((done or [0])[-1] + 1, 5):
    generator = torch.Generator().manual_seed(step)
    loss = squares(model, torch.randn(5, 4, generator=generator))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
    sw.checkpoint.save(f"{path}/step-{step}", model, optimizer, step=step)
"""


@pytest.mark.slow
def test_a_kill_in_mid_write_loses_no_saved_step(tmp_path: Path) -> None:
    def run(folder: str, kind: str, dies: bool = False) -> tuple[int, list[str]]:
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [sys.executable, "-c", RUN, str(tmp_path / folder), kind, "dies" if dies else "lives"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
        return ended.returncode, ended.stdout.splitlines()

    code, whole = run("memory", "memory")
    assert code == 0
    assert len(whole) == 4
    code, before = run("disk", "disk", dies=True)
    assert code == -signal.SIGKILL
    assert before[:2] == whole[:2]
    assert {path.name for path in (tmp_path / "disk").iterdir()} >= {"step-1", "step-2"}
    code, after = run("disk", "disk")
    assert code == 0
    assert after == whole[2:]
    code, after = run("disk", "memory")
    assert (code, after) == (0, [])


@on_ranks(1)
def test_steps_and_loads_after_a_failure_leave_no_slice_half_way() -> None:
    twins = Twins(offload=places(PLACES[0]))
    path = shared_folder()
    twins.train(2)
    sw.checkpoint.save(f"{path}/one", twins.sharded, twins.optimizers[1])

    def fails(self: ScratchFile, start: int, data: memoryview) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for broken in ("read", "write"):
        squares(twins.sharded, twins.batch()).backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ScratchFile, broken, fails)
            with pytest.raises(UsageError, match="is lost"):
                two_steps(twins)
            with suppress(UsageError):  # where something is still to be written
                sw.release(twins.sharded)
        for _ in range(2):
            with pytest.raises(UsageError, match="is lost"):
                twins.optimizers[1].step()
        twins.optimizers[1].zero_grad()
        sw.checkpoint.load(f"{path}/one", twins.sharded, twins.optimizers[1])
        assert all(each.state in (SliceState.OFFLOADED, SliceState.RESIDENT) for each in slices(twins))
    twins.train(2)


@pytest.mark.parametrize("what", ["write", "read"])
@on_ranks(1)
def test_an_interrupt_while_a_slice_is_waited_for_loses_nothing(what: str) -> None:
    disk = Disk(Path(shared_folder()), "weights")
    store = ShardStore(disk)
    first, second = (OffloadedSlice(store, 5000, torch.float32) for _ in range(2))
    store.allocate()
    for each, number in ((first, 1.0), (second, 2.0)):
        each.begin_anew()
        each.flat().fill_(number)
    store.finish()
    go_on, whole = threading.Event(), getattr(ScratchFile, what)

    def slow(self: ScratchFile, start: int, data: memoryview) -> None:
        go_on.wait(60)
        whole(self, start, data)

    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    if what == "write":
        first.flat().fill_(3.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScratchFile, what, slow)
        patch.setattr(OnThread, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            (first.finish if what == "write" and first.let_go() is None else first.load)()
    assert store.take_free_buffer().data_ptr() != first._buffer.data_ptr()  # type: ignore[union-attr]
    go_on.set()
    assert (first.flat() == (3.0 if what == "write" else 1.0)).all()
    assert (second.flat() == 2.0).all()


@on_ranks(1)
def test_copies_that_are_gone_leave_their_room_to_the_next() -> None:
    twins = Twins(offload=places(PLACES[0]))
    taken = []
    for _ in range(4):
        replica = copy.deepcopy(twins.sharded)
        assert torch.equal(squares(replica, batch(0)), squares(twins.sharded, batch(0)))
        del replica
        gc.collect()
        taken.append(store(twins).tier.nbytes)
    assert taken[1:] == taken[:1] * 3


@on_ranks(2)
def test_state_that_an_optimizer_makes_for_frozen_parameters_is_loaded_to_memory() -> None:
    """Adagrad makes state for all its parameters before any step; those that are never stepped have no room on disk."""
    path = shared_folder()
    states = []
    for offload in (None, sw.Offload(optimizer="nvme", path=path)):
        model = sw.shard(seeded(Adapted), offload=offload)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        assert any(not parameter.requires_grad for parameter in model.parameters())
        squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        sw.checkpoint.save(f"{path}/{offload is None}", model, optimizer)
        sw.checkpoint.load(f"{path}/{offload is None}", model, optimizer)
        squares(model, batch(1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        states.append([optimizer.state[p]["sum"].full_tensor() for p in model.parameters()])
    for ours, theirs in zip(*states, strict=True):
        assert torch.equal(ours, theirs)
