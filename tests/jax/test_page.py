"""The Python of docs/jax.md, run in the page's order on eight devices, with small models in place of the page's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("shardwise.jax", reason="the extra jax is not installed")

import numpy as np
import optax
import torch
import transformers
from flax import nnx

from tests.documents import blocks

WIDTH, VOCAB = 128, 64


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs)])

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + nnx.relu(layer(x))
        return self.embed.attend(x)


def loss_fn(model: Model, tokens: Any, rng: Any) -> tuple[Any, Any]:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    return losses.sum(), losses.size


def test_it_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained("Llama-3.2-1B")
    rng = np.random.default_rng(0)
    names: dict[str, Any] = {
        "Model": Model,
        "loss_fn": loss_fn,
        "batches": [rng.integers(0, VOCAB, (16, 9), dtype=np.int32) for _ in range(2)],
        "position": 3,
        "prompts": np.ones((8, 4), dtype=np.int32),
    }
    printed = [block for block in blocks("docs/jax.md", "python") if "not run" not in block.marks]
    for block in printed:
        exec(compile("\n" * block.line + block.text, block.page, "exec"), names)
    assert len(printed) == 4
    assert names["extra"].step == 100
    assert names["ids"].shape == (8, 4 + 64)
    assert "all-gather" in capsys.readouterr().out
