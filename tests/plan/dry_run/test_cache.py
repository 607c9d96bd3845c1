"""Recordings are kept, and none is ever taken for another."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def _unloaded() -> Iterator[None]:
    """What a test changes is no part of the code that is loaded in the next."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("kept_"):
            del sys.modules[name]


def test_a_recording_comes_back_as_it_was(runs: list[Job]) -> None:
    source = resolve(LLAMA)
    first = recorded(source, JOB)
    assert recorded(source, JOB) == first
    assert len(runs) == 1


def test_jobs_that_the_engine_cannot_tell_apart_share_one(runs: list[Job]) -> None:
    source = resolve(LLAMA)
    first = recorded(source, JOB)
    changes = {
        "gpu": "a100-sxm-80gb", "interconnect": "800gbps", "price_per_hour": 2.0, "engine": "fsdp2", "offload": "cpu",
    }  # fmt: skip
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
    (tmp_path / ".#kept_tower.py").symlink_to("nobody@host.1234")  # an editor's lock
    assert recording_name(source, JOB) == before
    (tmp_path / "kept_settings.json").write_text("{}")  # code may read it
    assert recording_name(source, JOB) not in {before, None}


def project(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    """A project whose factory imports from beside its package, and more when it is called. Returns what it imports."""
    monkeypatch.syspath_prepend(str(folder))
    (folder / f"{name}_models").mkdir()
    (folder / f"{name}_common.py").write_text("LAYERS = 2")
    (folder / f"{name}_models" / "build.py").write_text(
        f"from {name}_common import LAYERS\nfrom torch import nn\n"
        "class Net(nn.Sequential):\n    def forward(self, x): return super().forward(x.float()).mean()\n"
        "def make(): return Net(*(nn.Linear(64, 64) for _ in range(LAYERS)))\n"
    )
    return folder / f"{name}_common.py"


def test_a_factorys_imports_are_part_of_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for where in ("beside", "elsewhere"):
        (tmp_path / where).mkdir()
    common = project(tmp_path / "beside", monkeypatch, "kept_a")
    names = [recording_name(resolve("kept_a_models.build:make"), JOB)]
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere" / "kept_loaded.py").write_text("")
    importlib.import_module("kept_loaded")
    names.append(recording_name(resolve("kept_a_models.build:make"), JOB))
    assert None not in names
    assert len(set(names)) == 2
    common.write_text("LAYERS = 3")  # what is loaded is 2
    assert recording_name(resolve("kept_a_models.build:make"), JOB) is None
    common.unlink()
    assert recording_name(resolve("kept_a_models.build:make"), JOB) is None


def test_nothing_is_kept_of_code_that_the_disk_has_no_more(
    runs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "project").mkdir()
    common = project(tmp_path / "project", monkeypatch, "kept_b")
    source = resolve("kept_b_models.build:make")
    job = replace(JOB, units=1)
    first = recorded(source, job)
    assert recorded(source, job) == first
    assert len(runs) == 1
    common.write_text("LAYERS = 3")
    assert recorded(source, job) == first
    assert len(runs) == 2
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_an_edit_in_the_middle_of_a_dry_run_keeps_nothing(
    runs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "project").mkdir()
    common = project(tmp_path / "project", monkeypatch, "kept_c")
    source = resolve("kept_c_models.build:make")
    own = step.record_once

    def edited(builder: Any, job: Job, rank: int = 0) -> Any:
        common.write_text("LAYERS = 4")
        return own(builder, job, rank)

    monkeypatch.setattr(step, "record_once", edited)
    recorded(source, replace(JOB, units=1))
    assert not (tmp_path / "kept").exists()


def test_a_callable_has_no_name() -> None:
    assert recording_name(ModelSource("a function", build=resolve(LLAMA).builder()), JOB) is None
    assert recording_name(resolve(LLAMA), replace(JOB, units=lambda fqn, module: True)) is None


def test_units_by_the_names_of_their_classes_have_one() -> None:
    both = {
        replace(JOB, units=names).units for names in (["LlamaMLP", "LlamaAttention"], {"LlamaAttention", "LlamaMLP"})
    }
    assert both == {("LlamaAttention", "LlamaMLP")}
    names = [recording_name(resolve(LLAMA), replace(JOB, units=units)) for units in (None, "LlamaMLP", ["LlamaMLP"])]
    assert None not in names
    assert names[0] != names[1] == names[2]


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
