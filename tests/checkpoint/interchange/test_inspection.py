"""What is found in checkpoints, partial directories and runs; and how the command tells it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardwise as sw
from shardwise.checkpoint import convert, inspect
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.interchange.inspection import InspectedRun, Inspection, Partial, groups
from shardwise.cli.app import run
from tests.checkpoint.states import build, step, train_and_save
from tests.engine.cases import Case
from tests.engine.rig import Net
from tests.ranks import RankPools


@pytest.fixture(scope="module")
def saved(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two checkpoints of a Net with four blocks, saved by 2 ranks."""
    root = tmp_path_factory.mktemp("runs") / "run"
    ranks(2).run(save_twice, root)
    return root


def save_twice(root: Path) -> None:
    model, optimizer = build(Case("full_shard", 2), Net)
    for number in (1, 2):
        step(model, optimizer, number)
        path = root / "checkpoints" / f"step-{number:06d}"
        sw.checkpoint.save(path, model, optimizer, step=number, extra={"data": {"sample": 7}})


@pytest.fixture
def room(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def test_contents(saved: Path) -> None:
    found = inspect(saved / "checkpoints" / "step-000002")
    assert isinstance(found, Inspection)
    assert (found.step, found.saved_by, found.extra, found.damage) == (2, 2, {"data": {"sample": 7}}, ())
    assert [group.prefix for group in found.model] == ["enter", *(f"blocks.{n}" for n in range(4)), "leave"]
    numel = sum(p.numel() for p in Net().parameters())
    assert sum(group.numel for group in found.model) == numel
    assert found.optimizer_bytes == 2 * 4 * numel
    assert found.optimizer is not None
    assert len(found.optimizer["groups"][0]["fqns"]) == len(list(Net().parameters()))
    files = saved / "checkpoints" / "step-000002"
    assert found.files == {file.name: file.stat().st_size for file in files.iterdir()}


def test_the_same_of_every_kind(saved: Path, tmp_path: Path) -> None:
    own = saved / "checkpoints" / "step-000002"
    convert(own, tmp_path / "dcp", "dcp")
    convert(own, tmp_path / "full.pt")
    convert(own, tmp_path / "hf", "hf")
    expected = inspect(own)
    assert isinstance(expected, Inspection)
    for name in ("dcp", "full.pt", "hf"):
        found = inspect(tmp_path / name)
        assert isinstance(found, Inspection)
        assert sorted(found.model, key=repr) == sorted(expected.model, key=repr)
        assert found.damage == ()
        if name != "hf":
            assert found.optimizer is not None
            assert found.optimizer["state"] == expected.optimizer["state"]  # type: ignore[index]
            assert (found.step, found.optimizer_bytes) == (2, expected.optimizer_bytes)


def test_damage_is_found_and_the_rest_still_told(room: Path) -> None:
    path = room / "checkpoints" / "step-000002"
    with (path / "optimizer.safetensors").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    seen: list[int] = []
    found = inspect(path, progress=lambda done, total: seen.append(total - done))
    assert isinstance(found, Inspection)
    assert len(found.damage) == 1
    assert "optimizer.safetensors is damaged: bytes [" in found.damage[0]
    assert seen == sorted(seen, reverse=True)
    assert len(found.model) == 6
    quick = inspect(path, quick=True)
    assert isinstance(quick, Inspection)
    assert quick.damage == ()
    os.truncate(path / "model.safetensors", 100)
    found = inspect(path, quick=True)
    assert isinstance(found, Inspection)
    assert [text.split("/")[-1].split(":")[0] for text in found.damage] == ["model.safetensors is truncated"]


def test_a_truncated_dcp_directory(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(300)}, checkpoint_id=tmp_path / "c", no_dist=True)
    os.truncate(tmp_path / "c" / "__0_0.distcp", 1000)
    found = inspect(tmp_path / "c")
    assert isinstance(found, Inspection)
    assert "__0_0.distcp is truncated: it has 1000 bytes" in found.damage[0]


def test_what_a_crash_left_and_runs(room: Path) -> None:
    checkpoints = room / "checkpoints"
    shutil.copytree(checkpoints / "step-000002", checkpoints / "step-000003.partial")
    (checkpoints / "step-000003.partial" / "manifest.json").unlink()
    shutil.copytree(checkpoints / "step-000001", checkpoints / "step-000004")
    (checkpoints / "step-000004" / "training.json").write_text("{}")
    assert isinstance(inspect(checkpoints / "step-000003.partial"), Partial)
    for path in (room, checkpoints):
        found = inspect(path)
        assert isinstance(found, InspectedRun)
        assert [(one.name, one.step, one.saved_by, one.state) for one in found.checkpoints] == [
            ("step-000001", 1, 2, "committed"),
            ("step-000002", 2, 2, "committed"),
            ("step-000003.partial", None, 0, "partial"),
            ("step-000004", None, 0, "damaged"),
        ]


def test_a_checkpoint_at_a_url(ranks: RankPools, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"file://{tmp_path}/remote"
    ranks(2).run(train_and_save, Case("full_shard", 2), url)
    found = inspect(url)
    assert isinstance(found, Inspection)
    assert (found.kind.value, found.step, found.saved_by, found.damage) == ("parts", 2, 2, ())
    assert "rank-00001.bin" in found.files


def test_modules_are_told_by_their_first_number() -> None:
    names = ["a.0.x.w", "a.0.y.1.w", "a.1.x.w", "head.w", "w", "b.c.w"]
    found = groups([StoredTensor(name, "F32", (2, 3)) for name in names])
    assert [(group.prefix, len(group.tensors)) for group in found] == [
        ("a.0", 2),
        ("a.1", 1),
        ("head", 1),
        ("", 1),
        ("b.c", 1),
    ]


# The command ----------------------------------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], status: int, *arguments: object) -> str:
    """What the command prints, in 80 columns but for paths."""
    assert run(["inspect", *map(str, arguments)]) == status
    printed = capsys.readouterr()
    assert all(len(line) <= 80 or "/" in line for line in printed.out.splitlines())
    return printed.out + printed.err


def test_the_command(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = room / "checkpoints" / "step-000002"
    text = told(capsys, 0, path)
    rows = [line.split() for line in text.splitlines()]
    block = sum(p.numel() for p in Net().blocks[0].parameters())
    assert ["blocks.0", "to", "3", "24", f"{4 * block:,}", "2.9", "KiB", "F32"] in rows
    assert "step 2, saved by 2 ranks, shardwise" in text
    assert "AdamW: exp_avg, exp_avg_sq, step of 28 parameters" in text
    assert 'data: {"sample": 7}' in text
    assert text.endswith("health: good (every byte checked)\n")
    assert "headers and sizes checked" in told(capsys, 0, path, "--quick")
    assert "  blocks.3.norm.bias" in told(capsys, 0, path, "--tensors")
    assert "a run with 2 checkpoints" in told(capsys, 0, room)
    os.truncate(path / "model.safetensors", 100)
    assert "health: DAMAGED" in told(capsys, 1, path)
    path.rename(room / "x.partial")
    assert "left by a crash" in " ".join(told(capsys, 0, room / "x.partial").split())


def test_one_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "weights")  # known by its beginning
    assert " in 1 file\n" in told(capsys, 0, tmp_path / "weights")
    assert run(["convert", str(tmp_path / "weights"), str(tmp_path / "own")]) == 0
    assert "\n1 tensor, no optimizer, " in capsys.readouterr().out
    (tmp_path / "c.partial").mkdir()
    assert "in 0 files; the next" in told(capsys, 0, tmp_path / "c.partial")
    (tmp_path / "c.partial" / "a").touch()
    assert "in 1 file; the next" in told(capsys, 0, tmp_path / "c.partial")


def test_mistakes(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such checkpoint" in told(capsys, 2, room / "nothing")
    (room / "empty").mkdir()
    assert "is not a checkpoint" in told(capsys, 2, room / "empty")
    text = room / "notes.txt"
    text.write_text("PKZIP is a program\n")
    assert "notes.txt is not a checkpoint: it is neither a directory nor a file of torch.save" in told(capsys, 2, text)
    (room / "empty.bin").touch()
    assert "DAMAGED" in told(capsys, 1, room / "empty.bin")
    assert "overrides are for configurations" in told(capsys, 2, room / "checkpoints" / "step-000001", "train.steps=1")
