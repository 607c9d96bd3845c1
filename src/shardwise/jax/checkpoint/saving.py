"""`save`: every process writes the ranges of its own shards; together they become a checkpoint in one step."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.checkpoint.format import tensor_files
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.io.storage import Location, check_location
from shardwise.checkpoint.publish.target import FileSet
from shardwise.checkpoint.publish.writing import Writing, check_arguments, publish, take_along, target_at
from shardwise.checkpoint.ranks.agreement import wait_for_last_save
from shardwise.errors import UsageError
from shardwise.jax.checkpoint import adam, tree_json
from shardwise.jax.checkpoint.leaves import PARAMS, Leaf, leaves_of, split
from shardwise.jax.checkpoint.name_map import PLAIN, LeafPlace, NameMap
from shardwise.jax.checkpoint.pieces import PieceToWrite, copied, pieces_to_write, stored_tensors
from shardwise.jax.checkpoint.processes import Processes

_DISAGREE = (
    "processes disagree about the checkpoint: call swj.checkpoint.save with the same path, step, asynchronous, "
    "overwrite, max_file_bytes and names, and with trees of the same leaves, in every process"
)
_CONFIG = "config.json"


def save(  # noqa: PLR0913 - as in the torch engine
    path: Location,
    state: Any,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    max_file_bytes: int = 5_000_000_000,
    *,
    names: NameMap | None = None,
    files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint that any number of devices and processes can load. Every process must call this.

    Args:
        path: becomes the checkpoint, a directory on a file system that every process sees, or a URL that fsspec knows.
            It is complete or not there.
        state: any pytree of arrays and numbers. Of a training state, what is below `params` becomes the model's files
            and the rest the optimizer's, Adam's means under torch's names; of any other tree everything is the model.
        step: of the training, not negative.
        extra: a dict of anything else that a resumed run needs, as JSON; process 0's is saved.
        asynchronous: copy this process's shards to host memory and return; a thread writes them. Steps that donate the
            arrays may follow at once. The next call of this package waits for it and raises its error: end a program
            with `swj.checkpoint.wait()`.
        max_file_bytes: of tensors in one file; a larger tensor gets a file of its own.
        names: what the model's leaves are called in files, such as `Llama(...).file_names`: then transformers and the
            torch engine load them. None = of a module that has `file_names`, these; else the leaves' own paths.
        files: small ones to go along, by name: a tokenizer's, for example.
        overwrite: a checkpoint at `path` is replaced, in one step. Not for URLs.

    Raises CheckpointError, UsageError and MismatchError as `sw.checkpoint.save` does, in every process.

    No weights travel between processes: of every shard its first replica is written, at its place in the files.
    """
    check_location(path, "swj.checkpoint.save(path, state, ...)")
    peers = Processes()
    wait_for_last_save(peers)
    with peers.together("the checkpoint cannot be saved"):
        check_arguments(step, extra, max_file_bytes)
        target = target_at(path, overwrite)
        model, others = _LeafFiles(tensor_files.MODEL), _LeafFiles(tensor_files.OPTIMIZER)
        of_model, rest = split(leaves_of(state))
        names = names_of(state) if names is None else _checked(names)
        for leaf in of_model:
            model.add(leaf, names.parts(leaf.path, leaf.shape), peers.is_first)
        moments = adam.parts_of_moments(adam.states_in(state), of_model, rest, names)
        for leaf in rest:
            others.add(leaf, moments.get(leaf.path, (LeafPlace(leaf.path),)), peers.is_first)
        file_sets = [model.file_set(max_file_bytes)] + [others.file_set(max_file_bytes)] * bool(others.parts)
        optimizer = adam.document(moments, rest) if others.parts else None
        documents = {tree_json.NAME: tree_json.encode(model.parts, others.parts)}
        if names.config is not None:
            documents[_CONFIG] = (json.dumps(dict(names.config), indent=2, sort_keys=True) + "\n").encode()
        for file_set in file_sets:
            documents.update(file_set.files.index)
        writing = Writing(target, file_sets, {"optimizer": optimizer}, {}, documents)
        take_along(files or {}, writing)
        writing.training.update(step=step, extra=None if extra is None else copy.deepcopy(dict(extra)))
    peers.agree(f"{target.name}|{step}|{bool(asynchronous)}|{bool(overwrite)}|{writing.describe()}", _DISAGREE)
    publish(writing, peers, copied if asynchronous else None)


def wait() -> None:
    """Wait until no asynchronous save is under way. Every process must call this.

    Raises CheckpointError if the last one failed. In every process, whichever failed.
    """
    wait_for_last_save(Processes())


def _checked(names: Any) -> NameMap:
    if not isinstance(names, NameMap):
        raise UsageError(f"names is a {type(names).__name__}: pass a NameMap of rules, or leave it out")
    return names


def names_of(tree: Any) -> NameMap:
    """That a module brings along, the model of a training state perhaps; else every leaf's own."""
    places = [tree, tree.get(PARAMS) if isinstance(tree, Mapping) else getattr(tree, PARAMS, None)]
    if getattr(tree, "graph", None) is not None:
        places.append(tree.model())
    found = (getattr(place, "file_names", None) for place in places)
    return next((names for names in found if isinstance(names, NameMap)), PLAIN)


class _LeafFiles:
    """Leaves on their way into the files of one stem."""

    def __init__(self, stem: str) -> None:
        self.parts: dict[str, Sequence[LeafPlace]] = {}
        self._stem = stem
        self._tensors: list[StoredTensor] = []
        self._pieces: list[PieceToWrite] = []

    def add(self, leaf: Leaf, parts: Sequence[LeafPlace], is_first: bool) -> None:
        tensors = stored_tensors(leaf, parts)
        self.parts[leaf.path] = parts
        self._tensors += tensors
        self._pieces += pieces_to_write(leaf, parts, tensors, is_first)

    def file_set(self, max_file_bytes: int) -> FileSet[PieceToWrite]:
        return FileSet(tensor_files.lay_out_files(self._stem, tuple(self._tensors), max_file_bytes), self._pieces)
