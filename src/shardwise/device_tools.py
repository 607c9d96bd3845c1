"""What the host asks of a device besides computing: waits, memory, its name and its random numbers.

Like `accelerators`, whose functions the engine itself needs, it goes through `torch.accelerator` and torch's module for
a kind of device (`torch.cuda`, ...), so no kind needs code of its own.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from shardwise import accelerators

_GROUP = "/sys/fs/cgroup"
"""Where the control group of this process is seen."""
_LOOK_S = 1e-4
"""Seconds between two queries of an event: a hundredth of the time that a disk takes for a buffer."""


# Which device ---------------------------------------------------------------------------------------------------------


def count() -> int:
    """Return the number of accelerators that this process sees, if possible without initialising the driver."""
    found = torch.accelerator.current_accelerator()
    return 0 if found is None or found.type in accelerators.NO_COLLECTIVES else torch.accelerator.device_count()


def of_local_rank(local_rank: int) -> torch.device:
    """Return the accelerator for the rank with this number on this host and make it the current one; else the CPU."""
    found = accelerators.accelerator()
    if found is None:
        return accelerators.CPU
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(found.type, index)


# Waiting on the host --------------------------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    """Wait until the device has finished everything that was enqueued. Returns at once on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def wait_for(event: torch.Event) -> None:
    """Wait until the event has completed."""
    event.synchronize()


def wait_on_thread(event: torch.Event, device: torch.device) -> None:
    """Wait until the event has completed. For a thread that does nothing else: it sleeps between queries, because
    torch's own wait keeps a core busy."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)  # a thread's current device is the first one by default
    while not event.query():
        time.sleep(_LOOK_S)


# Memory ---------------------------------------------------------------------------------------------------------------


def allocated_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes that the device's allocator has handed out: now, and at the peak since `reset_peak`."""
    return torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Reset the peak to what is allocated now. Does nothing on a CPU, whose allocator does not count."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def sent(host: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor copied to the device, through pinned memory and without waiting. On a CPU, the tensor."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def fetched(number: Tensor) -> Callable[[], float]:
    """Enqueue a copy of a 0-d tensor to the host, without waiting.

    Returns:
        A function that returns the value. It waits for the copy, but not for work enqueued after it.
    """
    if number.device.type == "cpu":
        return number.item
    copy = torch.empty_like(number, device=accelerators.CPU, pin_memory=True)
    copy.copy_(number, non_blocking=True)
    copied = accelerators.current_stream(number.device).record_event()

    def value() -> float:
        copied.synchronize()
        return copy.item()

    return value


def host_memory(nbytes: int, device: torch.device) -> Tensor:
    """Return uninitialised host memory, 1-D uint8; pinned if the device is an accelerator, for asynchronous copies."""
    return torch.empty(nbytes, dtype=torch.uint8, device=accelerators.CPU, pin_memory=device.type != "cpu")


def pin(memory: Tensor, device: torch.device) -> Callable[[], object]:
    """Pin existing host memory, so that the device copies to and from it without the host. Pins only the pages of this
    memory.

    Returns:
        A function that unpins; call it before the memory is freed. If this kind of device cannot pin existing memory,
        both do nothing, and copies go through a buffer of the driver.
    """
    module = _module(device)
    if not hasattr(module, "cudart"):
        return lambda: None
    runtime, address = module.cudart(), memory.data_ptr()
    module.check_error(runtime.cudaHostRegister(address, memory.nbytes, 0))
    return partial(runtime.cudaHostUnregister, address)


def has_memory(device: torch.device) -> bool:
    """Whether the device has memory of its own, other than the host's."""
    return device.type != "cpu"


def total_bytes(device: torch.device) -> int:
    """Return the size of the accelerator's memory in bytes."""
    return int(_module(device).get_device_properties(device).total_memory)


def free_host_bytes() -> int:
    """Return the host memory that new work can have: this machine's, or what its control group's limit leaves."""
    page = os.sysconf("SC_PAGE_SIZE")
    free = page * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines("/proc/meminfo"):  # counts what the page cache would give back
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
    limit, used = (next(iter(_lines(f"{_GROUP}/memory.{what}")), "max") for what in ("max", "current"))
    if not (limit.isdecimal() and used.isdecimal()):
        return free
    lines = [line.split() for line in _lines(f"{_GROUP}/memory.stat")]
    cached = sum(int(nbytes) for kind, nbytes in lines if kind in {"active_file", "inactive_file"})
    return min(free, int(limit) - int(used) + cached)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return []


# What differs from kind to kind ---------------------------------------------------------------------------------------


def name(device: torch.device) -> str:
    """Return the accelerator's name, as its manufacturer gives it."""
    return str(_module(device).get_device_name(device))


def library_versions(device: torch.device) -> dict[str, str]:
    """Return the versions of the libraries under torch that a device uses; none on the CPU."""
    if device.type == "cpu":
        return {}
    found = {"cuda": str(torch.version.cuda or torch.version.hip)}
    if accelerators.backend_for(device) == "nccl" and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def identity(device: torch.device) -> str | None:
    """Return an identifier (UUID) that differs between all devices of this host, whatever index a process gives them.
    None for CPUs, which ranks share, and for kinds of device without one."""
    if device.type == "cpu":
        return None
    uuid = getattr(_module(device).get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def computes_in_bf16(device: torch.device) -> bool:
    """Whether an accelerator supports bf16 natively, not emulated; True if torch does not say. False on a CPU."""
    if device.type == "cpu":
        return False
    supported = getattr(_module(device), "is_bf16_supported", None)
    if supported is None:
        return True
    emulates = "including_emulation" in inspect.signature(supported).parameters
    return bool(supported(including_emulation=False) if emulates else supported())


def random_state(device: torch.device) -> Tensor:
    """Return the state of the device's default generator, as a byte tensor on the CPU."""
    state: Tensor = torch.get_rng_state() if device.type == "cpu" else _module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore a state that `random_state` returned."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        _module(device).set_rng_state(state, device)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """A context in which the device's random numbers start from a seed (below 2**63). The generator is restored."""
    before = random_state(device)
    try:
        set_random_state(device, torch.Generator(device).manual_seed(seed).get_state())
        yield
    finally:
        set_random_state(device, before)


def has_fused_adamw(device: torch.device) -> bool:
    """Whether torch has a fused AdamW kernel for this kind of device."""
    return device.type in _get_fused_kernels_supported_devices()


def _module(device: torch.device) -> Any:
    """Return torch's module for this kind of device, such as `torch.cuda`."""
    return torch.get_device_module(device)
