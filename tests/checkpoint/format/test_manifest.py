"""Damage of every kind is found, and said where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.manifest import FileRecord, Manifest, verify
from shardwise.checkpoint.io.checksums import RegionSums
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.errors import CheckpointError

DATA = bytes(range(100))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of two files; `a` was written in three regions by two ranks."""
    (tmp_path / "a").write_bytes(DATA)
    (tmp_path / "b").write_bytes(b"")
    first, second = RegionSums(), RegionSums()
    first.add(0, DATA[:10])
    first.add(10, DATA[10:30])
    first.add(60, DATA[60:])
    second.add(30, DATA[30:60])
    record = FileRecord(len(DATA), (*first.regions(), *second.regions()))
    manifest.write(LocalDirectory(tmp_path), Manifest({"a": record, "b": manifest.record_of(b"")}))
    return tmp_path


def edit(directory: Path, change: Callable[[dict], None]) -> None:
    path = directory / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_a_whole_checkpoint_verifies(directory: Path) -> None:
    verify(directory)
    document = json.loads((directory / "manifest.json").read_text())
    assert (document["format"], document["checksum"]) == (1, "xxh3_64")
    assert document["files"]["a"]["bytes"] == 100
    assert [(start, stop) for start, stop, _ in document["files"]["a"]["regions"]] == [(0, 30), (30, 60), (60, 100)]
    assert document["files"]["a"]["regions"][1][2] == xxhash.xxh3_64_hexdigest(DATA[30:60])


@pytest.mark.parametrize(
    ("byte", "region"), [(0, r"\[0, 30\)"), (29, r"\[0, 30\)"), (30, r"\[30, 60\)"), (99, "60, 100")]
)
def test_a_flipped_byte_is_found(directory: Path, byte: int, region: str) -> None:
    damaged = bytearray(DATA)
    damaged[byte] ^= 1
    (directory / "a").write_bytes(damaged)
    with pytest.raises(CheckpointError, match=f"a is damaged: bytes .*{region}"):
        verify(directory)


def test_a_file_of_another_size_or_none_is_found(directory: Path) -> None:
    (directory / "a").write_bytes(DATA[:-1])
    with pytest.raises(CheckpointError, match="a is truncated: 99 bytes, not 100"):
        verify(directory)
    (directory / "a").write_bytes(DATA + b"x")
    with pytest.raises(CheckpointError, match="too long"):
        verify(directory)
    (directory / "a").unlink()
    with pytest.raises(CheckpointError, match="a is missing"):
        verify(directory)


def test_a_region_in_no_checksum_is_found(directory: Path) -> None:
    edit(directory, lambda document: document["files"]["a"]["regions"].pop(1))
    with pytest.raises(CheckpointError, match=r"a: the manifest has no checksum for bytes \[30, 60\)"):
        verify(directory)


@pytest.mark.parametrize("region", [[20, 40, "0" * 16], [90, 120, "0" * 16], [-5, 10, "0" * 16]])
def test_regions_that_cannot_be_are_found(directory: Path, region: list) -> None:
    edit(directory, lambda document: document["files"]["a"]["regions"].append(region))
    with pytest.raises(CheckpointError, match="are invalid"):
        verify(directory)


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "sub/a", "..", "", "manifest.json"])
def test_a_name_that_leaves_the_checkpoint_is_refused(directory: Path, name: str) -> None:
    edit(directory, lambda document: document["files"].update({name: document["files"]["a"]}))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        verify(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 2, "checksum": "xxh3_64", "files": {}}'])
def test_a_damaged_manifest_is_an_error_of_one_line(directory: Path, text: str) -> None:
    (directory / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged") as caught:
        verify(directory)
    assert "\n" not in str(caught.value)


def test_a_number_without_end_is_damage(directory: Path) -> None:
    path = directory / "manifest.json"
    document = json.loads(path.read_text())
    next(iter(document["files"].values()))["bytes"] = "@"
    path.write_text(json.dumps(document).replace('"@"', "1e999"))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: OverflowError"):
        verify(directory)


def test_a_file_is_no_checkpoint(directory: Path) -> None:
    for path in (directory / "manifest.json", directory / "manifest.json" / "below"):
        with pytest.raises(CheckpointError, match=r"is not a directory, so it is not a checkpoint$"):
            verify(path)


def test_no_manifest_is_no_checkpoint(directory: Path) -> None:
    (directory / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        verify(directory)
    with pytest.raises(CheckpointError, match="does not exist"):
        verify(directory / "nowhere")


@given(st.lists(st.binary(max_size=5), max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_sums_are_those_of_the_runs_that_were_written(parts: list[bytes], jumps: list[bool]) -> None:
    sums, position, runs = RegionSums(), 0, []
    for part, jump in zip(parts, jumps, strict=False):
        if jump or not runs:
            position += 10
            runs.append((position, b""))
        sums.add(position, part)
        runs[-1] = (runs[-1][0], runs[-1][1] + part)
        position += len(part)
    expected = [(start, start + len(data), xxhash.xxh3_64_hexdigest(data)) for start, data in runs if data]
    assert sums.regions() == expected
