import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardwise.train.run.metrics import MetricsWriter, StepMetrics


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step, loss=2.5, lr=1e-3, grad_norm=0.7, tokens=1024, tokens_per_s=512.0, step_time_s=2.0,
        memory={"param_shards": 100, "optimizer": 200, "activations": None}, world_size=2,
    )  # fmt: skip


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_one_object_with_the_promised_keys(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl", tmp_path / "e.jsonl", flush_every=1) as writer:
        writer.step(metrics(1))
        writer.evaluation(1, {"loss": 3.25, "tokens": 999})
    assert lines(tmp_path / "m.jsonl") == [
        {
            "step": 1, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.7, "tokens": 1024, "tokens_per_s": 512.0,
            "step_time_s": 2.0, "memory": {"param_shards": 100, "optimizer": 200, "activations": None}, "world_size": 2,
            "skipped_steps": 0, "rollbacks": 0,
        }
    ]  # fmt: skip
    assert lines(tmp_path / "e.jsonl") == [{"step": 1, "loss": 3.25, "tokens": 999}]


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl", tmp_path / "e.jsonl", flush_every=1) as writer:
        writer.step(replace(metrics(1), loss=math.nan, grad_norm=math.inf))
    text = (tmp_path / "m.jsonl").read_text()
    assert '"loss": null' in text
    assert '"grad_norm": null' in text
    assert "NaN" not in text


def test_steps_reach_the_disk_every_so_often(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path, tmp_path / "e.jsonl", flush_every=3) as writer:
        counts = []
        for step in range(1, 8):
            writer.step(metrics(step))
            counts.append(len(lines(path)))
    assert counts == [0, 0, 3, 3, 3, 6, 6]
    assert len(lines(path)) == 7


class Kept(list[tuple[int, dict[str, float]]]):
    """A logger that keeps what it is given."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        self.append((step, dict(values)))

    def close(self) -> None:
        self.append((-1, {}))


def test_other_logs_get_what_was_measured(tmp_path: Path) -> None:
    loggers = [Kept(), Kept()]
    with MetricsWriter(tmp_path / "m.jsonl", tmp_path / "e.jsonl", 1, loggers) as writer:
        writer.step(metrics(1))
        writer.step(replace(metrics(2), grad_norm=None))
        writer.evaluation(2, {"loss": 3.25, "tokens": 999})
    first = {
        "train/loss": 2.5, "train/lr": 1e-3, "train/grad_norm": 0.7, "train/tokens_per_s": 512.0,
        "train/step_time_s": 2.0, "memory/param_shards": 100, "memory/optimizer": 200,
    }  # fmt: skip
    second = {name: value for name, value in first.items() if name != "train/grad_norm"}
    assert loggers == [[(1, first), (2, second), (2, {"eval/loss": 3.25}), (-1, {})]] * 2
