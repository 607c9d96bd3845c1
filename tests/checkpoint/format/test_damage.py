"""Bytes that changed, files that became shorter, longer or none: found, and said in one clear line."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import verify
from shardwise.checkpoint.format import manifest, tensor_files
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.errors import CheckpointError
from tests.engine.rig import Net, adamw

FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "training.json")
INDEX = "model.safetensors.index.json"
"""Read by other programs, not by `load`."""


def small() -> tuple[nn.Module, Any]:
    model = sw.shard(Net(depth=1))
    return model, adamw(model.parameters())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, optimizer = small()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    path = tmp_path_factory.mktemp("damage") / "step-000001"
    sw.checkpoint.save(path, model, optimizer, step=1)
    assert sorted(file.name for file in path.iterdir()) == sorted([*FILES, INDEX])
    return path


def flips(path: Path) -> list[tuple[int, int]]:
    """Every byte of a file with a bit to turn, another one each time; every 16th of the random states' long text."""
    generator = random.Random(path.name)
    size = path.stat().st_size
    return [(at, 1 << generator.randrange(8)) for at in range(0, size, 16 if path.name == "training.json" else 1)]


def layouts(path: Path) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """What the headers say, but for their metadata."""
    found = [tensor_files.find(Contents.of(path), stem).files for stem in ("model", "optimizer")]
    return [(dict(file.tensors), dict(file.starts)) for files in found for file in files.values()]


class Flipped:
    """One bit of a file, turned for a moment."""

    def __init__(self, path: Path, at: int, mask: int) -> None:
        self._path, self._at, self._mask = path, at, mask

    def __enter__(self) -> None:
        self._flip()

    def __exit__(self, *_: object) -> None:
        self._flip()

    def _flip(self) -> None:
        fd = os.open(self._path, os.O_RDWR)
        try:
            (byte,) = os.pread(fd, 1, self._at)
            os.pwrite(fd, bytes([byte ^ self._mask]), self._at)
        finally:
            os.close(fd)


def verified(path: Path) -> str:
    """What `verify` says; nothing if all is well."""
    try:
        verify(path)
    except CheckpointError as error:
        return str(error)
    return ""


def load_into(model: nn.Module, optimizer: Any, path: Path) -> tuple[int | None, str]:
    """The step that was loaded, or what `load` says."""
    try:
        return sw.checkpoint.load(path, model, optimizer).step, ""
    except CheckpointError as error:
        return None, str(error)


@pytest.mark.parametrize("name", [*FILES, INDEX])
def test_any_flipped_bit_is_found_where_it_is(name: str, path: Path) -> None:
    whole = manifest.read(LocalDirectory(path))
    for at, mask in flips(path / name):
        with Flipped(path / name, at, mask):
            said = verified(path)
            assert "\n" not in said
            if said:
                assert name in said or name == manifest.NAME, said
            else:  # white space of the manifest; what it says is the same
                assert name == manifest.NAME, f"byte {at} of {name} ^ {mask:#x} went unnoticed"
                assert manifest.read(LocalDirectory(path)) == whole
    verify(path)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name.endswith(".safetensors") else []) for name in FILES]
)
def test_loading_what_is_damaged_ends_in_one_line_or_in_numbers(name: str, path: Path) -> None:
    """`load` sums no tensors, but it never fails in another way, and it believes nothing else that is damaged."""
    model, optimizer = small()
    whole = layouts(path)
    for at, mask in flips(path / name):
        with Flipped(path / name, at, mask):
            step, said = load_into(model, optimizer, path)
            assert "\n" not in said
            if step is not None:
                assert step == 1
                assert name != "training.json"
                assert layouts(path) == whole


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [0, 1, 0.5, -1, +1, None])
def test_files_of_another_size_are_named(name: str, size: float | None, path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "step-000001"
    shutil.copytree(path, copy)
    before = (copy / name).stat().st_size
    if size is None:
        (copy / name).unlink()
    elif size == 1 and name == manifest.NAME:
        os.truncate(copy / name, 1)
    else:
        os.truncate(copy / name, {0: 0, 0.5: before // 2, -1: before - 2, 1: before + 1}[size])
    for check in (verify, lambda where: sw.checkpoint.load(where, *small())):
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            check(copy)


def test_a_manifest_that_names_a_file_twice_is_damaged(path: Path, tmp_path: Path) -> None:
    """Else one of the two would be in no checksum, and verify would say that all is well."""
    copy = tmp_path / "step-000001"
    shutil.copytree(path, copy)
    text = (copy / manifest.NAME).read_text()
    (copy / manifest.NAME).write_text(text.replace('"model.safetensors"', '"optimizer.safetensors"'))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: .*'optimizer\.safetensors' twice"):
        verify(copy)
