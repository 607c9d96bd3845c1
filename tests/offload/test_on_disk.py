"""Optimizer state on disk: the same bits, in little memory, and what happens when the disk fails."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.lookup import require_engine
from shardwise.errors import ConfigError, UsageError
from shardwise.files.scratch_file import PREFIX, ScratchFile
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.offload.offloaded_state import OffloadedState
from shardwise.offload.stores import of_owner
from tests.engine.rig import Net, Twins, batch, on_ranks, squares
from tests.offload.rig import LEAST, amsgrad, on_disk, resident, shared_folder, store
from tests.optim.rig import same_states


@on_ranks(1, 2)
def test_state_goes_through_the_least_ring() -> None:
    path = shared_folder()
    twins = Twins(optimizer=amsgrad, offload=on_disk(path, ring_bytes=LEAST))
    twins.train(2)
    same_states(twins)
    assert store(twins).ring_bytes == LEAST
    in_memory = sum(
        value.nbytes
        for state in twins.optimizers[1].state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and not isinstance(value, ShardedParameter)
    )
    assert sw.memory(twins.sharded).now["optimizer"] == LEAST + in_memory


@on_ranks(1)
def test_a_save_never_holds_all_of_the_state() -> None:
    path = shared_folder()
    torch.manual_seed(0)
    model = sw.shard(
        nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(24)]),
        units={nn.Linear},
        offload=on_disk(path, ring_bytes=40 * 2**20),
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    sw.checkpoint.save(f"{path}/warm", model, optimizer)
    for call in (
        lambda: sw.checkpoint.save(f"{path}/one", model, optimizer),
        lambda: sw.checkpoint.load(f"{path}/one", model, optimizer),
    ):
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        call()
        assert resident("VmHWM") - before < 96 * 2**20, "bytes of state are 192 MiB"


@on_ranks(1)
def test_a_full_disk_is_told_before_anything_is_updated() -> None:
    twins = Twins(offload=on_disk(shared_folder()))
    before = [p.local.clone() for p in twins.sharded.parameters()]
    twins.backward()

    def full(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.files.scratch_file.allocate", full)
        with pytest.raises(UsageError, match=r"no room for \d+ bytes of this rank's optimizer state .*No space left"):
            twins.optimizers[1].step()
    assert all(torch.equal(p.local, q) for p, q in zip(twins.sharded.parameters(), before, strict=True))
    assert not twins.optimizers[1].state
    twins.step()  # there is room now
    twins.same_parameters()


@pytest.mark.parametrize("broken", ["read", "write"])
@on_ranks(1)
def test_after_an_error_everything_raises_until_a_checkpoint_is_loaded(broken: str) -> None:
    path = shared_folder()
    twins = Twins(offload=on_disk(path, ring_bytes=LEAST))
    twins.train(2)
    sw.checkpoint.save(f"{path}/one", twins.sharded, twins.optimizers[1])
    calls = []
    whole = getattr(ScratchFile, broken)

    def fails_at_the_third(self: ScratchFile, start: int, data: memoryview) -> None:
        calls.append(start)
        if len(calls) == 3:
            raise OSError(errno.EIO, "Input/output error")
        whole(self, start, data)

    squares(twins.sharded, twins.batch()).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScratchFile, broken, fails_at_the_third)
        with pytest.raises(UsageError, match=r"is lost, .*Input/output error") as caught:
            twins.optimizers[1].step()
    assert path in str(caught.value)
    for call in (
        twins.optimizers[1].step,
        lambda: sw.checkpoint.save(f"{path}/two", twins.sharded, twins.optimizers[1]),
        next(iter(twins.optimizers[1].state.values()))["exp_avg"].full_tensor,
    ):
        with pytest.raises(Exception, match=r"Load the last checkpoint with sw.checkpoint.load"):
            call()
    twins.optimizers[1].zero_grad()
    sw.checkpoint.load(f"{path}/one", twins.sharded, twins.optimizers[1])
    twins.train(2)
    same_states(twins)


@on_ranks(1)
def test_what_stands_for_state_reads_the_file_and_cannot_be_written() -> None:
    twins = Twins(offload=on_disk(shared_folder()))
    twins.train(1)
    state = twins.optimizers[1].state_dict()["state"][0]["exp_avg"]
    plain = twins.optimizers[0].state_dict()["state"][0]["exp_avg"]
    assert torch.equal(state.full_tensor(), plain)
    assert torch.equal((2 * state).full_tensor(), 2 * plain)
    assert state.shape == plain.shape
    assert state.dtype == plain.dtype
    with pytest.raises(UsageError, match=r"because it is on disk"):
        state.zero_()
    saved = twins.optimizers[1].state_dict()
    twins.optimizers[1].load_state_dict(saved)  # in memory, until the next step
    twins.train(1)
    same_states(twins)
    assert isinstance(next(iter(twins.optimizers[1].state.values()))["exp_avg"], OffloadedState)


def test_configurations_are_refused_by_name() -> None:
    for options, reason in [
        ({"optimizer": "nvme"}, r"offload.optimizer='nvme' needs offload.path"),
        ({"params": "nvme"}, r"offload.params='nvme' needs offload.path"),
        ({"params": "disk"}, r"offload.params='disk': must be None, 'cpu' or 'nvme'"),
        ({"optimizer": "disk"}, r"offload.optimizer='disk': must be None, 'cpu' or 'nvme'"),
        ({"ring_bytes": 0}, r"offload.ring_bytes=0"),
        ({"ring_bytes": 1.5}, r"offload.ring_bytes=1.5: must be a number of bytes"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            sw.Offload(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"pass sw\.Offload"):
        sw.shard(nn.Linear(2, 2), offload="nvme")  # type: ignore[arg-type]


@on_ranks(1)
def test_the_host_on_cpu_ranks_changes_nothing_and_too_small_a_ring_names_the_least() -> None:
    twins = Twins(offload=sw.Offload(params="cpu", optimizer="cpu"))
    twins.train(2)
    assert of_owner(twins.engine.root).states is None
    twins = Twins(offload=on_disk(shared_folder(), ring_bytes=4096))
    twins.backward()
    with pytest.raises(ConfigError, match=r"state of its largest parameter, 'blocks.*': at least 16384 bytes"):
        twins.step()


DIES = """
import sys, time
from pathlib import Path
from shardwise.files.scratch_file import ScratchFile
file = ScratchFile(Path(sys.argv[1]))
file.grow(2**26)
print("there", flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}abc").write_bytes(b"of a process that died between two calls")
    with subprocess.Popen([sys.executable, "-c", DIES, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        assert list(tmp_path.iterdir()) == []
        process.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_where_files_need_names_and_where_the_page_cache_cannot_be_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    monkeypatch.delattr(os, "O_DIRECT")
    file = ScratchFile(tmp_path)
    assert not file.is_direct
    assert list(tmp_path.iterdir()) == []
    file.grow(8192)
    file.write(4096, memoryview(b"a" * 4096))
    back = bytearray(4096)
    file.read(4096, memoryview(back))
    assert bytes(back) == b"a" * 4096
    with pytest.raises(EOFError):
        file.read(8192, memoryview(back))
    file.close()


@on_ranks(1)
def test_optimizers_of_whole_matrices_are_refused() -> None:
    model = sw.shard(Net(), offload=on_disk(shared_folder()))
    muon = sw.optim.whole_matrix(torch.optim.Muon, model, lr=0.1, adamw={"lr": 0.1})
    squares(model, batch(0)).backward()
    with pytest.raises(UsageError, match="keeps the state of whole matrices on their owners"):
        muon.step()


@on_ranks(1)
def test_what_cannot_be_offloaded_leaves_units_below_as_they_are() -> None:
    model = Net()
    sw.shard(model.blocks[0])  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"offload='nvme': pass sw.Offload"):
        sw.shard(model, offload="nvme")  # type: ignore[arg-type]
    sw.shard(model)
    squares(model, batch(0)).backward()


class Tiny(nn.Module):
    """On all ranks but the first this has no elements of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.ones(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.nothing.sum()


@on_ranks(1, 2)
def test_ranks_without_elements_of_a_unit_step_on() -> None:
    path = shared_folder()

    def train(offload: sw.Offload | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = sw.shard(nn.Sequential(nn.Linear(4, 4), Tiny()), units={Tiny}, offload=offload)
        alone = next(model[1].parameters())
        optimizers = [torch.optim.AdamW(model[0].parameters(), lr=0.1), torch.optim.AdamW([alone], lr=0.1)]
        for _ in range(3):
            model(torch.ones(2, 4)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return list(sw.full_state_dict(model, rank0_only=False).values())

    assert all(map(torch.equal, train(on_disk(path)), train(None)))


@on_ranks(1)
def test_frozen_parameters_take_no_room_until_they_train() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 8))
    model[0].requires_grad_(False)
    sw.shard(model, offload=on_disk(shared_folder(), ring_bytes=2**18))  # the frozen weight's would not go through it
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for trains in (False, True):
        model[0].bias.requires_grad_(trains)
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    of_weight, of_bias = (optimizer.state.get(p, {}) for p in model[0].parameters())
    assert not of_weight
    assert isinstance(of_bias["exp_avg"], OffloadedState)
    states: Any = of_owner(require_engine(model).root).states
    assert states.tier.nbytes < 2**18
