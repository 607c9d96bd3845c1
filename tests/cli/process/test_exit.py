"""How commands end, and what they print for errors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardwise.cli.process.exit import mistake


@pytest.mark.parametrize(("module", "extra"), [("transformers.models", "train"), ("typer", "train"), ("jax", "jax")])
def test_a_missing_module_names_its_extra(module: str, extra: str) -> None:
    said = mistake(ModuleNotFoundError("No module", name=module))
    name = module.partition(".")[0]
    assert said == f"the module {name!r} is missing; install it with: pip install 'shardwise[{extra}]'"


def test_all_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("datasets", "peft"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", ["shardwise", "init", "--lora=8"])
    said = mistake(ModuleNotFoundError("No module", name="datasets"))
    assert said == "the modules datasets, peft are missing; install them with: pip install 'shardwise[train,peft]'"
    monkeypatch.setattr(sys, "argv", ["shardwise", "plan", "llama-3-8b", "--lora", "8"])  # plans without PEFT
    said = mistake(ModuleNotFoundError("No module", name="datasets"))
    assert said == "the module 'datasets' is missing; install it with: pip install 'shardwise[train]'"


def test_another_missing_module_is_no_mistake() -> None:
    assert mistake(ModuleNotFoundError("No module", name="shardwise.x")) is None


TOLD = """
import atexit, sys
class Kept:
    def __del__(self): print("taken apart")
kept = Kept()
atexit.register(print, "exit hook")
sys.stdout.write("not flushed yet ")
"""
"""A program that prints how it ends: after the exit hooks, Python calls `__del__` of objects that still exist."""


def told(program: str, status: int, *arguments: str) -> str:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", TOLD + program, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=buffered)
    assert ran.returncode == status, ran.stderr
    return ran.stdout


def test_an_end_flushes_and_runs_exit_hooks_and_leaves_memory_alone() -> None:
    assert told("from shardwise.cli.process.exit import end; end(3)", 3) == "not flushed yet exit hook\n"


def test_a_plan_ends_so_and_no_other_command_does() -> None:
    program = "from shardwise.cli.main import main; main()"
    planned = told(program, 2, "plan", "llama-3-8b", "--gpus", "8", "--workers", "0")
    assert planned == "not flushed yet exit hook\n"
    assert told(program, 0, "--version").endswith("exit hook\ntaken apart\n")


def test_an_end_that_nobody_reads_is_pythons_own() -> None:
    closed = "import os; r, w = os.pipe(); os.dup2(w, 1); os.close(r); "
    assert told(closed + "from shardwise.cli.process.exit import end; end(0)", 120) == ""
