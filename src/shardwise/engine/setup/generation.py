"""transformers' `generate` on ranks that finish at different times.

In transformers a rank that has finished goes on calling the model until all ranks have finished. Each call appends to
the rank's cache, past the end of a static cache and of learned positions, and a cache that the caller gets back holds
tokens that nobody generated. Here finished ranks call the model without their cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardwise.comm.collective_log import SyncPoint
from shardwise.engine.checked import CheckedEngine
from shardwise.errors import CollectiveTimeout, MismatchError

_CACHES = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")
"""The names under which transformers' models take their cache."""
_GOES_ON, _PREPARES = "_has_unfinished_sequences", "prepare_inputs_for_generation"
"""The methods of a transformers model that `generate` calls between two rounds."""


class _Rounds:
    """The rounds of one call of `generate` on this rank: the calls of the model that each add a token."""

    def __init__(self, model: nn.Module, engine: CheckedEngine) -> None:
        self._model, self._engine = model, engine
        self._goes_on: Any = getattr(model, _GOES_ON)
        self._prepare: Any = getattr(model, _PREPARES)
        self._last: Mapping[str, Any] | None = None
        """Inputs of the last round that added a token to what it had cached; None before such a round."""
        self._is_over = False
        self._others_wait = False
        """Whether other ranks wait for this one: in another round, or with the question whether there is one."""

    def has_unfinished_sequences(self, this_peer_finished: bool, synced_gpus: bool, device: Any) -> bool:
        """Return whether this rank has to call the model again. Every rank of the model must call this, unless
        `sw.unsharded` is active: then ranks call models of their own."""
        goes_on = bool(self._goes_on(this_peer_finished, False, device))
        if not synced_gpus or self._engine.is_suspended:
            return goes_on
        self._is_over = not goes_on
        while self._agree(goes_on):
            if goes_on or self._last is None:
                return True
            self._model(**self._without_cache(self._last))
        return False

    def _agree(self, goes_on: bool) -> bool:
        self._others_wait = self._engine.log.is_any(goes_on, SyncPoint.ROUND_OF_GENERATE)
        return self._others_wait

    def fail(self, error: Exception) -> None:
        """Tell the other ranks that this one raised, unless the model's forward has, or they are out of step anyway."""
        log = self._engine.log
        known = log.has_abandoned or isinstance(error, MismatchError | CollectiveTimeout)
        if self._others_wait and not known:
            log.abandon(error)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """Return the inputs of the next round."""
        inputs: Mapping[str, Any] = self._prepare(*args, **kwargs)
        self._last = None if kwargs.get("is_first_iteration") else inputs
        return self._without_cache(inputs) if self._is_over else inputs

    def _without_cache(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a call that computes with the last round's tokens alone, and keeps nothing."""
        of_encoder: bool = getattr(getattr(self._model, "config", None), "is_encoder_decoder", False)
        cached = {*_CACHES, "cache_position", "decoder_attention_mask" if of_encoder else "attention_mask"}
        alone = {name: value for name, value in inputs.items() if name not in cached}
        return alone | ({"use_cache": False} if "use_cache" in alone else {})


def is_generating(model: nn.Module) -> bool:
    """Whether a call of `model.generate` is in rounds."""
    return isinstance(getattr(model.__dict__.get(_GOES_ON), "__self__", None), _Rounds)


@contextmanager
def in_rounds(model: nn.Module, engine: CheckedEngine) -> Iterator[None]:
    """Within the block, `model.generate` continues on every rank until all ranks of the model have finished."""
    if not all(callable(getattr(type(model), name, None)) for name in (_GOES_ON, _PREPARES)):
        yield
        return
    before = {name: model.__dict__[name] for name in (_GOES_ON, _PREPARES) if name in model.__dict__}
    rounds = _Rounds(model, engine)
    own = {_GOES_ON: rounds.has_unfinished_sequences, _PREPARES: rounds.prepare_inputs_for_generation}
    model.__dict__.update(own)
    try:
        yield
    except Exception as error:
        rounds.fail(error)
        raise
    finally:
        for name in own:
            model.__dict__.pop(name, None)
        model.__dict__.update(before)
