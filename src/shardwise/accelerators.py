"""What the engine needs of a device, whatever its kind: which one it is, and its streams. `device_tools` has the rest.

All of it goes through `torch.accelerator`, `torch.Stream` and torch's module for a kind of device (`torch.cuda`, ...),
so no kind needs code of its own. It was written for CUDA and ROCm (which torch calls CUDA). XPU and devices from
outside torch take the same path, which has only been simulated on CPU ranks.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")

_FIRST = -1
"""Priority of a stream whose kernels run before those of others: in torch lower numbers mean higher priority."""
NO_COLLECTIVES = frozenset({"mps"})
"""Kinds of accelerators that no backend of torch.distributed supports: ranks on such machines compute on CPUs."""


# Which device ---------------------------------------------------------------------------------------------------------


def accelerator() -> torch.device | None:
    """Return this process's accelerator, with its index; None if there is none that ranks can train on."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type in NO_COLLECTIVES:
        return None
    return torch.device(found.type, torch.accelerator.current_device_index())


def of_group(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which ranks of a process group compute: the accelerator if the group has a backend for it;
    else the CPU, which users choose with `init_process_group("gloo")`. None: a world of one.

    Warns if an accelerator stays idle because it has no collectives.

    Raises:
        ValueError: the group's backend supports neither.
    """
    found = accelerator()
    if found is not None and (group is None or serves(group, found.type)):
        return found
    if group is not None and not serves(group, "cpu"):
        kinds = sorted(kinds_of(group))
        raise ValueError(
            f"the process group supports {', '.join(kinds) or 'no device'}, but torch sees {found or 'no accelerator'}"
        )
    idle = torch.accelerator.current_accelerator(check_available=True)
    if idle is not None and idle.type in NO_COLLECTIVES:
        warnings.warn(f"shardwise: there are no collectives for {idle.type}, so training runs on the CPU", stacklevel=2)
    return CPU


def of_kind(kind: str) -> torch.device:
    """Return this process's device of a given kind ("cpu", "cuda", ...).

    Raises:
        ValueError: the process has none of this kind.
    """
    if kind == "cpu":
        return CPU
    found = accelerator()
    if found is None or found.type != kind:
        raise ValueError(f"this process has no {kind} device (torch sees {'none' if found is None else found})")
    return found


def serves(group: dist.ProcessGroup, kind: str) -> bool:
    """Whether the process group has a backend for tensors on this kind of device. gloo counts for CPUs only, though
    torch registers it for CUDA too. A group that is not made of torch's backends, but implemented by itself, names no
    kinds and is assumed to support all."""
    kinds = kinds_of(group)
    return not kinds or kind in kinds


def kinds_of(group: dist.ProcessGroup) -> set[str]:
    """Return the kinds of devices that backends of the process group are made for."""
    devices = group._device_types
    return {d.type for d in devices if d.type == "cpu" or group._get_backend(d).name().lower() != "gloo"}


def backend_for(device: torch.device) -> str:
    """Return the torch.distributed backend for the device: nccl for CUDA and ROCm, xccl for XPU, gloo for CPUs."""
    return dist.get_default_backend_for_device(device)


# Streams --------------------------------------------------------------------------------------------------------------


def new_stream(device: torch.device) -> torch.Stream:
    """Return a new stream whose kernels run before those of the current one. Otherwise a collective, which needs few
    blocks, would wait until all blocks of a large matmul have started."""
    return torch.Stream(device=device, priority=_FIRST)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which operations on the device are enqueued now."""
    return torch.accelerator.current_stream(device)


def on(stream: torch.Stream) -> AbstractContextManager[Any]:
    """Return a context inside which operations are enqueued on `stream`."""
    return stream


# Sums -----------------------------------------------------------------------------------------------------------------


@functools.cache
def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype in which sums are computed: fp64, or fp32 on a device without fp64 (mps, some xpu).

    In fp32 a norm is as exact as when torch sums it over the pieces on a single device, but overflows sooner: the
    squares of norms above 1.8e19 do not fit.
    """
    try:
        torch.ones(1, dtype=torch.float64, device=device).square()
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64
