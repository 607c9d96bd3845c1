"""Made-up runs: directories with the files of a run that nobody trained."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.train.run.facts import Facts, Planned, UnitFacts
from shardwise.train.run.launches import Launch

CONFIG = """[model.config]
model_type = "llama"

[train]
steps = {steps}
lr = {lr}

[parallel]
strategy = "full_shard"

[log]
name = "{name}"
"""
MEMORY = {"param_shards": 4 * 2**20, "gathered_slots": 2**20, "optimizer": 8 * 2**20, "activations": None}
UNITS = tuple(UnitFacts(f"layers.{n}", "Block", 1000, 24, 2048, 4096, "fp32/bf16/fp32") for n in range(3))


def rows(steps: int, step_time_s: float = 0.5) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl`: a loss that falls, with noise."""
    chance = random.Random(0)
    return [
        {
            "step": step,
            "loss": 2 + 3 * math.exp(-10 * step / steps) + 0.1 * chance.random(),
            "lr": 1e-3,
            "grad_norm": 1 + chance.random(),
            "tokens": 1000,
            "tokens_per_s": 1000 / step_time_s,
            "step_time_s": step_time_s,
            "memory": MEMORY,
            "world_size": 2,
            "skipped_steps": 0,
        }
        for step in range(1, steps + 1)
    ]


def made_up(
    path: Path,
    steps: list[dict[str, Any]],
    evaluations: tuple[tuple[int, float], ...] = (),
    launches: tuple[Launch, ...] = (),
    lr: float = 1e-3,
    planned: Planned | None = None,
) -> Path:
    """Write a finished run and return its directory. `evaluations`: steps and held-out losses."""
    (path / "final").mkdir(parents=True, exist_ok=True)
    (path / "config.toml").write_text(CONFIG.format(steps=len(steps), lr=lr, name=path.name))
    found = [{"step": step, "loss": loss, "targets": 10} for step, loss in evaluations]
    for name, lines in (("metrics", steps), ("evaluations", found), ("launches", map(asdict, launches))):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    measured = {kind: size for kind, size in MEMORY.items() if size is not None}
    Facts(UNITS, (measured, {**measured, "optimizer": 10 * 2**20}), planned).write(path / "facts.json")
    return path
