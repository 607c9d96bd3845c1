"""Shards and optimizer state on disk while a device computes: the same bits, nothing unordered on the device, the host
or in the file, no wait for the device, and in memory no more than the rings. Played on CPU ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise import device_tools
from shardwise.engine.extensions.offloaded import shard_stores
from shardwise.engine.lookup import require_engine
from shardwise.errors import CheckpointError, PeerError, UsageError
from shardwise.files.direct import PAGE_BYTES
from shardwise.offload.shard_store import BUFFERS
from shardwise.offload.stores import of_owner
from shardwise.offload.tiers import staged_disk
from shardwise.offload.tiers.device_buffers import DeviceBuffers
from shardwise.offload.tiers.disk import Disk
from shardwise.offload.tiers.staged_disk import THREADS, StagedDisk
from tests.engine.rig import Net, Twins, batch, on_ranks, same_tensors, seeded, squares
from tests.engine.streams import played
from tests.offload.rig import LEAST, failing, shared_folder
from tests.optim.rig import same_states

PLACES: dict[str, dict[str, Any]] = {
    "params": {"params": "nvme"},
    "optimizer": {"optimizer": "nvme", "ring_bytes": LEAST},
    "both": {"params": "nvme", "optimizer": "nvme", "ring_bytes": LEAST},
    "params on the host": {"params": "cpu", "optimizer": "nvme", "ring_bytes": LEAST},
    "optimizer on the host": {"params": "nvme", "optimizer": "cpu", "ring_bytes": LEAST},
}


def offload(place: str) -> sw.Offload:
    return sw.Offload(path=shared_folder(), **PLACES[place])


@on_ranks(1)
def test_the_device_and_the_host_have_rings_alone() -> None:
    path = shared_folder()
    with played():
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(24)])
        places = sw.Offload(params="nvme", optimizer="nvme", path=path, ring_bytes=2**21)
        sw.shard(model, units={nn.Linear}, offload=places)
        optimizer = torch.optim.AdamW(model.parameters())
        sw.optimizer_in_backward(model, optimizer)
        for _ in range(3):
            model(torch.ones(2, 256)).sum().backward()
        (shards,) = shard_stores(require_engine(model))
        states = of_owner(require_engine(model).units[0]).states
        assert states is not None
        nbytes = 24 * 256 * 256 * 4
        assert isinstance(shards.tier, StagedDisk)
        assert isinstance(states.tier, StagedDisk)
        assert (shards.tier.nbytes, states.tier.nbytes) == (nbytes, 2 * nbytes)
        now = sw.memory(model).now
        assert 0 < now["param_shards"] == shards.ring_bytes == shards.tier.host_bytes <= BUFFERS * nbytes // 24
        assert now["optimizer"] == 2**21 + 24 * 4  # and the counts of steps
        assert sw.memory(model).host == {"param_shards": shards.ring_bytes, "optimizer": 2**21}
        assert sw.memory(model).disk == {"param_shards": nbytes, "optimizer": 2 * nbytes}
        sw.release(model)
        assert sw.memory(model).host == {"optimizer": 2**21}
        assert not any(Path(path).iterdir())


@on_ranks(2)
def test_views_of_many_slices_and_what_users_write() -> None:
    """More buffers than the ring's come and go with their stages; a slice that is wanted while it is written stays."""
    full = []
    with played() as order:
        for places in (offload("params"), None):
            model = sw.shard(seeded(lambda: Net(6)), "full_shard", offload=places)
            for step in range(2):
                with torch.no_grad():
                    torch._foreach_mul_(list(model.parameters()), 0.5)
                    for _ in range(2):
                        for parameter in model.parameters():
                            parameter.add_(step)
                squares(model, batch(step))
            full.append(sw.full_state_dict(model, rank0_only=False))
    assert order.races == []
    same_tensors(*full)


# An order that is missing ---------------------------------------------------------------------------------------------


def _await_no_copy(earlier: Any, copied: Any, device: Any) -> None:
    """The disk uses a stage that is being copied from, or to."""
    for job in earlier:
        job.end()


def _copied_at_once(self: Any) -> None:
    """The copy comes from a stage that the disk has not filled."""
    if self._disk.is_pending(self):
        self._disk.copy_in(self)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "copies of stages": (staged_disk, "_await", _await_no_copy),
    "work on stages": (StagedDisk, "_of", lambda self, stage: []),
    "places in the file": (StagedDisk, "_at", lambda self, start, stop, writes: []),
    "stages that are written twice": (StagedDisk, "_until_written", lambda self, stage: None),
    "reads": (staged_disk._Read, "wait", _copied_at_once),
    "quiet": (StagedDisk, "_until_quiet", lambda self: None),
    "uses": (DeviceBuffers, "use", lambda self, buffer: None),
    "copies of buffers": (DeviceBuffers, "before", lambda self, buffer: []),
}


def races() -> list[str]:
    path = shared_folder()
    with played() as order:
        twins = Twins(offload=offload("both"))
        for _ in range(3):
            with suppress(AssertionError):  # where the numbers are wrong as well
                twins.train(1)
        sw.checkpoint.save(f"{path}/one", twins.sharded, twins.optimizers[1])
        with torch.no_grad():
            for _ in range(2):
                for parameter in twins.sharded.parameters():
                    parameter.mul_(0.5)
            (shards,) = shard_stores(twins.engine)
            shards.finish()
            for parameter in reversed(list(twins.sharded.parameters())):  # what was written last comes first
                parameter.mul_(0.5)
    return order.races


@pytest.mark.parametrize("fault", [None, *FAULTS])
@on_ranks(1)
def test_an_order_that_is_missing_is_found(fault: str | None) -> None:
    if fault is None:
        assert races() == []
        return
    with mock.patch.object(*FAULTS[fault]):
        assert races() != []


# Failures and interrupts ----------------------------------------------------------------------------------------------


def three_steps(twins: Twins) -> None:
    """A write that fails is told by the step, or by what comes next."""
    for _ in range(3):
        squares(twins.sharded, twins.batch()).backward()
        twins.optimizers[1].step()
        twins.optimizers[1].zero_grad()


@pytest.mark.parametrize("place", ["optimizer", "both"])
@pytest.mark.parametrize("broken", ["read", "write"])
@on_ranks(1, 2)
def test_after_an_error_everything_raises_until_a_checkpoint_is_loaded(broken: str, place: str) -> None:
    if place == "both" and dist.get_world_size() > 1:
        return  # a forward in which one rank cannot read: the other's collectives are no doubles of ours
    path, is_first = shared_folder(), dist.get_rank() == 0
    with played() as order:
        twins = Twins(offload=offload(place))
        twins.train(2)
        sw.checkpoint.save(f"{path}/one", twins.sharded, twins.optimizers[1])
        with failing(broken, 3), pytest.raises(UsageError if is_first else PeerError, match="is lost"):
            three_steps(twins)
        for _ in range(2):
            with pytest.raises((UsageError, PeerError), match="Load the last checkpoint"):
                three_steps(twins)
        with pytest.raises((UsageError, CheckpointError), match="Load the last checkpoint"):
            sw.checkpoint.save(f"{path}/two", twins.sharded, twins.optimizers[1])
        twins.optimizers[1].zero_grad()
        sw.checkpoint.load(f"{path}/one", twins.sharded, twins.optimizers[1])
        twins.train(2)
        same_states(twins)
    assert order.races == []


@on_ranks(1)
def test_a_write_that_failed_is_never_read_and_is_told_by_a_save() -> None:
    path = shared_folder()
    with played():
        twins = Twins(offload=offload("both"))
        twins.train(2)
        squares(twins.sharded, twins.batch()).backward()
        with failing("write", 0):
            with suppress(UsageError):  # known in time, or not
                twins.optimizers[1].step()
            with pytest.raises((UsageError, CheckpointError), match="is lost"):
                sw.checkpoint.save(f"{path}/one", twins.sharded, twins.optimizers[1])
        with failing("write_some", 0), pytest.raises((UsageError, CheckpointError, OSError)):
            sw.checkpoint.load(f"{path}/none", twins.sharded, twins.optimizers[1])
        with pytest.raises(UsageError, match="is lost"):
            twins.optimizers[1].step()


def places_of(tier: StagedDisk, count: int) -> list[Tensor]:
    """Buffers of a page, with room for as many in the file."""
    tier.grow(8 * PAGE_BYTES)
    return [tier.buffer(PAGE_BYTES) for _ in range(count)]


def staged(**options: Any) -> StagedDisk:
    return StagedDisk(Disk(Path(shared_folder()), "weights", THREADS), torch.device("cpu"), "weights", **options)


@on_ranks(1)
def test_a_read_that_an_interrupt_left_does_not_come_later() -> None:
    with played(slow_disk=False) as order:
        tier = staged()
        first, second = places_of(tier, 2)
        tier.claim(first)
        first.fill_(1)
        tier.write(0, first).wait()
        left = tier.read(0, second)  # and whoever wanted it is gone
        left.job.end()
        tier.claim(second)
        second.fill_(2)
        tier.write(PAGE_BYTES, second).wait()
        left.wait()
        tier.use(second)
        assert bool((second == 2).all())
        back = tier.read(PAGE_BYTES, first)
        back.wait()
        tier.use(first)
        assert bool((first == 2).all())
    assert order.races == []


@on_ranks(1)
def test_reads_that_are_over_are_copied_before_anybody_waits_for_them() -> None:
    with played(slow_disk=False) as order:
        tier = staged()
        buffers = places_of(tier, 3)
        for index, buffer in enumerate(buffers):
            tier.claim(buffer)
            buffer.fill_(index)
            tier.write(index * PAGE_BYTES, buffer).wait()
        reads = [tier.read(index * PAGE_BYTES, buffer) for index, buffer in enumerate(buffers[:2])]
        for read in reads:
            read.job.end()
        tier.read(2 * PAGE_BYTES, buffers[2]).wait()
        assert not any(map(tier.is_pending, reads))
        assert order.waits == []
    assert order.races == []


@on_ranks(1)
def test_a_piece_on_the_host_goes_past_the_device() -> None:
    with played():
        tier = StagedDisk(Disk(Path(shared_folder()), "weights"), torch.device("meta"), "weights")
        tier.grow(PAGE_BYTES)
        tier.write_from(8, torch.arange(5.0))
        tier.settle()
        back = torch.empty(5)
        tier.read_into(8, back)
    assert torch.equal(back, torch.arange(5.0))


@on_ranks(1)
def test_memory_that_cannot_be_pinned_is_told_with_the_way_out() -> None:
    def refuses(memory: Tensor, device: torch.device) -> None:
        raise RuntimeError("out of memory")

    with played(), mock.patch.object(device_tools, "pin", refuses):
        with pytest.raises(UsageError, match=r"4096 bytes .* rank's weights cannot be pinned .*offload.pin = false"):
            places_of(staged(), 1)
        places_of(staged(pin=False), 1)
        with (
            mock.patch("shardwise.offload.tiers.disk.huge_page_buffer", side_effect=OSError("Cannot allocate memory")),
            pytest.raises(UsageError, match=r"no room for a stage of 4096 bytes .*Cannot allocate"),
        ):
            places_of(staged(), 1)


@on_ranks(1)
def test_a_stage_is_given_back_when_nothing_uses_it() -> None:
    pinned: list[int] = []
    known: dict[int, dict[int, int]] = {}

    def pin(memory: Tensor, device: torch.device) -> Callable[[], object]:
        pinned.append(memory.data_ptr())
        return lambda: known.update({pinned.index(memory.data_ptr()): dict(order.host.clock)})

    with played() as order, mock.patch.object(device_tools, "pin", pin):
        tier = staged()
        first, second = places_of(tier, 2)
        tier.claim(first)
        tier.write(0, first)
        tier.drop(first)
        tier.read(0, second).wait()
        tier.drop(second)
        while len(known) < 2:
            time.sleep(0.01)
        for index, stream in enumerate((tier._outward, tier._inward)):
            number = stream.number  # type: ignore[attr-defined]
            assert known[index].get(number) == order.operations[number], "its copy is over"
        assert order.waits == []
        assert tier.host_bytes == 0
