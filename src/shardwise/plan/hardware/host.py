"""The time that the host of an accelerator needs to launch work: a data file with a source for every figure."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

from shardwise.plan.hardware.devices import Figure
from shardwise.plan.hardware.toml_table import TomlTable

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
    whole = TomlTable(tomllib.loads(_FILE.read_text(encoding="utf-8")), "", ("host",))
    names = [known.name for known in fields(Host)]
    section = whole.section("host", names)
    found = {name: section.section(name, ("value", "source", "note")) for name in names}
    return Host(
        **{
            name: Figure(one.number("value"), one.text("source", ""), one.text("note", ""))
            for name, one in found.items()
        }
    )
