"""Metrics of each step: one JSON object per line, and TensorBoard files if configured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from shardwise.errors import UserError
from shardwise.train.config.schema import Config
from shardwise.train.run.directory import RunDirectory

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of one optimizer step, over all ranks unless stated otherwise. The fields are the keys in
    `metrics.jsonl`."""

    step: int
    """Number of optimizer steps taken, this one included: counted from 1."""
    loss: float
    """Mean negative log-likelihood over the step's target tokens of all ranks, in nats, before the update."""
    lr: float
    grad_norm: float | None
    """Norm of the whole gradient before clipping; None if the optimizer steps in backward."""
    tokens: int
    """Token positions that the model processed in this step on all ranks, prompts and padding included."""
    tokens_per_s: float
    step_time_s: float
    memory: Mapping[str, int | None]
    """Rank 0's bytes by kind, each kind at its own highest so far; None for a kind that was not measured."""
    world_size: int


class MetricsWriter:
    """Writes the metrics of steps and evaluations. Used on rank 0 only."""

    def __init__(self, metrics: Path, evaluations: Path, flush_every: int, tensorboard: Path | None = None) -> None:
        """
        Args:
            metrics: the file for steps, which is appended to.
            evaluations: the file for evaluations, which is appended to.
            flush_every: number of steps between flushes of the file for steps.
            tensorboard: directory for TensorBoard's files; None = write none.

        Raises:
            UserError: TensorBoard is configured but not installed.
        """
        self._flush_every = flush_every
        self._board = None if tensorboard is None else _open_board(tensorboard)
        self._steps: IO[str] = metrics.open("a", encoding="utf-8")
        self._evaluations: IO[str] = evaluations.open("a", encoding="utf-8")

    def step(self, metrics: StepMetrics) -> None:
        """Write one step."""
        self._steps.write(json.dumps(asdict(metrics)) + "\n")
        if metrics.step % self._flush_every == 0:
            self._steps.flush()
        if self._board is not None:
            for name in ("loss", "lr", "grad_norm", "tokens_per_s", "step_time_s"):
                if (value := getattr(metrics, name)) is not None:
                    self._board.add_scalar(f"train/{name}", value, metrics.step)
            for kind, size in metrics.memory.items():
                if size is not None:
                    self._board.add_scalar(f"memory/{kind}", size, metrics.step)

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        """Write the held-out loss after `step` steps, in nats per token."""
        self._evaluations.write(json.dumps({"step": step, "loss": loss, "tokens": tokens}) + "\n")
        self._evaluations.flush()
        if self._board is not None:
            self._board.add_scalar("eval/loss", loss, step)

    def flush(self) -> None:
        """Pass all steps written so far to the operating system."""
        self._steps.flush()

    def close(self) -> None:
        """Close all files."""
        self._steps.close()
        self._evaluations.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_writer(directory: RunDirectory, config: Config, first_step: int, say: Callable[[str], None]) -> MetricsWriter:
    """Prepare the directory of a run that starts or resumes, and return its writer. Rank 0 only.

    Args:
        directory: the run's directory.
        config: the run's configuration, which is written there.
        first_step: number of steps taken before.
        say: called with a line if metrics of an unfinished run are dropped.
    """
    if directory.begin(config, first_step):
        say(f"{directory.path} held a run that had not finished: it starts again from the beginning")
    board = directory.tensorboard if config.log.tensorboard else None
    return MetricsWriter(directory.metrics, directory.evaluations, config.log.every, board)


def _open_board(directory: Path) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "log.tensorboard=true needs TensorBoard, which is not installed: pip install tensorboard, "
            "or set log.tensorboard=false"
        ) from None
    return SummaryWriter(str(directory))
