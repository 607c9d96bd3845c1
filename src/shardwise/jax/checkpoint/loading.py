"""`load` and `load_pretrained`: every process reads the byte ranges of its own shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from shardwise.checkpoint.format import manifest, tensor_files, training_json
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.hugging_face import weights_of
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.format.tensor_files import TensorFiles
from shardwise.checkpoint.io.storage import Directory, Location, check_location, directory_of
from shardwise.checkpoint.ranks.agreement import fetched, wait_for_last_save
from shardwise.errors import CheckpointError, UsageError
from shardwise.jax.checkpoint import adam, tree_json
from shardwise.jax.checkpoint.from_orbax import is_of_orbax
from shardwise.jax.checkpoint.leaves import VARIABLES, Leaf, leaves_of, random_streams, split, with_leaves
from shardwise.jax.checkpoint.name_map import ANY, PLAIN, LeafPlace, NameMap
from shardwise.jax.checkpoint.pieces import DTYPES, LeafToRead
from shardwise.jax.checkpoint.processes import Processes
from shardwise.jax.checkpoint.saving import names_of

T = TypeVar("T")
_STAGED_BYTES = 512 * 2**20
"""Leaves are read in groups. A group is complete when it needs at least this much host memory."""
_SHOWN = 3
_DISAGREE = "processes disagree about what to load: give every process the same path and a tree of the same leaves"


Parts = Mapping[str, Sequence[LeafPlace]]
"""By path of a leaf, where it is stored. A leaf that is not in it is stored under its own path."""


class Extra(dict[str, Any]):
    """The `extra` dict that was passed to `save`."""

    step: int = 0
    """The `step` that was passed to `save`."""


def load(path: Location, like: T) -> tuple[T, Extra]:
    """Read a checkpoint of `swj.checkpoint.save`, or of the torch engine. Every process must call this.

    Args:
        path: a committed checkpoint, or its URL, saved by any number of devices and processes. From one of the torch
            engine, the moments and step count of Adam and AdamW are loaded into optax's Adam; the state of any other
            optimizer is an error that names it.
        like: a tree of the same leaves: a state, or `jax.eval_shape` of one with shardings. The result has its dtypes
            and shardings; an abstract leaf without a sharding is loaded whole onto this process's first device. If
            `like` has only a state's parameters, the rest is not read.

    Returns:
        A tree like `like` with the checkpoint's numbers, and the `extra` dict that was passed to `save` (empty if there
        was none), with the attribute `.step`.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or leaves that are missing, unexpected, of another shape or
            another kind of numbers: all named. UsageError, MismatchError. In every process.

    Each process reads the bytes of its own shards, in groups of leaves that need about 512 MiB of host memory.
    """
    check_location(path, "swj.checkpoint.load(path, like=...)")
    peers = Processes()
    wait_for_last_save(peers)
    with peers.together(f"{os.fspath(path)} cannot be loaded"):
        if is_of_orbax(path):
            raise CheckpointError(
                f"{os.fspath(path)} is an Orbax checkpoint: use swj.checkpoint.import_orbax(path, like=...)"
            )
        contents = Contents.of(path)
        training = training_json.read(contents)
        leaves = leaves_of(like)
        reading = _Reading(contents)
        if tree_json.is_there(contents):
            reading.expect_all(leaves)
        else:
            reading.expect_of_torch(leaves, names_of(like), training, adam.states_in(like))
        reading.check()
    peers.agree(f"{contents.manifest}|{reading.described}", _DISAGREE)
    with peers.together(f"{os.fspath(path)} cannot be loaded"):
        found = reading.run()
    extra = Extra(training["extra"] or {})
    extra.step = training["step"]
    return with_leaves(like, [found[leaf] for leaf in leaves]), extra


def load_pretrained(path: Location, like: T, names: NameMap | None = None) -> T:
    """Read a model's weights into a tree. Every process must call this.

    Args:
        path: a Hugging Face directory of safetensors files, a name on a hub ("org/name", "org/name@revision"), or a
            checkpoint of the torch engine or of JAX.
        like: parameters, or `jax.eval_shape` of them with shardings; see `load`. A module with numbers keeps its random
            streams if the files have none; its running means are also read from the checkpoint of a training state.
        names: the names of the leaves in the files; None = the module's own `file_names`, or else the leaves' paths.

    Raises CheckpointError and UsageError as `load` does. A tensor in the files that matches no leaf is an error too,
    unless `names` ignores it, such as a tied head, which some files store.
    """
    check_location(path, "swj.checkpoint.load_pretrained(path, like=...)")
    peers = Processes()
    wait_for_last_save(peers)
    names = names or names_of(like)
    path = fetched(path, peers, _DISAGREE)
    with peers.together(f"{os.fspath(path)} cannot be loaded"):
        opened, files = _opened(path)
        names = names.as_in(files.tensors)
        leaves = leaves_of(like)
        parts = {leaf.path: names.parts(leaf.path, leaf.shape) for leaf in leaves}
        stored, absent = _partition(leaves, lambda leaf: all(part.name in files.tensors for part in parts[leaf.path]))
        reading = _Reading(opened)
        absent = reading.expect_beside_parameters(absent)
        streams, absent = _partition(absent, partial(_is_among, random_streams(like)))
        reading.keep(streams)
        reading.expect([leaf for leaf in leaves if leaf in {*stored, *absent}], files, parts, names)
        reading.check()
    headers = [(name, file.nbytes, file.header) for name, file in files.files.items()]
    peers.agree(f"{headers}|{reading.described}", _DISAGREE)
    with peers.together(f"{os.fspath(path)} cannot be loaded"):
        found = reading.run()
    return with_leaves(like, [found[leaf] for leaf in leaves])


def _partition(leaves: Sequence[Leaf], has: Callable[[Leaf], bool]) -> tuple[list[Leaf], list[Leaf]]:
    """Split the leaves into those for which `has` is true and the others."""
    return [leaf for leaf in leaves if has(leaf)], [leaf for leaf in leaves if not has(leaf)]


def _is_among(paths: Collection[str], leaf: Leaf) -> bool:
    return leaf.path in paths


def _opened(path: Location) -> tuple[Contents | Directory, TensorFiles]:
    directory = directory_of(path)
    with manifest.reading(directory):
        if directory.has(manifest.NAME):
            contents = Contents.of(path)
            return contents, tensor_files.find_model(contents)
        return directory, weights_of(directory)


class _Reading:
    """One load: leaves matched with stored tensors."""

    def __init__(self, opened: Contents | Directory) -> None:
        self._opened = opened
        self._known: dict[Leaf, Any] = {}
        """Values that are known without reading tensor files: step counts and kept random streams."""
        self._wanted: list[tuple[TensorFiles, LeafToRead]] = []
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._wrong: list[str] = []

    def expect(self, leaves: Sequence[Leaf], files: TensorFiles, parts: Parts, names: NameMap = PLAIN) -> None:
        """Match leaves with the tensors of one stem's files. Without leaves, none of these counts as unexpected."""
        stored = files.tensors
        left = dict.fromkeys(name for name in stored if not names.ignores(name))
        for leaf in leaves:
            own = parts.get(leaf.path, (LeafPlace(leaf.path),))
            for part in own:
                left.pop(part.name, None)
            missing = [part.name for part in own if part.name not in stored]
            if missing:
                self._missing.append(leaf.path if leaf.path in missing else f"{leaf.path} ({_shown(missing)})")
            elif self._fits(leaf, own, stored):
                self._wanted.append((files, LeafToRead(leaf, own, [stored[part.name] for part in own])))
        self._unexpected += left if leaves else ()

    def expect_beside_parameters(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Match leaves with the module variables of a training state that JAX saved. Returns the missing leaves."""
        if not isinstance(self._opened, Contents) or not tree_json.is_there(self._opened):
            return list(leaves)
        files = tensor_files.find(self._opened, tensor_files.OPTIMIZER)
        parts = {leaf.path: (LeafPlace(f"{VARIABLES}.{leaf.path}"),) for leaf in leaves}
        found, absent = _partition(leaves, lambda leaf: parts[leaf.path][0].name in files.tensors)
        self.expect(found, files, parts, ANY)
        return absent

    def keep(self, streams: Sequence[Leaf]) -> None:
        """Keep the values of random streams that the files do not hold. Raises UsageError if they are abstract."""
        for leaf in streams:
            if isinstance(leaf.value, jax.ShapeDtypeStruct):
                raise UsageError(
                    f"{leaf.path!r} belongs to a random stream, which {self._opened} does not hold: give like= a "
                    "module with numbers, such as init(...)(jax.random.key(0)), whose streams are then kept"
                )
            self._known[leaf] = leaf.value

    def expect_all(self, leaves: Sequence[Leaf]) -> None:
        """Match a whole tree with a checkpoint that JAX saved."""
        assert isinstance(self._opened, Contents)
        of_model, others = split(leaves)
        model_parts, other_parts = tree_json.read(self._opened)
        self.expect(of_model, tensor_files.find(self._opened, tensor_files.MODEL), model_parts)
        self.expect(others, tensor_files.find(self._opened, tensor_files.OPTIMIZER), other_parts)

    def expect_of_torch(
        self, leaves: Sequence[Leaf], names: NameMap, training: Mapping[str, Any], states: Sequence[str]
    ) -> None:
        """Match a whole tree with a checkpoint of the torch engine.

        states: the paths of the tree's Adam states, which are matched with the state of torch's Adam or AdamW.
        """
        assert isinstance(self._opened, Contents)
        of_model, others = split(leaves)
        files = tensor_files.find_model(self._opened)
        names = names.as_in(files.tensors)
        parts = {leaf.path: names.parts(leaf.path, leaf.shape) for leaf in of_model}
        self.expect(of_model, files, parts, names)
        saved = (training["optimizer"] or {}).get("class")
        if others and saved not in adam.CLASSES:
            with_what = f"with {saved}, whose state optax does not know" if saved else "without an optimizer"
            raise CheckpointError(
                f"{self._opened} was saved by torch {with_what}: to read its model, use "
                "swj.checkpoint.load_pretrained(path, like=...)"
            )
        counts = adam.counted(training, others)
        rest = [leaf for leaf in others if leaf.path not in counts]
        self._known = {leaf: leaf.number(counts[leaf.path]) for leaf in others if leaf.path in counts}
        moments = adam.parts_of_moments(states, of_model, rest, names)
        self.expect(rest, tensor_files.find(self._opened, tensor_files.OPTIMIZER), moments)

    def _fits(self, leaf: Leaf, parts: Sequence[LeafPlace], stored: Mapping[str, StoredTensor]) -> bool:
        rows = [part.row for part in parts if part.row is not None]
        if rows and sorted(rows) != list(range(leaf.shape[0] if leaf.shape else 0)):
            self._wrong.append(f"{leaf.path} (here {leaf.shape}, stored in {len(rows)} rows)")
            return False
        for part in parts:
            tensor = stored[part.name]
            here = part.shape_in_file(leaf.shape) if len(leaf.shape) >= _dims(part) else leaf.shape
            if tensor.shape != here:
                self._wrong.append(f"{part.name} (here {here}, stored {tensor.shape})")
                return False
            if _numbers(DTYPES[tensor.dtype]) != _numbers(leaf.dtype):
                self._wrong.append(f"{part.name} (here {leaf.dtype}, stored as {tensor.dtype})")
                return False
        return True

    def check(self) -> None:
        """Raise CheckpointError, naming the leaves, unless stored and wanted leaves match."""
        found = (
            ("missing from the checkpoint", self._missing),
            ("unexpected in the checkpoint", self._unexpected),
            ("with another shape or kind", self._wrong),
        )
        wrong = [f"{what}: {_shown(names)}" for what, names in found if names]
        if wrong:
            raise CheckpointError(f"{self._opened} does not fit: {'; '.join(wrong)}")

    @property
    def described(self) -> str:
        """Text that must be equal in every process."""
        return str([(one.leaf.path, one.leaf.shape, str(one.leaf.dtype)) for _, one in self._wanted])

    def run(self) -> dict[Leaf, Any]:
        """Read everything and return the value of each leaf. Does not communicate."""
        values = dict(self._known)
        for files, group in self._groups():
            pieces = [(piece, piece.places[0]) for one in group for piece in one.begin()]
            tensor_files.read(self._opened, files, pieces)
            values.update((one.leaf, one.finish()) for one in group)
        return values

    def _groups(self) -> Iterator[tuple[TensorFiles, list[LeafToRead]]]:
        """Yield groups of leaves of one stem that are read together."""
        group: list[LeafToRead] = []
        nbytes = 0
        for position, (files, one) in enumerate(self._wanted):
            group.append(one)
            nbytes += one.nbytes
            following = self._wanted[position + 1][0] if position + 1 < len(self._wanted) else None
            if following is not files or nbytes >= _STAGED_BYTES:
                yield files, group
                group, nbytes = [], 0


def _dims(part: LeafPlace) -> int:
    return (part.row is not None) + len(part.order or ())


def _numbers(dtype: np.dtype[Any]) -> str:
    """Return the kind of numbers, "real", "complex" or "whole". A load casts within a kind, and never to another."""
    if jax.dtypes.issubdtype(dtype, np.floating):
        return "real"
    return "complex" if np.issubdtype(dtype, np.complexfloating) else "whole"


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
