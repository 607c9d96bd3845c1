"""The example of questions about pictures: what it prints, at any number of ranks, and its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise as sw
from tests.examples.rig import assert_shown, losses, module, torchrun
from tests.ranks import RankPools

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SMALL = "examples/visual_bert.py --steps 210 --log-every 10 --save-every 50"


def shares(lines: list[str]) -> dict[str, tuple[float, float]]:
    """Return the percentages of right answers, with a picture and without, by model."""
    table = lines[next(n for n, line in enumerate(lines) if line.startswith("right answers")) + 1 :]
    return {words[0]: (float(words[1][:-1]), float(words[2][:-1])) for words in map(str.split, table)}


@pytest.mark.slow
def test_it_answers_what_only_the_picture_shows(tmp_path: Path) -> None:
    first = torchrun(2, SMALL, tmp_path)
    assert_shown("Questions about pictures", first)
    right = shares(first)
    assert right["Reader"][0] < 35, "colours and shapes are one of four"
    assert right["Answerer"][0] > 70
    assert right["Reader"][1] == right["Answerer"][1] == 100
    assert right["onnxruntime"] == right["Answerer"]

    checkpoints = tmp_path / "runs/visual-bert/answerer"
    for step in (100, 150, 200, 210):
        (checkpoints / f"step-{step:06d}").rename(tmp_path / f"step-{step}")
    again = torchrun(3, SMALL, tmp_path)
    assert again[0].endswith("from step 210")
    assert again[1].endswith("from step 50"), "when the tower is still frozen"
    uninterrupted = losses(first[first.index(next(line for line in first if line.startswith("Answerer"))) :])
    resumed = losses(again)
    assert len(resumed) == 16
    for step, loss in resumed.items():
        assert loss == pytest.approx(uninterrupted[step], abs=1e-4 if int(step.split()[1]) < 160 else 2e-2), step
    assert shares(again)["Answerer"][0] == pytest.approx(right["Answerer"][0], abs=5)


def gradients(rank: int, ranks: int, shard: bool) -> tuple[int, dict[str, Any]]:
    """Return this rank's number of pictures, and the gradients of a step in which only some rows have one."""
    example = module("visual_bert")
    torch.manual_seed(0)
    model = example.Answerer()
    if shard:
        sw.shard(model, units={example.PictureTower, example.VisualBertLayer})
    rows = example.draw(24, seed=3, first_without=12)
    mine = rows.part(rank * 24 // ranks, (rank + 1) * 24 // ranks)
    (F.cross_entropy(model(*mine[:-1]), mine.answers, reduction="sum") * ranks / 24).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return len(mine.pictures), {name: grad.full_tensor() if shard else grad for name, grad in found.items()}


def sharded_gradients(ranks: int) -> tuple[int, dict[str, Any]]:
    return gradients(torch.distributed.get_rank(), ranks, shard=True)


@pytest.mark.parametrize("number", [2, 3])
def test_gradients_where_ranks_have_no_picture(ranks: RankPools, number: int) -> None:
    pictures, expected = gradients(0, 1, shard=False)
    results = ranks(number).run(sharded_gradients, number)
    assert results[0][0] == 0
    assert sum(count for count, _ in results) == pictures > 0
    for _, found in results:
        assert found.keys() == expected.keys()
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=1e-4)
