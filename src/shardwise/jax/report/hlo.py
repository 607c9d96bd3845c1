"""A parser for the text of a compiled XLA program: computations, instructions, and how often each runs."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}


@dataclass(frozen=True)
class HloShape:
    """Dtype and dims of one array on one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return _BITS.get(self.dtype) or int((re.search(r"\d+", self.dtype) or [8])[0])  # "f8e4m3fn", "s32"

    @property
    def nbytes(self) -> int:
        return self.numel * self.bits // 8

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("f", "bf"))


@dataclass(frozen=True)
class Instruction:
    """An instruction, one line of a computation."""

    name: str
    opcode: str
    shapes: tuple[HloShape, ...]
    """Shapes of its result; several if that is a tuple."""
    operands: tuple[str, ...]
    text: str
    """The text after the opcode: operands and attributes as printed."""

    def attribute(self, name: str) -> str | None:
        """Return the text after `name=`, up to the next comma or space; None without it."""
        match = re.search(rf"[ ,]{name}=%?([^,\s]+)", self.text)
        return match[1] if match else None

    @property
    def runs(self) -> str:
        """Name of the computation that a loop, a fusion or a call runs; else empty."""
        found = (self.attribute(name) for name in ("body", "calls", "to_apply"))
        return next((name for name in found if name), "")

    @property
    def collective(self) -> str | None:
        """The collective's name in COLLECTIVES if the instruction is or starts one; else None."""
        name = self.opcode.removesuffix("-start")
        return name if name in COLLECTIVES else None

    @property
    def op_name(self) -> str:
        """The part of the traced function that it comes from, or an argument's name; often empty."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.text)
        return match[1].replace("\\'", "'") if match else ""

    @property
    def index(self) -> int:
        """The index of a get-tuple-element or a parameter, which it must be."""
        return int(self.attribute("index") or 0) if self.opcode == "get-tuple-element" else int(self.text.split(")")[0])

    def takes(self, place: int) -> bool:
        """Whether it is a get-tuple-element of this place."""
        return self.opcode == "get-tuple-element" and self.index == place


@dataclass
class Computation:
    """A computation, which is a function of the program."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    """Instructions by name, in the order in which they are printed."""
    root: str = ""

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """By name of a value, the instructions that read it."""
        found = defaultdict(list)
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                found[operand].append(instruction)
        return found

    def parameter(self, index: int) -> str:
        """Return the name of the parameter with this index."""
        return next(one.name for one in self.instructions.values() if one.opcode == "parameter" and one.index == index)

    def results(self, collective: Instruction, place: int) -> list[str]:
        """Return the names of the values that a collective computes from its operand at this place."""
        made = [collective]
        if collective.opcode.endswith("-start"):
            made = [user for user in self.users[collective.name] if user.opcode.endswith("-done")]
        if len(collective.operands) > 1:
            made = [user for one in made for user in self.users[one.name] if user.takes(place)]
        return [one.name for one in made]


@dataclass
class Program:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: Computation
    aliases: dict[int, int]
    """By index of an output, the index of the donated argument whose memory it reuses."""

    @cached_property
    def callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """By name of a computation, the loops whose body it is and the fusions and calls that run it."""
        found = defaultdict(list)
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                if instruction.opcode in ("while", "fusion", "call"):
                    found[instruction.runs].append((computation, instruction))
        return found

    def called(self, instruction: Instruction) -> Computation | None:
        """Return the computation that a loop, a fusion or a call runs; None for other instructions."""
        return self.computations.get(instruction.runs)

    def runs(self) -> dict[str, int]:
        """Return, by name of a computation, how often it runs in one run of the program. A loop of unknown length is
        counted as one iteration."""
        found: dict[str, int] = defaultdict(int)

        def visit(name: str, times: int) -> None:
            if name not in self.computations:
                return
            found[name] += times
            for instruction in self.computations[name].instructions.values():
                if instruction.opcode in ("while", "call", "fusion"):
                    visit(instruction.runs, times * trip_count(instruction, self.computations))
                elif instruction.opcode == "conditional":
                    for branch in re.findall(r"%([\w.\-]+)", instruction.text.partition("branch_computations")[2]):
                        visit(branch, times)

        visit(self.entry.name, 1)
        return found


def trip_count(loop: Instruction, computations: Mapping[str, Computation]) -> int:
    """Return the number of iterations of a while loop: as XLA says, else the limit of its counter, as if it began at 0;
    1 if neither is known, or for any other instruction."""
    match = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text)
    if match is not None:
        return int(match[1])
    condition = computations.get(loop.attribute("condition") or "")
    test = condition.instructions[condition.root] if condition is not None else None
    if condition is None or test is None or test.opcode != "compare" or test.attribute("direction") != "LT":
        return 1
    limit = condition.instructions[test.operands[1]]
    return int(limit.text.split(")")[0]) if limit.opcode == "constant" else 1


def parse(text: str) -> Program:
    """Parse `compiled.as_text()`. Raises ValueError if it is no program."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head is not None:
            current = computations.setdefault(head[2], Computation(head[2]))
            entry = current if head[1] else entry
        elif current is not None and " = " in line:
            instruction = _instruction(line)
            current.instructions[instruction.name] = instruction
            if line.lstrip().startswith("ROOT "):
                current.root = instruction.name
    for computation in computations.values():
        for name, instruction in computation.instructions.items():
            computation.instructions[name] = _told_apart(instruction, computations)
    if entry is None:
        raise ValueError("the text has no ENTRY computation: it is not a compiled XLA program")
    header = text.partition("\n")[0]
    aliases = re.findall(r"\{(\d*)\}: \((\d+), \{\}", header.partition("input_output_alias=")[2])
    return Program(computations, entry, {int(output or 0): int(argument) for output, argument in aliases})


def _told_apart(one: Instruction, computations: dict[str, Computation]) -> Instruction:
    """Return an async-start that wraps a collective as that collective's own start; other instructions unchanged."""
    inner = computations.get(one.attribute("calls") or "") if one.opcode == "async-start" else None
    if inner is None or inner.instructions[inner.root].collective is None:
        return one
    around = inner.instructions[inner.root]
    return Instruction(one.name, f"{around.opcode}-start", one.shapes, one.operands, around.text)


def _instruction(line: str) -> Instruction:
    left, _, right = line.strip().removeprefix("ROOT ").partition(" = ")
    stop = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    opcode, _, text = right[stop:].strip().partition("(")
    operands = text[: _closing("(" + text, 0) - 1]
    shapes = re.findall(r"([a-z]\w*)\[([\d,]*)\]", right[:stop])
    return Instruction(
        left.removeprefix("%"),
        opcode,
        tuple(HloShape(dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in shapes),
        tuple(re.findall(r"%([\w.\-]+)", operands)),
        text,
    )


def _closing(text: str, start: int) -> int:
    """Return the index at which the parenthesis that opens at `start` closes."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)
