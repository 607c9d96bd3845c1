"""The random states of one process as JSON, for `training.json`."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shardwise import device_tools


def capture(device: torch.device) -> dict[str, Any]:
    """Return this process's random states as JSON: torch's on the CPU and on `device`, Python's, and numpy's unless its
    global generator was replaced (`np.random.set_bit_generator`)."""
    states: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state()),
        "python": _python_state(),
    }
    if _numpy_is_usual():
        states["numpy"] = _numpy_state()
    if device.type != "cpu":
        states[device.type] = _encode(device_tools.random_state(device))
    return states


def restore(states: Mapping[str, Any], device: torch.device) -> None:
    """Set this process's random states to what `capture` returned. Raises KeyError for another document."""
    torch.set_rng_state(_decode(states["torch"]))
    kind, words, spare = states["python"]
    random.setstate((kind, tuple(_decode(words).view(torch.uint32).tolist()), spare))
    if "numpy" in states and _numpy_is_usual():
        name, words, *rest = states["numpy"]
        np.random.set_state((name, _decode(words).view(torch.uint32).numpy(), *rest))
    if device.type != "cpu" and device.type in states:
        device_tools.set_random_state(device, _decode(states[device.type]))


def _python_state() -> list[Any]:
    kind, numbers, spare = random.getstate()
    return [kind, _encode(torch.tensor(numbers, dtype=torch.uint32, device="cpu").view(torch.uint8)), spare]


def _numpy_is_usual() -> bool:
    """Return whether numpy's global generator is of its original kind; whoever installed another one looks after it."""
    return bool(np.random.get_state(legacy=False)["bit_generator"] == "MT19937")


def _numpy_state() -> list[Any]:
    name, words, position, has_spare, spare = np.random.get_state(legacy=True)
    return [name, _encode(torch.from_numpy(words).view(torch.uint8)), int(position), int(has_spare), float(spare)]


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.numpy())).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
