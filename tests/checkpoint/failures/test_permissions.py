"""Checkpoints that this user may not read, and places where he may not write: one line that says which."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import shardwise as sw
from shardwise.checkpoint import convert
from shardwise.cli.app import run
from shardwise.errors import UnreadableError
from tests.unprivileged import open_directory, unprivileged


@pytest.fixture
def room() -> Iterator[Path]:
    """A checkpoint of each kind, and a run of two."""
    with open_directory() as path:
        document = {"model": {"w": torch.ones(3)}, "optimizer": {"state": {}, "param_groups": []}, "step": 1}
        torch.save(document, path / "full.pt")
        dcp.save(document, checkpoint_id=path / "dcp", no_dist=True)
        convert(path / "full.pt", path / "run" / "checkpoints" / "step-000001")
        shutil.copytree(path / "run" / "checkpoints" / "step-000001", path / "run" / "checkpoints" / "step-000002")
        convert(path / "full.pt", path / "hf", "hf")
        convert(path / "run" / "checkpoints" / "step-000001", path / "first.pt")  # imports what it imports
        yield path


def line(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command of another user's that ends with status 2."""
    with unprivileged():
        status = run([*map(str, arguments)])
    printed = capsys.readouterr()
    assert (status, printed.out, printed.err.count("\n")) == (2, "", 1), printed
    return printed.err


@pytest.mark.parametrize(
    "hidden",
    [
        "run",
        "run/checkpoints/step-000002",
        "run/checkpoints/step-000002/manifest.json",
        "run/checkpoints/step-000002/training.json",
        "run/checkpoints/step-000002/model.safetensors",
        "hf",
        "hf/model.safetensors",
        "dcp",
        "dcp/.metadata",
        "dcp/__0_0.distcp",
        "full.pt",
    ],
)
def test_what_may_not_be_read_is_named(hidden: str, room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = room / Path(hidden).parts[0]
    steps = room / "run" / "checkpoints" / "step-000002"
    assert run(["inspect", str(top)]) == 0
    capsys.readouterr()
    (room / hidden).chmod(0o000)
    if hidden in {"run", "run/checkpoints/step-000002", "run/checkpoints/step-000002/training.json"}:
        assert f"{room / hidden}" in line(capsys, "inspect", top)
    what = steps if "run" in hidden else top
    assert f"{room / hidden}" in line(capsys, "inspect", what)
    (room / "out").mkdir()
    (room / "out").chmod(0o777)
    for to in {"dcp", "hf", "pt"} - {what.name, what.suffix[1:]}:
        told = line(capsys, "convert", what, room / "out" / "new", "--to", to)
        assert f"{room / hidden}" in told
        assert "cannot be read: Permission denied" in told
    assert list((room / "out").iterdir()) == []


def test_where_nothing_may_be_written(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = room / "run" / "checkpoints" / "step-000001"
    for source, target, to in (
        (step, "new.pt", "pt"),
        (step, "new", "hf"),
        (step, "new", "dcp"),
        (room / "dcp", "new", "shardwise"),
    ):
        told = line(capsys, "convert", source, room / target, "--to", to)
        assert f"{room / target} cannot be written: " in told
        assert "Permission denied" in told


def test_weights_to_begin_with(room: Path) -> None:
    save_file({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, room / "hf" / "model.safetensors")
    model = sw.shard(torch.nn.Linear(3, 3))
    sw.checkpoint.load_pretrained(room / "hf", model)
    for hidden in ("model.safetensors", "."):
        (room / "hf" / hidden).chmod(0o000)
        with unprivileged(), pytest.raises(UnreadableError, match=f"{room}/hf.* cannot be read: Permission denied"):
            sw.checkpoint.load_pretrained(room / "hf", model)
