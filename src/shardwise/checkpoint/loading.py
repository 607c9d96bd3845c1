"""`load`: every rank reads the bytes of its own fragments, at any world size."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.format import optimizer_state, per_rank_buffers, random_state, tensor_files, training_json
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.local_tensor import DTYPES, piece_of
from shardwise.checkpoint.format.matching import Matched, Wanted, check_ties, match, shown
from shardwise.checkpoint.format.model_state import give_extra_state
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.io.storage import Location, check_location
from shardwise.checkpoint.names.index_map import Place
from shardwise.checkpoint.names.transformers_names import find, find_adapter
from shardwise.checkpoint.names.wrappers import unwrapped, unwrapped_name
from shardwise.checkpoint.ranks.agreement import wait_for_last_save
from shardwise.checkpoint.ranks.consensus import Peers
from shardwise.engine.extensions.offloaded import shard_stores
from shardwise.engine.lookup import engines_of
from shardwise.engine.setup.torch_patches import with_state
from shardwise.errors import CheckpointError, one_line
from shardwise.modules.adapters import adapter_config, adapter_names
from shardwise.modules.deferred_init.deferral import give_buffers
from shardwise.offload.offloaded_state import OffloadedState
from shardwise.offload.shard_store import ShardStore
from shardwise.offload.state_store import StateStore
from shardwise.offload.step import stores_of

_log = logging.getLogger(__name__)

_DISAGREE = (
    "ranks disagree about what to load: call sw.checkpoint.load on every rank with the same checkpoint and "
    "strict, and either with an optimizer of the same class and groups or without one"
)


class Loaded(dict[str, Any]):
    """The `extra` that `save` was given, and the names that did not fit."""

    step: int = 0
    """The `step` that `save` was given."""
    missing: tuple[str, ...] = ()
    """Names in the model or the optimizer that the checkpoint lacks: left as they were."""
    unexpected: tuple[str, ...] = ()
    """Names only in the checkpoint: not read."""
    wrong_shape: tuple[str, ...] = ()
    """Names in both with different shapes, each with its two shapes: left as they were."""


def load(path: Location, model: nn.Module, optimizer: Optimizer | None = None, strict: bool = True) -> Loaded:
    """Read a checkpoint into a sharded model, and an optimizer. Every rank must call this.

    Args:
        path: a committed checkpoint or its URL, saved by any number of ranks under any strategy.
        model: a sharded model. Its parameters and buffers are overwritten, each cast to the dtype that the model keeps
            it in. A checkpoint of an adapter overwrites the model's adapter only.
        optimizer: an optimizer of the model's parameters, in any groups and order: state and options are matched by
            fqn. Its class must be the one that was saved; with strict=False an optimizer of another class is left as it
            is. With an optimizer the load counts as a resumption: at the world size of the save, random states
            (Python's, numpy's and torch's) are restored too.
        strict: False loads what fits and reports the rest in the result, instead of raising.

    Returns:
        The dict that `save` was given as `extra` (empty without one), with `.step`, `.missing`, `.unexpected` and
        `.wrong_shape`.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, it has no optimizer or one of another class, or entries
            are missing, unexpected, of another shape or of another kind of numbers: the first are named, and how many
            more there are, before anything is overwritten. UsageError: an entry of the model's state_dict cannot be
            read into. MismatchError: ranks load different things. Every rank raises, whichever failed.

    Sizes, headers and `training.json` are checked, checksums of tensors are not: `verify` reads everything. Each rank
    reads only its own bytes.
    """
    check_location(path, "sw.checkpoint.load(path, model, ...)")
    return load_contents(lambda: Contents.of(path), os.fspath(path), model, optimizer, strict)


@torch.inference_mode(False)  # tensors made here are trained later
@torch.no_grad()
def load_contents(
    opened: Callable[[], Contents], name: str, model: nn.Module, optimizer: Optimizer | None, strict: bool = True
) -> Loaded:
    """Load as `load` does, from contents wherever they are. Every rank must call this.

    opened: opens the contents, the same on every rank. name: for messages.
    """
    model = unwrapped(model)
    engines = engines_of(model)
    peers = Peers(engines)
    give_buffers(model, engines[0].mesh.device)
    shards, states = shard_stores(*engines), [] if optimizer is None else stores_of(optimizer)
    wait_for_last_save(peers)
    doing = f"{name} cannot be loaded"
    with peers.together(doing):
        reading = _Reading(opened())
        matched = reading.expect_model(model)
        if optimizer is not None:
            reading.expect_optimizer(model, optimizer, strict)
        if strict:
            matched.raise_differences(reading.contents, "strict=False loads what fits and reports the rest")
            reading.expect_scale(model)
        matched.check_dtypes(reading.contents, reading.model_files.tensors)
        if strict:
            check_ties(reading.contents, reading.contents, reading.model_files, matched)
        for store in shards:
            store.notice_failures()
        weights_failed = any(store.tier.has_failed for store in shards)
        state_failed = optimizer is not None and any(store.has_lost(optimizer) for store in states)
        reading.expect_what_is_lost(weights_failed, optimizer if state_failed else None)
        wanted = [*matched.wanted, *reading.optimizer_pieces]
        rows = per_rank_buffers.own_rows(wanted, reading.by_rank_files.tensors, peers)
    peers.agree(f"{reading.contents.manifest}|{strict}|{_describe(model, optimizer)}", _DISAGREE)
    with peers.together(doing):
        for engine in engines:
            engine.reshard_all()
        with _written_anew(shards, states, optimizer):
            done = reading.read(rows, shards, states, peers.reads_alone)
        give_extra_state(model, [piece for piece, _ in matched.wanted])
        if optimizer is not None:
            reading.restore(optimizer)
            with_state.add(optimizer)
            random = reading.training["rng"]
            if len(random) == peers.world_size and random[peers.rank]:  # JAX's processes have none
                _restore_random(reading.contents, random[peers.rank], peers.device)
    mib, direct_mib = sum(read.read_bytes for read in done) / 2**20, sum(read.direct_bytes for read in done) / 2**20
    _log.info("%s: rank %d read %.1f MiB, %.1f of them past the page cache", name, peers.rank, mib, direct_mib)
    return reading.result()


def _restore_random(contents: Contents, saved: Any, device: torch.device) -> None:
    try:
        random_state.restore(saved, device)
    except Exception as error:  # Python's, numpy's or torch's about a state that is none
        what = f"a random state in it is none: {one_line(error, with_type=True)}"
        raise CheckpointError(f"{contents}/{training_json.NAME} is damaged: {what}") from None


@contextmanager
def _written_anew(
    shards: Sequence[ShardStore], states: Sequence[StateStore], optimizer: Optimizer | None
) -> Iterator[None]:
    """Inside the block, the caller writes all of the model's shards and of the optimizer's state that rest on a tier.
    If it succeeds, earlier errors of the tier are forgotten."""
    with ExitStack() as anew:
        for shard_store in shards:
            anew.enter_context(shard_store.tier.written_anew())
        if optimizer is not None:
            for state_store in states:
                anew.enter_context(state_store.written_anew(optimizer))
        yield


def _describe(model: nn.Module, optimizer: Optimizer | None) -> str:
    """Return text that must be equal on every rank: the optimizer's class, and its groups by fqn."""
    if optimizer is None:
        return "no optimizer"
    groups = optimizer_state.named_groups(model, optimizer)
    return f"{optimizer_state.class_of(optimizer)}|{[[fqn for fqn, _ in members] for members in groups]}"


_SCALES = ("lora_alpha", "alpha_pattern", "use_rslora", "use_dora")
"""Keys of an adapter's configuration that show in no shape but change what the adapter's numbers add."""
_UNKNOWN = "unknown"
"""Class of the optimizer in a checkpoint that was converted."""
_ADAMS = {"Adam", "AdamW"}
_MOMENTS = {"exp_avg", "exp_avg_sq"}
_STATE: dict[str, tuple[set[str], set[str]]] = {
    "Adam": (_MOMENTS, {"max_exp_avg_sq"}),
    "AdamW": (_MOMENTS, {"max_exp_avg_sq"}),
    "AdamWBF16": (_MOMENTS, set()),
    "RAdam": (_MOMENTS, set()),
    "NAdam": ({*_MOMENTS, "mu_product"}, set()),
    "Adamax": ({"exp_avg", "exp_inf"}, set()),
    "Adagrad": ({"sum"}, set()),
    "Adadelta": ({"square_avg", "acc_delta"}, set()),
    "RMSprop": ({"square_avg"}, {"momentum_buffer", "grad_avg"}),
    "Rprop": ({"prev", "step_size"}, set()),
    "SGD": (set(), {"momentum_buffer"}),
}
"""By class: the state that it keeps for every parameter besides the number of steps, and what some options add."""


def _is_state_alone(kind: str, saved: Mapping[str, Any]) -> bool:
    """Return whether the saved state is an Adam's without its options, as JAX writes it: torch's Adam and AdamW can
    both load it."""
    return not saved["groups"] and {kind, saved["class"]} <= _ADAMS


def _other_state(kind: str, saved: Mapping[str, Any]) -> str | None:
    """Return the names of the state in a converted checkpoint if an optimizer of class `kind` keeps other state; None
    if it does not, or if that is not known."""
    needed, possible = _STATE.get(kind, (set(), set()))
    if saved["class"] != _UNKNOWN or kind not in _STATE:
        return None
    for values in saved["state"].values():
        names = values.keys() - {"step"}
        if names and not needed <= names <= needed | possible:
            return ", ".join(sorted(names))
    return None


class _Reading:
    """One load: the checkpoint's tensors and options, matched with the model's and the optimizer's."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.training = training_json.read(contents)
        self.model_files = tensor_files.find_model(contents)
        self.of_adapter = self.model_files.stem == tensor_files.ADAPTER
        """Whether the checkpoint was saved without the base model."""
        self.optimizer_files = tensor_files.find(contents, tensor_files.OPTIMIZER)
        self.by_rank_files = tensor_files.find(contents, per_rank_buffers.STEM)
        self.optimizer_pieces: Wanted = []
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[tuple[Tensor, dict[str, Any]]] = []
        """Parameters, each with the state to put into the optimizer once that has been read."""
        self._matched = Matched()
        self._absent: tuple[list[str], list[str]] = [], []
        """The model's names that are not in the files: all of them, and those that were expected there."""

    def expect_model(self, model: nn.Module) -> Matched:
        """Match the model's state_dict with the files by name. Later differences are added to the returned object."""
        self._matched = match(model, self.model_files.tensors, find_adapter if self.of_adapter else find)
        ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
        expected = {*map(unwrapped_name, adapter_names(model))} if self.of_adapter else self._matched.missing
        absent = self._matched.missing
        self._matched.missing = [name for name in absent if name in expected and name not in ignored]
        self._absent = absent, [*self._matched.missing]
        return self._matched

    def expect_scale(self, model: nn.Module) -> None:
        """Raise CheckpointError if the model scales its adapter's output differently from the saved adapter."""
        if not self.of_adapter or tensor_files.ADAPTER_CONFIG not in self.contents.sizes:
            return
        saved, own = json.loads(self.contents.read(tensor_files.ADAPTER_CONFIG)), adapter_config(model)
        for key in _SCALES:
            was, now = saved.get(key), getattr(own, key, None)
            if (was or None) != (now or None):
                raise CheckpointError(
                    f"{self.contents} is an adapter with {key}={was!r}, but the model's has {key}={now!r}, which "
                    f"gives the same numbers another meaning: build the adapter with {key}={was!r}, or load it "
                    "with strict=False"
                )

    def expect_optimizer(self, model: nn.Module, optimizer: Optimizer, strict: bool) -> None:
        """Match the optimizer's parameters with the saved groups and state by fqn."""
        for store in stores_of(optimizer):
            store.prepare(optimizer)
        saved = self._saved_for(optimizer_state.class_of(optimizer), strict)
        groups_of = {fqn: number for number, group in enumerate(saved["groups"]) for fqn in group["fqns"]}
        stored = self.optimizer_files.tensors
        left = dict.fromkeys((self.training["optimizer"] or {"state": ()})["state"])
        named = optimizer_state.named_groups(model, optimizer)
        every_fqn = [fqn for members in named for fqn, _ in members]
        saved_names = optimizer_state.saved_names(model, every_fqn, {**saved["state"], **groups_of})
        for number, (group, members) in enumerate(zip(optimizer.param_groups, named, strict=True)):
            fqns = [fqn for fqn, _ in members]
            found = sorted({groups_of[name] for fqn in fqns if (name := saved_names.get(fqn)) in groups_of})
            self._expect_options(number, fqns, group, [saved["groups"][position] for position in found], strict)
            for fqn, parameter in members:
                name = saved_names.get(fqn)
                if name is not None and name in saved["state"]:
                    self._expect_state((fqn, parameter), group, optimizer, name, stored)
                    del left[name]
                else:
                    self._matched.missing.append(f"optimizer state of {fqn}")
        self._matched.unexpected.update((f"optimizer state of {fqn}", fqn) for fqn in left)

    def expect_what_is_lost(self, weights: bool, optimizer: Optimizer | None) -> None:
        """Raise CheckpointError if the checkpoint lacks something that a failed disk has lost: the model's weights (if
        `weights`), or the state of `optimizer` and the weights that it was updating."""
        if not weights and optimizer is None:
            return
        absent = [*self._absent[0 if weights else 1], *self._matched.wrong_shape]
        read = {id(parameter) for parameter, _ in self._states}
        for parameter, values in {} if optimizer is None else optimizer.state.items():
            on_disk = [value for value in values.values() if isinstance(value, OffloadedState)]
            if on_disk and id(parameter) not in read:
                absent.append(f"optimizer state of {on_disk[0].fqn}")
        if absent:
            raise CheckpointError(
                f"{self.contents} lacks {shown(absent)}, and this run lost its own copy when a disk failed: load "
                "a checkpoint that has all of it, or start the run anew"
            )

    def read(
        self, rows: Wanted, shards: Sequence[ShardStore], states: Sequence[StateStore], alone: bool
    ) -> list[tensor_files.Read]:
        """Fill all pieces, including those that rest on a tier. No communication."""
        done = [
            tensor_files.read(self.contents, self.model_files, self._matched.wanted, alone),
            tensor_files.read(self.contents, self.optimizer_files, self.optimizer_pieces, alone),
            tensor_files.read(self.contents, self.by_rank_files, rows),
        ]
        for shard_store in shards:
            shard_store.finish()
        for state_store in states:
            state_store.tier.settle()
        return done

    def _saved_for(self, kind: str, strict: bool) -> dict[str, Any]:
        """Return the saved state that an optimizer of class `kind` can load. If another class was saved, return empty
        state, or with `strict` raise CheckpointError."""
        saved: dict[str, Any] | None = self.training["optimizer"]
        other = None if saved is None else _other_state(kind, saved)
        if saved is not None and other is None and (saved["class"] in {kind, _UNKNOWN} or _is_state_alone(kind, saved)):
            return saved
        if other is not None and strict:
            raise CheckpointError(
                f"{self.contents} was converted, which does not keep the optimizer's class, and has the state "
                f"{other}, which {kind} does not have: load it with an optimizer of the class that was trained "
                "with, without one, or with strict=False, which leaves this optimizer unchanged"
            )
        if saved is None and strict:
            raise CheckpointError(f"{self.contents} was saved without an optimizer: load it without one")
        if saved is not None and strict:
            raise CheckpointError(
                f"{self.contents} was saved with {saved['class']}, but this is {kind}, for which its state and "
                "options may mean something else: load it without an optimizer, or with strict=False, which "
                "leaves this optimizer unchanged"
            )
        return {"groups": [], "state": {}}

    def _expect_options(
        self, number: int, fqns: list[str], group: dict[str, Any], saved: list[dict[str, Any]], strict: bool
    ) -> None:
        """Take the options for one group from the saved groups of its parameters, if these all have the same options.
        Otherwise raise CheckpointError, or without `strict` report the group's options as missing."""
        options = [optimizer_state.options_of(one) for one in saved]
        if all(one == options[0] for one in options):
            for key, value in options[0].items() if options else ():
                if not optimizer_state.may_be(group.get(key), value):
                    raise CheckpointError(
                        f"{self.contents} has {key}={value!r} for group {number} of the optimizer, which has "
                        f"{group[key]!r} there: it is damaged, or of another version of the optimizer"
                    )
            self._options += [(group, one) for one in saved[:1]]
        elif strict:
            raise CheckpointError(
                f"group {number} of the optimizer has parameters of {len(saved)} groups of {self.contents} with "
                f"different options, such as {fqns[0]!r}: group parameters as before, or keep this group's "
                "options with strict=False"
            )
        else:
            self._matched.missing.append(f"options of the optimizer's group {number}")

    def _expect_state(
        self,
        member: tuple[str, Tensor],
        group: dict[str, Any],
        optimizer: Optimizer,
        saved_name: str,
        stored: dict[str, StoredTensor],
    ) -> None:
        """Match the state of a group's member (fqn, parameter), which was saved under `saved_name`."""
        fqn, parameter = member
        document = self.training["optimizer"]
        values: dict[str, Any] = {}
        pieces: Wanted = []
        for name, value in document["state"][saved_name].items():
            if not isinstance(value, dict):
                values[name] = value
            elif "scalar" in value:
                values[name] = optimizer_state.scalar(name, value, parameter, group)
            elif value.get("tensor") not in stored:
                self._matched.missing.append(f"{fqn}.{name}")
                return
            else:
                tensor = stored[value["tensor"]]
                follows = tensor.dtype == document["dtypes"].get(saved_name)
                follows = follows and not getattr(optimizer, "keeps_state_dtypes", False)
                dtype = parameter.dtype if follows else DTYPES[tensor.dtype]  # follows: was saved in its dtype
                target = optimizer_state.target_for(optimizer, parameter, name, dtype, tensor.shape)
                piece = piece_of((f"{fqn}.{name}",), target)
                if not self._matched.fits(piece, tensor.shape):
                    return
                values[name] = target
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
        """Return the result for the caller of `load`."""
        loaded = Loaded(self.training["extra"] or {})
        loaded.step = self.training["step"]
        loaded.missing = tuple(self._matched.missing)
        loaded.unexpected = tuple(self._matched.unexpected)
        loaded.wrong_shape = tuple(self._matched.wrong_shape)
        return loaded
