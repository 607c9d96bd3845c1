"""Decoders in flax nnx, built from the config.json of a transformers model. They do not need transformers itself.

model = swj.init(lambda key: swj.models.from_config(config, key), mesh)(key)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.jax.models import gpt2, llama
from shardwise.jax.models.generation import generate
from shardwise.jax.models.gpt2 import GPT2, GPT2Config
from shardwise.jax.models.llama import Llama, LlamaConfig

__all__ = [
    "FAMILIES",
    "GPT2",
    "GPT2Config",
    "Llama",
    "LlamaConfig",
    "from_config",
    "generate",
    "known_keys",
    "read_config",
]

FAMILIES: Mapping[str, tuple[Callable[[Mapping[str, Any]], Any], Callable[..., Any]]] = {
    "gpt2": (GPT2Config.of, GPT2),
    "llama": (LlamaConfig.of, Llama),
    "mistral": (LlamaConfig.of, Llama),
    "qwen2": (LlamaConfig.of, Llama),
    "qwen3": (LlamaConfig.of, Llama),
}
"""By `model_type`, the function that reads the configuration, and the module's class."""


def from_config(config: Mapping[str, Any], key: Any, dtype: str = "float32") -> Any:
    """Create a module with random parameters; inside `swj.init` each device draws only its shards.

    Args:
        config: of transformers, as in a config.json; `model_type` is required, and the rest has transformers' defaults.
        key: a `jax.random.key`.
        dtype: of the parameters.

    Raises ConfigError for a `model_type` or a value that the JAX models do not support.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise ConfigError(f"model_type={kind!r}: must be one of the JAX models {', '.join(FAMILIES)}")
    _check_numbers(config)
    read, module = FAMILIES[kind]
    return module(read(config), key, dtype)


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"),
)


def _check_numbers(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a size that is no positive integer, or rotary settings that are no table."""
    for key in _SIZES:
        size = config.get(key)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ConfigError(f"{key}={size!r} in the model's configuration: must be a whole number of at least 1")
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise ConfigError(f"{key}={config[key]!r} in the model's configuration: must be a table")


def known_keys(kind: str) -> frozenset[str]:
    """Return the keys that a configuration of this `model_type` may have, with those that do not affect the model."""
    own = gpt2.KEYS if kind == "gpt2" else llama.KEYS
    return (
        own
        | {"model_type", "architectures", "dtype", "torch_dtype", "use_cache", "transformers_version"}
        | {f"{name}_token_id" for name in ("bos", "eos", "pad")}
    )


def read_config(path: str | Path) -> dict[str, Any]:
    """Read the configuration from a directory or a config.json. Raises ConfigError if there is none."""
    place = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place} cannot be read as the configuration of a model: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{place} is not the configuration of a model: it must be a JSON object")
    return config
