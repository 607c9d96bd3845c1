"""The collectives of a compiled program: their number, bytes, axes, and the parameters of that shape."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from jax.sharding import Mesh, NamedSharding, Sharding

from shardwise.jax.report.compiled import Parameters, mesh_of, parameters_of, unwrapped
from shardwise.jax.report.hlo import Program, axes_of_group, group_in, parse
from shardwise.jax.report.tables import amount, columns, without_numbers
from shardwise.jax.rules import axes_of

MAKE_REDUCE_SCATTERS = frozenset({"gpu", "cuda", "rocm", "tpu"})
"""Platforms whose compiler turns an all-reduce of which each device keeps only a piece into a reduce-scatter. The CPU's
compiler runs every reduce-scatter as an all-reduce and a slice."""
_OPERATIONS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(frozen=True)
class CollectiveOperand:
    """One array that a collective moves. XLA may combine several arrays in one operation."""

    operation: str
    axes: str
    """The mesh axes along which the devices of a group differ, such as "dp_shard" or "dp_replicate x dp_shard"."""
    what: str
    """The dotted paths of the parameters of that shape (an array does not say which one it is), or "(op_name)" from
    XLA for an array that has no parameter's shape."""
    parameter: bool
    """Whether the array has the shape of a parameter: gathered, in pieces, or of one layer of a stack."""
    times: int
    """How often the collective runs in one run of the program; more than once inside a loop."""
    dtype: str
    """XLA's name of the dtype that is sent, such as "bf16". A CPU's compiler sends bf16 as f32."""
    nbytes: int
    """Bytes of the array, once: as each device of a group has it after an all-gather, or before a reduction."""
    is_cut: bool
    """Whether the array is summed over dp_shard and its parameter is cut over it: each device needs only a piece of the
    sum, and an all-reduce could be a reduce-scatter."""
    instruction: str

    @property
    def meant(self) -> str:
        """The operation's name; "all-reduce, cut" if each device needs only a piece of the sum."""
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
    dtype: str
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
        alike: dict[tuple[str, str, str, str], list[CollectiveOperand]] = defaultdict(list)
        for part in self.parts:
            alike[part.meant, part.axes, part.what, part.dtype].append(part)
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
        rows = [(*line[:5], amount(line.nbytes)) for line in self.lines()]
        total = ", ".join(f"{count} {operation}" for operation, count in sorted(self.counts().items()))
        head = ("operation", "axes", "of", "dtype", "times", "bytes a device")
        table = columns(head, rows, head[4:])
        note = f"\n{_NOTE}" if self.platform not in MAKE_REDUCE_SCATTERS else ""
        return f"{table}\n{total} in one run, {amount(sum(self.bytes().values()))} a device{note}"


_NOTE = (
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
    parameters = parameters_of(compiled)
    found = [_operand(moved, parameters) for moved in _moved(parse(compiled.as_text()), mesh)]
    return CollectivesReport(tuple(found), str(mesh.devices.flat[0].platform))


class _Moved(NamedTuple):
    """An array that a collective moves, as the program's text has it."""

    operation: str
    instruction: str
    op_name: str
    axes: str
    times: int
    dtype: str
    dims: tuple[int, ...]
    """After an all-gather, or before a reduction."""
    nbytes: int


def _moved(program: Program, mesh: Mesh) -> Iterator[_Moved]:
    seen: set[str] = set()
    for within, times in program.runs().items():
        for name, one in program.computations[within].items():
            operation = one.opcode.removesuffix("-start")
            # A TPU's program repeats a collective, with the same channel, in all code that overlaps it.
            channel = one.attribute("channel_id") or name
            if operation not in _OPERATIONS or channel in seen:
                continue
            seen.add(channel)
            group = group_in(one.text, mesh.size)
            for operand in one.operands:
                (shape,) = program.computations[within][operand].shapes
                if not shape.dims:
                    continue  # a norm or a loss: a few bytes
                dims, copies = list(shape.dims), 1
                if operation == "all-gather":
                    copies = len(group)
                    dims[int(one.attribute("dimensions").strip("{}"))] *= copies
                if within.startswith("all-reduce-scatter"):  # a TPU runs this sum and its slice as one operation
                    operation = "reduce-scatter"
                axes = axes_of_group(group, mesh)
                yield _Moved(operation, name, one.op_name, axes, times, shape.dtype, tuple(dims), shape.nbytes * copies)


def _operand(moved: _Moved, parameters: Parameters) -> CollectiveOperand:
    alike = {path: placed for path, placed in parameters.items() if _key(moved.dims) in _keys(*placed)}
    all_cut = bool(alike) and all(_gathered(*placed) != placed[1].shard_shape(placed[0]) for placed in alike.values())
    return CollectiveOperand(
        moved.operation,
        moved.axes,
        ", ".join(sorted(set(map(without_numbers, alike)))) or f"({'/'.join(moved.op_name.split('/')[-2:])})",
        bool(alike),
        moved.times,
        moved.dtype,
        moved.nbytes,
        moved.operation == "all-reduce" and "dp_shard" in moved.axes and all_cut,
        moved.instruction,
    )


def _keys(shape: tuple[int, ...], sharding: Sharding) -> set[tuple[int, ...]]:
    """Return the keys of the shapes in which a device holds a parameter: whole, gathered over dp_shard alone, or its
    piece; and those of one layer, if the first dim is that of a stack of layers."""
    held = (shape, _gathered(shape, sharding), sharding.shard_shape(shape))
    return {_key(dims[skip:]) for dims in held for skip in (0, int(len(dims) > 2))}


def _gathered(shape: tuple[int, ...], sharding: Sharding) -> tuple[int, ...]:
    """Return the shape of a parameter's piece after a gather over dp_shard."""
    piece = sharding.shard_shape(shape)
    if not isinstance(sharding, NamedSharding):
        return piece
    pairs = zip_longest(piece, sharding.spec)
    return tuple(
        size * sharding.mesh.shape["dp_shard"] if "dp_shard" in axes_of(names) else size for size, names in pairs
    )


def _key(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return what a shape has in common with its transposes, which compilers move in its place."""
    return tuple(sorted(size for size in dims if size > 1))
