"""Generation of tokens, greedy or sampled, with a cache of the keys and values of the tokens so far."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardwise.errors import UsageError


def generate(  # noqa: PLR0913 - one for each choice
    model: Any,
    ids: Any,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    end_id: int | None = None,
    key: Any = None,
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Add generated tokens to rows of tokens. Every process must call this, with the same arguments.

    Args:
        model: a decoder of `shardwise.jax.models`, sharded or not.
        ids: [batch, tokens], rows of one length, at least one token.
        new_tokens: how many to add to each row.
        temperature: 0 takes the likeliest token; else tokens are drawn from the logits divided by it.
        top_k: draw from this many of the likeliest tokens; 0 = from all.
        end_id: once a row has generated this token, the rest of the row is filled with it. None = rows do not end.
        key: a `jax.random.key` to draw with; None = `jax.random.key(0)`.

    Returns:
        [batch, tokens + new_tokens] int32, on the host.

    Raises UsageError for rows without tokens, tokens outside the model's vocabulary, more tokens than it has positions,
    or negative numbers.
    """
    ids = _checked(ids, model, new_tokens)
    if new_tokens < 0 or temperature < 0 or top_k < 0:
        raise UsageError(f"new_tokens={new_tokens}, temperature={temperature} and top_k={top_k} cannot be negative")
    if not new_tokens:
        return ids
    key = jax.random.key(0) if key is None else key
    graph, state = nnx.split(model)
    choice = _Choice(new_tokens, temperature, top_k, -1 if end_id is None else end_id)
    added = _generate(graph, choice, state, jnp.asarray(ids), key)
    if not (added.is_fully_addressable or added.is_fully_replicated):
        from jax.experimental import multihost_utils

        added = multihost_utils.process_allgather(added, tiled=True)
    return np.concatenate([ids, np.asarray(added)], axis=1)


def _checked(ids: Any, model: Any, new_tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return ids as int32. Raises UsageError for ids that the model cannot continue, which a JAX program would clip."""
    if not hasattr(model, "empty_cache"):
        raise UsageError(f"a {type(model).__name__} cannot generate: pass a decoder of shardwise.jax.models")
    try:
        found = np.asarray(ids)
    except ValueError:
        raise UsageError("the rows of ids have different lengths: pass rows of one length, batch by batch") from None
    if found.ndim != 2 or not found.size:
        raise UsageError(f"ids of shape {found.shape}: must be [batch, tokens] with at least one token")
    config = getattr(model, "config", None)
    words, room = getattr(config, "vocab_size", 2**31), getattr(config, "positions", None)
    if not np.issubdtype(found.dtype, np.integer) or found.min() < 0 or found.max() >= words:
        raise UsageError(f"ids from {found.min()} to {found.max()}: must be whole numbers from 0 to {words - 1}")
    if room is not None and found.shape[1] + new_tokens > room:
        raise UsageError(
            f"{found.shape[1]} tokens and {new_tokens} new ones are more than the model's {room} positions"
        )
    return found.astype(np.int32)


class _Choice(NamedTuple):
    """How tokens are chosen from logits, and how many tokens to generate."""

    new_tokens: int
    temperature: float
    top_k: int
    end_id: int
    """The token that ends a row; -1: rows do not end."""

    def __call__(self, logits: jax.Array, ended: jax.Array, key: Any) -> jax.Array:
        """Choose a token for each row of logits [batch, vocab_size]; `end_id` for rows that have ended."""
        logits = logits.astype(jnp.float32)
        if not self.temperature:
            chosen = jnp.argmax(logits, axis=-1)
        else:
            logits = logits / self.temperature
            if self.top_k:
                least = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][:, -1:]
                logits = jnp.where(logits < least, -jnp.inf, logits)
            chosen = jax.random.categorical(key, logits, axis=-1)
        return jnp.where(ended, self.end_id, chosen).astype(jnp.int32)


@partial(jax.jit, static_argnums=(0, 1))
def _generate(graph: Any, choice: _Choice, state: Any, ids: jax.Array, key: Any) -> jax.Array:
    """Generate tokens [batch, new_tokens] that follow `ids` [batch, tokens]."""
    model = nnx.merge(graph, state)
    batch, length = ids.shape
    dtype = next(leaf.dtype for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating))
    cache = model.empty_cache(batch, length + choice.new_tokens, dtype)
    logits, cache = model.extend(ids, 0, cache)

    def body(carry: Any, step: Any) -> tuple[Any, jax.Array]:
        logits, cache, ended = carry
        token = choice(logits, ended, jax.random.fold_in(key, step))
        ended = ended | (token == choice.end_id)
        following, cache = model.extend(token[:, None], length + step, cache)
        return (following[:, -1], cache, ended), token

    start = (logits[:, -1], cache, jnp.zeros(batch, bool))
    (logits, _, ended), tokens = jax.lax.scan(body, start, jnp.arange(choice.new_tokens - 1))
    last = choice(logits, ended, jax.random.fold_in(key, choice.new_tokens - 1))
    return jnp.concatenate([tokens.T, last[:, None]], axis=1)
