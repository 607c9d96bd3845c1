"""Ranks that would not train on the same rows are stopped before they train."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.errors import ConfigError
from shardwise.train import trainer
from shardwise.train.config.files import load
from tests.ranks import RankPools
from tests.tiny import GPT2

TINY = f"""{GPT2}
[train]
steps = 2
"""


def refused(folder: str, said: str, overrides: list[str]) -> None:
    """Train with a folder for each rank. Every rank must refuse, and no file of the run but its lock may be left."""
    before = Path.cwd()
    os.chdir(Path(folder) / str(dist.get_rank()))
    try:
        with pytest.raises(ConfigError, match=said):
            trainer.run(load("tiny.toml", overrides[dist.get_rank()].split()))
        assert not list(Path("runs").glob("*/[!.]*"))
    finally:
        os.chdir(before)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for rank in range(2):
        (tmp_path / str(rank) / "texts").mkdir(parents=True)
        (tmp_path / str(rank) / "tiny.toml").write_text(TINY)
        for i in range(12):
            (tmp_path / str(rank) / "texts" / f"{i}.txt").write_text(f"the {i} quick brown foxes jump. " * (1 + i % 5))
    return tmp_path


def test_a_file_that_one_rank_lacks(ranks: RankPools, folders: Path) -> None:
    (folders / "1" / "texts" / "3.txt").unlink()
    said = (
        r"rank 0 read \d+ sequences .* rank 1 read \d+ sequences .*: data\.source='texts/\*\.txt' .* same contents on "
        "all ranks"
    )
    ranks(2).run(refused, str(folders), said, ["", ""])


def test_as_many_rows_with_other_words(ranks: RankPools, folders: Path) -> None:
    path = folders / "1" / "texts" / "3.txt"
    path.write_text(path.read_text().replace("fox", "cat"))
    ranks(2).run(refused, str(folders), r"rank 0 read .*digest .* rank 1 read .*digest", ["", ""])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps=3", r"train\.steps is 2 on rank 0 and 3 on rank 1"),
        ("data.seed=1", r"data\.seed is 0 on rank 0 and 1 on rank 1"),
        ("data.source=texts/1.txt", r"data\.source is .*texts/\*\.txt. on rank 0 and .texts/1\.txt. on rank 1"),
        ("checkpoint.every=1", r"checkpoint\.every is 0 on rank 0 and 1 on rank 1"),
    ],
)
def test_another_configuration(ranks: RankPools, folders: Path, override: str, said: str) -> None:
    ranks(2).run(refused, str(folders), said, ["", override])
