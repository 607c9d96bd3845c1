"""Other tools' logs of a run's metrics: TensorBoard's files and Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from shardwise.errors import UserError, one_line
from shardwise.train.config.schema import Config
from shardwise.train.run.directory import RunDirectory


class MetricLogger(Protocol):
    """A log of numbers, by name and step. Used on rank 0 only."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Add the numbers of a step. The names begin with a part and a slash, such as "train/loss"."""

    def close(self) -> None:
        """Write what is left, and close all files."""


def open_loggers(directory: RunDirectory, config: Config) -> list[MetricLogger]:
    """Open the logs that the configuration asks for. Raises UserError if one is not installed or cannot be opened."""
    loggers: list[MetricLogger] = []
    if config.log.tensorboard:
        loggers.append(TensorBoard(directory.tensorboard))
    if config.log.wandb is not None:
        loggers.append(WeightsAndBiases(config.log.wandb, directory, config))
    return loggers


class TensorBoard:
    """TensorBoard's event files."""

    def __init__(self, path: Path) -> None:
        """`path`: the directory of the files. Raises UserError if TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard", "log.tensorboard", "TensorBoard") from None
        self._writer = SummaryWriter(str(path))

    def add(self, values: Mapping[str, float], step: int) -> None:
        """See `MetricLogger`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `MetricLogger`."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases. Its account, server and mode come from the WANDB_... environment variables.

    A resumed run goes on with the same one, which it knows by the file `wandb-id` of its directory. Steps that are
    taken again appear twice, because what was logged cannot be taken back.
    """

    def __init__(self, project: str, directory: RunDirectory, config: Config) -> None:
        """`directory`: gets the run's own files. Raises UserError if wandb is not installed or the run cannot begin."""
        try:
            import wandb
        except ImportError:
            raise _missing("wandb", "log.wandb", "Weights & Biases") from None
        if not directory.wandb_id.exists():
            directory.wandb_id.write_text(uuid4().hex, encoding="utf-8")
        try:
            self._run: Any = wandb.init(
                project=project,
                name=config.log.name,
                id=directory.wandb_id.read_text(encoding="utf-8"),
                resume="allow",
                dir=directory.path,
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(console="off"),  # the terminal is ours
            )
        except (wandb.Error, OSError) as error:
            raise UserError(
                f"log.wandb={project!r}: the run could not begin ({one_line(error)}); set WANDB_MODE=offline to log "
                "without a server, or leave log.wandb out"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def add(self, values: Mapping[str, float], step: int) -> None:
        """See `MetricLogger`."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """See `MetricLogger`."""
        self._run.finish()


def _missing(package: str, key: str, tool: str) -> UserError:
    return UserError(f"{key} needs {tool}, which is not installed: pip install {package}, or leave {key} out")
