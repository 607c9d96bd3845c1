"""Each benchmark, run as a user runs it, on shapes too small to mean anything."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import on_ranks, program
from benchmarks.common.target import Target, paired_ratio

ROOT = Path(__file__).parents[2]
TINY_SHAPE = {"layers": 1, "width": 16, "heads": 2, "vocab": 32, "seq": 8, "batch": 1}
TINY_GPT = [
    *(f"--{name}={size}" for name, size in TINY_SHAPE.items()),
    "--steps=2",
    "--warmup=1",
    "--rounds=1",
]
TINY_OVERHEAD = ["--units=2", "--parameters=3", "--repeats=2", "--rounds=1", "--worlds", "2", "4"]


def _run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program(name), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)


def _result(directory: Path) -> dict[str, object]:
    (path,) = directory.glob("*.json")
    assert path.with_suffix(".md").read_text().startswith("# ")
    result = json.loads(path.read_text())
    assert isinstance(result, dict)
    return result


@pytest.mark.slow
def test_peers_agree_on_losses_and_bytes(tmp_path: Path) -> None:
    done = _run("peers", *TINY_GPT, "--engines", "ddp,fsdp2", "--out", str(tmp_path / "peers.json"))
    assert done.returncode == 0, done.stderr
    engines = _result(tmp_path)["engines"]
    assert isinstance(engines, dict)
    assert engines["ddp"]["losses"] == pytest.approx(engines["fsdp2"]["losses"], rel=1e-5)
    assert engines["ddp"]["sent_bytes"] > 0
    assert engines["fsdp2"]["sent_bytes"] > engines["ddp"]["sent_bytes"]


@pytest.mark.slow
def test_overhead_measures_fsdp2_over_plain(tmp_path: Path) -> None:
    out = str(tmp_path / "overhead.json")
    done = _run("overhead", *TINY_OVERHEAD, "--engines", "plain,fsdp2", "--out", out)
    assert done.returncode == 0, done.stderr
    overheads = _result(tmp_path)["overheads_s"]
    assert isinstance(overheads, dict)
    assert set(overheads) == {"step fsdp2 2", "step fsdp2 4", "adamw fsdp2"}


@pytest.mark.slow
def test_checkpoints_are_timed_beside_dcp(tmp_path: Path) -> None:
    out = str(tmp_path / "checkpoint.json")
    sizes = [f"--{name}={size}" for name, size in TINY_SHAPE.items() if name != "batch"]
    done = _run("checkpoint", *sizes, "--rounds=1", "--repeats=1", "--directory", str(tmp_path), "--out", out)
    assert done.returncode == 0, done.stderr
    result: Any = _result(tmp_path)
    assert len(result["targets"]) == 6
    sides = result["sides"]
    assert sides["shardwise"]["held_bytes"] == sides["dcp"]["held_bytes"] > 0
    for side in sides.values():
        assert 0.0 <= side["still_cached"][0] <= 1.0
        assert side["save_s"][0] > 0 < side["load_s"][0]
    assert result["plain"]["written_bytes"] == sides["shardwise"]["written_bytes"] > sides["shardwise"]["held_bytes"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_initial_numbers_are_timed(tmp_path: Path) -> None:
    out = str(tmp_path / "initialisation.json")
    done = _run(
        "initialisation",
        "--ranks=1",
        "--rounds=1",
        "--blocks=1",
        "--width=64",
        "--ways",
        "plain",
        "device",
        "--out",
        out,
    )
    assert done.returncode == 0, done.stderr
    runs: Any = _result(tmp_path)["runs"]
    assert list(runs) == ["plain", "device"]
    assert all(run[0][0]["wall_s"] > 0 for run in runs.values())


def test_unknown_engine_is_one_line() -> None:
    done = _run("peers", "--engines", "fsdp3")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown engine 'fsdp3'; known are alone, ddp")
    done = _run("peers", "--steps", "0")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "'0': must be a whole number of at least 1 (see benchmarks peers --help)" in done.stderr


def test_targets_compare_round_by_round() -> None:
    target = paired_ratio("step", [1.0, 2.0, 9.0], [2.0, 4.0, 9.0], 0.5)
    assert target.value == 0.5
    assert str(target).startswith("PASS")
    assert str(Target("step", float("nan"), 1.0)).startswith("MISSED")


@pytest.mark.slow
def test_owners_send_what_arithmetic_says(tmp_path: Path) -> None:
    tiny = ["--rounds=1", "--layers=1", "--width=24", "--out", str(tmp_path / "whole-matrix")]
    command = [sys.executable, *on_ranks(2, *program("whole_matrix"), *tiny)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, done.stderr
    result: Any = _result(tmp_path)
    assert [rank["sent"]["owners"] for rank in result["ranks"]] == [rank["expected"] for rank in result["ranks"]]
    assert all(rank["off"] == 0.0 for rank in result["ranks"])


@pytest.mark.slow
def test_state_on_disk_is_measured_in_alternation(tmp_path: Path) -> None:
    sizes = ["--layers=4", "--width=128", "--vocab=64", "--ring-mib=2", "--steps=3", "--rounds=2"]
    scratch = tmp_path / "scratch"
    done = _run("offload", *sizes, "--no-deepspeed", f"--path={scratch}", "--out", str(tmp_path / "offload"))
    assert done.returncode == 0, done.stderr
    runs: Any = _result(tmp_path)["runs"]
    assert list(runs) == ["none", "memory", "nvme", "disk"]
    assert [len(ranks) for rounds in runs.values() for ranks in rounds] == [2] * 8
    for on_disk, in_memory in zip(runs["nvme"], runs["memory"], strict=True):
        assert sorted(rank["losses"] for rank in on_disk) == sorted(rank["losses"] for rank in in_memory)
        assert all(rank["file_bytes"] > rank["ring_bytes"] > 0 for rank in on_disk)
    assert "losses that differ from those in memory: 0" in done.stdout
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_experts_over_ranks_are_compared_with_fsdp2_as_transformers_arranges_it(tmp_path: Path) -> None:
    done = _run("experts", "--rounds", "1", "--steps", "2", "--layers", "1", "--out", str(tmp_path / "experts"))
    assert done.returncode == 0, done.stderr
    assert "PASS   greatest difference of the losses from FSDP2's, both at ep=2: " in done.stdout
    assert "PASS   greatest difference of the losses at ep=2 and ep=1" in done.stdout
    everyone: Any = _result(tmp_path)["ranks"]
    for rank in everyone:
        held = rank["held"].values()
        assert len(held) == 3
        assert max(held) < 1.2 * min(held)


@pytest.mark.slow
def test_each_axis_sends_what_the_formulas_say(tmp_path: Path) -> None:
    done = _run("axis_bytes", "--ranks=4", "--out", str(tmp_path / "axis-bytes"))
    assert done.returncode == 0, done.stderr + done.stdout
    cases: Any = _result(tmp_path)["cases"]
    assert [(case["case"]["strategy"], len(case["sent"])) for case in cases] == [
        ("full_shard", 4),
        ("shard_grad_op", 4),
        ("no_shard", 4),
        ("hybrid_shard", 4),
        ("full_shard", 4),
        ("full_shard", 4),
    ]
    for case in cases:
        assert case["sent"][0]["elsewhere"] == 0
        for sent, formula in zip(case["sent"], case["formula"], strict=True):
            assert all(sent[axis] == formula[axis] + case["control"][axis] for axis in formula)
            assert all(formula[axis] > 40_000 > 2_000 > case["control"][axis] for axis in formula)


@pytest.mark.slow
def test_sizes_that_a_mesh_does_not_divide_are_compared_with_one_process(tmp_path: Path) -> None:
    done = _run("uneven_tensor", "--sizes", "3", "8", "--out", str(tmp_path / "uneven-tensor"))
    assert done.returncode == 0, done.stderr
    assert "PASS   sizes at which shardwise is wrong: 0" in done.stdout
    everyone: Any = _result(tmp_path)["ranks"]
    assert len(everyone) == 4
    for rank in everyone:
        assert list(rank["found"]) == ["FSDP2", "shardwise"]
        assert list(rank["found"]["shardwise"]) == ["3", "8"]
        ours = [*rank["found"]["shardwise"].values(), rank["found"]["FSDP2"]["8"]]
        assert all(set(size.values()) == {"right"} and len(size) == 5 for size in ours)
