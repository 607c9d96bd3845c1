"""TensorBoard's files, and what is said where a tool is not installed. Weights & Biases: tests/integrations."""

import sys
from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.train.run.directory import RunDirectory
from shardwise.train.run.metric_loggers import open_loggers
from tests.train.rig import configured


def test_none_unless_asked_for(tmp_path: Path) -> None:
    assert open_loggers(RunDirectory(tmp_path), configured(tmp_path, "")) == []


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = RunDirectory(tmp_path)
    (logger,) = open_loggers(directory, configured(tmp_path, "log.tensorboard = true"))
    logger.add({"train/loss": 2.5, "memory/optimizer": 200}, 1)
    logger.close()
    events = EventAccumulator(str(directory.tensorboard)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.5)]
    assert [event.value for event in events.Scalars("memory/optimizer")] == [200]


@pytest.mark.parametrize(
    ("log", "module", "words"),
    [
        (
            "log.tensorboard = true",
            "torch.utils.tensorboard",
            r"log\.tensorboard needs .*: pip install tensorboard, or",
        ),
        ('log.wandb = "sevens"', "wandb", r"log\.wandb needs .*: pip install wandb, or leave log\.wandb out"),
    ],
)
def test_a_tool_that_is_not_installed(
    log: str, module: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=words):
        open_loggers(RunDirectory(tmp_path), configured(tmp_path, log))
