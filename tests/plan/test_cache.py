"""A directory of files: bounded, switchable, named by what they depend on."""

import os
from pathlib import Path

import pytest

from shardwise.plan import cache


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_what_is_written_is_read(folder: Path) -> None:
    cache.write("a.kind", {"x": [1, 2.5, None]})
    assert cache.read("a.kind") == {"x": [1, 2.5, None]}
    assert cache.read("b.kind") is None
    assert [path.name for path in folder.iterdir()] == ["a.kind"]


def test_a_damaged_file_is_none(folder: Path) -> None:
    cache.write("a.kind", [1] * 100)
    for damage in (b"", (folder / "a.kind").read_bytes()[:-9]):
        (folder / "a.kind").write_bytes(damage)
        assert cache.read("a.kind") is None


def test_the_parts_and_our_own_code_are_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache, "_OWN", tmp_path)
    cache.code.cache_clear()
    names = {cache.name_of("kind", {"b": 1, "a": 2}), cache.name_of("kind", {"a": 2, "b": 1})}
    assert len(names) == 1
    names |= {cache.name_of("other", {"a": 2, "b": 1}), cache.name_of("kind", {"a": 2, "b": 2})}
    (tmp_path / "step.py").write_text("changed = True")
    cache.code.cache_clear()
    names.add(cache.name_of("kind", {"a": 2, "b": 1}))
    cache.code.cache_clear()
    assert len(names) == 4


def test_the_older_half_makes_room_for_new_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_FILES", 3)
    names = [cache.name_of("kind", number) for number in range(4)]
    for number, name in enumerate(names):
        cache.write(name, number)
        if number < 3:
            os.utime(folder / name, (number, number))
    assert {path.name for path in folder.iterdir()} == {*names[2:]}


def test_what_is_not_ours_is_never_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_FILES", 3)
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious" * 100)
    (folder / "album.shardwise").mkdir()
    (folder / "link.shardwise").symlink_to(folder / "thesis.txt")
    strange = {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    for number in range(20):
        cache.write(cache.name_of("kind", number), number)
    own = [path for path in folder.iterdir() if path.name not in strange]
    assert strange < {path.name for path in folder.iterdir()}
    assert 0 < len(own) <= 3


def test_a_write_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    cache.write("a.kind", 1)
    assert list(folder.iterdir()) == []


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.VARIABLE, "0")
    assert cache.cache_directory() is None
    cache.write("a.kind", 1)
    assert cache.read("a.kind") is None
    monkeypatch.setenv(cache.VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_directory() == tmp_path / "shardwise" / "plan"
    monkeypatch.setenv(cache.VARIABLE, "~/here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_directory() == tmp_path / "here"


def test_a_directory_that_cannot_be_written_to_keeps_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "a file" / "below"))
    cache.write("a.kind", 1)
    assert cache.read("a.kind") is None
