"""The best checkpoint is kept, and a run that no longer gets better stops, also after it was resumed."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from shardwise.errors import ConfigError
from shardwise.train import trainer
from shardwise.train.config.files import load
from tests.train.rig import furnish, read, run_alone

WORSE = ("train.lr=1.0", "train.eval_every=1", "checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_best=true")
"""At this learning rate, the held-out loss rises after some steps."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)


def best_of(name: str) -> tuple[int, float]:
    rows = [row for row in read(f"runs/{name}/evaluations.jsonl") if row["step"]]
    best = min(rows, key=lambda row: row["loss"])
    return best["step"], best["loss"]


def steps(name: str) -> list[str]:
    return sorted(path.name for path in Path(f"runs/{name}/checkpoints").iterdir())


def test_the_best_checkpoint_is_kept_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    run_alone(*WORSE, "train.steps=3", "train.schedule=constant")
    step, _ = best_of("tiny")
    assert step < 3
    assert steps("tiny") == ["best", f"step-{step:06d}", "step-000003"]
    assert Path("runs/tiny/checkpoints/best").resolve().name == f"step-{step:06d}"
    final, best, last = (
        load_file(f"runs/tiny/{place}/model.safetensors")
        for place in ("final", "checkpoints/best", "checkpoints/step-000003")
    )
    assert all((final[name] == best[name]).all() for name in best)
    assert any((final[name] != last[name]).any() for name in last)
    assert "the best evaluation found loss" in capsys.readouterr().out


def test_a_run_that_gets_no_better_stops_and_stays_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    run_alone(*WORSE, "train.steps=40", "train.patience=2")
    step, _ = best_of("tiny")
    stopped = read("runs/tiny/metrics.jsonl")[-1]["step"]
    assert stopped == step + 2
    assert f"stopped after step {stopped} of 40" in capsys.readouterr().out
    assert Path("runs/tiny/final").is_dir()

    run_alone(*WORSE, "train.steps=40", "train.patience=2")
    assert "It stopped early, at loss" in capsys.readouterr().out
    assert read("runs/tiny/metrics.jsonl")[-1]["step"] == stopped

    shutil.rmtree("runs/tiny/final")  # as if it had been interrupted while it was written
    run_alone(*WORSE, "train.steps=40", "train.patience=2")
    assert read("runs/tiny/metrics.jsonl")[-1]["step"] == stopped
    assert Path("runs/tiny/final").is_dir()


def test_the_count_goes_on_when_a_run_is_resumed() -> None:
    run_alone(*WORSE, "train.steps=40", "train.patience=3", "log.name=whole")
    whole = read("runs/whole/metrics.jsonl")[-1]["step"]
    for end in range(1, whole + 1):  # a launch for every step
        run_alone(*WORSE, f"train.steps={end}", "train.patience=3", "train.schedule=constant", "log.name=parts")
        shutil.rmtree("runs/parts/final", ignore_errors=True)
    run_alone(*WORSE, "train.steps=40", "train.patience=3", "train.schedule=constant", "log.name=parts")
    step, _ = best_of("parts")
    assert read("runs/parts/metrics.jsonl")[-1]["step"] == max(step + 3, whole)
    assert Path("runs/parts/checkpoints/best").resolve().name == f"step-{step:06d}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.eval_every=0", "train.patience=2"], "patience = 2 counts evaluations: set eval_every as well"),
        (["train.min_delta=0.1"], "min_delta = 0.1 has no effect without patience"),
        (["checkpoint.keep_best=true"], "checkpoint.keep_best needs train.eval_every and checkpoint.every above 0"),
        (["train.best_by=perplexity"], 'means the same as "loss"'),
    ],
)
def test_settings_that_need_others(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("tiny.toml", overrides)
    assert message in str(caught.value)


def test_a_metric_that_there_is_not_ends_the_run_with_a_line() -> None:
    with pytest.raises(ConfigError, match=r"train.best_by='f1': evaluations of this task find loss"):
        trainer.run(load("tiny.toml", ["train.best_by=f1"]))
    assert json.loads(Path("runs/tiny/metrics.jsonl").read_text().splitlines()[-1])["step"] == 3
