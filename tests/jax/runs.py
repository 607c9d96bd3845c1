"""Small runs of `shardwise train` with JAX: their data, their configuration, what they wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.train.config.files import load
from shardwise.train.on_jax import trainer

CONFIG = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
tie_word_embeddings = true
[data]
source = "texts/*.txt"
seq_len = 32
eval_fraction = 0.2
[train]
steps = 6
global_batch = 8
lr = 3e-3
schedule = "constant"
[parallel]
backend = "jax"
ranks = 4
[checkpoint]
every = 2
"""


def prepare(folder: Path) -> None:
    """Texts, and the configuration `tiny.toml`."""
    (folder / "texts").mkdir()
    for number in range(20):
        words = " ".join(f"{(number * k) % 97} times {k} is {number * k};" for k in range(40))
        (folder / "texts" / f"{number:02}.txt").write_text(words)
    (folder / "tiny.toml").write_text(CONFIG)


def train(*overrides: str) -> None:
    """Run `tiny.toml` in the working directory."""
    trainer.run(load("tiny.toml", overrides))


def steps_of(run: str | Path) -> list[dict[str, Any]]:
    """`metrics.jsonl` of a run, by its name or its directory."""
    return [json.loads(line) for line in (Path("runs") / run / "metrics.jsonl").read_text().splitlines()]


def losses_of(run: str | Path) -> list[float]:
    """By step."""
    return [step["loss"] for step in steps_of(run)]
