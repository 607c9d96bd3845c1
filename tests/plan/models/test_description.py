"""What was kept of a configuration."""

from pathlib import Path

import pytest

from shardwise.plan.kept import files
from shardwise.plan.models import description
from shardwise.plan.models.description import ConfigDescription, keep_description, kept_description

CONFIG = {"model_type": "llama", "hidden_size": 8}


def test_it_comes_back_unless_it_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    assert kept_description(CONFIG) is None
    known = ConfigDescription(positions=2048, is_rotary=True, normalised={"hidden_size": 8}, is_language_model=True)
    keep_description(CONFIG, known)
    assert kept_description(CONFIG) == known
    for damage in ([1, 2], {"positions": 1}, "words"):
        files.write(description._name(CONFIG), damage)
        assert kept_description(CONFIG) is None
