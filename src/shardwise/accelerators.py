"""The one file that knows kinds of devices: which accelerator is here, its streams, memory, random numbers and name.

Everything goes through `torch.accelerator`, `torch.Stream` and the module that torch keeps for a kind of device, so no
kind needs code here. CUDA and ROCm (which calls itself CUDA) are what it was written for; XPU and devices from outside
torch go the same way and have only been played on CPU ranks.
"""

from __future__ import annotations

import functools
import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

CPU = torch.device("cpu")

_FIRST = -1
"""The priority of a stream whose kernels go before those of others: torch's numbers fall as priority rises."""
_LOOK_S = 1e-4
"""Between two looks at an event: a hundredth of what a disk takes for a buffer."""
_NO_COLLECTIVES = frozenset({"mps"})
"""Accelerators that no backend of torch.distributed serves: ranks beside one compute on their CPUs."""


# Which device ---------------------------------------------------------------------------------------------------------


def accelerator() -> torch.device | None:
    """This process's accelerator, with its index; None where there is none that ranks can train on."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type in _NO_COLLECTIVES:
        return None
    return torch.device(found.type, torch.accelerator.current_device_index())


def count() -> int:
    """Accelerators that this process sees. Starts no driver where torch can count without."""
    found = torch.accelerator.current_accelerator()
    return 0 if found is None or found.type in _NO_COLLECTIVES else torch.accelerator.device_count()


def of_local_rank(local_rank: int) -> torch.device:
    """The accelerator of the rank with that number on this host, which becomes the current one, else the CPU."""
    found = accelerator()
    if found is None:
        return CPU
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(found.type, index)


def of_group(group: dist.ProcessGroup | None) -> torch.device:
    """Where ranks of a process group compute: on the accelerator, if the group has a backend for it; else on the CPU,
    as users ask for with `init_process_group("gloo")`. None: a world of one. Warns where an accelerator is left idle
    that nobody decided about.

    Raises:
        ValueError: the group's backend serves neither.
    """
    found = accelerator()
    if found is not None and (group is None or serves(group, found.type)):
        return found
    if group is not None and not serves(group, "cpu"):
        kinds = sorted(kinds_of(group))
        raise ValueError(
            f"the process group serves {', '.join(kinds) or 'no device'}, and torch sees {found or 'none'}"
        )
    idle = torch.accelerator.current_accelerator(check_available=True)
    if idle is not None and idle.type in _NO_COLLECTIVES:
        warnings.warn(f"shardwise: no collectives for {idle.type} exist, so this trains on the CPU", stacklevel=2)
    return CPU


def of_kind(kind: str) -> torch.device:
    """The device of this process that is of a kind ("cpu", "cuda", ...).

    Raises:
        ValueError: there is none.
    """
    if kind == "cpu":
        return CPU
    found = accelerator()
    if found is None or found.type != kind:
        raise ValueError(f"no {kind} device is here (torch sees {'none' if found is None else found})")
    return found


def serves(group: dist.ProcessGroup, kind: str) -> bool:
    """Whether a backend of the process group moves tensors on devices of that kind. gloo is for CPUs, though torch
    registers it for CUDA too. A group that is not a list of torch's backends, but an implementation of its own, names
    no kind: it is taken to serve any."""
    kinds = kinds_of(group)
    return not kinds or kind in kinds


def kinds_of(group: dist.ProcessGroup) -> set[str]:
    """The kinds of devices that backends of the process group were made for."""
    devices = group._device_types
    return {d.type for d in devices if d.type == "cpu" or group._get_backend(d).name().lower() != "gloo"}


def backend_for(device: torch.device) -> str:
    """The backend of torch.distributed that is made for the device: nccl for CUDA and ROCm, xccl for XPU, gloo for
    CPUs."""
    return dist.get_default_backend_for_device(device)


# Streams --------------------------------------------------------------------------------------------------------------


def new_stream(device: torch.device) -> torch.Stream:
    """A stream whose kernels go before those of the current one. Else a collective that has few blocks waits until a
    large product has none left."""
    return torch.Stream(device=device, priority=_FIRST)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that operations on the device are enqueued on now."""
    return torch.accelerator.current_stream(device)


def on(stream: torch.Stream) -> AbstractContextManager[Any]:
    """Inside, operations are enqueued on `stream`."""
    return stream


def wait(device: torch.device) -> None:
    """Return when the device has done everything that was enqueued; at once on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def wait_on_thread(event: torch.Event, device: torch.device) -> None:
    """Return when the event is over. For a thread that does nothing else: it sleeps between looks, since torch's own
    wait keeps a core busy."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)  # a thread's calls are else for the first device
    while not event.query():
        time.sleep(_LOOK_S)


# Memory ---------------------------------------------------------------------------------------------------------------


def allocated_bytes(device: torch.device) -> tuple[int, int]:
    """What the device's allocator has handed out: now, and at the peak since `reset_peak`."""
    return torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """The peak is what is allocated now. Nothing happens on a CPU, whose allocator does not count."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def sent(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on the device, without waiting: it goes through pinned memory. Itself on a CPU."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def fetched(number: Tensor) -> Callable[[], float]:
    """Have a 0-d tensor copied to the host behind what its device has been given to do, without waiting.

    Returns:
        Its value; waits for the copy, and for nothing that the device is given later.
    """
    if number.device.type == "cpu":
        return number.item
    copy = torch.empty_like(number, device=CPU, pin_memory=True)
    copy.copy_(number, non_blocking=True)
    copied = current_stream(number.device).record_event()

    def value() -> float:
        copied.synchronize()
        return copy.item()

    return value


def host_memory(nbytes: int, device: torch.device) -> Tensor:
    """Bytes of the host, 1-D uint8; pinned, where the device is to copy from and to them by itself."""
    return torch.empty(nbytes, dtype=torch.uint8, device=CPU, pin_memory=device.type != "cpu")


def pin(memory: Tensor, device: torch.device) -> Callable[[], object]:
    """Have the device copy to and from host memory by itself, beside what the host does. Pins the pages that the
    memory lies in, no others.

    Returns:
        What undoes it; call it before the memory is given back. It does nothing where a kind of device cannot pin
        memory that is there already: copies then go through memory of its driver's.
    """
    module = _module(device)
    if not hasattr(module, "cudart"):
        return lambda: None
    runtime, address = module.cudart(), memory.data_ptr()
    module.check_error(runtime.cudaHostRegister(address, memory.nbytes, 0))
    return partial(runtime.cudaHostUnregister, address)


def has_memory(device: torch.device) -> bool:
    """Whether the device computes with memory of its own, and not the host's."""
    return device.type != "cpu"


def total_bytes(device: torch.device) -> int:
    """The accelerator's memory."""
    return int(_module(device).get_device_properties(device).total_memory)


# What differs from kind to kind ---------------------------------------------------------------------------------------


def name(device: torch.device) -> str:
    """The accelerator's name, as its maker gives it."""
    return str(_module(device).get_device_name(device))


def identity(device: torch.device) -> str | None:
    """What no other device of this host has, whatever each process calls it; None for CPUs, which ranks share, and for
    kinds of device that have no such number."""
    if device.type == "cpu":
        return None
    uuid = getattr(_module(device).get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def computes_in_bf16(device: torch.device) -> bool:
    """Whether an accelerator has bf16 of its own, not emulated; where torch does not say, it has. False on a CPU."""
    if device.type == "cpu":
        return False
    supported = getattr(_module(device), "is_bf16_supported", None)
    if supported is None:
        return True
    emulates = "including_emulation" in inspect.signature(supported).parameters
    return bool(supported(including_emulation=False) if emulates else supported())


def random_state(device: torch.device) -> Tensor:
    """The state of the generator that operations on the device take numbers from: bytes, on the CPU."""
    state: Tensor = torch.get_rng_state() if device.type == "cpu" else _module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set what `random_state` gave."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        _module(device).set_rng_state(state, device)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, the device's random numbers begin at a seed (below 2**63); its generator is left as it was."""
    before = random_state(device)
    try:
        set_random_state(device, torch.Generator(device).manual_seed(seed).get_state())
        yield
    finally:
        set_random_state(device, before)


def has_fused_adamw(device: torch.device) -> bool:
    """Whether torch has AdamW as one kernel there."""
    return device.type in _get_fused_kernels_supported_devices()


@functools.cache
def widest_float(device: torch.device) -> torch.dtype:
    """The dtype in which sums are formed: fp64, or fp32 on a device that has no fp64 (mps, some xpu).

    There a norm is summed as exactly as torch sums one over the pieces of a single device, and can overflow sooner: the
    squares of norms above 1.8e19 do not fit.
    """
    try:
        torch.ones(1, dtype=torch.float64, device=device).square()
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def _module(device: torch.device) -> Any:
    """What torch keeps for that kind of device."""
    return torch.get_device_module(device)
