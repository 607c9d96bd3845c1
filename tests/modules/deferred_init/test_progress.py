"""What is said while numbers are drawn on the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.modules.deferred_init import materialize
from shardwise.modules.deferred_init.progress import DrawingProgress, log_to

GB = 1_000_000_000


def said(total_gb: float, draws: list[tuple[float, float]]) -> list[str]:
    """What is said of draws: (the time when each is over, in s; its GB)."""
    now_s, lines = 0.0, []
    with log_to(lines.append):
        progress = DrawingProgress(int(total_gb * GB), lambda: now_s)
        for over_s, size_gb in draws:
            now_s = over_s
            progress.drew(int(size_gb * GB))
    return lines


def test_it_is_said_once_early_and_then_each_minute() -> None:
    lines = said(70, [(second, 0.25) for second in range(1, 200)])
    assert lines[0].startswith(
        "initial values: 0.5 of 70.0 GB drawn on the CPU, about 5 min left; with sw.init_on_device()"
    )
    assert lines[1] == "initial values: 15.5 of 70.0 GB drawn on the CPU, about 4 min left"
    assert len(lines) == 4


@pytest.mark.parametrize(("left", "rate", "words"), [(10, 1, "10 s"), (200, 1, "3 min"), (9000, 1, "2.5 h")])
def test_the_time_left_follows_the_rate(left: float, rate: float, words: str) -> None:
    [line] = said(4 * rate + left * rate, [(4, 4 * rate)])
    assert f"about {words} left" in line


def test_short_drawing_is_not_worth_a_word() -> None:
    assert said(0.2, [(second / 100, 0.001) for second in range(200)]) == []
    assert said(8, [(1, 1), (8, 7)]) == [], "it is over"
    assert said(6, [(3, 5), (3.5, 1)]) == []


def test_without_a_hearer_it_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"shardwise: initial values: 1\.0 of 9\.0 GB"):
        DrawingProgress(9 * GB, iter([0.0, 3.0]).__next__).drew(GB)


class Counted:
    """Stands for `DrawingProgress`; keeps what it is told."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes, self.draws = total_bytes, list[int]()
        self.drew = self.draws.append


@pytest.mark.parametrize("on_device", [False, True])
def test_every_draw_on_the_cpu_counts_once(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Counted] = []

    def counted(total_bytes: int) -> Counted:
        made.append(Counted(total_bytes))
        return made[-1]

    monkeypatch.setattr(materialize, "DrawingProgress", counted)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if on_device:
            with sw.init_on_device():
                sw.shard(model)
            assert made == []
        else:
            sw.shard(model)
            assert made[0].draws == [4 * 35, 4 * 7, 4 * 21, 4 * 3]
            assert made[0].total_bytes == 4 * (35 + 7 + 21 + 3)
