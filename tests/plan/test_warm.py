"""A question that was asked before is answered without torch and transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli.app import run
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.operations import _GROUPED_COSTS
from shardwise.plan.dry_run.recording import GROUPED
from shardwise.plan.models.source import resolve
from shardwise.plan.search.evaluator import Evaluator
from shardwise.plan.simulate.forecast import forecast
from shardwise.plan.simulate.kept_forecasts import kept_forecast

ROOT = Path(__file__).parents[2]
TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 320,
}  # fmt: skip
PROGRAM = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = sys.modules["numpy"] = None  # an import of them raises
from shardwise.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_PLAN_CACHE", str(tmp_path / "kept"))
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(TINY))


def test_a_warm_answer_imports_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "config.json", "--gpus", "4", "--seq-len", "64", "--micro-batch", "1,2"]
    asked += ["--activation-checkpointing", "none", "--strategy", "full_shard,no_shard", "--workers", "1"]
    asked += ["--html", "page.html", "--config", "run.toml", "--smallest-cluster", "--largest-batch"]
    assert run([*asked[:-1], "--budget", "2"]) == 0
    cold = capsys.readouterr().out
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    warm = subprocess.run(
        [sys.executable, "-c", PROGRAM, *asked[:-1], "--budget", "2"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (warm.returncode, warm.stdout) == (0, cold), warm.stderr


def test_a_kept_forecast_is_the_forecast() -> None:
    source, job = resolve(TINY), Job(gpus_per_node=4, seq_len=64)
    assert kept_forecast(source, job, scaled=True) is None
    made = Evaluator(source)(job)
    kept = kept_forecast(source, job, scaled=True)
    assert kept == made
    assert replace(made, recording=forecast(TINY, gpus_per_node=4, seq_len=64).recording) == forecast(
        TINY, gpus_per_node=4, seq_len=64
    )


@pytest.mark.parametrize("change", [{"gpu": "a100-sxm-80gb"}, {"segments": "expandable"}])
def test_what_no_recording_knows_is_part_of_a_forecasts_name(change: dict[str, object]) -> None:
    source, job = resolve(TINY), Job(gpus_per_node=4, seq_len=64)
    Evaluator(source)(job)
    assert kept_forecast(source, replace(job, **change), scaled=True) is None  # type: ignore[arg-type]
    assert kept_forecast(source, job, scaled=False) is None


def test_a_price_asks_for_no_new_forecast() -> None:
    """It is what people ask second; all that it changes is a product."""
    source, job = resolve(TINY), Job(gpus_per_node=4, seq_len=64)
    made = Evaluator(source)(job)
    priced = replace(job, price_per_hour=2.0)
    kept = kept_forecast(source, priced, scaled=True)
    assert kept is not None
    assert (kept.job, kept.price_per_hour) == (priced, 2.0)
    assert kept.cost == Evaluator(source)(priced).cost
    assert replace(kept, job=job, price_per_hour=None, recording=made.recording) == made
    again = kept_forecast(source, job, scaled=True)
    assert again is not None
    assert again.price_per_hour is None


def test_every_grouped_product_has_its_costs() -> None:
    assert _GROUPED_COSTS.keys() == GROUPED
