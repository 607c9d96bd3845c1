"""GPT-2's decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise.errors import ConfigError
from shardwise.jax.batches import keep_rows
from shardwise.jax.checkpoint.name_map import NameMap, Rule
from shardwise.jax.models.layers import (
    Cache,
    Decoder,
    Embedding,
    Keys,
    LayerNorm,
    Linear,
    attend,
    through_layers,
)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}


KEYS = frozenset({*_DEFAULTS, "n_inner", "n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop"})
"""Keys that configurations of this family may have."""


@dataclass(frozen=True)
class GPT2Config:
    """The settings of a GPT-2 decoder."""

    vocab_size: int
    positions: int
    width: int
    inner: int
    layers: int
    heads: int
    eps: float
    std: float
    source: str
    """The configuration as JSON, for config.json."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GPT2Config:
        """Read a configuration of transformers. Raises ConfigError for settings that this module does not support.

        There is no dropout: the rates that transformers applies (`resid_pdrop` and so on, by default 0.1) are ignored.
        """
        given = {key: value for key, value in config.items() if value is not None}
        full = {**_DEFAULTS, **given}
        for key, value in _DEFAULTS.items():
            if isinstance(value, str | bool) and full[key] != value:
                raise ConfigError(f"{key}={full[key]!r}: the JAX model of model_type='gpt2' supports only {value!r}")
        if full["n_embd"] % full["n_head"]:
            raise ConfigError(f"n_embd={full['n_embd']} is not a multiple of n_head={full['n_head']}")
        source = json.dumps({"architectures": ["GPT2LMHeadModel"], **given}, sort_keys=True)
        return cls(
            vocab_size=full["vocab_size"],
            positions=full["n_positions"],
            width=full["n_embd"],
            inner=full.get("n_inner", 4 * full["n_embd"]),
            layers=full["n_layer"],
            heads=full["n_head"],
            eps=full["layer_norm_epsilon"],
            std=full["initializer_range"],
            source=source,
        )


class Attention(nnx.Module):
    """Attention with one matrix for queries, keys and values."""

    def __init__(self, config: GPT2Config, keys: Keys, dtype: Any) -> None:
        width = config.width
        self.c_attn = Linear((config.layers, width, 3 * width), keys, config.std, dtype, bias=True)
        std = config.std / (2 * config.layers) ** 0.5
        self.c_proj = Linear((config.layers, width, width), keys, std, dtype, bias=True)
        self.heads = config.heads

    def __call__(self, x: jax.Array, start: Any, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """x: [batch, tokens, features], the first token at position `start`. Returns the output and the cache."""
        query, keys, values = (
            part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(self.c_attn(x), 3, axis=-1)
        )
        if cache is not None:
            cache = cache.extended(keys, values, start)
            keys, values = cache
        return self.c_proj(attend(query, keys, values, start if cache is not None else 0)), cache


class MLP(nnx.Module):
    """An MLP with the tanh approximation of GELU."""

    def __init__(self, config: GPT2Config, keys: Keys, dtype: Any) -> None:
        self.c_fc = Linear((config.layers, config.width, config.inner), keys, config.std, dtype, bias=True)
        std = config.std / (2 * config.layers) ** 0.5
        self.c_proj = Linear((config.layers, config.inner, config.width), keys, std, dtype, bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., features]. Returns the same shape."""
        return self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=True))


class Layers(nnx.Module):
    """All blocks, with their parameters stacked. A call computes one block, with the parameters of one layer."""

    def __init__(self, config: GPT2Config, keys: Keys, dtype: Any) -> None:
        shape = (config.layers, config.width)
        self.ln_1 = LayerNorm(shape, config.eps, dtype)
        self.attn = Attention(config, keys, dtype)
        self.ln_2 = LayerNorm(shape, config.eps, dtype)
        self.mlp = MLP(config, keys, dtype)

    def __call__(self, x: jax.Array, start: Any, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """Compute one block."""
        attended, cache = self.attn(self.ln_1(x), start, cache)
        x = x + attended
        return x + self.mlp(self.ln_2(x)), cache


class GPT2(Decoder):
    """ids [batch, tokens] -> logits [batch, tokens, vocab_size], as transformers' `GPT2LMHeadModel` without dropout."""

    def __init__(self, config: GPT2Config, key: Any, dtype: Any = "float32") -> None:
        """Args: see `Llama`."""
        keys = Keys(key)
        self.config = config
        self.wte = Embedding((config.vocab_size, config.width), keys, config.std, dtype)
        self.wpe = Embedding((config.positions, config.width), keys, config.std, dtype)
        self.h = Layers(config, keys, dtype)
        self.ln_f = LayerNorm((config.width,), config.eps, dtype)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Return the logits of the token that follows each token."""
        return self.extend(ids, 0, None)[0]

    def extend(self, ids: jax.Array, start: Any, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """Return the logits of tokens that begin at position `start`, after those in the cache, and the new cache."""
        x = self.wte(ids) + self.wpe(start + jnp.arange(ids.shape[1]))[None]
        x, cache = through_layers(self.h, x, start, cache, self.policy)
        return keep_rows(self.wte.attend(self.ln_f(x))), cache

    def empty_cache(self, batch: int, room: int, dtype: Any) -> Cache:
        """Return a cache with room for this many tokens."""
        config = self.config
        return Cache.empty(config.layers, batch, room, config.heads, config.width // config.heads, dtype)

    @property
    def file_names(self) -> NameMap:
        """The names that transformers gives the parameters."""
        ignored = (r"lm_head\.weight", r".*\.attn\.(masked_)?bias")
        source = {**json.loads(self.config.source), "dtype": str(self.ln_f.scale.get_value().dtype)}
        return NameMap(RULES, source, ignored, "transformer.")


RULES = (
    Rule("wte.embedding", "transformer.wte.weight"),
    Rule("wpe.embedding", "transformer.wpe.weight"),
    *(
        Rule(f"h.{path}.{own}", f"transformer.h.{{}}.{path}.{theirs}")
        for path in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2")
        for own, theirs in (("kernel", "weight"), ("scale", "weight"), ("bias", "bias"))
    ),
    Rule("ln_f.scale", "transformer.ln_f.weight"),
    Rule("ln_f.bias", "transformer.ln_f.bias"),
)
"""Names in files. Kernels have the same layout in both; blocks are stacked here and separate in files."""
