"""The names and layouts that a tree's leaves have in files, as data.

A leaf is stored as it is, under its own path, unless a rule says otherwise. Rules cover the two differences between JAX
models and what Hugging Face stores: JAX's matrices are transposed, and a model's layers are stacked in one array, over
which a scan runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import UsageError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeafPlace:
    """A tensor in a file that holds a leaf, or one row of it."""

    name: str
    """The tensor's name in the file."""
    row: int | None = None
    """Index in the leaf's first dim, which counts layers; None: all of the leaf."""
    order: tuple[int, ...] | None = None
    """The dims of the leaf, or of its row, in the order of the stored tensor's dims; None: the same order."""

    def shape_in_file(self, shape: Shape) -> Shape:
        """Return the shape of the stored tensor, given the leaf's."""
        own = shape if self.row is None else shape[1:]
        return own if self.order is None else tuple(own[dim] for dim in self.order)

    def to_json(self) -> list[Any]:
        """Return what `of_json` reads."""
        return [self.name, self.row, None if self.order is None else list(self.order)]

    @classmethod
    def of_json(cls, entry: Sequence[Any]) -> LeafPlace:
        """Read what `to_json` returned."""
        name, row, order = entry
        return cls(str(name), None if row is None else int(row), None if order is None else tuple(map(int, order)))


@dataclass(frozen=True, slots=True)
class Rule:
    """Where the leaves of one path, or of one pattern of paths, are stored."""

    leaf: str
    """A leaf's path, such as "layers.mlp.up.kernel". "{}" matches a number."""
    name: str
    """The name in files, such as "model.layers.{}.mlp.up_proj.weight". "{}" is replaced by the number in the leaf's
    path; if that has none, the leaf is a stack of layers, and each of its rows is a tensor of that number."""
    transposed: bool = False
    """Whether files hold the transposed matrix."""

    def parts(self, leaf: str, shape: Shape) -> tuple[LeafPlace, ...] | None:
        """Return where a leaf is stored; None if this rule does not match. Raises UsageError if it has too few dims."""
        found = re.fullmatch(re.escape(self.leaf).replace(r"\{\}", r"(\d+)"), leaf)
        if found is None:
            return None
        stacked = "{}" in self.name and not found.groups()
        if len(shape) < 2 * self.transposed + stacked:
            raise UsageError(f"{leaf!r} of shape {shape} has too few dims to be stored as {self.name!r}")
        order = (1, 0) if self.transposed else None
        if stacked:
            return tuple(LeafPlace(self.name.format(row), row, order) for row in range(shape[0]))
        return (LeafPlace(self.name.format(*found.groups()), None, order),)


@dataclass(frozen=True, slots=True)
class NameMap:
    """Rules for one kind of model. The first rule that matches a leaf applies."""

    rules: tuple[Rule, ...]
    config: Mapping[str, Any] | None = None
    """The model's config.json, which is saved with a checkpoint so that transformers can load it."""
    ignored: tuple[str, ...] = ()
    """Regular expressions for names in files that no leaf needs: a tied head, constants that models once stored."""

    prefix: str = ""
    """Prefix of the names in files, such as "model."; files that a base model wrote without its head lack it."""

    def ignores(self, name: str) -> bool:
        """Whether a tensor of this name in a file may belong to no leaf."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def as_in(self, stored: Iterable[str]) -> NameMap:
        """Return the map for files with these tensors: without the prefix if none of their names has it."""
        if not self.prefix or any(name.startswith(self.prefix) for name in stored):
            return self
        rules = tuple(replace(rule, name=rule.name.removeprefix(self.prefix)) for rule in self.rules)
        return replace(self, rules=rules, prefix="")

    def parts(self, leaf: str, shape: Shape) -> tuple[LeafPlace, ...]:
        """Return where a leaf is stored: as it is, under its own path, if no rule matches it."""
        found = (rule.parts(leaf, shape) for rule in self.rules)
        return next((parts for parts in found if parts is not None), (LeafPlace(leaf),))


PLAIN = NameMap(())
"""Stores every leaf as it is, under its own path."""

ANY = NameMap((), ignored=(".*",))
"""Like `PLAIN`, but ignores every other tensor in the files."""
