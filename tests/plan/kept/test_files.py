"""A directory of files: bounded, switchable, named by what they depend on."""

import os
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


OLD, NEW = files.name_of("kind", "old"), files.name_of("kind", "new")


def test_room_is_made_for_new_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(OLD, "x" * 10)
    size = (folder / OLD).stat().st_size
    monkeypatch.setattr(files, "LIMIT_BYTES", size * 3 // 2)
    files.write(NEW, "y" * 10)
    assert [path.name for path in folder.iterdir()] == [NEW]


def test_what_is_not_ours_is_never_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LIMIT_BYTES", 60)
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious" * 100)
    (folder / "album.shardwise").mkdir()
    (folder / "link.shardwise").symlink_to(folder / "thesis.txt")
    strange = {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    for number in range(20):  # each of some 20 bytes
        files.write(files.name_of("kind", number), number)
    own = [path for path in folder.iterdir() if path.name not in strange]
    assert strange < {path.name for path in folder.iterdir()}
    assert 0 < sum(path.stat().st_size for path in own) <= files.LIMIT_BYTES


def test_a_write_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        files.write(OLD, 1)
    assert list(folder.iterdir()) == []
    (folder / ".killed.shardwise").write_bytes(b"half")
    files.write(OLD, 1)
    assert (folder / ".killed.shardwise").exists()  # another process may be writing it
    os.utime(folder / ".killed.shardwise", (1, 1))
    files.write(OLD, 1)
    assert [path.name for path in folder.iterdir()] == [OLD]


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(files.VARIABLE, "0")
    assert files.cache_directory() is None
    files.write("a.kind", 1)
    assert files.read("a.kind") is None
    monkeypatch.setenv(files.VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_directory() == tmp_path / "shardwise" / "plan"
    monkeypatch.setenv(files.VARIABLE, "~/here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_directory() == tmp_path / "here"


def test_a_directory_that_cannot_be_written_to_keeps_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "a file" / "below"))
    files.write("a.kind", 1)
    assert files.read("a.kind") is None
