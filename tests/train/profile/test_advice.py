"""The change of one setting that the planner thinks makes a run's communication cost less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.models.source import resolve
from shardwise.plan.search.evaluator import Evaluator
from shardwise.plan.simulate.forecast import Forecast
from shardwise.train.config.files import load
from shardwise.train.profile.advice import _changes, _keys, faster_settings
from tests.train.rig import furnish

MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 320,
    "num_attention_heads": 4,
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {"gpu": "l4", "gpus_per_node": 2, "nodes": 2, "seq_len": 64}
JOB = Job.of(**ARGUMENTS)
CHANGES: dict[str, dict[str, Any]] = {
    "train.micro_batch = 2": {"micro_batch": 2},
    'parallel.strategy = "shard_grad_op"': {"strategy": "shard_grad_op"},
    'parallel.strategy = "hybrid_shard", parallel.shard_group = 2': {"strategy": "hybrid_shard", "shard_group": 2},
    'parallel.param_dtype = "bf16"': {"precision": sw.Precision(param="bf16")},
    'parallel.reduce_dtype = "bf16"': {"precision": sw.Precision(reduce="bf16")},
    "parallel.slots = 5": {"slots": 5},
}
"""What may be proposed for this job: keys of a configuration, and arguments of a plan."""


@pytest.fixture(scope="module")
def forecast() -> Evaluator:
    return Evaluator(resolve(MODEL))


def keys_for(**arguments: Any) -> list[str]:
    job = Job.of(**{**ARGUMENTS, **arguments})
    return [_keys(job, change) for change in _changes(job)]


def test_every_change_is_named_by_the_keys_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_for() == [*CHANGES]
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    for keys in CHANGES:
        config = load("tiny.toml", keys.replace('"', "").replace(" = ", "=").split(", "))
        for one in keys.split(", "):
            (section, key), value = one.split(" = ")[0].split("."), one.split(" = ")[1].strip('"')
            assert str(getattr(getattr(config, section), key)) == value


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        ({"nodes": 1}, {"hybrid_shard"}),
        ({"strategy": "shard_grad_op"}, {"parallel.strategy"}),
        ({"precision": sw.Precision(reduce="bf16")}, {"parallel.reduce_dtype"}),
        ({"precision": sw.Precision(param="bf16")}, {"parallel.param_dtype"}),
        ({"precision": sw.Precision(param="bf16", reduce="bf16")}, {"parallel.param_dtype", "parallel.reduce_dtype"}),
        ({"gpu": "cpu"}, {"parallel.param_dtype", "parallel.reduce_dtype"}),
    ],
)
def test_nothing_is_proposed_that_the_run_has_or_cannot_have(arguments: dict[str, Any], absent: set[str]) -> None:
    left = [keys for keys in CHANGES if not any(part in keys for part in absent)]
    assert keys_for(**arguments) == left


def test_the_change_with_most_tokens_per_second_is_proposed(forecast: Evaluator) -> None:
    before = forecast(JOB)
    planned = {keys: forecast(Job.of(**ARGUMENTS, **change)) for keys, change in CHANGES.items()}
    best = max(planned, key=lambda keys: planned[keys].tokens_per_s_per_gpu)
    gain = planned[best].tokens_per_s_per_gpu / before.tokens_per_s_per_gpu - 1
    more = (planned[best].peak_memory_bytes - before.peak_memory_bytes) / 2**30
    said = f"{best}: {gain:.0%} more tokens per second by the planner's estimate, {more:+.2f} GiB"
    assert gain > 0.1
    assert faster_settings(JOB, forecast) == said


def test_what_cannot_be_planned_or_does_not_fit_is_left_out(forecast: Evaluator) -> None:
    """What was proposed is refused, or too large, the next time: then the next best is proposed, at last none."""
    refused: list[Job] = []
    too_large: list[Job] = []

    def some(job: Job) -> Forecast:
        if job in refused:
            raise PlanError("the model cannot be run dry so")
        found = forecast(job)
        return replace(found, reserved_memory_bytes=found.usable_bytes + 1) if job in too_large else found

    jobs = {keys: Job.of(**ARGUMENTS, **change) for keys, change in CHANGES.items()}
    fast = {keys: forecast(job).tokens_per_s_per_gpu for keys, job in jobs.items()}
    helpful = [keys for keys in CHANGES if fast[keys] > 1.02 * forecast(JOB).tokens_per_s_per_gpu]
    assert len(helpful) > 2
    for number, keys in enumerate(sorted(helpful, key=fast.__getitem__, reverse=True)):
        assert faster_settings(JOB, some).startswith(f"{keys}: ")
        (too_large if number % 2 else refused).append(jobs[keys])
    assert faster_settings(JOB, some).startswith("no single setting helps")


def test_a_run_that_cannot_be_planned_itself_raises() -> None:
    def refuse(job: Job) -> Forecast:
        raise PlanError("the model cannot be built")

    with pytest.raises(PlanError, match="cannot be built"):
        faster_settings(JOB, refuse)
