"""Inputs of blocks on the host, run dry: the copies of the real engine, and its bytes on device and host."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.model_tools import activation_offload
from shardwise.model_tools.activation_checkpointing import checkpoint_units
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import AWAY, BACK, Allocate, Free, HostCopy, Recording, Wait
from shardwise.plan.dry_run.step import record
from shardwise.plan.offload.memory import offloaded, quarter_of
from shardwise.plan.simulate.forecast import forecast_of
from tests.engine.cases import MIXED
from tests.engine.rig import seeded
from tests.engine.streams import played
from tests.plan.rig import Regression, gpt2

if TYPE_CHECKING:
    from tests.ranks import RankPools

DEPTH = 5
ROWS = 300


def real() -> tuple[list[tuple[str, int]], int, int]:
    """Of one step: copies in their order, the most bytes that came back and are there at once, bytes of the host."""
    copies: list[tuple[str, int]] = []
    back: list[int] = [0, 0]
    """Now, and at most."""
    keep, come = activation_offload.HostCopies.keep, activation_offload.KeptInput.come

    def leaves(own: activation_offload.HostCopies, leaving: Tensor) -> activation_offload.KeptInput:
        copies.append((AWAY, leaving.nbytes))
        return keep(own, leaving)

    def comes(kept: activation_offload.KeptInput) -> None:
        come(kept)
        assert kept._coming is not None
        nbytes = kept._coming.nbytes
        copies.append((BACK, nbytes))
        back[0] += nbytes
        back[1] = max(back)
        weakref.finalize(kept._coming.untyped_storage(), lambda: back.__setitem__(0, back[0] - nbytes))

    with played(), pytest.MonkeyPatch.context() as patch:
        model = checkpoint_units(sw.shard(seeded(lambda: Regression(DEPTH))), "offload")
        patch.setattr(activation_offload.HostCopies, "keep", leaves)
        patch.setattr(activation_offload.KeptInput, "come", comes)
        for _ in range(2):
            copies.clear()
            model(torch.ones(ROWS, 4)).backward()
        copied = model.blocks[0].forward.args[2].copies  # type: ignore[index, union-attr]
        host = sum(memory.nbytes for free in copied.buffers._free.values() for memory, _ in free)
    return copies, back[1], host


def come_back(recorded: Recording) -> int:
    """The most bytes that are there at once of what came back."""
    coming: dict[int, int] = {}
    born: Allocate | None = None
    for event in recorded.events:
        if isinstance(event, Allocate):
            born = event
        elif isinstance(event, HostCopy) and event.way == BACK and born is not None:
            coming[born.block] = born.nbytes
    now = most = 0
    for event in recorded.events:
        if isinstance(event, Allocate | Free) and event.block in coming:
            now += coming[event.block] * (1 if isinstance(event, Allocate) else -1)
            most = max(most, now)
    return most


def test_copies_and_bytes_are_the_engines(ranks: RankPools) -> None:
    [(copies, back, host)] = ranks(1).run(real)
    job = Job(gpus_per_node=1, micro_batch=ROWS, activation_checkpointing="offload")
    recorded = record(lambda: Regression(DEPTH), job)
    dry = [(event.way, event.nbytes) for event in recorded.events if isinstance(event, HostCopy)]
    assert dry == copies == [(AWAY, ROWS * 6 * 4)] * DEPTH + [(BACK, ROWS * 6 * 4)] * DEPTH
    assert come_back(recorded) == back == 2 * ROWS * 6 * 4
    assert offloaded(recorded, recorded.events).host_bytes == host > DEPTH * ROWS * 6 * 4
    assert forecast_of(recorded).host_bytes_per_rank == host


def test_sizes_of_the_hosts_memory_are_the_engines() -> None:
    with played() as order:
        for nbytes in (1, 7, 1000, 4097, 10**6):
            memory = activation_offload._HostBuffers().take(nbytes, torch.device("cpu"), order.current)
            assert memory.nbytes == -(-nbytes // quarter_of(nbytes)) * quarter_of(nbytes)


def test_every_copy_is_waited_for_and_leaves_less_on_the_device() -> None:
    full, away = (
        record(lambda: gpt2(n_layer=8), Job(seq_len=64, micro_batch=2, precision=MIXED, activation_checkpointing=mode))
        for mode in ("full", "offload")
    )
    waits = [event.number for event in away.events if isinstance(event, Wait)]
    assert len(set(waits)) == len(waits)
    assert {event.number for event in away.events if isinstance(event, HostCopy)} <= set(waits)
    before, after = forecast_of(full), forecast_of(away)
    width = 2 * 64 * 32 * 2
    assert before.memory["activations"] - after.memory["activations"] >= 4 * width
    assert (before.host_bytes_per_rank, after.host_bytes_per_rank) == (0, 8 * width)
    assert after.copies_s > 0
    assert {"host to device", "device to host"} <= set(after.timeline.streams)


def test_cpus_and_other_engines() -> None:
    """On CPU ranks it is the usual recomputation, and nothing is elsewhere."""
    job = Job(gpu="cpu", seq_len=16, activation_checkpointing="offload")
    found = forecast_of(record(gpt2, job))
    assert (found.host_bytes_per_rank, found.copies_s) == (0, 0)
    with pytest.raises(ConfigError, match="is forecast only for shardwise, not fsdp2"):
        Job(activation_checkpointing="offload", engine="fsdp2")
