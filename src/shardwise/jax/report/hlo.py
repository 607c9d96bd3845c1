"""Reading the text of a compiled XLA program: its instructions, how often each runs, and which devices take part."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}
_CALLS = frozenset({"while", "call", "fusion", "async-start"})


class HloShape(NamedTuple):
    """Dtype and dims of one array on one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        bits = _BITS.get(self.dtype) or int((re.search(r"\d+", self.dtype) or [8])[0])  # "f8e4m3fn", "s32"
        return self.numel * bits // 8


class Instruction(NamedTuple):
    """An instruction, one line of a computation."""

    opcode: str
    shapes: tuple[HloShape, ...]
    """Shapes of its result; several if that is a tuple."""
    operands: tuple[str, ...]
    text: str
    """The text after the opcode: operands and attributes as printed."""

    def attribute(self, name: str) -> str:
        """Return the text after `name=`, up to the next comma or space; "" without it."""
        match = re.search(rf"[ ,]{name}=%?([^,\s]+)", self.text)
        return match[1] if match else ""

    @property
    def op_name(self) -> str:
        """The part of the traced function that it comes from; often empty."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.text)
        return match[1].replace("\\'", "'") if match else ""


Computation = dict[str, Instruction]
"""A function of the program: its instructions by name."""


class Program(NamedTuple):
    """A compiled program."""

    computations: dict[str, Computation]
    entry: str
    """The name of the computation that is run."""

    def runs(self) -> dict[str, int]:
        """Return, by name of a computation, how often it runs in one run of the program. A loop of unknown length is
        counted as one iteration."""
        found: dict[str, int] = defaultdict(int)

        def visit(name: str, times: int) -> None:
            found[name] += times
            for one in self.computations[name].values():
                if one.opcode in _CALLS:
                    called = one.attribute("body") or one.attribute("calls") or one.attribute("to_apply")
                    visit(called, times * (self._iterations(one) if one.opcode == "while" else 1))
                elif one.opcode == "conditional":
                    for branch in re.findall(r"%([\w.\-]+)", one.text.partition("branch_computations")[2]):
                        if branch in self.computations:
                            visit(branch, times)

        visit(self.entry, 1)
        return found

    def _iterations(self, loop: Instruction) -> int:
        """Return the iterations of a loop: as XLA says, else the limit of its counter, as if it began at 0; else 1."""
        if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
            return int(match[1])
        condition = self.computations.get(loop.attribute("condition"), {})
        less = [one for one in condition.values() if one.opcode == "compare" and one.attribute("direction") == "LT"]
        limit = condition[less[0].operands[1]] if less else None
        return int(limit.text.split(")")[0]) if limit is not None and limit.opcode == "constant" else 1


_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")


def parse(text: str) -> Program:
    """Parse `compiled.as_text()`. Raises ValueError if it is no program."""
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation = {}
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif match := _LINE.match(line):
            name, left, opcode, rest = match.groups()
            shapes = tuple(HloShape(*found) for found in _shapes(left))
            operands = tuple(re.findall(r"%([\w.\-]+)", rest.split("), ")[0]))
            current[name] = Instruction(opcode, shapes, operands, rest)
    if not entry:
        raise ValueError("the text has no ENTRY computation: it is not a compiled XLA program")
    return Program(computations, entry)


def _shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(dtype, _ints(dims)) for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", text)]


def group_in(text: str, devices: int) -> list[int]:
    """Return the first group of devices, as positions in the mesh, from a collective's attributes."""
    if braces := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", text):
        return list(_ints(braces[1]))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _order(iota[2], iota[3]).reshape(_ints(iota[1]))[0].ravel().tolist()
    named = re.search(
        r"replica_groups=mesh\[([^]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", text
    )
    if named is None:
        return list(range(devices))
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
    order = _order(named[2] or str(devices), named[3]).reshape(tuple(sizes.values()))
    used = re.findall(r"'(\w+)'", named[4])
    return order[tuple(slice(None) if name in used else 0 for name in sizes)].ravel().tolist()


def axes_of_group(group: Sequence[int], mesh: Mesh) -> str:
    """Return the axes along which a group's devices differ, such as "dp_replicate x dp_shard"; "?" for no axis."""
    places = np.unravel_index(list(group), mesh.devices.shape)
    differ = [name for name, along in zip(mesh.axis_names, places, strict=True) if len(set(along.tolist())) > 1]
    return " x ".join(differ) or "?"


def _order(dims: str, transposed: str | None) -> np.ndarray:
    numbers = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return numbers.transpose(_ints(transposed)) if transposed else numbers


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)
