"""`benchmarks/accelerator/gpu.py`: the table, the result, and that no check can end another."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import program
from benchmarks.accelerator.bench import Bench
from benchmarks.accelerator.check import CHECKS, Check
from benchmarks.accelerator.checks import two_devices
from benchmarks.accelerator.device import accelerator
from benchmarks.accelerator.private_names import NAMES, missing
from benchmarks.accelerator.row import Row, Verdict
from benchmarks.accelerator.runner import Runner
from benchmarks.accelerator.trace import Trace, profiled

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(accelerator() is not None, reason="these are about machines without one")


def run_script(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program("gpu"), *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_checks_leave_a_table_and_a_result(tmp_path: Path) -> None:
    done = run_script("--quick", "--only", "imports,more", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*-gpu.json")
    result = json.loads(path.read_text())
    assert result["machine"]["accelerator"] == "none"
    assert result["machine"]["torch"] == torch.__version__
    verdicts = {(row["check"], row["name"]): row["verdict"] for row in result["rows"]}
    assert verdicts["imports", "private names of torch"] == "PASS"
    assert verdicts["more", "hybrid groups"] == "not possible here"
    assert {check for check, _ in verdicts} == {"imports", "more"}
    table = path.with_suffix(".md").read_text()
    for row in result["rows"]:
        assert row["name"] in done.stdout
        assert row["name"] in table
    assert "PASS" in done.stdout.splitlines()[2], "rows are printed as they come, after the machine's facts"


def test_checks_have_names_and_what_is_not_one_is_a_mistake() -> None:
    listed = run_script("--list")
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [check.name for check in CHECKS]
    for wrong in (["--only", "parity,nonesuch"], ["--nonesuch"], ["stray"]):
        assert run_script(*wrong).returncode == 2
    assert "nonesuch" in run_script("--only", "nonesuch").stderr


def test_a_failure_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.accelerator import gpu

    monkeypatch.setattr(gpu, "CHECKS", (Check("planted", "", 60, "tests.benchmarks.gpu_check_broken"),))
    assert gpu.main(["--out", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("*-gpu.json")
    assert json.loads(path.read_text())["rows"][0]["verdict"] == "FAIL"


def test_the_limits_of_all_checks_are_near_nine_minutes() -> None:
    from benchmarks.accelerator import gpu

    assert gpu.BUDGET_S <= 9 * 60 - 20, "starting, facts and writing take their time too"
    assert all(check.limit_s < gpu.BUDGET_S / 4 for check in CHECKS)


# The runner -----------------------------------------------------------------------------------------------------------


def rows_of(tmp_path: Path, check: Check, **options: Any) -> tuple[list[Row], Runner]:
    runner = Runner(tmp_path, lambda name, row: None, **options)
    return runner.run(check), runner


def test_whatever_a_case_does_the_others_run(tmp_path: Path) -> None:
    start = time.monotonic()
    rows, runner = rows_of(tmp_path, Check("odd", "", 10, "tests.benchmarks.gpu_checks"))
    assert time.monotonic() - start < 25
    found = {row.name: row for row in rows}
    assert len(found) == len(rows), "no case runs twice"
    assert [row.name for row in rows if row.verdict is Verdict.PASS] == ["good", "raises, first"]
    assert found["wrong"].verdict is Verdict.FAIL
    assert "on purpose [tests/benchmarks/gpu_checks.py:" in found["raises"].reason
    assert "illegal memory access" in found["loses"].reason
    assert found["crashes"].verdict is Verdict.FAIL
    assert "SIGSEGV" in found["crashes"].reason
    assert found["hangs"].verdict is Verdict.FAIL
    assert 'it stood at File "tests/benchmarks/gpu_checks.py", line' in found["hangs"].reason
    assert found["never reached"] == Row("never reached", Verdict.NOT_RUN, reason="out of time")
    assert "about to hang" in runner.logs["odd"]


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    (row,), _ = rows_of(tmp_path, Check("odd", "", 60, "tests.benchmarks.gpu_check_unimportable"))
    assert row.verdict is Verdict.IMPOSSIBLE
    assert "pip install xxhash" in row.reason


def test_what_no_longer_fits_is_not_run(tmp_path: Path) -> None:
    (row,), _ = rows_of(tmp_path, CHECKS[0], budget_s=1.0)
    assert (row.verdict, row.reason) == (Verdict.NOT_RUN, "out of time")


# The checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streams", "tiny", "init", "offload"])
def test_a_check_runs_without_a_device(tmp_path: Path, name: str) -> None:
    check = next(check for check in CHECKS if check.name == name)
    rows, runner = rows_of(tmp_path, check, quick=True)
    assert rows
    assert [row for row in rows if row.verdict in (Verdict.FAIL, Verdict.NOT_RUN)] == [], runner.logs
    assert any(row.reason == "no accelerator" for row in rows)


def test_what_needs_two_devices_is_said(tmp_path: Path) -> None:
    rows = list(two_devices.more(Bench(True, tmp_path)))
    assert all(row.verdict is Verdict.IMPOSSIBLE and row.reason.startswith("no accelerator: ") for row in rows)


def _events() -> Iterator[dict[str, Any]]:
    """A step whose forward launches two kernels and whose backward, in another thread, one, beside a collective's."""

    def span(cat: str, name: str, ts: float, dur: float, tid: int, **args: int) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    yield {"ph": "M", "name": "process_name"}
    yield span("user_annotation", "forward", 0, 100, 1)
    yield span("user_annotation", "backward", 100, 100, 1)
    yield span("cpu_op", "c10d::_allgather_base_", 140, 20, 2)
    for correlation, ts, tid in ((1, 10, 1), (2, 20, 1), (3, 120, 2), (4, 150, 2), (5, 300, 1)):
        yield span("cuda_runtime", "cudaLaunchKernel", ts, 3, tid, correlation=correlation)
        yield span("kernel", f"k{correlation}", ts + 5, 20, 0, correlation=correlation, stream=tid)
    yield span("cuda_runtime", "cudaDeviceSynchronize", 350, 10, 1, correlation=6)


def test_a_trace_tells_launches_by_region_and_collectives_apart() -> None:
    trace = Trace.of(_events())
    assert [span.correlation for span in trace.launched("forward")] == [1, 2]
    assert [span.correlation for span in trace.launched("backward")] == [3]
    assert trace.idle_after("backward") == 305 - 175
    assert trace.idle_after("nonesuch") is None
    assert trace.streams() == {1: 3, 2: 2}


def test_torch_writes_traces_as_they_are_read(tmp_path: Path) -> None:
    def action() -> None:
        with torch.profiler.record_function("forward"):
            torch.ones(3).add_(1)

    trace = profiled(torch.device("cpu"), action, tmp_path / "trace.json.gz")
    assert trace.regions["forward"].end > trace.regions["forward"].start
    assert trace.launches == []


# The private names ----------------------------------------------------------------------------------------------------


def _chain(node: ast.AST, aliases: dict[str, str]) -> str:
    """A dotted name as it would be written without aliases; "" if it is none."""
    if isinstance(node, ast.Attribute):
        before = _chain(node.value, aliases)
        return f"{before}.{node.attr}" if before else ""
    return aliases.get(node.id, "") if isinstance(node, ast.Name) else ""


def _private_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    aliases: dict[str, str] = {}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {
                (a.asname or a.name.split(".")[0]): (a.name if a.asname else a.name.split(".")[0]) for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            aliases |= {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
            found |= {f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _chain(node.value, aliases):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                aliases[target.id] = _chain(node.value, aliases)
    found |= {_chain(node, aliases) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    private = {name for name in found if name.startswith("torch.")}
    return {name for name in private if any(p.startswith("_") and not p.startswith("__") for p in name.split("."))}


def test_the_list_of_private_names_is_complete() -> None:
    used = set().union(*(_private_names(path) for path in (ROOT / "src" / "shardwise").rglob("*.py")))
    assert len(used) > 20
    unlisted = {
        n for n in used if not any(name == n or n.startswith(f"{name}.") or name.startswith(f"{n}.") for name in NAMES)
    }
    assert unlisted == set()
    assert missing() == []
