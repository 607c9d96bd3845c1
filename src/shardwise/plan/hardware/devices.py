"""Devices and interconnects, from data files with a source for every figure; a user may give files of their own."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar

from shardwise.errors import PlanError
from shardwise.plan.hardware.reading import HardwareFileError, by, is_amount, read
from shardwise.suggest import did_you_mean, nearest_path
from shardwise.toml_text import toml_text

_DATA = files("shardwise.plan.hardware") / "data"
_PER_NODE = re.compile(r"(?:(\d+)\s*[xX]\s*)?(\d+(?:\.\d+)?)\s*[gG](b|bit|B)(?:ps|/s)")
"""A node's rate. GB is not Gb: a byte has eight bits."""
_GENERIC_LATENCY_S = 4e-6
T = TypeVar("T")
_DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_NODE = ("link_bytes_per_s", "link_share", "memory_bytes", "disk_bytes_per_s", "processors_bytes_per_s")
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
class Link:
    """A connection, in one direction: of a device to others in its node, or of a node to others."""

    bytes_per_s: Figure
    """Rate of all of a device's links, or of all adapters of a node, together."""
    latency_s: Figure
    """Latency of a hop."""


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The network between nodes."""

    name: str
    title: str
    node: Link


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates measured on a machine, as `shardwise plan --calibrate` stores them, used instead of those of data sheets.

    Each list has (size, value) pairs with the size ascending; between two sizes the value is interpolated.
    """

    memory: Points
    """Bytes read and written by an operation -> bytes per second."""
    matmul: Mapping[str, Points] = field(default_factory=dict, metadata=by(_DTYPES))
    """By dtype: operations of a product -> operations per second."""
    attention: Points = ()
    """Operations of a causal call, without the masked half -> operations per second."""
    operations: Mapping[str, Points] = field(default_factory=dict)
    """The same as memory by operator, for those that compute more than they move; "mul_" stands for all in-place
    operators."""
    collectives: Mapping[str, Points] = field(default_factory=dict, metadata=by(_COLLECTIVES))
    """By collective: bytes of the whole buffer -> seconds."""
    ranks: int = 1
    """The number of ranks that took part in the collectives, and kept the machine busy during the other
    measurements."""
    operation_s: float = 0.0
    """The host's seconds for an operation of any size."""

    def __post_init__(self) -> None:
        if self.collectives and self.ranks == 1:
            raise HardwareFileError("measured.ranks = 1, but measured.collectives needs at least 2 ranks")


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory."""

    bytes: Figure
    """As marketed."""
    usable_bytes: Figure
    """Memory that a program sees before it allocates anything."""
    bytes_per_s: Figure


@dataclass(frozen=True, slots=True)
class Processor:
    """A device's processor."""

    count: Figure
    """Streaming multiprocessors, compute units or cores: the units over which a kernel's tiles are distributed."""
    power_w: Figure

    def __post_init__(self) -> None:
        if self.count.value < 1:
            raise HardwareFileError(f"processor.count.value = {self.count.value!r} is less than 1")


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a device."""

    per_hour: Figure


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, its node and its usual interconnect: the tables and keys of its file.

    Rates are in bytes or operations per second; a multiply-add is two operations, and rates are dense.
    """

    name: str
    """The name that a user gives: that of a packaged device, or the path of the user's file."""
    title: str
    kind: Literal["gpu", "cpu"]
    """CPU ranks compute and communicate in turn; GPU ranks do both at once."""
    interconnect: str
    """The usual interconnect between nodes, as for `find_interconnect`."""
    peak_flops: Mapping[str, Figure] = field(metadata=by(_DTYPES))
    """By dtype, the rate in the data sheet; MFU is relative to it."""
    memory: Memory
    processor: Processor
    link: Link
    matmul_flops: Mapping[str, Figure] = field(default_factory=dict, metadata=by(_DTYPES))
    """By dtype, the rate measured on a large product, if it was published."""
    attention_flops: Mapping[str, Figure] = field(default_factory=dict, metadata=by(("flash1", "flash2")))
    """By kernel, the measured rate, if it was published."""
    node: Mapping[str, Figure] = field(default_factory=dict, metadata=by(_NODE))
    """Figures of the host that differ from the usual ones, by field of `hardware.node.Node`."""
    price: Price | None = None
    measured: Measured | None = None

    def __post_init__(self) -> None:
        if "fp32" not in self.peak_flops:
            raise HardwareFileError("peak_flops.fp32 is missing")

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
        device: Hardware = _packaged(Hardware, "devices", name.lower())
        return device
    if _is_file(name):
        return _parsed(Hardware, Path(name))
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
        interconnect: Interconnect = _packaged(Interconnect, "interconnects", name.lower())
        return interconnect
    if match := _PER_NODE.fullmatch(name.strip()):
        return _of_rate(name, int(match[1] or 1) * float(match[2]) * 1e9 / (1 if match[3] == "B" else 8))
    if _is_file(name):
        return _parsed(Interconnect, Path(name))
    raise PlanError(
        f"unknown interconnect {name!r}{did_you_mean(name.lower(), interconnect_names())}; the packaged ones are "
        f"{', '.join(interconnect_names())}; or give the rate of a node, such as 800gbps (bits) or 100GBps "
        "(bytes), or the path of a file"
    )


def _of_rate(name: str, bytes_per_s: float) -> Interconnect:
    if not is_amount(bytes_per_s):
        raise PlanError(f"interconnect {name!r}: the rate of a node must be above 0 and finite")
    latency = Figure(_GENERIC_LATENCY_S, "as packaged for InfiniBand")
    return Interconnect(name, name, Link(Figure(bytes_per_s, "as asked for"), latency))


def with_usable_bytes(hardware: Hardware, nbytes: int, source: str = "as this machine's driver says") -> Hardware:
    """Return the same device with other usable bytes."""
    return replace(hardware, memory=replace(hardware.memory, usable_bytes=Figure(float(nbytes), source)))


def write_device(hardware: Hardware, path: Path) -> None:
    """Write a device, such as a calibrated one, to a file. `find_device` reads it back equal except for its name."""
    tree = _plain(hardware)
    del tree["name"]
    path.write_text(toml_text(tree, is_inline=lambda table: "source" in table), encoding="utf-8")


def _plain(value: Any) -> Any:
    """Return dataclasses as dicts, without what is None or empty."""
    if is_dataclass(value):
        value = {known.name: getattr(value, known.name) for known in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items() if inner not in (None, "", (), {}, 0)}
    return value


def _is_file(name: str) -> bool:
    return name.endswith(".toml") or os.path.isfile(name)  # noqa: PTH113 - a name that is too long for a path is none


def _names(folder: str) -> list[str]:
    return sorted(
        entry.name.removesuffix(".toml") for entry in (_DATA / folder).iterdir() if entry.name.endswith(".toml")
    )


@cache
def _packaged(kind: type[T], folder: str, name: str) -> T:
    return _made(kind, name, (_DATA / folder / f"{name}.toml").read_text(encoding="utf-8"))


def _parsed(kind: type[T], path: Path) -> T:
    try:
        return _made(kind, str(path), path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"no such file: {str(path)!r}{nearest_path(path)}") from None
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: is not TOML: {error}") from error
    except HardwareFileError as error:
        raise PlanError(f"{path}: {error} (src/shardwise/plan/hardware/data has examples of every key)") from error


def _made(kind: type[T], name: str, text: str) -> T:
    usual = {"title": name, **({"interconnect": "8x400gbps"} if kind is Hardware else {})}
    made: T = read(kind, {**usual, **tomllib.loads(text)}, "", given={"name": name})
    return made
