"""Suggestions of the nearest name."""

from pathlib import Path

from shardwise.suggest import did_you_mean, nearest_path


def test_the_nearest_names_but_never_the_name_itself(tmp_path: Path) -> None:
    assert did_you_mean("lama", ["llama", "opt"]) == "; did you mean llama?"
    assert did_you_mean("make", ["make", "maker"]) == "; did you mean maker?"
    assert did_you_mean("make", ["make"]) == ""
    (tmp_path / "empty").mkdir()
    assert nearest_path(tmp_path / "empty") == ""
