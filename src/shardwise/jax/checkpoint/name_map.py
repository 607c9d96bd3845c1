"""What a tree's leaves are called in files, and how they lie there: as data.

A leaf is in a file as it is, under its own path, unless a rule says otherwise. A rule knows two things that JAX models
do differently from what Hugging Face stores: matrices the other way round, and the layers of a model stacked in one
array, which a scan goes through.
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
    """In the file."""
    row: int | None = None
    """Of the leaf's first dim, which counts layers; None: all of the leaf."""
    order: tuple[int, ...] | None = None
    """The leaf's dims (its row's, where there is one) in the order of the file's; None: the same."""

    def shape_in_file(self, shape: Shape) -> Shape:
        """Of the stored tensor, from the leaf's."""
        own = shape if self.row is None else shape[1:]
        return own if self.order is None else tuple(own[dim] for dim in self.order)

    def to_json(self) -> list[Any]:
        """For `of_json`."""
        return [self.name, self.row, None if self.order is None else list(self.order)]

    @classmethod
    def of_json(cls, entry: Sequence[Any]) -> LeafPlace:
        """What `to_json` gave."""
        name, row, order = entry
        return cls(str(name), None if row is None else int(row), None if order is None else tuple(map(int, order)))


@dataclass(frozen=True, slots=True)
class Rule:
    """Where the leaves of one path lie."""

    leaf: str
    """A path, such as "layers.mlp.up.kernel". "{}" stands for a number."""
    name: str
    """In files, such as "model.layers.{}.mlp.up_proj.weight". "{}" is the number in the leaf's path, or else counts the
    rows of a leaf in which layers are stacked."""
    transposed: bool = False
    """Whether a matrix lies in files the other way round."""

    def parts(self, leaf: str, shape: Shape) -> tuple[LeafPlace, ...] | None:
        """Where a leaf lies; None if this rule is not about it. Raises UsageError for a leaf of too few dims."""
        found = re.fullmatch(re.escape(self.leaf).replace(r"\{\}", r"(\d+)"), leaf)
        if found is None:
            return None
        stacked = "{}" in self.name and not found.groups()
        if len(shape) < 2 * self.transposed + stacked:
            raise UsageError(f"{leaf!r} of shape {shape} is to be stored as {self.name!r}, which needs more dims")
        order = (1, 0) if self.transposed else None
        if stacked:
            return tuple(LeafPlace(self.name.format(row), row, order) for row in range(shape[0]))
        return (LeafPlace(self.name.format(*found.groups()), None, order),)


@dataclass(frozen=True, slots=True)
class NameMap:
    """Rules for one kind of model; the first that is about a leaf counts."""

    rules: tuple[Rule, ...]
    config: Mapping[str, Any] | None = None
    """The model's config.json, which goes along with a checkpoint, so that transformers loads it."""
    ignored: tuple[str, ...] = ()
    """Patterns of names in files that no leaf needs: a head that is tied, constants that models once stored."""

    prefix: str = ""
    """Of names in files, which those that a base model wrote without its head do not have."""

    def ignores(self, name: str) -> bool:
        """Whether a tensor in a file that is no leaf's is no mistake."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def as_in(self, stored: Iterable[str]) -> NameMap:
        """The map to names of files that may lack the prefix."""
        if not self.prefix or any(name.startswith(self.prefix) for name in stored):
            return self
        rules = tuple(replace(rule, name=rule.name.removeprefix(self.prefix)) for rule in self.rules)
        return replace(self, rules=rules, prefix="")

    def parts(self, leaf: str, shape: Shape) -> tuple[LeafPlace, ...]:
        """Where a leaf lies. As it is, under its own path, where no rule is about it."""
        found = (rule.parts(leaf, shape) for rule in self.rules)
        return next((parts for parts in found if parts is not None), (LeafPlace(leaf),))


PLAIN = NameMap(())
"""Every leaf as it is, under its own path."""

ANY = NameMap((), ignored=(".*",))
"""The same, beside whatever else a file has."""
