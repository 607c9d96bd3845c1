"""Building blocks of decoders. Their parameters may be created with a leading dim of stacked layers, but calls need
those of one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise.jax.batches import keep_rows

Shape = tuple[int, ...]
Policy = Callable[..., Any]


class Keys:
    """A source of random keys: every call returns the next one."""

    def __init__(self, key: Any) -> None:
        self._key = key
        self._count = 0

    def __call__(self) -> Any:
        self._count += 1
        return jax.random.fold_in(self._key, self._count)


class Linear(nnx.Module):
    """A linear layer: x [..., inputs] -> [..., outputs]."""

    def __init__(self, shape: Shape, keys: Keys, std: float, dtype: Any, bias: bool = False) -> None:
        """shape: [layers..., inputs, outputs]."""
        self.kernel = nnx.Param(std * jax.random.normal(keys(), shape, dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros((*shape[:-2], shape[-1]), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute in the dtype of the input."""
        y = x @ self.kernel[...].astype(x.dtype)
        return y + self.bias[...].astype(x.dtype) if hasattr(self, "bias") else y


class Embedding(nnx.Module):
    """An embedding table: ids [...] -> [..., features]."""

    def __init__(self, shape: Shape, keys: Keys, std: float, dtype: Any) -> None:
        """shape: [ids, features]."""
        self.embedding = nnx.Param(std * jax.random.normal(keys(), shape, dtype))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Look up rows, in the table's dtype. NaN for ids outside it; JAX would count negative ids from its end."""
        table = self.embedding[...]
        return jnp.take(table, jnp.where(ids < 0, table.shape[0], ids), axis=0)

    def attend(self, x: jax.Array) -> jax.Array:
        """Return the logits [..., ids] of a head that is tied to the table."""
        return x @ self.embedding[...].astype(x.dtype).T


class RMSNorm(nnx.Module):
    """An RMS norm over the last dim, computed in float32."""

    def __init__(self, shape: Shape, eps: float, dtype: Any) -> None:
        self.scale = nnx.Param(jnp.ones(shape, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normalised x in the dtype of the input."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return self.scale[...].astype(x.dtype) * wide.astype(x.dtype)


class LayerNorm(nnx.Module):
    """A layer norm over the last dim, computed in float32, with a bias."""

    def __init__(self, shape: Shape, eps: float, dtype: Any) -> None:
        self.scale = nnx.Param(jnp.ones(shape, dtype))
        self.bias = nnx.Param(jnp.zeros(shape, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normalised x in the dtype of the input."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...] + self.bias[...]).astype(x.dtype)


class Cache(NamedTuple):
    """The keys and values of the tokens so far, of all layers or of one."""

    keys: jax.Array
    """[layers, batch, room, heads of keys, head]; without the first dim for one layer. `room` is the number of tokens
    that fit."""
    values: jax.Array
    """Shaped like `keys`."""

    @classmethod
    def empty(cls, layers: int, batch: int, room: int, heads: int, head: int, dtype: Any) -> Cache:
        """Return an empty cache with room for `room` tokens."""
        zeros = jnp.zeros((layers, batch, room, heads, head), dtype)
        return cls(zeros, zeros)

    def extended(self, keys: jax.Array, values: jax.Array, start: Any) -> Cache:
        """Return the cache of one layer with these tokens, the first at position `start`, written to it."""
        begin = (0, start, 0, 0)
        return Cache(
            jax.lax.dynamic_update_slice(self.keys, keys.astype(self.keys.dtype), begin),
            jax.lax.dynamic_update_slice(self.values, values.astype(self.values.dtype), begin),
        )


def attend(query: jax.Array, keys: jax.Array, values: jax.Array, start: Any) -> jax.Array:
    """Compute causal attention: each query looks at the positions up to its own.

    Args:
        query: [batch, queries, heads, head], the first at position `start`.
        keys: [batch, positions, heads of keys, head], the first at position 0.
        values: shaped like `keys`.

    Returns:
        [batch, queries, heads * head].
    """
    positions = start + jnp.arange(query.shape[1])
    mask = positions[:, None] >= jnp.arange(keys.shape[1])[None, :]
    found = jax.nn.dot_product_attention(
        query, keys.astype(query.dtype), values.astype(query.dtype), mask=mask[None, None]
    )
    return found.reshape(*query.shape[:2], -1)


def through_layers(
    stack: nnx.Module, x: jax.Array, start: Any, cache: Cache | None, policy: Policy | None
) -> tuple[jax.Array, Cache | None]:
    """Run `x` through layers whose parameters are stacked, as a scan with one compiled body.

    Args:
        stack: a module with parameters [layers, ...]. Given those of one layer, `stack(x, start, cache)` returns x and
            the layer's cache.
        x: [batch, tokens, features].
        start: the position of the first token.
        cache: of all layers, or None.
        policy: what each layer keeps for backward; None: everything.
    """
    graph, stacked = nnx.split(stack)

    def layer(x: jax.Array, own: Any) -> tuple[jax.Array, Cache | None]:
        state, cache = own
        x, cache = nnx.merge(graph, state)(x, start, cache)
        return keep_rows(x), cache

    body = layer if policy is None else jax.checkpoint(layer, policy=policy)
    return jax.lax.scan(body, keep_rows(x), (stacked, cache))


class Decoder(nnx.Module):
    """Base class of the decoders, with the interface that recomputation needs."""

    policy: Policy | None = None
    """What each layer keeps for backward; None: everything."""

    def recompute(self, policy: Policy) -> None:
        """Make each layer keep only what the policy says, and compute the rest again in backward."""
        self.policy = policy
