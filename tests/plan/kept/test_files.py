"""A directory of files: bounded, switchable, named by what they depend on."""

from pathlib import Path

import pytest

from shardwise.plan.kept import files


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_what_is_written_is_read(folder: Path) -> None:
    files.write("a.kind", {"x": [1, 2.5, None]})
    assert files.read("a.kind") == {"x": [1, 2.5, None]}
    assert files.read("b.kind") is None
    assert [path.name for path in folder.iterdir()] == ["a.kind"]


def test_a_damaged_file_is_none(folder: Path) -> None:
    files.write("a.kind", [1] * 100)
    for damage in (b"", (folder / "a.kind").read_bytes()[:-9], b"{}"):
        (folder / "a.kind").write_bytes(damage)
        assert files.read("a.kind") is None


def test_the_parts_and_our_own_code_are_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "_OWN", tmp_path)
    files.code.cache_clear()
    names = {files.name_of("kind", {"b": 1, "a": 2}), files.name_of("kind", {"a": 2, "b": 1})}
    assert len(names) == 1
    names |= {files.name_of("other", {"a": 2, "b": 1}), files.name_of("kind", {"a": 2, "b": 2})}
    (tmp_path / "step.py").write_text("changed = True")
    files.code.cache_clear()
    names.add(files.name_of("kind", {"a": 2, "b": 1}))
    files.code.cache_clear()
    assert len(names) == 4


def test_room_is_made_for_new_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write("old.kind", "x" * 10)
    size = (folder / "old.kind").stat().st_size
    monkeypatch.setattr(files, "LIMIT_BYTES", size * 3 // 2)
    files.write("new.kind", "y" * 10)
    assert [path.name for path in folder.iterdir()] == ["new.kind"]


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(files.VARIABLE, "0")
    assert files.cache_directory() is None
    files.write("a.kind", 1)
    assert files.read("a.kind") is None
    monkeypatch.setenv(files.VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_directory() == tmp_path / "shardwise" / "plan"


def test_a_directory_that_cannot_be_written_to_keeps_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "a file" / "below"))
    files.write("a.kind", 1)
    assert files.read("a.kind") is None
