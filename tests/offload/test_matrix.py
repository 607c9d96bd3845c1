"""The same bits wherever it rests: a matrix of places by programs, beside a device and on CPU ranks alone."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from shardwise.engine.extensions.offloaded import OffloadedGradient
from shardwise.offload import host_step
from shardwise.offload.offloaded_slice import OffloadedSlice
from tests.engine.rig import on_ranks, same_tensors
from tests.engine.streams import played
from tests.offload.places import (
    GRADIENTS,
    GRADIENTS_BESIDE_A_DISK,
    HOST_STEP,
    HOST_STEP_FROM_DISK,
    IN_HOST_MEMORY,
    ON_A_DISK,
    ON_DISK,
    offload,
)
from tests.offload.programs import BASIC, IN_PARTS, OF_DTYPES, OF_OPTIMIZERS, PROGRAMS, Trained

BOTH = "params=cpu,optimizer=cpu"
ALL = f"{BOTH},gradients=cpu"
STEPS_OF_STATE, STEPS_OF_ALL = "optimizer=cpu,step=cpu", f"{ALL},step=cpu"
STEPS_FROM_DISK = "optimizer=nvme,step=cpu"
EDITS, SUMS, SCALING = "accumulation, clipping, evaluation and edits", "sums of micro-batches", "loss scaling"


def cells(programs: Iterable[str], where: Iterable[str], *strategies: str) -> list[tuple[str, str, str]]:
    return list(itertools.product(programs, where, strategies or ("full_shard",)))


BESIDE_A_DEVICE = [
    *cells(BASIC, [*IN_HOST_MEMORY, *ON_DISK, *GRADIENTS, *HOST_STEP]),
    *cells(BASIC, [*IN_HOST_MEMORY, *ON_DISK, *GRADIENTS, STEPS_OF_ALL], "shard_optimizer"),
    *cells(["tied"], [*GRADIENTS_BESIDE_A_DISK, *HOST_STEP_FROM_DISK]),
    *cells([EDITS], [*IN_HOST_MEMORY, *GRADIENTS, STEPS_OF_STATE, STEPS_OF_ALL, STEPS_FROM_DISK]),
    *cells([SUMS, SCALING], [*GRADIENTS, STEPS_OF_STATE, STEPS_OF_ALL, STEPS_FROM_DISK]),
    *cells([EDITS, SUMS, SCALING], [*GRADIENTS, STEPS_OF_ALL, STEPS_FROM_DISK], "shard_grad_op"),
    *cells(["steps in backward"], [*IN_HOST_MEMORY, *ON_A_DISK, "gradients=cpu", *HOST_STEP]),
    *cells(["all at once", "all at once, nf4"], ["params=nvme,optimizer=nvme", ALL]),
    *cells(["checkpoints"], [BOTH, *ON_DISK[-3:], STEPS_OF_STATE, STEPS_OF_ALL, ALL]),
    *cells(IN_PARTS, GRADIENTS),
    *cells(OF_DTYPES, ["gradients=cpu", ALL]),
    *cells(["dtypes"], [STEPS_OF_ALL]),
    *cells(OF_OPTIMIZERS, [*HOST_STEP, STEPS_FROM_DISK]),
]
ON_CPU_RANKS = [
    *cells(BASIC, ON_A_DISK, "full_shard", "shard_grad_op", "shard_optimizer", "no_shard"),
    *cells(["amsgrad", "nadam"], ["optimizer=nvme"], "full_shard", "no_shard"),
    *cells([EDITS, SCALING, "evaluation in inference mode", "steps in backward"], ON_A_DISK),
    *cells(["all at once", "all at once, nf4", "checkpoints", "few slots", "reduced in fp32"], ON_A_DISK),
    *cells(["schedules, closures and hooks", "steps in backward"], ["optimizer=nvme"], "no_shard"),
    *cells(["schedules, closures and hooks"], ["optimizer=nvme"]),
    *cells(["checkpoints"], ["optimizer=nvme"], "no_shard"),
    *cells(["replicas"], ON_A_DISK, "hybrid_shard"),
    *cells(["tied"], [ALL, STEPS_OF_ALL]),
]


@functools.cache
def usual(program: str, strategy: str, is_played: bool) -> Trained:
    """What a program computes with everything on the device. A rank keeps it for the cells that follow."""
    return PROGRAMS[program](None, strategy)


def assert_same(program: str, place: str, strategy: str, is_played: bool) -> None:
    expected = usual(program, strategy, is_played)
    where = offload(place)
    with mock.patch.object(host_step, "_FUSED_ON_CPU", ()):  # the device's kernels would not be the host's either
        found = PROGRAMS[program](where, strategy)
    assert found.numbers == expected.numbers
    same_tensors(expected.tensors, found.tensors)
    if where.path is not None:
        assert not any(Path(where.path).iterdir()), "files of offload have no name: nothing can be left behind"


def beside_a_device(program: str, place: str, strategy: str, slow_disk: bool = True) -> None:
    with played(slow_disk) as order:
        assert_same(program, place, strategy, is_played=True)
    assert not order.races, order.races[0]


@pytest.mark.parametrize(("program", "place", "strategy"), BESIDE_A_DEVICE)
@on_ranks(2)
def test_beside_a_device(program: str, place: str, strategy: str) -> None:
    beside_a_device(program, place, strategy)


@pytest.mark.parametrize("slow_disk", [True, False], ids=["slow", "fast"])
@pytest.mark.parametrize("place", ON_DISK)
@on_ranks(2)
def test_nobody_waits_for_a_device_beside_a_disk(place: str, slow_disk: bool) -> None:
    gc.collect()  # what is left of a model before gives its stages back, and waits for the device
    beside_a_device("edits without a wait", place, "full_shard", slow_disk)


@pytest.mark.parametrize("place", ["gradients=cpu", ALL])
@on_ranks(4)
def test_beside_replicas(place: str) -> None:
    beside_a_device("replicas", place, "hybrid_shard")


@pytest.mark.parametrize(("program", "place", "strategy"), ON_CPU_RANKS)
@on_ranks(2)
def test_on_cpu_ranks(program: str, place: str, strategy: str) -> None:
    assert_same(program, place, strategy, is_played=False)


@pytest.mark.parametrize("program", [*BASIC, "nadam"])
@on_ranks(1)
def test_on_one_rank(program: str) -> None:
    assert_same(program, "optimizer=nvme", "full_shard", is_played=False)


# Planted faults -------------------------------------------------------------------------------------------------------


def misses_a_sum(self: OffloadedGradient) -> tuple[Tensor, bool]:
    """The sum of a further micro-batch overwrites those before it."""
    total, _ = prepare_sum(self)
    return total, False


prepare_sum = OffloadedGradient.prepare_sum
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "sums of micro-batches": (OffloadedGradient, "prepare_sum", misses_a_sum),
    "reduced in parts": (OffloadedSlice, "note_write", lambda self: None),
}


@pytest.mark.parametrize("program", FAULTS)
@on_ranks(2)
def test_a_fault_fails_its_cell(program: str) -> None:
    with mock.patch.object(*FAULTS[program]), pytest.raises(AssertionError):
        beside_a_device(program, ALL, "full_shard")
