"""`save`: every rank writes its own bytes, and the directory becomes a checkpoint in one rename."""

from __future__ import annotations

import copy
import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint import commit, manifest, tensor_files, training_state
from shardwise.checkpoint.manifest import FileRecord, Region
from shardwise.checkpoint.naming import is_transformers
from shardwise.checkpoint.optimizer_state import OptimizerState, optimizer_state
from shardwise.checkpoint.peers import Peers
from shardwise.checkpoint.piece import Piece, pieces_of_model
from shardwise.checkpoint.tensor_files import TensorFiles
from shardwise.engine.shard import require_engine
from shardwise.errors import CheckpointError, UsageError

_SIGHT_S = 5.0
"""How long a rank waits for rank 0's token to come in sight: network file systems cache names for a moment."""


def save(  # noqa: PLR0913, PLR0917 - the promised signature
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write a checkpoint that any number of ranks under any strategy can load. Every rank must call this.

    Args:
        path: becomes the checkpoint itself, a directory; on a file system that every rank sees. Written as
            `path.partial` and renamed when everything is on disk, so `path` is either complete or not there.
        model: sharded. Stored in the master dtype, under the names that its `from_pretrained` expects.
        optimizer: of the model's parameters; its state, groups and options are saved by fqn.
        step: of the training, not negative.
        extra: a dict of anything else that a resumed run needs, as JSON; `load` returns it. Rank 0's is saved.
        asynchronous: not available yet.
        max_file_bytes: of tensors in one file; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: `path` exists, it cannot be written, or not all ranks see it. UsageError: something that
            cannot be saved. MismatchError: ranks want to save different things. On every rank, whoever failed; then
            what was at `path` before is still there.

    No weights travel between ranks: each writes the byte ranges of its own fragments, replicas sharing the work.
    """
    peers = Peers(require_engine(model).mesh)
    with peers.together("the checkpoint cannot be saved"):
        _check(asynchronous, step, extra, max_file_bytes)
        target = Path(os.path.abspath(path))  # noqa: PTH100 - not through links: the last name is what is renamed
        contents = _contents(model, optimizer, max_file_bytes)
    peers.agree(f"{target.name}|{step}|{contents.describe()}")
    try:
        _write(peers, target, model, contents, {"step": step, "extra": None if extra is None else dict(extra)})
    except Exception:
        if peers.is_first:
            commit.discard(target)
        raise


@dataclass(frozen=True)
class _Kind:
    """The files of one kind and what lies in them."""

    files: TensorFiles
    pieces: list[Piece]


@dataclass(frozen=True)
class _Contents:
    """What a checkpoint is going to hold. The same on every rank, but for the numbers."""

    kinds: list[_Kind]
    optimizer: OptimizerState | None

    def describe(self) -> str:
        headers = [(name, file.header) for kind in self.kinds for name, file in kind.files.files.items()]
        return f"{headers}|{self.optimizer.document if self.optimizer else None}"


def _check(asynchronous: bool, step: int, extra: object, max_file_bytes: int) -> None:
    if asynchronous:
        raise UsageError("sw.checkpoint.save(asynchronous=True) is not available yet: save synchronously")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"step={step!r}: a number of steps, at least 0")
    if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise UsageError(f"max_file_bytes={max_file_bytes!r}: a number of bytes, at least 1")
    if extra is not None and not isinstance(extra, Mapping):
        raise UsageError(f"extra is a dict, not a {type(extra).__name__}")
    training_state.check_json(None if extra is None else dict(extra), "extra")


def _contents(model: nn.Module, optimizer: Optimizer | None, max_file_bytes: int) -> _Contents:
    pieces = pieces_of_model(model)
    kinds = [_Kind(tensor_files.plan("model", pieces, max_file_bytes), pieces)]
    state = None if optimizer is None else optimizer_state(model, optimizer)
    if state is not None:
        kinds.append(_Kind(tensor_files.plan("optimizer", state.pieces, max_file_bytes), state.pieces))
    return _Contents(kinds, state)


def _write(peers: Peers, target: Path, model: nn.Module, contents: _Contents, training: dict[str, Any]) -> None:
    partial = commit.partial_of(target)
    token = partial / f".token-{peers.first_says(secrets.randbits(62)):x}"
    with peers.together(f"{target} cannot be written"):
        if peers.is_first:
            commit.begin(target)
            token.touch()
            for kind in contents.kinds:
                tensor_files.create(partial, kind.files)
    with peers.together(f"{target} cannot be written"):
        _look_for(token, peers)
    with peers.together(f"{target} cannot be written"):
        regions: dict[str, list[Region]] = {}
        for kind in contents.kinds:
            regions.update(tensor_files.write(partial, kind.files, kind.pieces, peers))
        device = require_engine(model).mesh.device
        report = {"regions": regions, "rng": training_state.random_state(device)}
        _report(partial, peers.rank).write_text(json.dumps(report), encoding="utf-8")
    with peers.together(f"{target} cannot be written"):
        if peers.is_first:
            token.unlink()
            _finish(partial, model, contents, training, peers.world_size)
            commit.commit(target)


def _look_for(token: Path, peers: Peers) -> None:
    deadline = time.monotonic() + _SIGHT_S
    while not (token.parent.is_dir() and any(seen.name == token.name for seen in token.parent.iterdir())):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank {peers.rank} does not see what rank 0 wrote to {token.parent}: save to a file system that all "
                "ranks share"
            )
        time.sleep(0.02)


def _report(partial: Path, rank: int) -> Path:
    """What a rank has to say to rank 0: checksums and random states, gone before the commit."""
    return partial / f".rank-{rank}.json"


def _finish(partial: Path, model: nn.Module, contents: _Contents, training: dict[str, Any], world_size: int) -> None:
    """Write what there is one of, and the manifest last. By rank 0, when every rank's bytes are on disk."""
    regions: dict[str, list[Region]] = {}
    rng = []
    for rank in range(world_size):
        report = json.loads(_report(partial, rank).read_text(encoding="utf-8"))
        rng.append(report["rng"])
        for name, found in report["regions"].items():
            regions.setdefault(name, []).extend(Region(*region) for region in found)
        _report(partial, rank).unlink()
    document = contents.optimizer.document if contents.optimizer else None
    training_state.write(partial, training_state.describe(training["step"], document, rng, training["extra"]))
    _write_configuration(partial, model)
    layouts = {name: file for kind in contents.kinds for name, file in kind.files.files.items()}
    records = {name: FileRecord(file.nbytes, tuple(regions[name])) for name, file in layouts.items()}
    for path in sorted(partial.iterdir()):
        if path.name not in layouts:
            commit.sync(path)
            records[path.name] = manifest.record_of(path)
    manifest.write(partial, records)


def _write_configuration(directory: Path, model: nn.Module) -> None:
    """A transformers model's config.json and generation_config.json, as its save_pretrained writes them."""
    if not is_transformers(model):
        return
    source: Any = model
    config = copy.deepcopy(source.config)
    config.dtype = str(source.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    generation = getattr(model, "generation_config", None)
    if generation is not None and source.can_generate():
        generation.save_pretrained(directory)
