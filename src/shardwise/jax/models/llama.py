"""Llama's decoder and its relatives: Mistral, Qwen 2 (biases), Qwen 3 (norms of queries and keys)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from shardwise.errors import ConfigError
from shardwise.jax.batches import keep_rows
from shardwise.jax.checkpoint.name_map import NameMap, Rule
from shardwise.jax.models.layers import (
    Cache,
    Decoder,
    Embedding,
    Keys,
    Linear,
    RMSNorm,
    attend,
    through_layers,
)
from shardwise.jax.models.rope import frequencies, rotate

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32000, "intermediate_size": 11008, "architectures": ["LlamaForCausalLM"]},
    "mistral": {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "architectures": ["MistralForCausalLM"],
    },
    "qwen2": {"vocab_size": 151936, "intermediate_size": 22016, "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "head_dim": 128,
        "architectures": ["Qwen3ForCausalLM"],
    },
}
"""transformers' defaults by `model_type`; `_COMMON` has those that all types share."""
_COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}


KEYS = frozenset(
    {*_COMMON, *(key for own in _DEFAULTS.values() for key in own)}
    | {"num_key_value_heads", "head_dim", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"}
    | {"layer_types", "sliding_window", "max_window_layers", "pretraining_tp"}
)
"""Keys that configurations of this family may have."""


@dataclass(frozen=True)
class LlamaConfig:
    """The settings of a Llama decoder or one of its relatives."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    eps: float
    rope: tuple[tuple[str, Any], ...]
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    std: float
    source: str
    """The configuration as JSON, for config.json."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read a configuration of transformers. Raises ConfigError for settings that these modules do not support."""
        kind = config["model_type"]
        full = {**_COMMON, **_DEFAULTS[kind], **config}
        full = {key: value for key, value in full.items() if value is not None}
        heads = full["num_attention_heads"]
        rope = {"rope_theta": full.get("rope_theta", 10000.0)}
        rope |= full.get("rope_parameters") or full.get("rope_scaling") or {}
        _check(kind, full)
        bias = full["attention_bias"]
        return cls(
            vocab_size=full["vocab_size"],
            hidden_size=full["hidden_size"],
            intermediate_size=full["intermediate_size"],
            layers=full["num_hidden_layers"],
            heads=heads,
            key_heads=full.get("num_key_value_heads", heads),
            head_dim=full.get("head_dim", full["hidden_size"] // heads),
            eps=full["rms_norm_eps"],
            rope=tuple(sorted(rope.items())),
            tied=full["tie_word_embeddings"],
            qkv_bias=True if kind == "qwen2" else bias,
            output_bias=False if kind == "qwen2" else bias,
            mlp_bias=full["mlp_bias"] if kind == "llama" else False,
            qk_norm=kind == "qwen3",
            std=full["initializer_range"],
            source=json.dumps({"architectures": full["architectures"], **config}, sort_keys=True),
        )


def _check(kind: str, full: Mapping[str, Any]) -> None:
    """Raises ConfigError for settings with which transformers would compute something else than these modules."""
    if full["hidden_act"] != "silu":
        raise ConfigError(f"hidden_act={full['hidden_act']!r}: JAX models of model_type={kind!r} support only silu")
    if full["attention_dropout"]:
        raise ConfigError(f"attention_dropout={full['attention_dropout']}: JAX models have no dropout; set it to 0")
    types = set(full.get("layer_types") or ()) - {"full_attention"}
    window = full.get("sliding_window") if kind == "mistral" or full["use_sliding_window"] else None
    if types or window:
        found = f"layer_types with {min(types)!r}" if types else f"sliding_window={window}"
        raise ConfigError(f"{found}: JAX models attend to all earlier tokens; set sliding_window = 0")
    wide, heads = full["hidden_size"], full["num_attention_heads"]
    key_heads = full.get("num_key_value_heads", heads)
    if heads % key_heads or ("head_dim" not in full and wide % heads):
        raise ConfigError(
            f"num_attention_heads={heads} must be a multiple of num_key_value_heads={key_heads}, and without "
            f"head_dim it must divide hidden_size={wide}"
        )


class Attention(nnx.Module):
    """Attention in which several heads of queries may share one head of keys and values."""

    def __init__(self, config: LlamaConfig, keys: Keys, dtype: Any) -> None:
        lead, wide, head = (config.layers,), config.hidden_size, config.head_dim

        def linear(inputs: int, outputs: int, bias: bool) -> Linear:
            return Linear((*lead, inputs, outputs), keys, config.std, dtype, bias)

        self.q_proj = linear(wide, config.heads * head, config.qkv_bias)
        self.k_proj = linear(wide, config.key_heads * head, config.qkv_bias)
        self.v_proj = linear(wide, config.key_heads * head, config.qkv_bias)
        self.o_proj = linear(config.heads * head, wide, config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm((*lead, head), config.eps, dtype)
            self.k_norm = RMSNorm((*lead, head), config.eps, dtype)
        self.config = config

    def __call__(self, x: jax.Array, start: Any, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """x: [batch, tokens, features], the first token at position `start`. Returns the output and the cache."""
        head, batch = self.config.head_dim, x.shape[:2]
        query, keys, values = (
            project(x).reshape(*batch, -1, head) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.qk_norm:
            query, keys = self.q_norm(query), self.k_norm(keys)
        angles = frequencies(head, dict(self.config.rope))
        query, keys = rotate(query, angles, start), rotate(keys, angles, start)
        if cache is not None:
            cache = cache.extended(keys, values, start)
            keys, values = cache
        return self.o_proj(attend(query, keys, values, start if cache is not None else 0)), cache


class MLP(nnx.Module):
    """An MLP with a silu gate."""

    def __init__(self, config: LlamaConfig, keys: Keys, dtype: Any) -> None:
        inner, outer = (config.layers, config.hidden_size, config.intermediate_size), config.intermediate_size
        self.gate_proj = Linear(inner, keys, config.std, dtype, config.mlp_bias)
        self.up_proj = Linear(inner, keys, config.std, dtype, config.mlp_bias)
        self.down_proj = Linear((config.layers, outer, config.hidden_size), keys, config.std, dtype, config.mlp_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., features]. Returns the same shape."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layers(nnx.Module):
    """All blocks, with their parameters stacked. A call computes one block, with the parameters of one layer."""

    def __init__(self, config: LlamaConfig, keys: Keys, dtype: Any) -> None:
        shape = (config.layers, config.hidden_size)
        self.input_layernorm = RMSNorm(shape, config.eps, dtype)
        self.self_attn = Attention(config, keys, dtype)
        self.post_attention_layernorm = RMSNorm(shape, config.eps, dtype)
        self.mlp = MLP(config, keys, dtype)

    def __call__(self, x: jax.Array, start: Any, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """Compute one block."""
        attended, cache = self.self_attn(self.input_layernorm(x), start, cache)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Llama(Decoder):
    """ids [batch, tokens] -> logits [batch, tokens, vocab_size], in the dtype of the parameters.

    Reference: arXiv:2302.13971. It computes what transformers' `LlamaForCausalLM` and its relatives compute.
    """

    def __init__(self, config: LlamaConfig, key: Any, dtype: Any = "float32") -> None:
        """
        Args:
            config: from `LlamaConfig.of`.
            key: a `jax.random.key`. Matrices are drawn from a normal distribution, as in transformers.
            dtype: of the parameters.
        """
        keys = Keys(key)
        self.config = config
        self.embed_tokens = Embedding((config.vocab_size, config.hidden_size), keys, config.std, dtype)
        self.layers = Layers(config, keys, dtype)
        self.norm = RMSNorm((config.hidden_size,), config.eps, dtype)
        if not config.tied:
            self.lm_head = Linear((config.hidden_size, config.vocab_size), keys, config.std, dtype)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Return the logits of the token that follows each token."""
        return self.extend(ids, 0, None)[0]

    def extend(self, ids: jax.Array, start: Any, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """Return the logits of tokens that begin at position `start`, after those in the cache, and the new cache."""
        x, cache = through_layers(self.layers, self.embed_tokens(ids), start, cache, self.policy)
        x = self.norm(x)
        return keep_rows(self.embed_tokens.attend(x) if self.config.tied else self.lm_head(x)), cache

    def empty_cache(self, batch: int, room: int, dtype: Any) -> Cache:
        """Return a cache with room for this many tokens."""
        config = self.config
        return Cache.empty(config.layers, batch, room, config.key_heads, config.head_dim, dtype)

    @property
    def file_names(self) -> NameMap:
        """The names that transformers gives the parameters."""
        ignored = (r".*rotary_emb\.inv_freq", *([r"lm_head\.weight"] if self.config.tied else []))
        source = {**json.loads(self.config.source), "dtype": str(self.norm.scale.get_value().dtype)}
        return NameMap(RULES, source, ignored, "model.")


def _of_blocks(path: str, transposed: bool, *kinds: tuple[str, str]) -> list[Rule]:
    return [
        Rule(f"layers.{path}.{own}", f"model.layers.{{}}.{path}.{theirs}", transposed and own == "kernel")
        for own, theirs in kinds
    ]


RULES = (
    Rule("embed_tokens.embedding", "model.embed_tokens.weight"),
    Rule("norm.scale", "model.norm.weight"),
    Rule("lm_head.kernel", "lm_head.weight", transposed=True),
    *(
        rule
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        for rule in _of_blocks(f"self_attn.{name}", True, ("kernel", "weight"), ("bias", "bias"))
    ),
    *(
        rule
        for name in ("gate_proj", "up_proj", "down_proj")
        for rule in _of_blocks(f"mlp.{name}", True, ("kernel", "weight"), ("bias", "bias"))
    ),
    *(
        rule
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
        for rule in _of_blocks(name, False, ("scale", "weight"))
    ),
)
"""Names in files. Kernels are [inputs, outputs] here and [outputs, inputs] in files; blocks are stacked here and
separate in files."""
