"""Devices and interconnects, from data files with a source for every figure; a user may give files of their own."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from shardwise.errors import PlanError
from shardwise.plan.hardware.toml_table import HardwareFileError, TomlTable, is_amount
from shardwise.suggest import did_you_mean, nearest_path

_DATA = files("shardwise.plan.hardware") / "data"
_PER_NODE = re.compile(r"(?:(\d+)\s*[xX]\s*)?(\d+(?:\.\d+)?)\s*[gG](b|bit|B)(?:ps|/s)")
"""A node's rate. GB is not Gb: a byte has eight bits."""
_GENERIC_LATENCY_S = 4e-6
T = TypeVar("T")
Points = tuple[tuple[float, float], ...]
"""(size, value) pairs, size ascending."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and its source."""

    value: float
    source: str
    """A URL, or how it was measured."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The network between nodes."""

    name: str
    title: str
    bytes_per_s: Figure
    """Rate of all adapters of a node together, in one direction."""
    latency_s: Figure
    """Latency of a hop from node to node."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates measured on a machine, as `shardwise plan --calibrate` stores them, used instead of those of data sheets.

    Each list has (size, value) pairs with the size ascending; between two sizes the value is interpolated.
    """

    matmul: Mapping[str, Points] = field(default_factory=dict)
    """By dtype: operations of a product -> operations per second."""
    attention: Points = ()
    """Operations of a causal call, without the masked half -> operations per second."""
    memory: Points = ()
    """Bytes read and written by an operation -> bytes per second."""
    operations: Mapping[str, Points] = field(default_factory=dict)
    """The same by operator, for those that compute more than they move; "mul_" stands for all in-place operators."""
    collectives: Mapping[str, Points] = field(default_factory=dict)
    """By "all_gather", "reduce_scatter" and "all_reduce": bytes of the whole buffer -> seconds."""
    ranks: int = 1
    """The number of ranks that took part in the collectives, and kept the machine busy during the other
    measurements."""
    operation_s: float = 0.0
    """The host's seconds for an operation of any size."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, its node and its usual interconnect.

    Rates are in bytes or operations per second; a multiply-add is two operations, and rates are dense.
    """

    name: str
    """The name that a user gives: that of a packaged device, or the path of the user's file."""
    title: str
    kind: str
    """gpu or cpu. CPU ranks compute and communicate in turn; GPU ranks do both at once."""
    interconnect: str
    """The usual interconnect between nodes, as for `find_interconnect`."""
    peak_flops: Mapping[str, Figure]
    """By dtype, the rate in the data sheet; MFU is relative to it."""
    memory_bytes: Figure
    """Memory as marketed."""
    usable_bytes: Figure
    """Memory that a program sees before it allocates anything."""
    memory_bytes_per_s: Figure
    processors: Figure
    """Streaming multiprocessors, compute units or cores: the units over which a kernel's tiles are distributed."""
    power_w: Figure
    link_bytes_per_s: Figure
    """Rate of one device's links to others in its node, in one direction."""
    link_latency_s: Figure
    matmul_flops: Mapping[str, Figure] = field(default_factory=dict)
    """By dtype, the rate measured on a large product, if it was published."""
    attention_flops: Mapping[str, Figure] = field(default_factory=dict)
    """By kernel ("flash1", "flash2"), the measured rate, if it was published."""
    node: Mapping[str, Figure] = field(default_factory=dict)
    """Figures of the host that differ from the usual ones, by field of `hardware.node.Node`."""
    price_per_hour: Figure | None = None
    measured: Measured | None = None

    def peak(self, dtype: str) -> float:
        """Return the data sheet's rate for a dtype; that of fp32 if it has none."""
        return (self.peak_flops.get(dtype) or self.peak_flops["fp32"]).value

    def sustained(self, dtype: str) -> float:
        """Return the rate of a large product: as measured; else the same part of the peak as was measured in bf16; else
        the usual part of the peak."""
        if dtype in self.matmul_flops:
            return self.matmul_flops[dtype].value
        if "bf16" in self.matmul_flops and dtype in LIKE_BF16:
            return self.peak(dtype) * self.matmul_flops["bf16"].value / self.peak("bf16")
        return self.peak(dtype) * USUAL_SHARE

    def check_computes(self, dtype: str) -> None:
        """Raise PlanError if the dtype is bf16 or fp16 and the device is a GPU without matrix products in it."""
        known = [*self.peak_flops, *self.matmul_flops]
        if self.kind == "gpu" and dtype in ("bf16", "fp16") and dtype not in known:
            ways = " or ".join(name for name in ("bf16", "fp16", "fp32") if name in known)
            raise PlanError(f"precision {dtype}: {self.title} has no matrix products in {dtype}; use precision {ways}")

    @property
    def overlaps(self) -> bool:
        """Whether communication and computation overlap."""
        return self.kind == "gpu"


LIKE_BF16 = ("fp16", "fp8", "tf32")
"""Dtypes in which a large product reaches the same part of the peak as in bf16."""
USUAL_SHARE = 0.78
"""Part of the peak that a large product reaches on devices that nobody has measured: between an A100's 82 % and an
H100's 73 %."""


def device_names() -> list[str]:
    """Return the names of the packaged devices."""
    return _names("devices")


def interconnect_names() -> list[str]:
    """Return the names of the packaged interconnects."""
    return _names("interconnects")


def find_device(asked: Hardware | str | Path) -> Hardware:
    """Return a device by its packaged name or the path of a file like the packaged ones. Returns Hardware unchanged.

    Raises:
        PlanError: no such device or file, or an invalid file.
    """
    if isinstance(asked, Hardware):
        return asked
    name = str(asked)
    if name.lower() in device_names():
        device: Hardware = _packaged("devices", name.lower(), _device)
        return device
    if _is_file(name):
        return _parsed(Path(name), _device)
    raise PlanError(
        f"unknown device {name!r}{did_you_mean(name.lower(), device_names())}; the packaged ones are "
        f"{', '.join(device_names())}; or give the path of a hardware file, or measure this machine with "
        "`shardwise plan --calibrate`"
    )


def find_interconnect(asked: Interconnect | str | Path) -> Interconnect:
    """Return an interconnect by its packaged name, the path of a file, or a node's rate.

    Args:
        asked: a rate is in bits ("800gbps", "8x400Gb/s") or in bytes ("100GBps", "8x50GB/s").

    Raises:
        PlanError: none of these.
    """
    if isinstance(asked, Interconnect):
        return asked
    name = str(asked)
    if name.lower() in interconnect_names() and "GB" not in name:
        interconnect: Interconnect = _packaged("interconnects", name.lower(), _interconnect)
        return interconnect
    if match := _PER_NODE.fullmatch(name.strip()):
        return _of_rate(name, int(match[1] or 1) * float(match[2]) * 1e9 / (1 if match[3] == "B" else 8))
    if _is_file(name):
        return _parsed(Path(name), _interconnect)
    raise PlanError(
        f"unknown interconnect {name!r}{did_you_mean(name.lower(), interconnect_names())}; the packaged ones are "
        f"{', '.join(interconnect_names())}; or give the rate of a node, such as 800gbps (bits) or 100GBps "
        "(bytes), or the path of a file"
    )


def _of_rate(name: str, bytes_per_s: float) -> Interconnect:
    if not is_amount(bytes_per_s):
        raise PlanError(f"interconnect {name!r}: the rate of a node must be above 0 and finite")
    return Interconnect(
        name, name, Figure(bytes_per_s, "as asked for"), Figure(_GENERIC_LATENCY_S, "as packaged for InfiniBand")
    )


def with_usable_bytes(hardware: Hardware, nbytes: int) -> Hardware:
    """Return the same device with other usable bytes, as reported by this machine's driver."""
    return replace(hardware, usable_bytes=Figure(float(nbytes), "as this machine's driver says"))


def write_device(hardware: Hardware, path: Path) -> None:
    """Write a device, such as a calibrated one, to a file. `find_device` reads it back equal except for its name."""
    tables: dict[str, Mapping[str, Any]] = {name: getattr(hardware, name) for name in _RATES}
    for name, keys in _FIGURES.items():
        figures = {key: getattr(hardware, field_name) for key, field_name in keys.items()}
        tables[name] = {key: figure for key, figure in figures.items() if figure is not None}
    if hardware.measured is not None:
        measured = {name: getattr(hardware.measured, name) for name in _MEASURED}
        tables["measured"] = {
            key: value for key, value in measured.items() if not isinstance(value, Mapping) and value != ()
        }
        tables |= {f"measured.{key}": value for key, value in measured.items() if isinstance(value, Mapping)}
    lines = [f"{name} = {_toml(getattr(hardware, name))}" for name in ("title", "kind", "interconnect")]
    for name, table in tables.items():
        if table:
            lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml(value: Any) -> str:
    if isinstance(value, str):  # TOML's escapes are JSON's
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Figure):
        return f"{{ {', '.join(f'{key} = {_toml(part)}' for key, part in asdict(value).items() if part != '')} }}"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, tuple) else repr(value)


def _is_file(name: str) -> bool:
    return name.endswith(".toml") or os.path.isfile(name)  # noqa: PTH113 - a name that is too long for a path is none


def _names(folder: str) -> list[str]:
    return sorted(
        entry.name.removesuffix(".toml") for entry in (_DATA / folder).iterdir() if entry.name.endswith(".toml")
    )


@cache
def _packaged(folder: str, name: str, make: Callable[[str, Mapping[str, Any]], T]) -> T:
    return make(name, tomllib.loads((_DATA / folder / f"{name}.toml").read_text(encoding="utf-8")))


def _parsed(path: Path, make: Callable[[str, Mapping[str, Any]], T]) -> T:
    try:
        return make(str(path), tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise PlanError(f"no such file: {str(path)!r}{nearest_path(path)}") from None
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: is not TOML: {error}") from error
    except HardwareFileError as error:
        raise PlanError(f"{path}: {error} (src/shardwise/plan/hardware/data has examples of every key)") from error


_DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
_NODE = ("link_bytes_per_s", "link_share", "memory_bytes", "disk_bytes_per_s", "processors_bytes_per_s")
_RATES = {
    "peak_flops": _DTYPES,
    "matmul_flops": _DTYPES,
    "attention_flops": ("flash1", "flash2"),
    "node": _NODE,
}
"""Tables of a device's file that are fields of `Hardware`, and the keys that they may have."""
_FIGURES = {
    "memory": {"bytes": "memory_bytes", "usable_bytes": "usable_bytes", "bytes_per_s": "memory_bytes_per_s"},
    "processor": {"count": "processors", "power_w": "power_w"},
    "link": {"bytes_per_s": "link_bytes_per_s", "latency_s": "link_latency_s"},
    "price": {"per_hour": "price_per_hour"},
}
"""The other tables: by key, the field of `Hardware`. All are required, except the price."""
_MEASURED = tuple(known.name for known in fields(Measured))
_OPS = ("all_gather", "reduce_scatter", "all_reduce")


def _device(name: str, data: Mapping[str, Any]) -> Hardware:
    whole = TomlTable(data, "", ("title", "kind", "interconnect", *_RATES, *_FIGURES, "measured"))
    rates: dict[str, Any] = {table: _figures(whole.section(table, known)) for table, known in _RATES.items()}
    figures: dict[str, Any] = {
        field_name: _figure(whole.section(table, keys), key)
        for table, keys in _FIGURES.items()
        if table != "price" or table in whole
        for key, field_name in keys.items()
    }
    kind = whole.value("kind")
    if "fp32" not in rates["peak_flops"]:
        raise HardwareFileError("peak_flops.fp32 is missing")
    if kind not in ("gpu", "cpu"):
        raise HardwareFileError(f"kind = {kind!r}: must be 'gpu' or 'cpu'")
    if figures["processors"].value < 1:
        raise HardwareFileError(f"processor.count.value = {figures['processors'].value!r} is less than 1")
    return Hardware(
        name=name,
        title=whole.text("title", name),
        kind=kind,
        interconnect=whole.text("interconnect", "8x400gbps"),
        measured=_measured(whole.section("measured", _MEASURED)) if "measured" in whole else None,
        **rates,
        **figures,
    )


def _interconnect(name: str, data: Mapping[str, Any]) -> Interconnect:
    whole = TomlTable(data, "", ("title", "node"))
    node = whole.section("node", ("bytes_per_s", "latency_s"))
    return Interconnect(name, whole.text("title", name), _figure(node, "bytes_per_s"), _figure(node, "latency_s"))


def _measured(section: TomlTable) -> Measured:
    collectives = _curves(section.section("collectives", _OPS))
    ranks = section.count("ranks", 1)
    if collectives and ranks == 1:
        raise HardwareFileError("measured.ranks = 1, but measured.collectives needs at least 2 ranks")
    return Measured(
        matmul=_curves(section.section("matmul", _DTYPES)),
        attention=section.points("attention") if "attention" in section else (),
        memory=section.points("memory"),
        operations=_curves(section.section("operations")),
        collectives=collectives,
        ranks=ranks,
        operation_s=0.0 if section.value("operation_s") in (None, 0) else section.number("operation_s"),
    )


def _curves(section: TomlTable) -> Mapping[str, Points]:
    return {key: section.points(key) for key in section.keys}


def _figures(section: TomlTable) -> Mapping[str, Figure]:
    return {key: _figure(section, key) for key in section.keys}


def _figure(section: TomlTable, key: str) -> Figure:
    entry = section.value(key)
    if not isinstance(entry, dict) or "value" not in entry or "source" not in entry:
        raise HardwareFileError(f'{section.name_of(key)} must be {{ value = NUMBER, source = "URL" }}')
    figure = section.section(key, ("value", "source", "note"))
    return Figure(figure.number("value"), figure.text("source", ""), figure.text("note", ""))
