"""Recordings are kept, and none is ever taken for another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.plan.dry_run import step
from shardwise.plan.dry_run.cache import recorded, recording_name
from shardwise.plan.dry_run.job import Job
from shardwise.plan.kept import files
from shardwise.plan.models.source import ModelSource, resolve
from shardwise.policy.precision import Precision

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
JOB = Job(seq_len=64, gpus_per_node=4, nodes=2, precision=Precision("bf16", "fp32", "fp32"))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Job]:
    """Jobs that were run dry, with an empty cache at hand."""
    monkeypatch.setenv("SHARDWISE_PLAN_CACHE", str(tmp_path / "kept"))
    seen: list[Job] = []
    own = step.record_once

    def noted(builder: Any, job: Job, rank: int = 0) -> Any:
        seen.append(job)
        return own(builder, job, rank)

    monkeypatch.setattr(step, "record_once", noted)
    return seen


def test_a_recording_comes_back_as_it_was(runs: list[Job]) -> None:
    source = resolve(LLAMA)
    first = recorded(source, JOB)
    assert recorded(source, JOB) == first
    assert len(runs) == 1


def test_jobs_that_the_engine_cannot_tell_apart_share_one(runs: list[Job]) -> None:
    source = resolve(LLAMA)
    first = recorded(source, JOB)
    changes = {"gpu": "a100-sxm-80gb", "interconnect": "800gbps", "price_per_hour": 2.0, "engine": "fsdp2"}
    for name, value in changes.items():
        other = replace(JOB, **{name: value})
        assert recorded(source, other) == replace(first, job=other)
    flat = replace(JOB, gpus_per_node=8, nodes=1)
    assert recorded(source, flat) == replace(first, job=flat) == step.record_once(source.builder(), flat)
    assert runs == [JOB, flat]


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": 1}, {"strategy": "no_shard"}, {"strategy": "hybrid_shard"}, {"micro_batch": 2}, {"accumulation": 2},
        {"precision": Precision()}, {"seq_len": 32}, {"slots": 4}, {"activation_checkpointing": "full"},
        {"compile": True}, {"optimizer": "sgd"}, {"attention": "eager"}, {"loss": "fused"}, {"gpu": "cpu"},
        {"units": 1000}, {"reshard_after_forward": False},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_engine_sees_has_a_name_of_its_own(change: dict[str, Any]) -> None:
    source = resolve(LLAMA)
    assert recording_name(source, replace(JOB, **change)) != recording_name(source, JOB)


def test_models_ranks_and_code_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve(LLAMA)
    names = {recording_name(source, JOB), recording_name(source, JOB, 1)}
    names.add(recording_name(resolve({**LLAMA, "vocab_size": 321}), JOB))
    monkeypatch.setattr(files, "code", lambda: ["another version"])
    names.add(recording_name(source, JOB))
    assert len(names) == 4


def test_a_factory_is_known_by_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kept_tower.py").write_text("def build():\n    return None\n")
    source = resolve("kept_tower:build")
    before = recording_name(source, JOB)
    assert before is not None
    (tmp_path / "kept_settings.json").write_text("{}")  # code may read it
    assert recording_name(source, JOB) not in {before, None}


def test_a_callable_has_no_name() -> None:
    assert recording_name(ModelSource("a function", build=resolve(LLAMA).builder()), JOB) is None
    assert recording_name(resolve(LLAMA), replace(JOB, units=lambda fqn, module: True)) is None


def test_a_damaged_file_is_made_anew(runs: list[Job], tmp_path: Path) -> None:
    source = resolve(LLAMA)
    first = recorded(source, JOB)
    (file,) = (tmp_path / "kept").iterdir()
    for damage in (b"", file.read_bytes()[:-9], b"{}"):
        file.write_bytes(damage)
        assert recorded(source, JOB) == first
    assert len(runs) == 4
    assert list((tmp_path / "kept").iterdir()) == [file]


def test_a_directory_that_cannot_be_written_to_keeps_none(
    runs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("SHARDWISE_PLAN_CACHE", str(tmp_path / "a file" / "below"))
    assert recorded(resolve(LLAMA), JOB) == recorded(resolve(LLAMA), JOB)
    assert len(runs) == 2
