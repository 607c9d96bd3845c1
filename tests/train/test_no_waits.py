"""A step queues work on its device and never waits for it. Its numbers are read a step late, and are the same.

A CPU stands for the device: inside a step, operations that would copy a number from a device to the host raise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise import accelerators, device_tools
from shardwise.checkpoint import latest
from shardwise.errors import UserError
from shardwise.train import trainer
from shardwise.train.config.files import load
from shardwise.train.run.metrics import StepMetrics
from tests.comm.nccl_double import doubled
from tests.ranks import RankPools
from tests.train.rig import (
    WaitsForDeviceError,
    furnish,
    read,
    train,
    waiting_raises,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "wait",
    [
        float, bool, int, Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero,
        lambda x: torch.equal(x, x), lambda x: x.reshape(1)[x.reshape(1) > 0], lambda x: x if x > 0 else -x,
    ],
)  # fmt: skip
def test_the_double_notices_waits(wait: Callable[[Tensor], Any]) -> None:
    number = torch.tensor(2.0)
    wait(number)
    with waiting_raises(), pytest.raises(WaitsForDeviceError):
        wait(number)


def train_on_streams(folder: Path, *overrides: str) -> str:
    """Train as `train` does, with the collectives that accelerators use."""
    with doubled() as launches:
        printed = train(folder, *overrides)
        assert launches
    return printed


def timeless(name: str) -> list[dict[str, Any]]:
    """Return the metrics that a run wrote for its steps, without the times."""
    rows = read(f"runs/{name}/metrics.jsonl")
    return [{key: value for key, value in row.items() if "_s" not in key} for row in rows]


SAVING = ("train.steps=7", "checkpoint.every=2", "train.clip=0.5")


def test_steps_that_are_read_late_write_the_same(folder: Path) -> None:
    trainer.run(load("tiny.toml", ["log.name=now", *SAVING]))
    train(folder, "log.name=late", *SAVING)
    assert timeless("late") == timeless("now")
    assert [row["step"] for row in timeless("late")] == [1, 2, 3, 4, 5, 6, 7]
    assert all(row["step_time_s"] > 0 for row in read("runs/late/metrics.jsonl"))
    assert read("runs/late/evaluations.jsonl") == read("runs/now/evaluations.jsonl")
    for path in ("final/model.safetensors", "checkpoints/step-000004/optimizer.safetensors"):
        assert Path("runs/late", path).read_bytes() == Path("runs/now", path).read_bytes()


@pytest.mark.parametrize("override", ["train.clip=0", "train.clip=0.5", "parallel.param_dtype=fp16"])
def test_a_step_of_ranks_waits_for_no_device(folder: Path, ranks: RankPools, override: str) -> None:
    """Each rank accumulates gradients over two micro-batches."""
    ranks(2).run(train_on_streams, folder, override, timeout_s=120)
    assert [row["step"] for row in timeless("tiny")] == [1, 2, 3, 4, 5, 6]


def test_steps_are_read_while_the_next_is_under_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    step, shown, evaluate, save = (
        trainer.Trainer.step, trainer.RunConsole.step, trainer.Trainer._evaluate, trainer.Trainer._save,
    )  # fmt: skip

    def taken(self: trainer.Trainer, number: int) -> None:
        step(self, number)
        done.append(f"taken {number + 1}")

    def told(self: trainer.RunConsole, metrics: StepMetrics) -> None:
        shown(self, metrics)
        done.append(f"read {metrics.step}")

    def evaluated(self: trainer.Trainer, *args: Any) -> bool:
        done.append("evaluate")
        return evaluate(self, *args)

    def saved(self: trainer.Trainer, *args: Any) -> None:
        done.append("save")
        save(self, *args)

    monkeypatch.setattr(trainer.Trainer, "step", taken)
    monkeypatch.setattr(trainer.RunConsole, "step", told)
    monkeypatch.setattr(trainer.Trainer, "_evaluate", evaluated)
    monkeypatch.setattr(trainer.Trainer, "_save", saved)
    train(folder, "train.steps=5", "checkpoint.every=3", "train.eval_every=0")
    assert done == [
        "taken 1", "taken 2", "read 1", "taken 3", "read 2", "read 3", "save",
        "taken 4", "taken 5", "read 4", "read 5", "evaluate",
    ]  # fmt: skip


@pytest.mark.parametrize("every", [0, 1, 2])
def test_a_run_that_diverged_ends_with_the_same_words_and_saves_nothing_of_it(folder: Path, every: int) -> None:
    diverging = ("train.lr=1e30", "train.clip=0", "train.eval_every=0", f"checkpoint.every={every}")
    with pytest.raises(UserError, match="diverged") as now:
        trainer.run(load("tiny.toml", ["log.name=now", *diverging]))
    with pytest.raises(UserError) as late:
        train(folder, "log.name=late", *diverging)
    assert str(late.value) == str(now.value)
    assert timeless("late") == timeless("now")
    first_bad = int(re.findall(r"step (\d+)", str(late.value))[0])
    newest = latest("runs/late")
    assert newest is None or int(newest.name.removeprefix("step-")) < first_bad
    assert newest is None or newest.name == latest("runs/now").name  # type: ignore[union-attr]


class OnDevice(Tensor):
    device = torch.device("xpu", 0)  # type: ignore[assignment]


def test_a_number_is_on_its_way_before_anything_else_is_enqueued() -> None:
    done = mock.Mock()
    number = torch.tensor(2.5).as_subclass(OnDevice)
    host = mock.patch.object(torch, "empty_like", return_value=torch.empty(()))
    with host, mock.patch.object(accelerators, "current_stream", return_value=done):
        value = device_tools.fetched(number)
        number.fill_(3.0)
    assert [call[0] for call in done.mock_calls] == ["record_event"]
    assert value() == 2.5
    assert [call[0] for call in done.mock_calls] == ["record_event", "record_event().synchronize"]


def test_what_goes_to_a_device_goes_through_pinned_memory() -> None:
    host = mock.Mock()
    assert device_tools.sent(host, OnDevice.device) is host.pin_memory().to.return_value
    host.pin_memory().to.assert_called_once_with(OnDevice.device, non_blocking=True)
    assert device_tools.sent(host, torch.device("cpu")) is host
