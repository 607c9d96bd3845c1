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
from shardwise.fsdp.strategy import Precision
from shardwise.plan import cache
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.operations import _GROUPED_COSTS
from shardwise.plan.dry_run.recording import GROUPED
from shardwise.plan.models.source import ModelSource, resolve
from shardwise.plan.models.transformers_models import cached_description, described
from shardwise.plan.search.evaluator import Evaluator, cached_forecast
from shardwise.plan.simulate.forecast import forecast, forecast_of, recorded

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
    asked += ["--config", "run.toml", "--smallest-cluster", "--largest-batch"]
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


def test_a_cached_forecast_is_the_forecast() -> None:
    source, job = resolve(TINY), Job(gpus_per_node=4, seq_len=64)
    assert cached_forecast(source, job) is None
    made = Evaluator(source)(job)
    assert cached_forecast(source, job) == made
    whole = forecast(TINY, gpus_per_node=4, seq_len=64)
    assert replace(made, recording=whole.recording) == whole


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": "a100-sxm-80gb"}, {"segments": "expandable"}, {"nodes": 2}, {"strategy": "no_shard"},
        {"micro_batch": 2}, {"precision": Precision("bf16")}, {"engine": "fsdp2"}, {"offload": "cpu"}, {"units": 99},
    ],
    ids=str,
)  # fmt: skip
def test_another_job_has_another_forecast(change: dict[str, object]) -> None:
    source, job = resolve(TINY), Job(gpus_per_node=4, seq_len=64)
    Evaluator(source)(job)
    assert cached_forecast(source, replace(job, **change)) is None  # type: ignore[arg-type]
    assert cached_forecast(resolve({**TINY, "vocab_size": 321}), job) is None


def test_user_code_is_not_cached(tmp_path: Path) -> None:
    """It may depend on anything; names of its classes do not."""
    job = Job(gpus_per_node=4, seq_len=64)
    Evaluator(ModelSource("a function", build=resolve(TINY).builder()))(job)
    Evaluator(resolve(TINY))(replace(job, units=lambda fqn, module: fqn.endswith("mlp")))
    assert not list((tmp_path / "kept").glob("*.forecast.*"))
    named = replace(job, units=["LlamaMLP"])
    made = Evaluator(resolve(TINY))(named)
    assert cached_forecast(resolve(TINY), named) == made


def test_a_damaged_file_is_made_anew(tmp_path: Path) -> None:
    source, job = resolve(TINY), Job(gpus_per_node=4, seq_len=64)
    made = Evaluator(source)(job)
    (file,) = (tmp_path / "kept").glob("*.forecast.*")
    for damage in (b"", file.read_bytes()[:-9], b"{}", b"[1]", b"3"):
        file.write_bytes(damage)
        assert cached_forecast(source, job) is None
        assert Evaluator(source)(job) == made


def test_a_price_asks_for_no_new_forecast() -> None:
    """It is what people ask second; all that it changes is a product."""
    source, job = resolve(TINY), Job(gpus_per_node=4, seq_len=64)
    made = Evaluator(source)(job)
    priced = replace(job, price_per_hour=2.0)
    cached = cached_forecast(source, priced)
    assert cached is not None
    assert (cached.job, cached.price_per_hour) == (priced, 2.0)
    assert cached.cost == Evaluator(source)(priced).cost
    assert replace(cached, job=job, price_per_hour=None, recording=made.recording) == made
    again = cached_forecast(source, job)
    assert again is not None
    assert again.price_per_hour is None


@pytest.mark.parametrize("damage", [[1, 2], {"positions": 1}, "words"])
def test_a_description_is_cached_unless_it_is_damaged(damage: object) -> None:
    assert cached_description(TINY) is None
    known = described(TINY)
    assert cached_description(TINY) == known
    cache.write(cache.name_of("model", TINY), damage)
    assert cached_description(TINY) is None


def test_a_long_accumulation_is_forecast_from_short_ones() -> None:
    job = Job(seq_len=64, gpus_per_node=2, micro_batch=2, accumulation=6)
    made = Evaluator(resolve(TINY))(job).to_dict()
    whole = forecast_of(recorded(resolve(TINY), job)).to_dict()
    for name in ("step_time_s", "tokens_per_s_per_gpu", "mfu", "compute_s", "exposed_comm_s", "tokens_per_s_range"):
        assert made.pop(name) == pytest.approx(whole.pop(name), rel=1e-3), name
    assert made == whole


def test_every_grouped_product_has_its_costs() -> None:
    assert _GROUPED_COSTS.keys() == GROUPED
