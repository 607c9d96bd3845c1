"""`save`: every rank writes its own bytes; together they become a checkpoint in one step."""

from __future__ import annotations

import copy
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint.format import (
    names_json,
    per_rank_buffers,
    random_state,
    tensor_files,
)
from shardwise.checkpoint.format.local_tensor import Piece
from shardwise.checkpoint.format.model_state import adapter_to_write, pieces_to_write
from shardwise.checkpoint.format.optimizer_state import optimizer_state
from shardwise.checkpoint.format.row_exchange import RowExchange
from shardwise.checkpoint.io.storage import Location, check_location
from shardwise.checkpoint.names.transformers_names import is_transformers
from shardwise.checkpoint.names.wrappers import unwrapped
from shardwise.checkpoint.publish.target import FileSet, Target
from shardwise.checkpoint.publish.writing import Prepared, Writing, check_arguments, publish, take_along, target_at
from shardwise.checkpoint.ranks.agreement import wait_for_last_save
from shardwise.checkpoint.ranks.consensus import Peers
from shardwise.checkpoint.staging import StagingBuffer
from shardwise.comm.collective_log import SyncPoint
from shardwise.engine.checked import CheckedEngine
from shardwise.engine.extensions import backward_steps
from shardwise.engine.extensions.offloaded import shard_stores
from shardwise.engine.lookup import engines_of
from shardwise.engine.setup.module_methods import give_up_interrupted
from shardwise.errors import UsageError
from shardwise.modules.adapters import adapter_config
from shardwise.offload.step import stores_of

_DISAGREE = (
    "ranks disagree about the checkpoint: call it on every rank with the same path, step, asynchronous, "
    "overwrite and max_file_bytes, and with models and optimizers that have the same parameters, state and "
    "options"
)

_staging_buffers: weakref.WeakKeyDictionary[CheckedEngine, StagingBuffer] = weakref.WeakKeyDictionary()


def save(  # noqa: PLR0913, PLR0917 - the promised signature
    path: Location,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    max_file_bytes: int = 5_000_000_000,
    *,
    files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
    adapter: bool = False,
) -> None:
    """Write a checkpoint that any number of ranks under any strategy can load. Every rank must call this.

    Args:
        path: the checkpoint itself, a directory on a file system that every rank sees. It is written as `path.partial`
            and renamed when everything is on disk, so `path` is either complete or absent. Or a URL that fsspec knows
            ("s3://bucket/run/step-000100"): then each rank writes a file of its own, and the checkpoint exists once its
            manifest does.
        model: a sharded model. Stored in the master dtype, under the names that its `from_pretrained` expects.
        optimizer: an optimizer of the model's parameters; its state, groups and options are saved by fqn.
        step: the training step, not negative.
        extra: a dict of anything else that a resumed run needs, as JSON; `load` returns it. Rank 0's is saved.
        asynchronous: copy this rank's bytes to host memory, which is kept for the next save, and return; a thread
            writes them. An optimizer step taken right after the call does not change what is saved. The next call of
            this package waits for the thread and raises its error. So end a program with `sw.checkpoint.wait(model)`:
            an error that no later call has raised is printed at exit, and does not change the program's exit status.
        max_file_bytes: most bytes of tensors in one file; a larger tensor gets a file of its own.
        files: small files to store as well, by name: a tokenizer's, for example. Rank 0's are saved.
        overwrite: replace a checkpoint at `path`, in one step, when the new one is on disk: until then the disk holds
            both. Not for URLs.
        adapter: save only the model's PEFT adapter, as files that PEFT loads (`adapter_model.safetensors`,
            `adapter_config.json`). `load` leaves the base model as it is.

    Raises:
        CheckpointError: `path` exists (with `overwrite`: and is not a checkpoint), it cannot be written, or not all
            ranks see it; or the previous asynchronous save failed, and nothing else was done. UsageError: something
            cannot be saved. MismatchError: ranks want to save different things, or are at different steps. Every rank
            raises, whichever failed; `path` is then as it was before.

    Each rank writes the byte ranges of its own fragments, and replicas share the work. No weights travel between ranks,
    except along a tensor axis that cuts a tensor into short ranges: there ranks exchange them, and write whole rows.
    """
    check_location(path, "sw.checkpoint.save(path, model, ...)")

    def aim() -> tuple[Target, str]:
        check_arguments(step, extra, max_file_bytes)
        target = target_at(path, overwrite)
        return target, f"{target.name}|{bool(overwrite)}"

    found = prepare(model, optimizer, step, extra, asynchronous, aim, max_file_bytes, files or {}, adapter)
    copy_pieces = _staging_buffers.setdefault(found.engine, StagingBuffer()).copy if asynchronous else None
    publish(Writing(**vars(found.prepared), target=found.target), found.peers, copy_pieces)


T = TypeVar("T")


class Preparation(NamedTuple, Generic[T]):
    """What `prepare` returns."""

    prepared: Prepared
    target: T
    peers: Peers
    engine: CheckedEngine
    """The first of the model's."""


def prepare(  # noqa: PLR0913, PLR0917 - those of `save`
    model: nn.Module,
    optimizer: Optimizer | None,
    step: int,
    extra: Mapping[str, Any] | None,
    asynchronous: bool,
    aim: Callable[[], tuple[T, str]],
    max_file_bytes: int = sys.maxsize,
    files: Mapping[str, bytes] = MappingProxyType({}),
    adapter: bool = False,
) -> Preparation[T]:
    """Return everything that a save writes. Tensors share the model's memory. Every rank must call this.

    aim: returns the target, and text about it that must be equal on every rank. If it raises, every rank raises. Other
    arguments and errors are those of `save`.
    """
    model = unwrapped(model)
    engines = engines_of(model)
    peers = Peers(engines)
    wait_for_last_save(peers)
    for engine in engines:
        engine.log.agree(SyncPoint.SAVE)  # a rank may have skipped its last optimizer step
    with peers.together("the checkpoint cannot be saved"):
        target, named = aim()
        _check_ready(engines, optimizer, asynchronous)
        prepared, whole = _prepare(model, optimizer, peers, max_file_bytes, adapter)
        take_along(files, prepared)
        prepared.training.update(step=step, extra=None if extra is None else copy.deepcopy(dict(extra)))
    peers.agree(f"{named}|{step}|{bool(asynchronous)}|{prepared.describe()}", _DISAGREE)
    rows = per_rank_buffers.differing(whole, peers)
    if rows:
        prepared.file_sets.append(FileSet(tensor_files.files_for(per_rank_buffers.STEM, rows, max_file_bytes), rows))
    exchange = RowExchange(peers)
    for number, file_set in enumerate(prepared.file_sets):
        prepared.file_sets[number] = FileSet(file_set.files, exchange.arrange(file_set.files, file_set.pieces))
    return Preparation(replace(prepared, exchange=exchange), target, peers, engines[0])


def _check_ready(engines: Sequence[CheckedEngine], optimizer: Optimizer | None, asynchronous: bool) -> None:
    """Clear up after an interrupted forward or backward. Raise UsageError if units are at different steps, if a disk
    has failed, or for an asynchronous save of weights or optimizer state that rest on a tier."""
    for engine in engines:
        give_up_interrupted(engine)
        backward_steps.check(engine)
    shards, states = shard_stores(*engines), [] if optimizer is None else stores_of(optimizer)
    for shard_store in shards:
        shard_store.tier.check()
    if optimizer is not None:
        for state_store in states:
            state_store.check(optimizer)
    if asynchronous and (shards or states):
        raise UsageError(
            "asynchronous=True with parameters or optimizer state offloaded: the next step would overwrite what "
            "is being saved, and host memory cannot hold a copy of all of it; leave asynchronous out"
        )


def wait(model: nn.Module) -> None:
    """Wait until no asynchronous save is under way. Every rank of the model must call this.

    Raises CheckpointError on every rank if the last one failed on any rank.
    """
    wait_for_last_save(Peers(engines_of(model)))


def _prepare(
    model: nn.Module, optimizer: Optimizer | None, peers: Peers, max_file_bytes: int, adapter: bool
) -> tuple[Prepared, list[Piece]]:
    """Return everything to write, and the pieces that every rank holds in full. Tensors share the model's memory."""
    stem, own = (
        (tensor_files.ADAPTER, adapter_to_write(model)) if adapter else (tensor_files.MODEL, pieces_to_write(model))
    )
    pieces = {stem: own}
    most_bytes = {tensor_files.ADAPTER: sys.maxsize}  # PEFT looks for one file
    state = None if optimizer is None else optimizer_state(model, optimizer)
    if state is not None:
        pieces[tensor_files.OPTIMIZER] = state.pieces
    file_sets = [
        FileSet(tensor_files.files_for(stem, found, most_bytes.get(stem, max_file_bytes)), _own(found, peers))
        for stem, found in pieces.items()
    ]
    documents: dict[str, bytes] = {}
    if peers.is_first:
        documents.update(_adapter_configuration(model) if adapter else _configuration(model))
        documents.update(_names(model, own))
    document = None if state is None else state.document
    whole = [piece for found in pieces.values() for piece in found if piece.is_whole]
    return Prepared(file_sets, {"optimizer": document}, random_state.capture(peers.device), documents), whole


def _names(model: nn.Module, pieces: list[Piece]) -> dict[str, bytes]:
    """Return `names.json` if the model's names differ from those in the files: FSDP2 looks for the model's."""
    asked = [(piece.names, piece.shape, piece.places) for piece in pieces]  # unchanged places are the same objects
    if model not in _encoded_names or _encoded_names[model][0] != asked:
        named = names_json.of_pieces(pieces)
        _encoded_names[model] = asked, {names_json.NAME: names_json.encode(named)} if named else {}
    return _encoded_names[model][1]


_encoded_names: weakref.WeakKeyDictionary[nn.Module, tuple[Any, dict[str, bytes]]] = weakref.WeakKeyDictionary()


def _own(pieces: list[Piece], peers: Peers) -> list[Piece]:
    return [own for piece in pieces if (own := piece.to_write(peers)) is not None]


def _adapter_configuration(model: nn.Module) -> dict[str, bytes]:
    """Return `adapter_config.json` as PEFT writes it."""
    config = copy.copy(adapter_config(model))
    config.inference_mode = True  # a caller who loads it to train says so
    with tempfile.TemporaryDirectory(prefix="shardwise-") as directory:
        config.save_pretrained(directory)
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def _configuration(model: nn.Module) -> dict[str, bytes]:
    """Return a transformers model's config.json and generation_config.json, as its save_pretrained writes them."""
    if not is_transformers(model):
        return {}
    source: Any = model
    config = copy.deepcopy(source.config)
    config.dtype = str(source.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory(prefix="shardwise-") as directory:
        config.save_pretrained(directory)
        generation = getattr(model, "generation_config", None)
        if generation is not None and source.can_generate():
            generation.save_pretrained(directory)
        return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir())}
