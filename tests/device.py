"""The device on which ranks run tests of the engine: the CPU, or the kind that SHARDWISE_TEST_DEVICE names.

    SHARDWISE_TEST_DEVICE=cuda pytest -m ranks tests/engine        # one rank on each device

With the variable set, also to `cpu`, a rank makes its tensors on its device (torch's default device), and its process
group has the kind's own backend beside gloo. Two ranks cannot share a device of NCCL's: tests for more ranks than there
are devices skip. Tests that simulate a device on a CPU skip as well.
"""

from __future__ import annotations

import os

import pytest

VARIABLE = "SHARDWISE_TEST_DEVICE"


def kind() -> str:
    """Return the kind of device ("cpu", "cuda", ...)."""
    return os.environ.get(VARIABLE) or "cpu"


def backend() -> str:
    """Return what a rank's default process group is made with."""
    import torch.distributed as dist

    return "gloo" if kind() == "cpu" else f"cpu:gloo,{kind()}:{dist.get_default_backend_for_device(kind())}"


def take(local_rank: int) -> None:
    """Make a rank's device the one on which its tensors are made."""
    import torch

    if kind() != "cpu":
        torch.accelerator.set_device_index(local_rank)
    if os.environ.get(VARIABLE):
        torch.set_default_device("cpu" if kind() == "cpu" else f"{kind()}:{local_rank}")


def skip_without(world_size: int) -> None:
    """Skip a test for which there are too few devices."""
    import torch

    if kind() == "cpu":
        return
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind():
        pytest.skip(f"{VARIABLE}={kind()}, but torch sees {'no accelerator' if found is None else found.type}")
    if world_size > (count := torch.accelerator.device_count()):
        pytest.skip(f"{world_size} ranks need a device each: torch sees {count}")


def skip_beside_one(what: str) -> None:
    """Skip a test that simulates a device, which needs ranks that compute on CPUs."""
    if kind() != "cpu":
        pytest.skip(f"{what} runs on CPU ranks")
