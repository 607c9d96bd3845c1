"""`save`: every rank writes its own bytes; together they become a checkpoint in one step."""

from __future__ import annotations

import copy
import os
import secrets
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint.format import (
    manifest,
    names_json,
    per_rank_buffers,
    random_state,
    tensor_files,
    training_json,
)
from shardwise.checkpoint.format.local_tensor import Piece
from shardwise.checkpoint.format.model_state import adapter_to_write, pieces_to_write
from shardwise.checkpoint.format.optimizer_state import optimizer_state
from shardwise.checkpoint.io.remote import RemoteDirectory
from shardwise.checkpoint.io.storage import Location, check_location, is_url
from shardwise.checkpoint.names.transformers_names import is_transformers
from shardwise.checkpoint.publish import commit
from shardwise.checkpoint.publish.per_rank_files import PerRankFiles
from shardwise.checkpoint.publish.shared_files import SharedFiles
from shardwise.checkpoint.publish.target import FileSet, Target, Written
from shardwise.checkpoint.ranks import save_thread
from shardwise.checkpoint.ranks.consensus import Peers, wait_for_last_save
from shardwise.checkpoint.ranks.file_barrier import Barrier, FileBarrier, read_note, write_note
from shardwise.checkpoint.staging import HostMemory
from shardwise.engine.engine import Engine
from shardwise.engine.lookup import require_engine
from shardwise.errors import CheckpointError, UsageError
from shardwise.modules.adapters import adapter_config
from shardwise.offload.state_store import stores_of

_SIGHT_S = 5.0
"""How long a rank waits for rank 0's token to come in sight: network file systems cache names for a moment."""
_CREATED = ".created"
_DISAGREE = (
    "ranks disagree about the checkpoint: call it with the same path, step, asynchronous, overwrite and "
    "max_file_bytes, and with models and optimizers that have the same parameters, state and options, on every rank"
)

_host_memory: weakref.WeakKeyDictionary[Engine, HostMemory] = weakref.WeakKeyDictionary()


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
        path: becomes the checkpoint itself, a directory; on a file system that every rank sees. Written as
            `path.partial` and renamed when everything is on disk, so `path` is either complete or not there. Or a URL
            that fsspec knows ("s3://bucket/run/step-000100"): then ranks write files of their own, and it is a
            checkpoint when its manifest is there.
        model: sharded. Stored in the master dtype, under the names that its `from_pretrained` expects.
        optimizer: of the model's parameters; its state, groups and options are saved by fqn.
        step: of the training, not negative.
        extra: a dict of anything else that a resumed run needs, as JSON; `load` returns it. Rank 0's is saved.
        asynchronous: copy this rank's bytes to host memory, which is kept for the next save, and return; a thread
            writes them. A step taken right after the call does not change what is saved. The next call of this package
            waits for the thread and raises its error. So end a program with `sw.checkpoint.wait(model)`: an error
            that no later call has raised is printed at exit, and does not change the program's exit status.
        max_file_bytes: of tensors in one file; a larger tensor gets a file of its own.
        files: small ones to go along, by name: a tokenizer's, for example. Rank 0's are saved.
        overwrite: a checkpoint that is at `path` is replaced, in one step, when the new one is on disk: until then
            both need room. Not for URLs.
        adapter: of the model only its adapter of PEFT, as files that PEFT loads (`adapter_model.safetensors`,
            `adapter_config.json`). `load` leaves the base as it is.

    Raises:
        CheckpointError: `path` exists (with `overwrite`: and is no checkpoint), it cannot be written, or not all ranks
            see it; or the asynchronous save before failed, and nothing else was done. UsageError: something that cannot
            be saved. MismatchError: ranks want to save different things. On every rank, whichever failed; then `path`
            is as it was before.

    No weights travel between ranks: each writes the byte ranges of its own fragments, replicas sharing the work.
    """
    check_location(path, "sw.checkpoint.save(path, model, ...)")
    engine = require_engine(model)
    peers = Peers(engine.mesh)
    wait_for_last_save(peers)
    with peers.together("the checkpoint cannot be saved"):
        _check(step, extra, max_file_bytes)
        engine.reducer.steps.check()
        for store in () if optimizer is None else stores_of(optimizer):
            store.check()
            if asynchronous:
                raise UsageError(
                    "asynchronous=True with optimizer state on disk (offload.optimizer='nvme'): the next step would "
                    "write over what is being saved, and a copy of all of it is what host memory has no room for; "
                    "leave asynchronous out"
                )
        target = _target(path, overwrite)
        writing = _prepare(target, model, optimizer, peers, max_file_bytes, adapter)
        _take_along(files or {}, writing)
        writing.training.update(step=step, extra=None if extra is None else copy.deepcopy(dict(extra)))
    peers.agree(f"{target.name}|{step}|{bool(asynchronous)}|{bool(overwrite)}|{writing.describe()}", _DISAGREE)
    rows = per_rank_buffers.differing(writing.whole, peers)
    if rows:
        writing.file_sets.append(FileSet(tensor_files.files_for(per_rank_buffers.STEM, rows, max_file_bytes), rows))
    try:
        _begin(target, peers)
        if asynchronous:
            _start(writing, peers, _host_memory.setdefault(engine, HostMemory()))
        else:
            writing.run(peers)
    except Exception:
        if peers.is_first:
            target.discard()
        raise


def wait(model: nn.Module) -> None:
    """Wait until no asynchronous save is under way. Every rank of the model must call this.

    Raises CheckpointError if the last one failed. On every rank, whichever failed.
    """
    wait_for_last_save(Peers(require_engine(model).mesh))


@dataclass(frozen=True)
class _Writing:
    """One save, decided upon: everything that there is to write, and where."""

    target: Target
    file_sets: list[FileSet[Piece]]
    training: dict[str, Any]
    """Of training.json, what rank 0 knows. "optimizer" is the same on every rank."""
    rng: dict[str, Any]
    """This rank's random states."""
    whole: list[Piece]
    """The pieces that every rank holds in full."""
    documents: dict[str, bytes]
    """Small files by name, rank 0's."""

    def describe(self) -> str:
        """Text that must be equal on every rank."""
        headers = [(name, file.header) for file_set in self.file_sets for name, file in file_set.files.files.items()]
        return f"{headers}|{self.training['optimizer']}"

    def run(self, barrier: Barrier) -> None:
        """Write and commit. Every rank must call this."""
        messages, doing = self.target.messages, f"{self.target} cannot be written"
        with barrier.together(doing, seen=lambda: read_note(messages, _CREATED) is not None):
            if barrier.is_first:
                self.target.create(self.file_sets)
                write_note(messages, _CREATED, {})
        with barrier.together(doing, seen=lambda: not barrier.is_first or None not in self._reports(barrier)):
            written = self.target.write(self.file_sets, barrier.rank)
            write_note(messages, _report(barrier.rank), {**written.to_json(), "rng": self.rng})
        with barrier.together(doing, seen=self.target.is_committed):
            if barrier.is_first:
                self._commit(barrier)

    def _reports(self, barrier: Barrier) -> list[dict[str, Any] | None]:
        return [read_note(self.target.messages, _report(rank)) for rank in range(barrier.world_size)]

    def _commit(self, barrier: Barrier) -> None:
        reports = self._reports(barrier)
        missing = [rank for rank, report in enumerate(reports) if report is None]
        if missing:
            raise CheckpointError(f"{self.target} cannot be written: the report of rank {missing[0]} is not there")
        found = [report for report in reports if report is not None]
        training = training_json.describe(rng=[report["rng"] for report in found], **self.training)
        documents = {**self.documents, training_json.NAME: training_json.encode(training)}
        self.target.commit(self.file_sets, Written.of_ranks(found), documents)


def _report(rank: int) -> str:
    """The name of a rank's note to rank 0: the regions that it wrote, and its random states."""
    return f".rank-{rank}"


def _check(step: int, extra: object, max_file_bytes: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"step={step!r}: a number of steps, at least 0")
    if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise UsageError(f"max_file_bytes={max_file_bytes!r}: a number of bytes, at least 1")
    if extra is not None and not isinstance(extra, Mapping):
        raise UsageError(f"extra is a dict, not a {type(extra).__name__}")
    training_json.check_json(None if extra is None else dict(extra), "extra")


def _take_along(files: Mapping[str, bytes], writing: _Writing) -> None:
    """Raises UsageError for a name that a checkpoint reserves."""
    taken = {manifest.NAME, training_json.NAME, names_json.NAME, *writing.documents}
    for name, data in files.items():
        if name != os.path.basename(name) or name in taken or ".safetensors" in name or name[:1] in {"", "."}:  # noqa: PTH119
            raise UsageError(f"files: {name!r} cannot be the name of a file that goes along with a checkpoint")
        if not isinstance(data, bytes):
            raise UsageError(f"files: {name!r} is a {type(data).__name__}, not bytes")
    writing.documents.update(files)


def _target(path: Location, overwrite: bool) -> Target:
    refusal = f"{os.fspath(path)!r} cannot be a checkpoint's name"
    if "\0" in os.fspath(path):
        raise UsageError(f"{refusal}: no name has a null character in it")
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - not through links: the last name is what is renamed
    target: Target
    if is_url(path):
        if overwrite:
            raise UsageError(f"overwrite=True: {os.fspath(path)!r} cannot be replaced in one step; save to another URL")
        target = PerRankFiles(RemoteDirectory.of(os.fspath(path)))
    else:
        target = SharedFiles.over(absolute) if overwrite else SharedFiles(absolute)
    if not target.name:
        raise UsageError(f"{refusal}: it is the root of the file system; save to a directory below it")
    if target.name.endswith((commit.PARTIAL, commit.DAMAGED, commit.REPLACED)):
        raise UsageError(
            f"{refusal}: `latest` and the trainer take names in {commit.PARTIAL} for unfinished saves and names in "
            f"{commit.DAMAGED} and {commit.REPLACED} for damaged and replaced ones"
        )
    return target


def _prepare(
    target: Target, model: nn.Module, optimizer: Optimizer | None, peers: Peers, max_file_bytes: int, adapter: bool
) -> _Writing:
    """Collect everything to write; tensors share their memory with the model."""
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
    for file_set in file_sets:
        documents.update(file_set.files.index)
    document = None if state is None else state.document
    device = require_engine(model).mesh.device
    whole = [piece for found in pieces.values() for piece in found if piece.is_whole]
    return _Writing(target, file_sets, {"optimizer": document}, random_state.capture(device), whole, documents)


def _names(model: nn.Module, pieces: list[Piece]) -> dict[str, bytes]:
    """`names.json` where the model's names are not those of the files: FSDP2 asks for the model's."""
    asked = [(piece.names, piece.shape, piece.places) for piece in pieces]  # places are the same objects each time
    if model not in _encoded_names or _encoded_names[model][0] != asked:
        named = names_json.of_pieces(pieces)
        _encoded_names[model] = asked, {names_json.NAME: names_json.encode(named)} if named else {}
    return _encoded_names[model][1]


_encoded_names: weakref.WeakKeyDictionary[nn.Module, tuple[Any, dict[str, bytes]]] = weakref.WeakKeyDictionary()


def _own(pieces: list[Piece], peers: Peers) -> list[Piece]:
    return [own for piece in pieces if (own := piece.to_write(peers)) is not None]


def _begin(target: Target, peers: Peers) -> None:
    """Make the target's directory, and check that every rank sees it."""
    token = f".token-{peers.broadcast_from_rank0(secrets.randbits(62)):x}"
    with peers.together(f"{target} cannot be written"):
        if peers.is_first:
            target.begin()
            write_note(target.messages, token, {})
    with peers.together(f"{target} cannot be written"):
        deadline = time.monotonic() + _SIGHT_S
        while token not in target.messages.names():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {peers.rank} does not see what rank 0 wrote to {target.messages}: save to a file system "
                    "that all ranks share"
                )
            time.sleep(0.02)


def _start(writing: _Writing, peers: Peers, memory: HostMemory) -> None:
    """Copy what this rank writes, and write the copy in a thread."""
    target = writing.target
    barrier = FileBarrier(target.messages, peers.rank, peers.world_size)
    with peers.together(f"{target} cannot be written"):
        barrier.announce_process()
        copies = memory.copy([piece for file_set in writing.file_sets for piece in file_set.pieces])
        each = iter(copies)
        file_sets = [replace(file_set, pieces=[next(each) for _ in file_set.pieces]) for file_set in writing.file_sets]
    with peers.together(f"{target} cannot be written"):
        barrier.learn_processes()
    copied = replace(writing, file_sets=file_sets)
    task = save_thread.SaveTask(
        what=str(target),
        run=lambda: copied.run(barrier),
        discard=target.discard if peers.is_first else lambda: None,
    )
    save_thread.start(task, peers.together(f"{target} cannot be written"))


def _adapter_configuration(model: nn.Module) -> dict[str, bytes]:
    """`adapter_config.json`, as PEFT writes it."""
    config = copy.copy(adapter_config(model))
    config.inference_mode = True  # whoever loads it to train says so
    with tempfile.TemporaryDirectory(prefix="shardwise-") as directory:
        config.save_pretrained(directory)
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def _configuration(model: nn.Module) -> dict[str, bytes]:
    """A transformers model's config.json and generation_config.json, as its save_pretrained writes them."""
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
