"""`load`: every rank reads the bytes of its own fragments, whoever wrote them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint import manifest, optimizer_state, tensor_files, training_state
from shardwise.checkpoint.peers import Peers
from shardwise.checkpoint.piece import DTYPES, Piece, piece_of, pieces_of_model
from shardwise.checkpoint.tensor_file import StoredTensor
from shardwise.checkpoint.tensor_files import TensorFiles
from shardwise.engine.shard import require_engine
from shardwise.errors import CheckpointError

_SHOWN = 8


class Loaded(dict[str, Any]):
    """The `extra` that `save` was given, and what did not fit."""

    step: int = 0
    """That `save` was given."""
    missing: tuple[str, ...] = ()
    """In the model or the optimizer, not in the checkpoint: left as they were."""
    unexpected: tuple[str, ...] = ()
    """In the checkpoint only: not read."""
    wrong_shape: tuple[str, ...] = ()
    """In both with different shapes, which are named: left as they were."""


@torch.no_grad()
def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, strict: bool = True
) -> Loaded:
    """Read a checkpoint into a sharded model, and an optimizer. Every rank must call this.

    Args:
        path: a committed checkpoint, saved by any number of ranks under any strategy.
        model: sharded. Its parameters and buffers are overwritten, cast to the dtypes that it keeps them in.
        optimizer: of the model's parameters, in any groups and order: state and options are matched by fqn. With one,
            this is taken as a resumption: at the world size of the save, random states are restored too.
        strict: False loads what fits and reports the rest in the result, instead of raising.

    Returns:
        The dict that `save` was given as `extra` (empty without one), with `.step`, `.missing`, `.unexpected` and
        `.wrong_shape`.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or entries that are missing, unexpected or of another shape: all
            named, before anything is overwritten. On every rank, whoever failed.

    Sizes and headers are checked, checksums are not: `verify` reads everything. Each rank reads only its own bytes.
    """
    engine = require_engine(model)
    peers = Peers(engine.mesh)
    directory = Path(path)
    with peers.together(f"{directory} cannot be loaded"):
        reading = _Reading(directory)
        reading.expect_model(model)
        if optimizer is not None:
            reading.expect_optimizer(model, optimizer)
        if strict:
            reading.raise_differences()
    with peers.together(f"{directory} cannot be loaded"):
        engine.release_all()
        tensor_files.read(directory, reading.model_files, reading.model_pieces)
        tensor_files.read(directory, reading.optimizer_files, reading.optimizer_pieces)
        if optimizer is not None:
            reading.restore(optimizer)
            states = reading.training["rng"]
            if len(states) == peers.world_size:
                training_state.restore_random_state(states[peers.rank], engine.mesh.device)
    return reading.result()


@dataclass(frozen=True, slots=True)
class _Member:
    """A parameter in an optimizer's group, and the state that it has there."""

    fqn: str
    parameter: Tensor
    group: dict[str, Any]
    present: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _NewState:
    """The state of one parameter, to be put into the optimizer when it has been read."""

    parameter: Tensor
    values: dict[str, Any]


@dataclass
class _Differences:
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)


class _Reading:
    """What is to be read from one checkpoint, compared with what is there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        files = manifest.read(directory)
        self.training = training_state.read(directory)
        self.model_files = tensor_files.find(directory, "model", files)
        self.optimizer_files = tensor_files.find(directory, "optimizer", files)
        self.model_pieces: list[tuple[str, Piece]] = []
        self.optimizer_pieces: list[tuple[str, Piece]] = []
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[_NewState] = []
        self._differences = _Differences()

    def expect_model(self, model: nn.Module) -> None:
        """Match the model's state_dict with the files by name."""
        stored = _stored(self.model_files)
        for piece in pieces_of_model(model):
            name = next((name for name in piece.names if name in stored), None)
            if name is None:
                self._differences.missing.append(piece.name)
            elif self._fits(piece, stored.pop(name)):
                self.model_pieces.append((name, piece))
        self._differences.unexpected.extend(stored)

    def expect_optimizer(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Match the optimizer's parameters with the saved groups and state by fqn."""
        saved = self.training["optimizer"]
        if saved is None:
            raise CheckpointError(f"{self.directory} was saved without an optimizer: load it without one")
        groups_of = {fqn: number for number, group in enumerate(saved["groups"]) for fqn in group["fqns"]}
        stored = _stored(self.optimizer_files)
        left = dict(saved["state"])
        named = optimizer_state.named_groups(model, optimizer)
        for number, (group, members) in enumerate(zip(optimizer.param_groups, named, strict=True)):
            found = {groups_of[fqn] for fqn, _ in members if fqn in groups_of}
            if len(found) > 1:
                raise CheckpointError(
                    f"group {number} of the optimizer has parameters of {len(found)} groups of {self.directory}, with "
                    f"options of their own, {members[0][0]!r} among them: group parameters as they were"
                )
            self._options += [(group, saved["groups"][position]) for position in found]
            for fqn, parameter in members:
                if fqn in left:
                    member = _Member(fqn, parameter, group, optimizer.state.get(parameter, {}))
                    self._expect_state(member, left.pop(fqn), stored)
                else:
                    self._differences.missing.append(f"optimizer state of {fqn}")
        self._differences.unexpected.extend(f"optimizer state of {fqn}" for fqn in left)

    def _expect_state(self, member: _Member, saved: dict[str, Any], stored: dict[str, StoredTensor]) -> None:
        values: dict[str, Any] = {}
        pieces: list[tuple[str, Piece]] = []
        for name, value in saved.items():
            if not isinstance(value, dict):
                values[name] = value
            elif "scalar" in value:
                values[name] = optimizer_state.scalar(value, member.parameter, member.group)
            elif value.get("tensor") not in stored:
                self._differences.missing.append(f"{member.fqn}.{name}")
                return
            else:
                tensor = stored[value["tensor"]]
                dtype = self._state_dtype(member.fqn, member.parameter, tensor.dtype)
                room = optimizer_state.room_for(member.parameter, dtype, member.present.get(name))
                piece = piece_of((f"{member.fqn}.{name}",), room)
                if not self._fits(piece, tensor):
                    return
                values[name] = room
                pieces.append((tensor.name, piece))
        self.optimizer_pieces += pieces
        self._states.append(_NewState(member.parameter, values))

    def _state_dtype(self, fqn: str, parameter: Tensor, saved: str) -> torch.dtype:
        """State that was kept in the parameter's dtype stays in the parameter's dtype when that changes."""
        follows = saved == self.training["optimizer"]["dtypes"].get(fqn)
        return parameter.dtype if follows else DTYPES[saved]

    def _fits(self, piece: Piece, found: StoredTensor) -> bool:
        if found.shape != piece.shape:
            self._differences.wrong_shape.append(f"{piece.name} (here {piece.shape}, stored {found.shape})")
        return found.shape == piece.shape

    def raise_differences(self) -> None:
        """Raise CheckpointError if anything does not fit."""
        found = self._differences
        parts = [
            f"{what}: {_list(names)}"
            for what, names in (
                ("missing from the checkpoint", found.missing),
                ("unexpected in it", found.unexpected),
                ("of another shape", found.wrong_shape),
            )
            if names
        ]
        if parts:
            raise CheckpointError(
                f"{self.directory} does not fit: {'; '.join(parts)}. strict=False loads what fits and reports the rest"
            )

    def restore(self, optimizer: Optimizer) -> None:
        """Put options and what was read into the optimizer."""
        for group, saved in self._options:
            optimizer_state.restore_options(group, saved)
        for state in self._states:
            optimizer.state.pop(state.parameter, None)
            if state.values:
                optimizer.state[state.parameter] = state.values

    def result(self) -> Loaded:
        """For the caller."""
        loaded = Loaded(self.training["extra"] or {})
        loaded.step = self.training["step"]
        loaded.missing = tuple(self._differences.missing)
        loaded.unexpected = tuple(self._differences.unexpected)
        loaded.wrong_shape = tuple(self._differences.wrong_shape)
        return loaded


def _stored(files: TensorFiles) -> dict[str, StoredTensor]:
    return {name: tensor for layout in files.files.values() for name, tensor in layout.tensors.items()}


def _list(names: Sequence[str] | Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
