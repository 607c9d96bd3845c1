"""`load`: every rank reads the bytes of its own fragments, at any world size."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.format import optimizer_state, per_rank_buffers, random_state, tensor_files, training_json
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.local_tensor import DTYPES, piece_of
from shardwise.checkpoint.format.matching import Matched, Wanted, match
from shardwise.checkpoint.format.model_state import give_extra_state
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.io.storage import Location, check_location
from shardwise.checkpoint.names.index_map import Place
from shardwise.checkpoint.names.transformers_names import find, find_adapter
from shardwise.checkpoint.ranks.consensus import Peers, wait_for_last_save
from shardwise.engine.lookup import require_engine
from shardwise.errors import CheckpointError
from shardwise.modules.adapters import adapter_names
from shardwise.offload.state_store import stores_of

_log = logging.getLogger(__name__)

_DISAGREE = (
    "ranks disagree about what to load: call sw.checkpoint.load with the same checkpoint and strict, and with an "
    "optimizer of the same class and groups or without one, on every rank"
)


class Loaded(dict[str, Any]):
    """The `extra` that `save` was given, and the names that did not fit."""

    step: int = 0
    """That `save` was given."""
    missing: tuple[str, ...] = ()
    """In the model or the optimizer, not in the checkpoint: left as they were."""
    unexpected: tuple[str, ...] = ()
    """In the checkpoint only: not read."""
    wrong_shape: tuple[str, ...] = ()
    """In both with different shapes, which are named: left as they were."""


@torch.inference_mode(False)  # tensors made here are trained later
@torch.no_grad()
def load(path: Location, model: nn.Module, optimizer: Optimizer | None = None, strict: bool = True) -> Loaded:
    """Read a checkpoint into a sharded model, and an optimizer. Every rank must call this.

    Args:
        path: a committed checkpoint, or its URL; saved by any number of ranks under any strategy.
        model: sharded. Its parameters and buffers are overwritten, cast to the dtypes that it keeps them in. From a
            checkpoint of an adapter those of the model's adapter are, and no others.
        optimizer: of the model's parameters, in any groups and order: state and options are matched by fqn. Of the
            class that was saved; with strict=False one of another class is left as it is. With one, this is taken as a
            resumption: at the world size of the save, random states (Python's, numpy's and torch's) are restored too.
        strict: False loads what fits and reports the rest in the result, instead of raising.

    Returns:
        The dict that `save` was given as `extra` (empty without one), with `.step`, `.missing`, `.unexpected` and
        `.wrong_shape`.

    Raises:
        CheckpointError: no checkpoint, a damaged one, none or another kind of optimizer in it, or entries that are
            missing, unexpected, of another shape or another kind of numbers: all named, before anything is overwritten.
            UsageError: something in the model's state_dict that cannot be read into. MismatchError: ranks load
            different things. On every rank, whichever failed.

    Sizes, headers and `training.json` are checked, checksums of tensors are not: `verify` reads everything. Each rank
    reads only its own bytes.
    """
    check_location(path, "sw.checkpoint.load(path, model, ...)")
    engine = require_engine(model)
    peers = Peers(engine.mesh)
    wait_for_last_save(peers)
    doing = f"{os.fspath(path)} cannot be loaded"
    with peers.together(doing):
        reading = _Reading(Contents.of(path))
        matched = reading.expect_model(model)
        if optimizer is not None:
            reading.expect_optimizer(model, optimizer, strict)
        if strict:
            matched.raise_differences(reading.contents, "strict=False loads what fits and reports the rest")
        matched.check_dtypes(reading.contents, reading.model_files.tensors)
        wanted = [*matched.wanted, *reading.optimizer_pieces]
        rows = per_rank_buffers.own_rows(wanted, reading.by_rank_files.tensors, peers)
    peers.agree(f"{reading.contents.manifest}|{strict}|{_describe(model, optimizer)}", _DISAGREE)
    with peers.together(doing):
        engine.reshard_all()
        done = [
            tensor_files.read(reading.contents, reading.model_files, matched.wanted, peers.reads_alone),
            reading.read_optimizer(optimizer, peers),
            tensor_files.read(reading.contents, reading.by_rank_files, rows),
        ]
        give_extra_state(model, [piece for piece, _ in matched.wanted])
        if optimizer is not None:
            reading.restore(optimizer)
            states = reading.training["rng"]
            if len(states) == peers.world_size:
                random_state.restore(states[peers.rank], engine.mesh.device)
    mib, direct_mib = sum(read.read_bytes for read in done) / 2**20, sum(read.direct_bytes for read in done) / 2**20
    _log.info("%s: rank %d read %.1f MiB, %.1f of them past the page cache", path, peers.rank, mib, direct_mib)
    return reading.result()


def _describe(model: nn.Module, optimizer: Optimizer | None) -> str:
    """Text that must be equal on every rank."""
    if optimizer is None:
        return "no optimizer"
    groups = optimizer_state.named_groups(model, optimizer)
    return f"{optimizer_state.class_of(optimizer)}|{[[fqn for fqn, _ in members] for members in groups]}"


_UNKNOWN = "unknown"
"""Kind of the optimizer of a checkpoint that was converted."""


class _Reading:
    """One load: the checkpoint's tensors and options, matched with the model's and the optimizer's."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.training = training_json.read(contents)
        self.model_files = tensor_files.find_model(contents)
        self.of_adapter = self.model_files.stem == tensor_files.ADAPTER
        """Whether it was saved without the base."""
        self.optimizer_files = tensor_files.find(contents, tensor_files.OPTIMIZER)
        self.by_rank_files = tensor_files.find(contents, per_rank_buffers.STEM)
        self.optimizer_pieces: Wanted = []
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[tuple[Tensor, dict[str, Any]]] = []
        """Parameters, each with the state to put into the optimizer when it has been read."""
        self._matched = Matched()

    def expect_model(self, model: nn.Module) -> Matched:
        """Match the model's state_dict with the files by name. Further differences are added to the result."""
        self._matched = match(model, self.model_files.tensors, find_adapter if self.of_adapter else find)
        ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
        expected = adapter_names(model) if self.of_adapter else self._matched.missing
        self._matched.missing = [name for name in self._matched.missing if name in expected and name not in ignored]
        return self._matched

    def expect_optimizer(self, model: nn.Module, optimizer: Optimizer, strict: bool) -> None:
        """Match the optimizer's parameters with the saved groups and state by fqn."""
        for store in stores_of(optimizer):
            store.prepare(optimizer)
        saved = self._saved_for(optimizer_state.class_of(optimizer), strict)
        groups_of = {fqn: number for number, group in enumerate(saved["groups"]) for fqn in group["fqns"]}
        stored = self.optimizer_files.tensors
        left = dict.fromkeys((self.training["optimizer"] or {"state": ()})["state"])
        for number, (group, members) in enumerate(
            zip(optimizer.param_groups, optimizer_state.named_groups(model, optimizer), strict=True)
        ):
            fqns = [fqn for fqn, _ in members]
            found = sorted({groups_of[fqn] for fqn in fqns if fqn in groups_of})
            self._expect_options(number, fqns, group, [saved["groups"][position] for position in found], strict)
            for fqn, parameter in members:
                if fqn in saved["state"]:
                    self._expect_state((fqn, parameter), group, optimizer, saved["state"][fqn], stored)
                    del left[fqn]
                else:
                    self._matched.missing.append(f"optimizer state of {fqn}")
        self._matched.unexpected.update((f"optimizer state of {fqn}", fqn) for fqn in left)

    def read_optimizer(self, optimizer: Optimizer | None, peers: Peers) -> tensor_files.Read:
        """Fill the optimizer's pieces, those on disk as well. No communication."""
        stores = [] if optimizer is None else stores_of(optimizer)
        for store in stores:
            store.forgive()
        read = tensor_files.read(self.contents, self.optimizer_files, self.optimizer_pieces, peers.reads_alone)
        for store in stores:
            store.settle()
        return read

    def _saved_for(self, kind: str, strict: bool) -> dict[str, Any]:
        """The saved state that an optimizer of this kind can take; empty if another kind was saved."""
        saved: dict[str, Any] | None = self.training["optimizer"]
        if saved is not None and saved["class"] in {kind, _UNKNOWN}:
            return saved
        if saved is None and strict:
            raise CheckpointError(f"{self.contents} was saved without an optimizer: load it without one")
        if saved is not None and strict:
            raise CheckpointError(
                f"{self.contents} was saved with {saved['class']}, and this is {kind}, to which its state and options "
                "may mean something else: load it without an optimizer, or with strict=False, which leaves it as it is"
            )
        return {"groups": [], "state": {}}

    def _expect_options(
        self, number: int, fqns: list[str], group: dict[str, Any], saved: list[dict[str, Any]], strict: bool
    ) -> None:
        """Options for one group from the saved groups of its parameters, if these have the same."""
        options = [optimizer_state.options_of(one) for one in saved]
        if all(one == options[0] for one in options):
            self._options += [(group, one) for one in saved[:1]]
        elif strict:
            raise CheckpointError(
                f"group {number} of the optimizer has parameters of {len(saved)} groups of {self.contents}, with "
                f"options that differ, {fqns[0]!r} among them: group parameters as they were, or keep this group's "
                "options with strict=False"
            )
        else:
            self._matched.missing.append(f"options of the optimizer's group {number}")

    def _expect_state(
        self,
        member: tuple[str, Tensor],
        group: dict[str, Any],
        optimizer: Optimizer,
        saved: dict[str, Any],
        stored: dict[str, StoredTensor],
    ) -> None:
        """Match the saved state of a group's member (fqn, parameter)."""
        fqn, parameter = member
        values: dict[str, Any] = {}
        pieces: Wanted = []
        for name, value in saved.items():
            if not isinstance(value, dict):
                values[name] = value
            elif "scalar" in value:
                values[name] = optimizer_state.scalar(value, parameter, group)
            elif value.get("tensor") not in stored:
                self._matched.missing.append(f"{fqn}.{name}")
                return
            else:
                tensor = stored[value["tensor"]]
                follows = tensor.dtype == self.training["optimizer"]["dtypes"].get(fqn)
                dtype = parameter.dtype if follows else DTYPES[tensor.dtype]  # it was, and stays, the parameter's
                room = optimizer_state.room_for(optimizer, parameter, name, dtype, tensor.shape)
                piece = piece_of((f"{fqn}.{name}",), room)
                if not self._matched.fits(piece, tensor.shape):
                    return
                values[name] = room
                pieces.append((piece, Place.whole(tensor.name, tensor.shape)))
        self.optimizer_pieces += pieces
        self._states.append((parameter, values))

    def restore(self, optimizer: Optimizer) -> None:
        """Put the options and the state that was read into the optimizer."""
        for group, saved in self._options:
            optimizer_state.restore_options(group, saved)
        for parameter, values in self._states:
            optimizer.state.pop(parameter, None)
            if values:
                optimizer.state[parameter] = values

    def result(self) -> Loaded:
        """For the caller."""
        loaded = Loaded(self.training["extra"] or {})
        loaded.step = self.training["step"]
        loaded.missing = tuple(self._matched.missing)
        loaded.unexpected = tuple(self._matched.unexpected)
        loaded.wrong_shape = tuple(self._matched.wrong_shape)
        return loaded
