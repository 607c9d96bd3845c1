"""Commands never run code that a model's directory brings along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.app import run

pytest.importorskip("transformers")


@pytest.mark.parametrize("command", ["plan", "generate", "inspect"])
def test_code_beside_a_model_is_not_run(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = tmp_path / "ran"
    model = tmp_path / "model"
    model.mkdir()
    classes = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    (model / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": classes}))
    (model / "theirs.py").write_text(f"open({str(ran)!r}, 'w')")
    options = ["--prompt", "a"] if command == "generate" else []
    assert run([command, str(model), *options]) == 2
    assert "error: " in capsys.readouterr().err
    assert not ran.exists()
