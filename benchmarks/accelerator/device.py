"""The device at hand. Streams and events do nothing where there is none, so that the checks' code runs on CPUs too.

python -m benchmarks.accelerator.device     # what there is, as JSON
"""

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from shardwise import accelerators

PACKAGES = ("numpy", "xxhash", "safetensors", "triton", "transformers")
"""Beside torch: which of them are found is told. The engine needs the first two; plans and checkpoints no more."""
MIB = 2**20
GIB = 2**30


def accelerator() -> torch.device | None:
    """The first one, or None."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else torch.device(found.type, 0)


def device_at_hand() -> torch.device:
    return accelerator() or torch.device("cpu")


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def activities(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    """What a profiler is to look at."""
    kinds = torch.profiler.ProfilerActivity
    own = getattr(kinds, device.type.upper(), None)
    return [kinds.CPU] if own in {None, kinds.CPU} else [kinds.CPU, own]


class HostEvent:
    """An event of a device whose operations are over when they return."""

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class HostStream:
    """A stream of such a device."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device
        self.device_index = 0

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self, event: Any = None) -> HostEvent:
        return event or HostEvent()

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    with contextlib.nullcontext() if isinstance(stream, HostStream) else torch.cuda.stream(stream):
        yield


def current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else HostStream()


@contextlib.contextmanager
def played(device: torch.device) -> Iterator[None]:
    """On CPUs, streams do nothing inside, so that StreamCollectives can be made."""
    if device.type == "cuda":
        yield
        return
    with (
        mock.patch.object(accelerators, "new_stream", HostStream),
        mock.patch.object(accelerators, "on", on_stream),
        mock.patch.object(accelerators, "current_stream", return_value=HostStream()),
    ):
        yield


def same_bits() -> None:
    """Ask for kernels that repeat their bits; where there is none, the case learns of it by comparing."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_tf32 = False


def facts() -> dict[str, Any]:
    """What a result must carry about the device and its software; nothing that names the machine."""
    found = accelerator()
    told: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            told[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            told[package] = "not found"
    if found is None:
        return {**told, "accelerator": "none"}
    told |= {"accelerator": found.type, "devices": torch.accelerator.device_count()}
    with contextlib.suppress(Exception):  # a fact that a backend does not tell is left out
        told["device"] = torch.get_device_module(found).get_device_name(0)
        told["device_memory_gib"] = round(torch.get_device_module(found).mem_get_info(0)[1] / GIB, 1)
        told["cuda"], told["hip"] = torch.version.cuda, torch.version.hip
        told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return told


if __name__ == "__main__":
    print(json.dumps(facts()))
