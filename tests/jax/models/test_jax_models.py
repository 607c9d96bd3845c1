"""What a configuration asks for and these models do not compute is told, not left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from shardwise.errors import ConfigError, UsageError  # noqa: E402
from shardwise.jax import models  # noqa: E402
from shardwise.jax.models.rope import frequencies  # noqa: E402

KEY = jax.random.key(0)
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, r"model_type='mamba': must be one of the JAX models gpt2, llama, .*"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu'"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0\.1"),
        ({"model_type": "mistral"}, r"sliding_window=4096: .* set sliding_window = 0"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types with 'sliding_attention'"),
        ({"num_key_value_heads": 3}, r"must be a multiple of num_key_value_heads=3"),
        ({"hidden_size": "16"}, r"hidden_size='16' .*: must be a whole number"),
        ({"num_attention_heads": 0}, r"num_attention_heads=0 .*: must be a whole number"),
        ({"rope_scaling": "linear"}, r"rope_scaling='linear' .*: must be a table"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, r"rope_type='yarn'"),
        ({"model_type": "gpt2", "activation_function": "relu"}, r"activation_function='relu'"),
        ({"model_type": "gpt2", "n_embd": 10, "n_head": 3}, r"n_embd=10 is not a multiple of n_head=3"),
    ],
)
def test_what_is_not_there_is_told(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        nnx.eval_shape(lambda: models.from_config(SMALL | changes, jax.random.key(0))(jnp.zeros((1, 2), jnp.int32)))


def test_a_configuration_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        models.read_config(tmp_path)


def test_tokens_that_cannot_be_continued() -> None:
    model = models.from_config(SMALL, jax.random.key(0))
    with pytest.raises(UsageError, match=r"ids of shape \(1, 0\)"):
        models.generate(model, np.zeros((1, 0), int), 3)
    with pytest.raises(UsageError, match=r"ids from 3 to 32: must be whole numbers from 0 to 31"):
        models.generate(model, [[3, 32]], 3)
    with pytest.raises(UsageError, match=r"the rows of ids have different lengths"):
        models.generate(model, [[3, 1], [2]], 3)
    short = models.from_config({"model_type": "gpt2", "vocab_size": 8, "n_embd": 4, "n_head": 1, "n_positions": 6}, KEY)
    with pytest.raises(UsageError, match=r"4 tokens and 3 new ones are more than the model's 6 positions"):
        models.generate(short, [[1, 2, 3, 4]], 3)
    with pytest.raises(UsageError, match=r"cannot be negative"):
        models.generate(model, [[1]], -1)
    assert models.generate(model, [[1]], 0).tolist() == [[1]]


def test_ids_that_the_table_does_not_have_are_nan() -> None:
    """Padding of -100 that was left in would otherwise be some token."""
    logits = models.from_config(SMALL, KEY)(jnp.array([[1, 2, -1], [31, 32, 0], [3, 4, 5]]))
    assert np.isnan(np.asarray(logits)).any(axis=(1, 2)).tolist() == [True, True, False]


def test_layers_recompute_without_other_numbers() -> None:
    model = models.from_config(SMALL, jax.random.key(0))
    ids = jnp.arange(12).reshape(2, 6)

    def loss(model: Any) -> Any:
        return jnp.sum(jnp.sin(model(ids)))

    kept = nnx.jit(nnx.grad(loss))(model)
    model.recompute(jax.checkpoint_policies.nothing_saveable)
    text = str(jax.make_jaxpr(lambda state: loss(nnx.merge(nnx.graphdef(model), state)))(nnx.state(model)))
    assert "remat" in text or "checkpoint" in text
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(nnx.jit(nnx.grad(loss))(model)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_linear_scaling_divides_every_angle() -> None:
    plain = frequencies(8, {"rope_theta": 100.0})
    scaled = frequencies(8, {"rope_theta": 100.0, "type": "linear", "factor": 4.0})
    np.testing.assert_allclose(scaled * 4, plain, rtol=1e-6)
