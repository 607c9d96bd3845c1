"""`save`: every process writes the byte ranges of its own shards, and the checkpoint is committed in one step."""

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
        path: where the checkpoint is created: a directory on a file system that every process sees, or a URL that
            fsspec knows. It is either complete or absent.
        state: any pytree of arrays and numbers. Leaves of a training state below `params` are stored in the model's
            files and the rest in the optimizer's, Adam's means under torch's names; any other tree is all model.
        step: the step of the training, not negative.
        extra: a dict of anything else that a resumed run needs, stored as JSON; process 0's is saved.
        asynchronous: copy this process's shards to host memory and return, while a thread writes them. Steps that
            donate the arrays may follow at once. The next save, load or wait waits for the thread and raises its error:
            end a program with `swj.checkpoint.wait()`.
        max_file_bytes: the most bytes of tensors in one file; a larger tensor gets a file of its own.
        names: the names of the model's leaves in files, such as `Llama(...).file_names`, with which transformers and
            the torch engine can load them. None = the module's `file_names` if it has them, else the leaves' own paths.
        files: small files to store in the checkpoint, by name: a tokenizer's, for example.
        overwrite: replace a checkpoint at `path`, in one step. Not for URLs.

    Raises CheckpointError, UsageError and MismatchError as `sw.checkpoint.save` does, in every process.

    No weights travel between processes: the first replica of every shard is written at its place in the files.
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
        writing = Writing(file_sets, {"optimizer": optimizer}, {}, documents, target=target)
        take_along(files or {}, writing)
        writing.training.update(step=step, extra=None if extra is None else copy.deepcopy(dict(extra)))
    peers.agree(f"{target.name}|{step}|{bool(asynchronous)}|{bool(overwrite)}|{writing.describe()}", _DISAGREE)
    publish(writing, peers, copied if asynchronous else None)


def wait() -> None:
    """Wait until no asynchronous save is under way. Every process must call this.

    Raises CheckpointError in every process if the last save failed in any of them.
    """
    wait_for_last_save(Processes())


def _checked(names: Any) -> NameMap:
    if not isinstance(names, NameMap):
        raise UsageError(f"names is a {type(names).__name__}: pass a NameMap of rules, or leave it out")
    return names


def names_of(tree: Any) -> NameMap:
    """Return the `file_names` of a module, or of a training state's model; without one, `PLAIN`."""
    places = [tree, tree.get(PARAMS) if isinstance(tree, Mapping) else getattr(tree, PARAMS, None)]
    if getattr(tree, "graph", None) is not None:
        places.append(tree.model())
    found = (getattr(place, "file_names", None) for place in places)
    return next((names for names in found if isinstance(names, NameMap)), PLAIN)


class _LeafFiles:
    """The leaves to write to the files of one stem."""

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
