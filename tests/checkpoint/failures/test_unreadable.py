"""Storage that does not answer has damaged nothing: that is said, and not taken for damage or for absence."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.utils import _ReaderView

import shardwise as sw
from shardwise.checkpoint import inspect, latest, verify
from shardwise.checkpoint.interchange.inspection import Inspection
from shardwise.cli.app import run
from shardwise.errors import CheckpointError, UnreadableError
from tests.checkpoint.rig import away


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step-000001"
    model = sw.shard(torch.nn.Linear(3, 3))
    sw.checkpoint.save(path, model, torch.optim.AdamW(model.parameters()), step=1)
    return path


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
@pytest.mark.parametrize("function", ["open", "preadv"])
def test_what_cannot_be_read_is_named_with_the_reason(
    function: str, number: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away(monkeypatch, "optimizer.safetensors", number, function)
    with pytest.raises(UnreadableError) as caught:
        verify(checkpoint)
    assert str(caught.value) == f"{checkpoint}/optimizer.safetensors cannot be read: {os.strerror(number)}"
    with pytest.raises(UnreadableError):
        inspect(checkpoint)
    monkeypatch.undo()
    verify(checkpoint)


def test_a_file_that_is_gone_or_short_is_damage(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away(monkeypatch, "model.safetensors", errno.ENOENT)  # it went after its size was looked at
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing") as caught:
        verify(checkpoint)
    assert not isinstance(caught.value, UnreadableError)
    monkeypatch.undo()
    monkeypatch.setattr(os, "preadv", lambda *_: 0)  # it became shorter
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: it ends at byte 0") as caught:
        verify(checkpoint)
    assert not isinstance(caught.value, UnreadableError)


def test_a_manifest_that_cannot_be_read_is_not_no_checkpoint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Path.read_bytes

    def read_bytes(self: Path) -> bytes:
        if self.name == "manifest.json":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return original(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    for look in (lambda: latest(checkpoint.parent), lambda: verify(checkpoint)):
        with pytest.raises(UnreadableError, match=r"manifest\.json cannot be read: Stale file handle"):
            look()
    checkpoint.rename(checkpoint.with_name("lost+found"))
    assert latest(checkpoint.parent) is None
    checkpoint.with_name("lost+found").rename(checkpoint)
    for what in (checkpoint, checkpoint.parent):
        assert run(["inspect", str(what)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def iterdir(self: Path) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(UnreadableError, match="cannot be read: Input/output error"):
        latest(checkpoint.parent)


def test_inspect_still_tells_damage(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    found = inspect(checkpoint)
    assert isinstance(found, Inspection)
    assert [text.split("/")[-1] for text in found.damage] == [
        "model.safetensors is missing; the manifest lists 208 bytes"
    ]


@pytest.mark.parametrize("reads", [0, 1])
def test_a_conversion_whose_source_goes_away(reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first read of data, or the second: never taken for damage, nor for the target's fault."""
    torch.save({"model": {"a": torch.ones(9), "b": torch.ones(9)}, "step": 1}, tmp_path / "source.pt")
    sw.checkpoint.convert(tmp_path / "source.pt", tmp_path / "own")
    sw.checkpoint.convert(tmp_path / "own", tmp_path / "dcp", "dcp")
    preadv, left = os.preadv, 0

    def preadv_(fd: int, *arguments: Any) -> int:
        nonlocal left
        left -= not Path(f"/proc/self/fd/{fd}").readlink().name.startswith("new")
        if left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, *arguments)

    monkeypatch.setattr(os, "preadv", preadv_)
    for source, to in (("source.pt", "hf"), ("source.pt", "dcp"), ("dcp", "pt"), ("own", "pt"), ("own", "dcp")):
        left = reads
        with pytest.raises(UnreadableError, match=f"^{tmp_path}/{source}.* cannot be read: Input/output error$"):
            sw.checkpoint.convert(tmp_path / source, tmp_path / "new", to)
    assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize("source", ["source.pt", "source"])
def test_a_stream_whose_source_goes_away(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever torch is when reading fails."""
    if source == "source":
        dcp.save({"model": {"a": torch.ones(9)}, "step": 1}, checkpoint_id=tmp_path / source, no_dist=True)
    else:
        torch.save({"model": {"a": torch.ones(9)}, "step": 1}, tmp_path / source)

    class View(_ReaderView):
        reads = 0

        def readinto(self, into: Any) -> Any:
            View.reads += 1
            if View.reads > allowed:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().readinto(into)

        def read(self, size: int = -1) -> Any:
            self.readinto(bytearray())
            return super().read(size)

    monkeypatch.setattr("shardwise.checkpoint.interchange.torch_files._create_file_view", View)
    allowed = 10**6
    sw.checkpoint.convert(tmp_path / source, tmp_path / "whole")
    for allowed in range(View.reads):  # noqa: B007 - the view looks at it
        View.reads = 0
        with pytest.raises(UnreadableError, match=f"^{tmp_path}/{source}.* cannot be read: Input/output error$"):
            sw.checkpoint.convert(tmp_path / source, tmp_path / "new")
    assert not list(tmp_path.glob("new*"))


def test_a_load_whose_storage_goes_away(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sw.shard(torch.nn.Linear(3, 3))
    for function in ("open", "preadv"):
        away(monkeypatch, "model.safetensors", errno.EIO, function)
        with pytest.raises(UnreadableError, match=r"model\.safetensors cannot be read: Input/output error$"):
            sw.checkpoint.load(checkpoint, model)
        with pytest.raises(UnreadableError, match=r"model\.safetensors cannot be read: Input/output error$"):
            sw.checkpoint.load_pretrained(checkpoint, model)
        monkeypatch.undo()
