"""The second layout: files that ranks wrote each for itself, wherever fsspec reaches."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.checkpoint import convert, latest, verify
from shardwise.checkpoint.publish import writing
from shardwise.errors import CheckpointError, UsageError
from tests.checkpoint import states
from tests.checkpoint.objects import ObjectStore
from tests.checkpoint.states import State, build, everything, same, step, train_and_save
from tests.engine.cases import Case
from tests.engine.rig import Net, adamw, on_ranks
from tests.ranks import RankPools

CASE = Case("full_shard", 2)
ALONE = Case("full_shard", 1)
FILES = ("model.safetensors", "optimizer.safetensors")


def load_into(*arguments: Any, **options: Any) -> State:
    """In this module, so that ranks import `objects` with it."""
    return states.load_into(*arguments, **options)


@pytest.fixture(scope="module")
def saved(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of 3 ranks in the second layout, and what they held; `plain` beside it is in the first."""
    root = tmp_path_factory.mktemp("bucket")
    ranks(2).run(train_and_save, CASE, root / "plain")
    ranks(3).run(load_into, Case("full_shard", 3), root / "plain", f"objects://{root}/run/step-000002")
    return root, ranks(1).run(load_into, ALONE, root / "plain")[0]


def test_it_is_files_of_ranks_that_the_manifest_names(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    root, _ = saved
    verify(f"objects://{root}/run/step-000002")
    assert latest(f"objects://{root}/run") == f"objects://{root}/run/step-000002"
    own = [f"rank-{rank:05d}.bin" for rank in range(3)]
    assert sorted(path.name for path in (root / "run/step-000002").iterdir()) == sorted(
        [*own, "manifest.json", "model.safetensors.index.json", "names.json", "training.json"]
    )
    document = json.loads((root / "run/step-000002/manifest.json").read_text())
    assert set(document["files"]) == {*own, "model.safetensors.index.json", "names.json", "training.json"}
    assert set(document["joined"]) == set(FILES)
    sizes = [document["files"][name]["bytes"] for name in own]
    assert sum(sizes) == sum((root / "plain" / name).stat().st_size for name in FILES)


@pytest.mark.parametrize("case", [ALONE, CASE, Case("no_shard", 3), Case("hybrid_shard", 4)], ids=str)
def test_any_number_of_ranks_loads_it_and_saves_it_again(
    case: Case, saved: tuple[Path, dict[str, torch.Tensor]], ranks: RankPools, tmp_path: Path
) -> None:
    root, state = saved
    again = f"objects://{tmp_path}/again"
    for loaded in ranks(case.world_size).run(load_into, case, f"objects://{root}/run/step-000002", again):
        same(loaded, state)
    verify(again)
    convert(again, tmp_path / "joined")
    for name in FILES:
        assert (tmp_path / "joined" / name).read_bytes() == (root / "plain" / name).read_bytes()


def test_joined_files_are_those_of_the_first_layout(
    saved: tuple[Path, dict[str, torch.Tensor]], ranks: RankPools, tmp_path: Path
) -> None:
    root, state = saved
    ranks(3).run(_split_both_ways, root / "plain", tmp_path)
    convert(f"objects://{tmp_path}/parts", tmp_path / "joined")
    verify(tmp_path / "joined")
    names = sorted(path.name for path in (tmp_path / "split").iterdir())
    assert "model.safetensors.index.json" in names
    assert len(names) > 8
    assert sorted(path.name for path in (tmp_path / "joined").iterdir()) == names
    for name in set(names) - {"manifest.json", "training.json"}:
        assert (tmp_path / "joined" / name).read_bytes() == (tmp_path / "split" / name).read_bytes(), name
    (loaded,) = ranks(1).run(load_into, ALONE, tmp_path / "joined")
    same(loaded, state)


def _split_both_ways(source: Path, folder: Path) -> None:
    case = Case("full_shard", 3)
    load_into(case, source, folder / "split", max_file_bytes=700)
    load_into(case, source, f"objects://{folder}/parts", max_file_bytes=700)


@on_ranks(2)
def test_a_rank_reads_its_own_bytes(tmp_path: Path) -> None:
    model = sw.shard(torch.nn.Linear(1000, 500))
    sw.checkpoint.save(f"objects://{tmp_path}/c", model)
    other = sw.shard(torch.nn.Linear(1000, 500))
    ObjectStore.read_bytes = 0
    sw.checkpoint.load(f"objects://{tmp_path}/c", other)
    assert 1_000_000 <= ObjectStore.read_bytes < 1_060_000  # of 2 MB, and the small files
    assert torch.equal(other.weight.full_tensor(), model.weight.full_tensor())


@on_ranks(2)
def test_asynchronously(tmp_path: Path) -> None:
    url = f"objects://{tmp_path}/c"
    model, optimizer = build(CASE)
    step(model, optimizer, 0)
    before = everything(model, optimizer)
    sw.checkpoint.save(url, model, optimizer, step=1, asynchronous=True)
    step(model, optimizer, 1)
    verify(url)
    sw.checkpoint.load(url, model, optimizer)
    same(everything(model, optimizer), before)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("moment", [(0, "rank-00000.bin"), (1, "rank-00001.bin"), (0, "manifest.json")], ids=str)
def test_what_did_not_come_to_its_manifest_is_no_checkpoint(
    moment: tuple[int, str], asynchronous: bool, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(2).run(_fails, f"objects://{tmp_path}/run", moment, asynchronous)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-000001", "step-000002"]


def _fails(run: str, moment: tuple[int, str], asynchronous: bool) -> None:
    rank, name = moment
    model, optimizer = build(CASE)
    sw.checkpoint.save(f"{run}/step-000001", model, optimizer, step=1)

    def full(path: Path, data: bytes) -> None:
        if dist.get_rank() == rank and path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ObjectStore.before_write = full
    try:
        with pytest.raises(CheckpointError, match="No space left"):
            _save_and_wait(f"{run}/step-000002", model, optimizer, asynchronous)
    finally:
        ObjectStore.before_write = None
    dist.barrier()
    assert latest(run) == f"{run}/step-000001"
    with pytest.raises(CheckpointError, match=r"does not exist or is empty"):
        verify(f"{run}/step-000002")
    sw.checkpoint.save(f"{run}/step-000002", model, optimizer, step=2)
    verify(f"{run}/step-000002")
    assert latest(run) == f"{run}/step-000002"


def _save_and_wait(url: str, model: Any, optimizer: Any, asynchronous: bool) -> None:
    sw.checkpoint.save(url, model, optimizer, step=2, asynchronous=asynchronous)
    sw.checkpoint.wait(model)


def leave_partial(folder: Path) -> None:
    """What a save that was killed before its manifest leaves."""
    model, optimizer = build(ALONE)
    sw.checkpoint.save(f"objects://{folder}", model, optimizer)
    (folder / "manifest.json").unlink()
    (folder / ".begun").write_text("{}")
    (folder / ".rank-0").write_text("{")
    (folder / "rank-00007.bin").write_bytes(b"of more ranks")


def test_what_a_crash_left_is_ignored_and_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    leave_partial(run / "step-000005")
    model, optimizer = build(ALONE)
    assert latest(f"objects://{run}") is None
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        sw.checkpoint.load(f"objects://{run}/step-000005", model)
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        convert(f"objects://{run}/step-000005", tmp_path / "joined")
    sw.checkpoint.save(f"objects://{run}/step-000005", model, optimizer)
    verify(f"objects://{run}/step-000005")
    assert not (run / "step-000005/rank-00007.bin").exists()
    assert latest(f"objects://{run}") == f"objects://{run}/step-000005"


def test_half_a_manifest_is_none(tmp_path: Path) -> None:
    leave_partial(tmp_path / "c")
    (tmp_path / "c" / "manifest.json").write_text('{"format": 1, "files": {')
    assert latest(f"objects://{tmp_path}") is None


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    model, optimizer = build(ALONE)
    sw.checkpoint.save(f"objects://{tmp_path}/c", model, optimizer)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.png").write_bytes(b"smile")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("c", "photos"):
        with pytest.raises(CheckpointError, match=f"{name} exists already"):
            sw.checkpoint.save(f"objects://{tmp_path}/{name}", model, optimizer)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_names_that_latest_passes_over_are_refused(tmp_path: Path) -> None:
    model = sw.shard(Net())
    for name in ("step-000001.partial", "step-000001.damaged", "step-000001.partial/"):
        with pytest.raises(
            UsageError, match=r"cannot be a checkpoint's name: `latest` and the trainer take names that end in"
        ):
            sw.checkpoint.save(f"objects://{tmp_path}/{name}", model)
    assert list(tmp_path.iterdir()) == []


def test_in_memory() -> None:
    model, optimizer = build(ALONE)
    before = everything(model, optimizer)
    for number in (9, 10):
        sw.checkpoint.save(f"memory://runs/a/checkpoints/step-{number:06d}", model, optimizer, step=number)
    newest = latest("memory://runs/a")
    assert newest == "memory://runs/a/checkpoints/step-000010"
    verify(newest)
    other, fresh = build(ALONE, seed=4)
    assert sw.checkpoint.load(newest, other, fresh).step == 10
    same(everything(other, fresh), before)
    assert latest("memory://nothing") is None


@on_ranks(2)
def test_ranks_without_common_storage_are_told(tmp_path: Path) -> None:
    model = sw.shard(Net())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_SIGHT_S", 0.1)
        with pytest.raises(CheckpointError, match=r"rank 1 does not see what rank 0 wrote to memory://own/c: .* share"):
            sw.checkpoint.save("memory://own/c", model)


@on_ranks(2)
def test_a_local_file_system_by_its_url(tmp_path: Path) -> None:
    model, optimizer = build(CASE)
    step(model, optimizer, 0)
    before = everything(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", None)  # nothing may need them
        patch.setattr(os, "pwrite", None)
        sw.checkpoint.save(f"file://{tmp_path}/run/step-000001", model, optimizer, step=1)
    dist.barrier()
    assert latest(f"file://{tmp_path}/run") == f"file://{tmp_path}/run/step-000001"
    verify(f"file://{tmp_path}/run/step-000001")
    verify(tmp_path / "run" / "step-000001")  # a checkpoint is what it is, however it is reached
    step(model, optimizer, 1)
    sw.checkpoint.load(tmp_path / "run" / "step-000001", model, optimizer)
    same(everything(model, optimizer), before)


# Damage ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    model = sw.shard(Net(depth=1))
    sw.checkpoint.save(f"objects://{tmp_path}/c", model, adamw(model.parameters()))
    return tmp_path / "c"


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (_flip, r"rank-00000\.bin is damaged: bytes \["),
    (lambda path: path.write_bytes(path.read_bytes()[:-3]), "is truncated"),
    (Path.unlink, "is missing"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=["flipped", "truncated", "missing"])
def test_damage_is_found_and_nothing_is_joined(
    whole: Path, damage: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    damage(whole / "rank-00000.bin")
    with pytest.raises(CheckpointError, match=words):
        verify(f"objects://{whole}")
    with pytest.raises(CheckpointError, match=words):
        convert(f"objects://{whole}", tmp_path / "joined")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    if damage is not _flip:
        with pytest.raises(CheckpointError, match=words):
            sw.checkpoint.load(f"objects://{whole}", sw.shard(Net(depth=1)))


def test_a_damaged_small_file_is_not_joined(whole: Path, tmp_path: Path) -> None:
    _flip(whole / "training.json")
    with pytest.raises(CheckpointError, match=r"training\.json is damaged"):
        convert(f"objects://{whole}", tmp_path / "joined")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


PARTS: list[Callable[[list[list[Any]]], Any]] = [
    lambda parts: parts[0].__setitem__(2, "../../secret"),
    lambda parts: parts[0].__setitem__(2, "nothing.bin"),
    lambda parts: parts[0].__setitem__(3, -1),
    lambda parts: parts[-1].__setitem__(3, 10**9),
    lambda parts: parts.pop(),
    lambda parts: parts.append([0, 8, "rank-00000.bin", 0]),
    lambda parts: parts[0].__setitem__(1, 0),
]


@pytest.mark.parametrize("change", PARTS)
def test_parts_that_cannot_be_are_refused(whole: Path, change: Callable[[list[list[Any]]], Any]) -> None:
    path = whole / "manifest.json"
    document = json.loads(path.read_text())
    change(document["joined"]["model.safetensors"]["parts"])
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        verify(f"objects://{whole}")


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "rank-00000.bin"])
def test_a_joined_file_cannot_leave_the_checkpoint(whole: Path, name: str, tmp_path: Path) -> None:
    path = whole / "manifest.json"
    document = json.loads(path.read_text())
    document["joined"][name] = document["joined"].pop("model.safetensors")
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        convert(f"objects://{whole}", tmp_path / "joined")


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_joined_says_why(whole: Path, tmp_path: Path) -> None:
    convert(f"objects://{whole}", tmp_path / "joined")
    with pytest.raises(CheckpointError, match="joined exists already"):
        convert(f"objects://{whole}", tmp_path / "joined")
    verify(tmp_path / "joined")
    with pytest.raises(CheckpointError, match="the source already has that kind"):
        convert(tmp_path / "joined", tmp_path / "again", "shardwise")
    with pytest.raises(UsageError, match="a conversion writes only to a path"):
        convert(f"objects://{whole}", "memory://joined")


def test_without_fsspec_and_with_unknown_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sw.shard(Net())
    with pytest.raises(UsageError, match=r"nowhere://c cannot be reached: .*nowhere"):
        sw.checkpoint.save("nowhere://c", model)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    for call in (
        lambda: sw.checkpoint.save("memory://c", model),
        lambda: sw.checkpoint.load("memory://c", model),
        lambda: verify("memory://c"),
        lambda: latest("memory://c"),
    ):
        with pytest.raises(UsageError, match=r"fsspec, which is not installed: pip install 'shardwise\[storage\]'"):
            call()
