"""A training program as data: a model, how it is sharded and what is done with it.

A program says everything that a run depends on, so it can be printed, sent to ranks, made smaller and run again. Its
`repr` is Python that makes it anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

Units = None | int | str | tuple[str, ...]


class _Short:
    """A dataclass whose `repr` leaves out fields that are as by default."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Node(_Short):
    """One module. `parts.py` says what each kind does with its children and its option."""

    kind: str
    children: tuple[Node, ...] = ()
    option: str = ""
    unit: bool = False
    """A unit where `Sharding.units` is "marked"."""
    frozen: bool = False
    """Its parameters, its children's included, want no gradient from the start."""
    tie: int = 0
    """Nodes of one number above 0 share their weight."""
    cut: str = ""
    """How the tensor axis cuts it, if there is one: "" or one of `cutting.CUTS`."""

    def walk(self) -> Iterator[Node]:
        """This node and those below it, in the order of the module tree."""
        yield self
        for child in self.children:
            yield from child.walk()

    def with_child(self, position: int, *others: Node) -> Node:
        """With `others` in place of one child."""
        children = (*self.children[:position], *others, *self.children[position + 1 :])
        return dataclasses.replace(self, children=children)

    def lines(self, indent: str = "") -> Iterator[str]:
        marks = [name for name in ("unit", "frozen") if getattr(self, name)]
        marks += [f"tie {self.tie}"] if self.tie else []
        marks += [f"cut {self.cut}"] if self.cut else []
        yield " ".join([indent + self.kind, self.option, *(f"[{mark}]" for mark in marks)]).replace("  [", " [")
        for child in self.children:
            yield from child.lines(indent + "  ")


@dataclass(frozen=True, repr=False)
class Sharding(_Short):
    """Arguments of `sw.shard`, and what moves the bytes."""

    strategy: str = "full_shard"
    reshard: bool | int | None = None
    units: Units = None
    """As of `sw.shard`; classes by name; "marked" is a callable that says yes to marked nodes."""
    extra_slots: int = 0
    """Beyond the least that the nesting of units needs."""
    first: bool = False
    """The first node is sharded by itself before, so that its units are adopted."""
    collectives: str = "shm"
    param: str | None = None
    """Of `sw.Precision`."""
    reduce: str | None = None


# Actions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Train(_Short):
    """Forwards and backwards, perhaps an update."""

    shape: str = "plain"
    """One of `SHAPES`: which forwards and backwards a micro-batch has."""
    synced: tuple[bool, ...] = (True,)
    """By micro-batch: False is inside `sw.no_sync`."""
    input_grad: bool = False
    """The input wants a gradient too."""
    recompute: str = ""
    """The whole model under a checkpoint: "reentrant" or "non-reentrant"."""
    grads: str = ""
    """What is done to gradients: "" or one of `GRADS`."""
    clip: str = ""
    """"torch" or "sw"."""
    hold: str = ""
    """One of `HELD`: what is unsharded by hand around each micro-batch, and resharded after it."""
    step: bool = True
    zero: str = "none"
    """Afterwards: one of `ZEROS`."""


@dataclass(frozen=True, repr=False)
class Evaluate(_Short):
    """A forward alone."""

    mode: str = "no_grad"
    """One of `MODES`."""
    evaluating: bool = True
    """In `eval()` mode."""


@dataclass(frozen=True, repr=False)
class Raise(_Short):
    """A forward and backward that raise on every rank, caught; gradients are dropped if backward did."""

    where: str = "forward"
    """"forward" or "backward"."""
    at: int = 0
    """How many modules are entered before."""
    synced: bool = True


@dataclass(frozen=True, repr=False)
class Freeze(_Short):
    """`requires_grad_` of every third parameter is turned over, the last layer's left alone."""

    phase: int = 0


@dataclass(frozen=True, repr=False)
class Edit(_Short):
    """Weights are scaled by hand."""

    how: str = "inplace"
    """One of `EDITS`."""


@dataclass(frozen=True, repr=False)
class Save(_Short):
    """`sw.checkpoint.save`."""


@dataclass(frozen=True, repr=False)
class Load(_Short):
    """`sw.checkpoint.load` of what was saved last; nothing if nothing was."""


@dataclass(frozen=True, repr=False)
class Copy(_Short):
    """Goes on with a deep copy of the model and its optimizer."""


@dataclass(frozen=True, repr=False)
class Release(_Short):
    """`sw.release`."""


Action = Train | Evaluate | Raise | Freeze | Edit | Save | Load | Copy | Release

SHAPES = ("plain", "two_forwards", "retain", "two_losses", "interleaved", "eval_between", "stacked")
HELD = ("whole", "first", "twice")
"""The model, its first part, or that once more when micro-batches are over."""
GRADS = ("scale", "drop", "assign")
ZEROS = ("none", "zeros", "model", "keep")
MODES = ("no_grad", "inference", "grad")
EDITS = ("inplace", "local", "unsharded", "data")
OPTIMIZERS = ("sgd", "adamw-loop", "adamw-foreach", "adamw-fused")
"""Those that are drawn; "muon" is asked for."""


@dataclass(frozen=True, repr=False)
class Program(_Short):
    """All of it."""

    seed: int = 0
    """Of weights and batches."""
    world_size: int = 2
    """Ranks along the data axes: each has batches of its own."""
    tp: int = 1
    """Ranks along the tensor axis, with equal batches."""
    width: int = 4
    dtype: str = "fp32"
    """In which parameters are stored, but for those of nodes that say otherwise."""
    model: Node = Node("chain")
    output: str = ""
    """What the whole model returns its tensor in: one of `parts.PACKS`."""
    sharding: Sharding = Sharding()
    optimizer: str = "sgd"
    lora: bool = False
    """PEFT's adapters beside its linear layers; all else but the last layer is frozen."""
    actions: tuple[Action, ...] = ()
    joined: bool = False
    """Ranks may use different units, as inside `sw.join(any_units=True)`."""

    @property
    def ranks(self) -> int:
        """All ranks, of which those of the tensor axis are consecutive."""
        return self.world_size * self.tp

    def __str__(self) -> str:
        head = (
            f"{self.world_size} x {self.tp} ranks, seed {self.seed}, width {self.width}, {self.dtype}, {self.optimizer}"
        )
        head += f", returns {self.output}" if self.output else ""
        head += ", adapters" * self.lora
        model = "\n".join(self.model.lines("    "))
        actions = "\n".join(f"    {number}. {action!r}" for number, action in enumerate(self.actions))
        return f"  {head}\n  {self.sharding!r}\n{model}\n{actions}"
