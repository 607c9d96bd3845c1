"""The time that the host of an accelerator needs to launch work: a data file with a source for every figure."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from shardwise.plan.hardware.devices import Figure
from shardwise.plan.hardware.reading import read

_FILE = files("shardwise.plan.hardware") / "data" / "host.toml"


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of the thread that launches work."""

    operation_s: Figure
    """Seconds of an operation in eager mode: PyTorch's dispatch, autograd and one launch."""
    compiled_operation_s: Figure
    """The same from a compiled graph's wrapper."""
    collective_s: Figure
    """Seconds to launch a collective through torch.distributed."""
    hop_s: Figure
    """Seconds until a small message to another host is read."""


@cache
def usual_host() -> Host:
    """Return the packaged figures."""
    usual: Host = read(Host, tomllib.loads(_FILE.read_text(encoding="utf-8"))["host"], "host")
    return usual
