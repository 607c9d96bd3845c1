"""Devices and what links them: data files with a source for every figure, the user's own among them."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from shardwise.errors import PlanError
from shardwise.plan.hardware.toml_table import HardwareFileError, TomlTable, is_amount
from shardwise.suggest import did_you_mean, nearest_path

_DATA = files("shardwise.plan.hardware") / "data"
_PER_NODE = re.compile(r"(?:(\d+)\s*[xX]\s*)?(\d+(?:\.\d+)?)\s*[gG](b|bit|B)(?:ps|/s)")
"""A rate. GB is not Gb: a byte has eight bits."""
_GENERIC_LATENCY_S = 4e-6
T = TypeVar("T")
Points = tuple[tuple[float, float], ...]
"""(size, value) pairs, size ascending."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and where it is from."""

    value: float
    source: str
    """A URL, or how it was measured."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Interconnect:
    """What links nodes."""

    name: str
    title: str
    bytes_per_s: Figure
    """One way, all adapters of a node together."""
    latency_s: Figure
    """A hop from node to node."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates of the machine at hand, as `shardwise plan --calibrate` stores them, in place of data sheets'.

    Every list is of (size, value) pairs with the size ascending; between two sizes the value is interpolated.
    """

    matmul: Mapping[str, Points] = field(default_factory=dict)
    """By dtype: operations of a product -> operations a second."""
    attention: Points = ()
    """Operations of a causal call, the masked half left out -> operations a second."""
    memory: Points = ()
    """Bytes read and written by an operation -> bytes a second."""
    operations: Mapping[str, Points] = field(default_factory=dict)
    """The same by operator, for those that compute more than they move; "mul_" stands for all that work in place."""
    collectives: Mapping[str, Points] = field(default_factory=dict)
    """By "all_gather", "reduce_scatter" and "all_reduce": bytes of the whole buffer -> seconds."""
    ranks: int = 1
    """That took part in the collectives, and kept the machine busy while the rest was measured."""
    operation_s: float = 0.0
    """Of the host, an operation, whatever its size."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, its node and the interconnect it is usually found with.

    Rates are in bytes or operations a second; a multiply-add is two operations, and rates are dense.
    """

    name: str
    """As it is asked for: a packaged device's, or the path of the user's own file."""
    title: str
    kind: str
    """gpu or cpu. A CPU's ranks compute and communicate in turn; a GPU's do both at once."""
    interconnect: str
    peak_flops: Mapping[str, Figure]
    """By dtype, as the data sheet has it: what MFU is a part of."""
    memory_bytes: Figure
    """As marketed."""
    usable_bytes: Figure
    """As a program sees it before it allocates anything."""
    memory_bytes_per_s: Figure
    processors: Figure
    """Streaming multiprocessors, compute units, cores: what a kernel's tiles are dealt out to."""
    power_w: Figure
    link_bytes_per_s: Figure
    """Between devices of one node, one way, of one device."""
    link_latency_s: Figure
    matmul_flops: Mapping[str, Figure] = field(default_factory=dict)
    """By dtype, measured on a large product, where someone has published it."""
    attention_flops: Mapping[str, Figure] = field(default_factory=dict)
    """By kernel ("flash1", "flash2"), measured, where someone has published it."""
    price_per_hour: Figure | None = None
    measured: Measured | None = None

    def peak(self, dtype: str) -> float:
        """The data sheet's rate for a dtype; that of fp32 where it has none."""
        return (self.peak_flops.get(dtype) or self.peak_flops["fp32"]).value

    def sustained(self, dtype: str) -> float:
        """The rate of a large product: as measured, or in a measured dtype's proportion to the peak, or a usual one."""
        if dtype in self.matmul_flops:
            return self.matmul_flops[dtype].value
        if "bf16" in self.matmul_flops and dtype in ("fp16", "fp8", "tf32"):
            return self.peak(dtype) * self.matmul_flops["bf16"].value / self.peak("bf16")
        return self.peak(dtype) * _USUAL_SHARE

    @property
    def overlaps(self) -> bool:
        """Whether communication goes on beside computation."""
        return self.kind == "gpu"


_USUAL_SHARE = 0.78
"""Of the peak, for devices nobody has measured: between an A100's 82 % and an H100's 73 %."""


def device_names() -> list[str]:
    """Packaged devices."""
    return _names("devices")


def interconnect_names() -> list[str]:
    """Packaged interconnects."""
    return _names("interconnects")


def find_device(asked: Hardware | str | Path) -> Hardware:
    """A device by its packaged name or the path of a file like the packaged ones; Hardware is returned as it is.

    Raises:
        PlanError: no such device or file, or a file that lacks something.
    """
    if isinstance(asked, Hardware):
        return asked
    name = str(asked)
    if name.lower() in device_names():
        return _packaged_device(name.lower())
    path = Path(name)
    if path.suffix == ".toml" or os.path.isfile(path):  # noqa: PTH113 - a name that is too long for a path is none
        return _parsed(path, _device)
    raise PlanError(
        f"unknown device {name!r}{did_you_mean(name.lower(), device_names())}; packaged are "
        f"{', '.join(device_names())}; or pass the path of a file like theirs, or measure "
        "this machine with `shardwise plan --calibrate`"
    )


def find_interconnect(asked: Interconnect | str | Path) -> Interconnect:
    """What links nodes, by its packaged name, the path of a file, or a node's rate.

    Args:
        asked: a rate is in bits ("800gbps", "8x400Gb/s") or in bytes ("100GBps", "8x50GB/s").

    Raises:
        PlanError: none of these.
    """
    if isinstance(asked, Interconnect):
        return asked
    name = str(asked)
    if name.lower() in interconnect_names() and "GB" not in name:
        return _packaged_interconnect(name.lower())
    if match := _PER_NODE.fullmatch(name.strip()):
        return _of_rate(name, int(match[1] or 1) * float(match[2]) * 1e9 / (1 if match[3] == "B" else 8))
    path = Path(name)
    if path.suffix == ".toml" or os.path.isfile(path):  # noqa: PTH113 - a name that is too long for a path is none
        return _parsed(path, _interconnect)
    raise PlanError(
        f"unknown interconnect {name!r}{did_you_mean(name.lower(), interconnect_names())}; packaged are "
        f"{', '.join(interconnect_names())}; or give a node's rate, such as 800gbps (bits) or 100GBps (bytes), or the "
        "path of a file"
    )


def _of_rate(name: str, bytes_per_s: float) -> Interconnect:
    if not is_amount(bytes_per_s):
        raise PlanError(f"interconnect {name!r}: a node's rate must be above 0, and finite")
    return Interconnect(
        name, name, Figure(bytes_per_s, "as asked for"), Figure(_GENERIC_LATENCY_S, "as packaged for InfiniBand")
    )


def with_usable_bytes(hardware: Hardware, nbytes: int) -> Hardware:
    """The same device, of which a program sees so many bytes."""
    return replace(hardware, usable_bytes=Figure(float(nbytes), "as this machine's driver says"))


def write_device(hardware: Hardware, path: Path) -> None:
    """Store a device, such as a calibrated one, as a file that `find_device` reads back equal but for its name."""
    lines = [f"title = {_text(hardware.title)}", f"kind = {_text(hardware.kind)}"]
    lines.append(f"interconnect = {_text(hardware.interconnect)}")
    for section, figures in _sections(hardware).items():
        lines += ["", f"[{section}]"]
        lines += [f"{key} = {_figure_text(figure)}" for key, figure in figures.items()]
    if hardware.measured is not None:
        lines += ["", *_measured_lines(hardware.measured)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _sections(hardware: Hardware) -> dict[str, dict[str, Figure]]:
    sections = {
        "peak_flops": dict(hardware.peak_flops),
        "matmul_flops": dict(hardware.matmul_flops),
        "attention_flops": dict(hardware.attention_flops),
        "memory": {
            "bytes": hardware.memory_bytes,
            "usable_bytes": hardware.usable_bytes,
            "bytes_per_s": hardware.memory_bytes_per_s,
        },
        "processor": {"count": hardware.processors, "power_w": hardware.power_w},
        "link": {"bytes_per_s": hardware.link_bytes_per_s, "latency_s": hardware.link_latency_s},
    }
    if hardware.price_per_hour is not None:
        sections["price"] = {"per_hour": hardware.price_per_hour}
    return {name: figures for name, figures in sections.items() if figures}


def _measured_lines(measured: Measured) -> list[str]:
    lines = ["[measured]", f"ranks = {measured.ranks}", f"operation_s = {measured.operation_s!r}"]
    curves = {name: getattr(measured, name) for name in ("attention", "memory")}
    lines += [f"{name} = {_points_text(points)}" for name, points in curves.items() if points]
    for name in ("matmul", "operations", "collectives"):
        lines += ["", f"[measured.{name}]"]
        lines += [f"{key} = {_points_text(points)}" for key, points in getattr(measured, name).items()]
    return lines


def _points_text(points: Points) -> str:
    return "[" + ", ".join(f"[{float(size)!r}, {float(value)!r}]" for size, value in points) + "]"


def _figure_text(figure: Figure) -> str:
    note = f", note = {_text(figure.note)}" if figure.note else ""
    return f"{{ value = {figure.value!r}, source = {_text(figure.source)}{note} }}"


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _names(folder: str) -> list[str]:
    return sorted(
        entry.name.removesuffix(".toml") for entry in (_DATA / folder).iterdir() if entry.name.endswith(".toml")
    )


@cache
def _packaged_device(name: str) -> Hardware:
    return _device(name, tomllib.loads((_DATA / "devices" / f"{name}.toml").read_text(encoding="utf-8")))


@cache
def _packaged_interconnect(name: str) -> Interconnect:
    return _interconnect(name, tomllib.loads((_DATA / "interconnects" / f"{name}.toml").read_text(encoding="utf-8")))


def _parsed(path: Path, make: Callable[[str, Mapping[str, Any]], T]) -> T:
    try:
        return make(str(path), tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise PlanError(f"no file {str(path)!r}{nearest_path(path)}") from None
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: not TOML: {error}") from error
    except HardwareFileError as error:
        raise PlanError(f"{path}: {error} (src/shardwise/plan/hardware/data has examples of every key)") from error


_TABLES = ("peak_flops", "matmul_flops", "attention_flops", "memory", "processor", "link", "price", "measured")
_DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
_OPS = ("all_gather", "reduce_scatter", "all_reduce")


def _device(name: str, data: Mapping[str, Any]) -> Hardware:
    whole = TomlTable(data, "", ("title", "kind", "interconnect", *_TABLES))
    memory = whole.section("memory", ("bytes", "usable_bytes", "bytes_per_s"))
    processor = whole.section("processor", ("count", "power_w"))
    link = whole.section("link", ("bytes_per_s", "latency_s"))
    peaks = _figures(whole.section("peak_flops", _DTYPES))
    if "fp32" not in peaks:
        raise HardwareFileError("peak_flops.fp32 is missing")
    kind = whole.value("kind")
    if kind not in ("gpu", "cpu"):
        raise HardwareFileError(f"kind = {kind!r} is neither 'gpu' nor 'cpu'")
    processors = _figure(processor, "count")
    if processors.value < 1:
        raise HardwareFileError(f"processor.count.value = {processors.value!r} is less than 1")
    return Hardware(
        name=name,
        title=whole.text("title", name),
        kind=kind,
        interconnect=whole.text("interconnect", "8x400gbps"),
        peak_flops=peaks,
        memory_bytes=_figure(memory, "bytes"),
        usable_bytes=_figure(memory, "usable_bytes"),
        memory_bytes_per_s=_figure(memory, "bytes_per_s"),
        processors=processors,
        power_w=_figure(processor, "power_w"),
        link_bytes_per_s=_figure(link, "bytes_per_s"),
        link_latency_s=_figure(link, "latency_s"),
        matmul_flops=_figures(whole.section("matmul_flops", _DTYPES)),
        attention_flops=_figures(whole.section("attention_flops", ("flash1", "flash2"))),
        price_per_hour=_figure(whole.section("price", ("per_hour",)), "per_hour") if "price" in whole else None,
        measured=_measured(whole.section("measured", _MEASURED)) if "measured" in whole else None,
    )


def _interconnect(name: str, data: Mapping[str, Any]) -> Interconnect:
    whole = TomlTable(data, "", ("title", "node"))
    node = whole.section("node", ("bytes_per_s", "latency_s"))
    return Interconnect(name, whole.text("title", name), _figure(node, "bytes_per_s"), _figure(node, "latency_s"))


_MEASURED = tuple(known.name for known in fields(Measured))


def _measured(section: TomlTable) -> Measured:
    collectives = _curves(section.section("collectives", _OPS))
    ranks = section.count("ranks", 1)
    if collectives and ranks == 1:
        raise HardwareFileError("measured.ranks = 1: collectives take more ranks than that")
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
