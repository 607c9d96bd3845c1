"""The collectives of a compiled program: their number, bytes, axes and parameters."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from jax.sharding import Mesh

from shardwise.jax.report.compiled import mesh_of, unwrapped
from shardwise.jax.report.flow import argument_behind, arguments_ahead, is_cut, narrowest_bits
from shardwise.jax.report.groups import axes_of_groups, groups_in
from shardwise.jax.report.hlo import Computation, Instruction, Program, parse
from shardwise.jax.report.tables import amount, columns, without_numbers

MAKE_REDUCE_SCATTERS = frozenset({"gpu", "cuda", "rocm", "tpu"})
"""Platforms whose compiler turns an all-reduce of which each device keeps only a piece into a reduce-scatter. The CPU's
compiler runs every reduce-scatter as an all-reduce and a slice."""


@dataclass(frozen=True)
class CollectiveOperand:
    """One array that a collective moves. XLA may combine several arrays in one operation."""

    operation: str
    axes: str
    """The mesh axes along which the devices of a group differ, such as "fsdp" or "replica x fsdp"."""
    what: str
    """A parameter's dotted path, the name of another argument such as "batch", or "(op_name)" from XLA for a value that
    belongs to no argument."""
    parameter: bool
    """Whether the array is a parameter that is gathered, or a parameter's gradient that is reduced."""
    times: int
    """How often the collective runs in one run of the program; more than once inside a loop."""
    nbytes: int
    """Bytes of the array, once: as each device of a group has it after an all-gather, or before a reduction."""
    unwidened_bytes: int
    """`nbytes` in the dtype before the platform widened it: a CPU's compiler sends bf16 as fp32."""
    is_cut: bool
    """Whether each device keeps only a piece of the sum, so that an all-reduce could be a reduce-scatter."""
    instruction: str

    @property
    def meant(self) -> str:
        """The operation's name; "all-reduce, cut" if each device keeps only a piece of the sum."""
        return f"{self.operation}, cut" if self.is_cut and self.operation == "all-reduce" else self.operation

    @property
    def total_bytes(self) -> int:
        return self.times * self.nbytes


class Line(NamedTuple):
    """A line of the table: operands that differ only in the numbers of their paths."""

    operation: str
    """See `CollectiveOperand.meant`."""
    axes: str
    what: str
    """See `CollectiveOperand.what`, with * in place of numbers."""
    times: int
    nbytes: int
    """Sum over all operands and runs."""


@dataclass(frozen=True)
class CollectivesReport:
    """All collectives of a program. `str()` is a table, in which operands that differ only in numbers are one line."""

    parts: tuple[CollectiveOperand, ...]
    platform: str

    def counts(self) -> dict[str, int]:
        """Return, by operation, how many collectives run in one run of the program."""
        times = {part.instruction: (part.operation, part.times) for part in self.parts}
        found: Counter[str] = Counter()
        for operation, count in times.values():
            found[operation] += count
        return dict(found)

    def bytes(self) -> dict[str, int]:
        """Return, by operation, the bytes of all arrays in one run of the program. See `CollectiveOperand.nbytes`."""
        found: Counter[str] = Counter()
        for part in self.parts:
            found[part.operation] += part.total_bytes
        return dict(found)

    def lines(self) -> list[Line]:
        """Return the table's lines, those with the most bytes first."""
        alike: dict[tuple[str, str, str], list[CollectiveOperand]] = defaultdict(list)
        for part in self.parts:
            alike[part.meant, part.axes, without_numbers(part.what)].append(part)
        found = [
            Line(*key, sum(part.times for part in parts), sum(part.total_bytes for part in parts))
            for key, parts in alike.items()
        ]
        return sorted(found, key=lambda line: -line.nbytes)

    def to_dict(self) -> dict[str, Any]:
        """Return counts, bytes and parts, for JSON."""
        parts = [asdict(part) for part in self.parts]
        return {"platform": self.platform, "counts": self.counts(), "bytes": self.bytes(), "parts": parts}

    def __str__(self) -> str:
        if not self.parts:
            return "no collectives"
        rows = [(line.operation, line.axes, line.what, line.times, amount(line.nbytes)) for line in self.lines()]
        total = ", ".join(f"{count} {operation}" for operation, count in sorted(self.counts().items()))
        table = columns(("operation", "axes", "of", "times", "bytes a device"), rows, ("times", "bytes a device"))
        note = f"\n{NOTE}" if self.platform not in MAKE_REDUCE_SCATTERS else ""
        return f"{table}\n{total} in one run, {amount(sum(self.bytes().values()))} a device{note}"


NOTE = (
    "This platform's compiler runs a reduce-scatter as an all-reduce of which a piece is kept; those of GPUs and "
    "TPUs do not."
)


def collectives(compiled: Any) -> CollectivesReport:
    """Read the collectives of a compiled program from its text. Does not communicate.

    Args:
        compiled: `step.lower(state, batch).compile()`, or any other program compiled by JAX for a mesh.

    Raises:
        UsageError: a program whose arguments are not on a mesh.
    """
    compiled = unwrapped(compiled)
    mesh = mesh_of(compiled)
    program = parse(compiled.as_text())
    runs = program.runs()
    found: list[CollectiveOperand] = []
    for at, one in _run(program):
        found += _parts(program, at, one, runs[at.name], mesh)
    return CollectivesReport(tuple(found), str(mesh.devices.flat[0].platform))


def _run(program: Program) -> Iterable[tuple[Computation, Instruction]]:
    """Yield each collective once. A TPU's program repeats one, with the same channel, in all code that overlaps it."""
    runs = program.runs()
    by_channel: dict[str, list[tuple[Computation, Instruction]]] = defaultdict(list)
    for computation in program.computations.values():
        for one in computation.instructions.values():
            if one.collective is not None and runs[computation.name]:
                by_channel[one.attribute("channel_id") or one.name].append((computation, one))
    for same in by_channel.values():
        starting = [(at, one) for at, one in same if any(_STARTS in user.text for user in at.users.get(one.name, ()))]
        yield from starting or same


_STARTS = '"AsyncCollectiveStart"'


def _parts(program: Program, at: Computation, one: Instruction, times: int, mesh: Mesh) -> Iterable[CollectiveOperand]:
    groups = groups_in(one.text, mesh.size)
    axes = axes_of_groups(groups, mesh)
    for index, operand in enumerate(one.operands):
        (shape,) = at.instructions[operand].shapes
        if not shape.dims:
            continue  # a norm or a loss: a few bytes
        cut = one.collective == "all-reduce" and _is_cut(program, at, at.results(one, index), axes, mesh)
        fused = any(call.opcode == "fusion" for _, call in program.callers.get(at.name, ()))
        operation = "reduce-scatter" if cut and fused else one.collective or ""  # fused, a TPU does it as one
        nbytes = shape.nbytes * (max(map(len, groups)) if operation == "all-gather" else 1)
        argument = argument_behind(program, at, operand)
        if argument is None and operation in ("all-reduce", "reduce-scatter"):
            argument = _gradient_of(program, at, one, index)
        what, parameter = _named(argument, one, program)
        unwidened = nbytes * narrowest_bits(program, at, operand) // shape.bits
        yield CollectiveOperand(operation, axes, what, parameter, times, nbytes, unwidened, cut, one.name)


def _is_cut(program: Program, at: Computation, sums: Sequence[str], axes: str, mesh: Mesh) -> bool:
    """Whether each device keeps only a piece of a sum over `axes`: one of as many equal pieces as there are devices
    along all of these axes, or along one of them, in which case the pieces are summed over the others."""
    sizes = [mesh.shape[axis] for axis in axes.split(" x ") if axis in mesh.shape]
    counts = {math.prod(sizes), *sizes} - {1}
    return bool(sums) and any(all(is_cut(program, at, name, count) for name in sums) for count in counts)


def _gradient_of(program: Program, at: Computation, one: Instruction, index: int) -> str | None:
    """Return the parameter that a reduced value updates; None unless it is exactly one."""
    ahead = set().union(*(arguments_ahead(program, at, name) for name in at.results(one, index)))
    own = {name for name in ahead if name.startswith(parameters_prefix(program))}
    return own.pop() if len(own) == 1 else None


def parameters_prefix(program: Program) -> str:
    """Return the prefix of the parameters' names: "state.params", else the name of the program's first argument."""
    names = [one.op_name for one in program.entry.instructions.values() if one.opcode == "parameter"]
    if any(name.startswith("state.params") for name in names):
        return "state.params"
    first = min(
        (one for one in program.entry.instructions.values() if one.opcode == "parameter"), key=lambda one: one.index
    )
    return re.split(r"[\[.]", first.op_name)[0]


def _named(argument: str | None, one: Instruction, program: Program) -> tuple[str, bool]:
    """Return `CollectiveOperand.what` and `.parameter` for a collective's argument, or for None."""
    if argument is None:
        return f"({'/'.join(one.op_name.split('/')[-2:])})", False
    prefix = parameters_prefix(program)
    keys = re.findall(r"\['?([^\]']+)'?\]|\.(\w+)", argument.removeprefix(prefix))
    if argument.startswith(prefix):
        return ".".join(a or b for a, b in keys) or argument, True
    return argument, False
