"""What counts as a checkpoint, and what is in its way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.checkpoint import latest
from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.checkpoint.publish import commit
from shardwise.checkpoint.publish.shared_files import SharedFiles
from shardwise.errors import CheckpointError, UnreadableError


def committed(path: Path, step: int) -> Path:
    path.mkdir(parents=True)
    (path / "training.json").write_text(json.dumps({"step": step}))
    record = manifest.record_of((path / "training.json").read_bytes())
    manifest.write(LocalDirectory(path), Manifest({"training.json": record}))
    return path


def test_the_latest_is_the_highest_step_that_was_committed(tmp_path: Path) -> None:
    assert latest(tmp_path / "nothing") is None
    assert latest(tmp_path) is None
    committed(tmp_path / "checkpoints" / "step-000900", 900)
    newest = committed(tmp_path / "checkpoints" / "step-001000", 1000)
    committed(tmp_path / "checkpoints" / "step-002000.partial", 2000)
    (tmp_path / "checkpoints" / "step-003000").mkdir()  # no manifest
    (tmp_path / "checkpoints" / "step-004000").write_text("a file")
    assert latest(tmp_path) == newest
    assert latest(tmp_path / "checkpoints") == newest
    other = committed(tmp_path / "mine", 1001)
    assert latest(tmp_path) == other


def test_directories_in_the_place_of_files_make_no_checkpoint(tmp_path: Path) -> None:
    newest = committed(tmp_path / "step-000001", 1)
    (tmp_path / "step-000002" / "manifest.json").mkdir(parents=True)
    other = committed(tmp_path / "mine", 3)
    (other / "training.json").unlink()
    (other / "training.json").mkdir()
    assert latest(tmp_path) == newest
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: it is a directory$") as caught:
        manifest.verify(tmp_path / "step-000002")
    assert not isinstance(caught.value, UnreadableError)


def test_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    path = committed(tmp_path / "step-000001", 1)
    with pytest.raises(CheckpointError, match="step-000001 exists already"):
        commit.begin(path)
    manifest.read(LocalDirectory(path))


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_checkpoint_is_replaced_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(commit, "_exchange", lambda left, right: False)
    path = committed(tmp_path / "step-000001", 1)
    (path / "of-the-old-one").touch()
    partial = commit.begin(path, overwrite=True)
    (partial / "of-the-new-one").touch()
    assert (path / "of-the-old-one").exists()
    commit.commit_over(path)
    assert [found.name for found in path.iterdir()] == ["of-the-new-one"]
    assert [found.name for found in tmp_path.iterdir()] == ["step-000001"]


def test_names_are_exchanged_in_one_step(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "file").touch()
    assert commit._exchange(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["file"]
    assert not commit._exchange(tmp_path / "a", tmp_path / "missing")


def test_nothing_but_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="is not a checkpoint, and overwrite=True replaces only checkpoints"):
        commit.begin(tmp_path / "mine", overwrite=True)
    checkpoint = committed(tmp_path / "step-000001", 1)
    (tmp_path / "link").symlink_to(checkpoint)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        commit.begin(tmp_path / "link", overwrite=True)
    assert commit.begin(tmp_path / "new", overwrite=True).is_dir()


def test_what_a_crash_left_is_replaced(tmp_path: Path) -> None:
    partial = tmp_path / "step-000001.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    assert commit.begin(tmp_path / "step-000001") == partial
    assert list(partial.iterdir()) == []
    commit.commit(tmp_path / "step-000001")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_partials_are_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = committed(tmp_path / "step-000001", 1)
    (tmp_path / "mine.partial").mkdir()
    (tmp_path / "step-000002.partial" / "below").mkdir(parents=True)
    assert [path.name for path in commit.remove_partials(tmp_path)] == ["step-000002.partial"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.partial", kept.name]


def test_a_checkpoint_is_called_partial_before_its_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = committed(tmp_path / "step-000001", 1)

    def stop(what: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(commit.shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            commit.remove(path)
    assert [left.name for left in tmp_path.iterdir()] == ["step-000001.partial"]
    commit.remove(committed(path, 1))
    assert list(tmp_path.iterdir()) == []


def test_of_a_link_the_link_alone_is_removed(tmp_path: Path) -> None:
    """Somebody moved a checkpoint to another disk and left a link."""
    elsewhere = committed(tmp_path / "elsewhere", 1)
    run = tmp_path / "run"
    run.mkdir()
    (run / "step-000001").symlink_to(elsewhere)
    commit.remove(run / "step-000001")
    (run / "step-000002.partial").symlink_to(elsewhere)
    commit.remove_partials(run)
    assert list(run.iterdir()) == []
    assert manifest.read(LocalDirectory(elsewhere)).files


def test_a_save_is_over_though_its_checkpoint_was_moved_on(tmp_path: Path) -> None:
    target = SharedFiles(tmp_path / "saved")
    target.begin()
    assert not target.is_committed()
    (committed(tmp_path / "other", 1) / manifest.NAME).rename(tmp_path / "saved.partial" / manifest.NAME)
    commit.commit(tmp_path / "saved")
    assert target.is_committed()
    (tmp_path / "saved").rename(tmp_path / "elsewhere")
    assert target.is_committed()


def test_what_is_set_aside_is_no_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):  # the second replaces the first
        aside = commit.set_aside(committed(tmp_path / "step-000003", step))
    assert [path.name for path in tmp_path.iterdir()] == [aside.name]
    assert manifest.read(LocalDirectory(aside)).files
    assert latest(tmp_path) is None
