"""The newcomer's walk of docs/tutorial.md: its data, its commands in order, its script. With fewer steps, so that the
model has learnt little; the exported model must answer as the merged one all the same."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "shardwise")
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
BASE_STEPS, STEPS = 4, 20
pytest.importorskip("onnxruntime")
pytest.importorskip("peft")


def _blocks(language: str) -> list[str]:
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    parts = re.split(r"^```(.*)\n", page, flags=re.MULTILINE)
    return [block for found, block in zip(parts[1::4], parts[2::4], strict=True) if found == language]


def _run(words: list[str], where: Path) -> str:
    done = subprocess.run(words, cwd=where, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_walk_ends_with_the_answer_of_the_merged_model(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    _run([*COMMAND, "train", "recipes/quickstart.toml", f"train.steps={BASE_STEPS}"], tmp_path)
    [rows] = _blocks("json")
    (tmp_path / "capitals.jsonl").write_text(rows, encoding="utf-8")
    lines = [line for block in _blocks("") for line in block.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("shardwise ")]
    assert [words[1] for words in commands] == ["init", "plan", "train", "generate", "convert", "generate", "export"]
    answers: list[str] = []
    for command in commands:
        words = [str(STEPS) if word == "300" else word for word in command[1:]]
        printed = _run([*COMMAND, *words], tmp_path)
        if words[0] == "generate":
            answers.append(printed)
    [script] = _blocks("python")
    merged = answers[1].strip()
    assert merged
    assert _run([sys.executable, "-c", script], tmp_path).strip() == merged
