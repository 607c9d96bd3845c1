"""Rotary position embeddings, as transformers computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.errors import ConfigError

_KINDS = ("default", "linear", "llama3")


def frequencies(head: int, settings: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the angle per position of each pair of features, float32 [head / 2].

    settings: a transformers model's `rope_parameters`: `rope_theta`, `rope_type` and the keys that the type needs.
    Raises ConfigError for an unsupported `rope_type`.
    """
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in _KINDS:
        raise ConfigError(f"rope_type={kind!r} is not supported by JAX models, which have {', '.join(_KINDS)}")
    own = 1.0 / float(settings["rope_theta"]) ** (np.arange(0, head, 2, dtype=np.float64) / head)
    if kind == "linear":
        own = own / settings["factor"]
    if kind == "llama3":
        own = _llama3(own, settings)
    return own.astype(np.float32)


def _llama3(own: Any, settings: Mapping[str, Any]) -> Any:
    """Divide low frequencies by the factor, keep high ones, and interpolate in between (arXiv:2407.21783)."""
    factor, low, high = (float(settings[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = settings["original_max_position_embeddings"] * own / (2 * math.pi)
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - ramp) * own / factor + ramp * own


def rotate(x: jax.Array, per_position: Any, start: Any) -> jax.Array:
    """Rotate queries or keys by the angles of their positions.

    Args:
        x: [batch, tokens, heads, head].
        per_position: from `frequencies`.
        start: the first token's position.
    """
    angles = (start + jnp.arange(x.shape[1]))[:, None].astype(jnp.float32) * per_position
    cos, sin = (jnp.tile(found, 2)[None, :, None, :].astype(x.dtype) for found in (jnp.cos(angles), jnp.sin(angles)))
    left, right = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-right, left], axis=-1) * sin
