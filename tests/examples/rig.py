"""Examples as their users start them, and what the page shows of them."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from tools.run_examples import TUTORIAL, environment, examples, furnish, output_of

EXAMPLES = Path(__file__).parents[2] / "examples"


def module(name: str) -> ModuleType:
    """Import a script without running it."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


ABORTS_AFTER_DCP = "terminate called without an active exception"
"""What torch 2.13 says where rank 0 aborts as Python exits, all work done: one run in five that calls `dcp.save`."""


def shell(commands: str, directory: Path, forgiven: str | None = None) -> list[str]:
    """Run commands in a directory, which gets a link to examples; return the lines that they print.

    They must succeed, or fail with the `forgiven` words.
    """
    if not (directory / "examples").exists():
        furnish(directory)
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=directory, env=environment(), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 or (forgiven and forgiven in done.stderr), done.stdout + done.stderr
    return done.stdout.splitlines()


def torchrun(ranks: int, command: str, directory: Path, forgiven: str | None = None) -> list[str]:
    """Start a script, with its options, on so many ranks, and do as `shell` does."""
    return shell(
        f"torchrun --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint localhost:0 {command}", directory
    )


def losses(lines: list[str]) -> dict[str, float]:
    """Return losses by what stands before them: `step 10: loss 1.25` is {"step 10": 1.25}."""
    found = (re.match(r"\s*(.*?)[:,] loss ([\d.]+)", line) for line in lines)
    return {match[1]: float(match[2]) for match in found if match}


def lines_of_code(file: Path) -> int:
    """Count lines that are neither empty nor a comment nor a docstring."""
    source = file.read_text(encoding="utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    numbered = enumerate(map(str.strip, source.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and n not in documented for n, line in numbered)


def assert_shown(heading: str, lines: list[str], but_last: int = 0) -> None:
    """Check that the page shows an output of such lines: the same ones in the same order but for numbers.

    Lines that follow one another and differ in numbers alone count once, so that runs may differ in their length. The
    last `but_last` lines of both may differ.
    """
    [shown] = [example.output.splitlines() for example in examples()[heading] if not example.is_diff]
    printed, shown = (found[: len(found) - but_last] for found in (lines, shown))
    assert _kinds(printed) == _kinds(shown), f"run: python tools/run_examples.py '{heading}'"


def assert_runs_as_shown(directory: Path, heading: str, guessed: str | None = None) -> list[str]:
    """Run a step of the tutorial in the directory of those before it, and check that it prints what the page shows.

    Differences of files are compared as they are, other lines but for numbers. Boxes are left out: one is a sample of a
    model's writing. So is what commands that begin with `guessed` print: a model not taught the answer. Returns the
    lines that commands other than `diff` have printed.
    """
    lines = []
    for example in examples(TUTORIAL)[heading]:
        printed = output_of(example.commands, directory)
        if example.is_diff:
            assert printed == example.output, "run: python tools/run_examples.py tutorial"
            continue
        found, shown = (
            [line for line in text.splitlines() if line[:1] not in {"│", "╭", "╰"}]
            for text in (printed, example.output)
        )
        if guessed is None or not example.commands.startswith(guessed):
            assert _kinds(found) == _kinds(shown), "run: python tools/run_examples.py tutorial"
        lines += found
    assert lines
    return lines


def _kinds(lines: list[str]) -> list[str]:
    kinds = [re.sub(r"[-+]?\d[\d.,]*(e[-+]\d+)?", "#", " ".join(line.split())) for line in lines]
    return [kind for before, kind in zip(["", *kinds], kinds, strict=False) if kind not in {before, ""}]
