import json
import sys
from pathlib import Path

import pytest

from shardwise.errors import UserError
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
        writer.evaluation(1, 3.25, 999)
    assert lines(tmp_path / "m.jsonl") == [
        {
            "step": 1, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.7, "tokens": 1024, "tokens_per_s": 512.0,
            "step_time_s": 2.0, "memory": {"param_shards": 100, "optimizer": 200, "activations": None}, "world_size": 2,
        }
    ]  # fmt: skip
    assert lines(tmp_path / "e.jsonl") == [{"step": 1, "loss": 3.25, "tokens": 999}]


def test_steps_reach_the_disk_every_so_often(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path, tmp_path / "e.jsonl", flush_every=3) as writer:
        counts = []
        for step in range(1, 8):
            writer.step(metrics(step))
            counts.append(len(lines(path)))
    assert counts == [0, 0, 3, 3, 3, 6, 6]
    assert len(lines(path)) == 7


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path / "m.jsonl", tmp_path / "e.jsonl", 1, tensorboard=tmp_path / "board") as writer:
        writer.step(metrics(1))
        writer.evaluation(1, 3.25, 999)
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [2.5]
    assert [event.value for event in events.Scalars("memory/optimizer")] == [200]
    assert "memory/activations" not in events.Tags()["scalars"]
    assert [event.value for event in events.Scalars("eval/loss")] == [3.25]


def test_tensorboard_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        MetricsWriter(tmp_path / "m.jsonl", tmp_path / "e.jsonl", 1, tensorboard=tmp_path / "board")
    assert not (tmp_path / "m.jsonl").exists()
