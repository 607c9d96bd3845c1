"""Saved by any number of ranks under any strategy, loaded by any other: bit-equal, and the very same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.checkpoint import verify
from shardwise.checkpoint.format import tensor_files
from shardwise.checkpoint.io import range_reader
from tests.checkpoint.rig import Reads, drop, skip_unless_direct
from tests.checkpoint.states import load_into, same, train_and_save
from tests.engine.cases import CASES, Case
from tests.ranks import RankPools

TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")
TARGETS = (Case("full_shard", 1), *CASES)


@pytest.fixture(scope="module")
def saved(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of 2 ranks and what they held."""
    path = tmp_path_factory.mktemp("run") / "step-000002"
    state, other = ranks(2).run(train_and_save, Case("full_shard", 2), path)
    same(state, other)
    return path, state


@pytest.mark.parametrize("case", TARGETS, ids=str)
def test_whoever_loads_it_has_the_same_numbers_and_writes_the_same_files(
    case: Case, saved: tuple[Path, dict[str, torch.Tensor]], ranks: RankPools, tmp_path: Path
) -> None:
    path, state = saved
    for loaded in ranks(case.world_size).run(load_into, case, path, tmp_path / "again"):
        same(loaded, state)
    verify(tmp_path / "again")
    for name in TENSOR_FILES:
        assert (tmp_path / "again" / name).read_bytes() == (path / name).read_bytes()


ALONE = [
    (Case("full_shard", 2), 2, True),
    (Case("shard_optimizer", 3), 3, True),
    (Case("no_shard", 2), 2, False),  # what one has read the other finds in the page cache
    (Case("no_shard", 2), 1, True),  # each has a machine of its own
    (Case("hybrid_shard", 4), 4, False),
    (Case("hybrid_shard", 4), 2, True),
]


@pytest.mark.parametrize(("case", "local_ranks", "is_direct"), ALONE, ids=str)
def test_who_reads_alone_reads_past_the_page_cache(
    case: Case,
    local_ranks: int,
    is_direct: bool,
    saved: tuple[Path, dict[str, torch.Tensor]],
    ranks: RankPools,
    tmp_path: Path,
) -> None:
    path, state = saved
    skip_unless_direct(path / "model.safetensors")
    for loaded, direct_bytes in ranks(case.world_size).run(_load_past_cache, case, path, local_ranks):
        same(loaded, state)
        assert bool(direct_bytes) == is_direct


def _load_past_cache(case: Case, path: Path, local_ranks: int) -> tuple[dict[str, torch.Tensor], int]:
    """However little it is. What was loaded, and the bytes that came past the page cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_reader, "_LEAST_BYTES", 1)
        patch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
        reads, read = Reads(patch), tensor_files.read

        def nothing_cached(*arguments: Any) -> tensor_files.Read:  # as the headers of such small files leave all of it
            for name in TENSOR_FILES:
                drop(path / name)
            return read(*arguments)

        patch.setattr(tensor_files, "read", nothing_cached)
        return load_into(case, path), sum(reads.direct)


@pytest.mark.parametrize("case", [case for case in CASES if case.strategy != "full_shard"][:6], ids=str)
def test_whoever_saved_it_one_rank_has_the_same_numbers(case: Case, ranks: RankPools, tmp_path: Path) -> None:
    state = ranks(case.world_size).run(train_and_save, case, tmp_path / "saved")[0]
    (loaded,) = ranks(1).run(load_into, Case("full_shard", 1), tmp_path / "saved")
    same(loaded, state)


def test_files_are_ordinary_safetensors_under_the_models_names(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = saved
    verify(path)
    model = load_file(path / "model.safetensors")
    assert "again.weight" not in model  # tied to leave.weight
    assert set(model) == {name for name in state if "exp_avg" not in name and "step" not in name} - {"again.weight"}
    optimizer = load_file(path / "optimizer.safetensors")
    assert "leave.weight.exp_avg" in optimizer
    for name, tensor in (*model.items(), *optimizer.items()):
        assert torch.equal(tensor, state[name]), name
    training = json.loads((path / "training.json").read_text())
    assert (training["step"], training["extra"], len(training["rng"])) == (2, {"position": [0, 7]}, 2)
    assert training["optimizer"]["groups"][0]["fqns"][0] == "scale"
    assert training["optimizer"]["state"]["scale"]["step"]["scalar"] == 2.0
    assert sorted(file.name for file in path.iterdir()) == sorted(
        [*TENSOR_FILES, "model.safetensors.index.json", "training.json", "manifest.json", "names.json"]
    )  # names.json for the tied weight; the index keeps programs that read every safetensors file off the optimizer's
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(model, "model.safetensors")


def test_several_files_hold_the_same(
    saved: tuple[Path, dict[str, torch.Tensor]], ranks: RankPools, tmp_path: Path
) -> None:
    path, state = saved
    case, split = Case("full_shard", 3), tmp_path / "split"
    ranks(3).run(_resave, case, path, split)
    verify(split)
    index = json.loads((split / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(split / file)[name], state[name])
    for loaded in ranks(2).run(load_into, Case("no_shard", 2), split):
        same(loaded, state)


def _resave(case: Case, path: Path, again: Path) -> None:
    load_into(case, path, again, max_file_bytes=700)
