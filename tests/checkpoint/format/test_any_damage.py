"""Whatever happens to the files of a checkpoint, of either layout, `verify` finds it and says where."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.checkpoint import verify
from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.errors import CheckpointError
from tests.checkpoint.states import train_and_save
from tests.engine.cases import Case
from tests.ranks import RankPools


@pytest.fixture(scope="module", params=["in-place", "in-parts"])
def whole(request: pytest.FixtureRequest, ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "saved"
    if request.param == "in-parts":
        pytest.importorskip("fsspec")
    where = f"file://{path}" if request.param == "in-parts" else path
    ranks(2).run(save_in_pieces, where)
    assert bool(manifest.read(LocalDirectory(path)).joined) == (request.param == "in-parts")
    return path


def save_in_pieces(where: Path) -> None:
    train_and_save(Case("full_shard", 2), where, max_file_bytes=700)


@pytest.fixture(scope="module")
def copy(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(whole, tmp_path_factory.mktemp("copy") / "saved")


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """Some change: bytes written over, put in, taken out, or moved."""
    kind = data.draw(st.sampled_from(["over", "over", "in", "out", "swap", "digits"]))
    at = data.draw(st.integers(0, max(0, len(content) - 1)))
    if kind == "over":
        new = data.draw(st.binary(min_size=1, max_size=9))
        return content[:at] + new + content[at + len(new) :]
    if kind == "in":
        return content[:at] + data.draw(st.binary(min_size=1, max_size=9)) + content[at:]
    stop = data.draw(st.integers(at, min(len(content), at + 40)))
    if kind == "out":
        return content[:at] + content[stop:]
    if kind == "swap":
        end = data.draw(st.integers(stop, min(len(content), stop + 40)))
        return content[:at] + content[stop:end] + content[at:stop] + content[end:]
    digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()] or [at]
    where = data.draw(st.sampled_from(digits))
    return content[:where] + bytes([data.draw(st.sampled_from(b"0123456789"))]) + content[where + 1 :]


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_change_is_found_and_named(whole: Path, copy: Path, data: st.DataObject) -> None:
    files = sorted(file.name for file in whole.iterdir())
    name = data.draw(st.sampled_from([*files, manifest.NAME, manifest.NAME]))
    content = (whole / name).read_bytes()
    changed = damaged(data, content)
    (copy / name).write_bytes(changed)
    said = verified(copy)
    unchanged = not said and manifest.read(LocalDirectory(copy)) == manifest.read(LocalDirectory(whole))
    (copy / name).write_bytes(content)
    assert "\n" not in said
    if said:
        assert changed != content
        assert name in said or name == manifest.NAME
    else:  # only white space of the manifest may change, or nothing
        assert unchanged
        assert changed == content or name == manifest.NAME


def verified(path: Path) -> str:
    """What `verify` says; nothing if all is well."""
    try:
        verify(path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_all_damaged_files_are_named_and_reading_is_followed(whole: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(whole, tmp_path / "saved")
    records = manifest.read(LocalDirectory(copy)).files
    seen: list[tuple[int, int]] = []
    verify(copy, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    total = sum(record.nbytes for record in records.values())
    assert seen[-1] == (total, total)
    first, second, *_ = (name for name, record in records.items() if record.nbytes)
    content = (copy / first).read_bytes()
    (copy / first).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (copy / second).unlink()
    found = [str(error) for error in manifest.damage(copy)]
    assert len(found) == 2
    assert f"{second} is missing" in found[0]
    assert f"{first} is damaged: bytes [" in found[1]
    assert [str(error) for error in manifest.damage(copy, quick=True)] == found[:1]
