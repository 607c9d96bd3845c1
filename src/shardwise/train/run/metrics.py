"""Metrics of each step: one JSON object per line, and in other tools' logs if configured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from shardwise.train.config.schema import Config
from shardwise.train.run.directory import RunDirectory
from shardwise.train.run.metric_loggers import MetricLogger, open_loggers


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of one optimizer step, over all ranks unless stated otherwise. The fields are the keys in
    `metrics.jsonl`, where a number that is not finite is null."""

    step: int
    """Number of the step, skipped ones included: counted from 1."""
    loss: float
    """Mean negative log-likelihood over the step's targets of all ranks, in nats, before the update."""
    lr: float
    grad_norm: float | None
    """Norm of the whole gradient before clipping; None if the optimizer steps in backward."""
    tokens: int
    """Token positions that the model processed in this step on all ranks, prompts and padding included; rows, where it
    reads no text."""
    tokens_per_s: float
    step_time_s: float
    memory: Mapping[str, int | None]
    """Rank 0's bytes by kind, each kind at its own highest so far; None for a kind that was not measured."""
    world_size: int
    skipped_steps: int = 0
    """Number of steps so far, this one included, that left weights and optimizer state as they were, because the loss
    or the gradient norm was not finite."""
    rollbacks: int = 0
    """How often the run went back to a checkpoint so far."""


_SHOWN = ("loss", "lr", "grad_norm", "tokens_per_s", "step_time_s")
"""Metrics that other tools' logs get, besides memory."""


class MetricsWriter:
    """Writes the metrics of steps and evaluations. Used on rank 0 only."""

    def __init__(
        self, metrics: Path, evaluations: Path, flush_every: int, loggers: Sequence[MetricLogger] = ()
    ) -> None:
        """
        Args:
            metrics: the file for steps, which is appended to.
            evaluations: the file for evaluations, which is appended to.
            flush_every: number of steps between flushes of the file for steps.
            loggers: other logs, which are closed with the files.
        """
        self._flush_every = flush_every
        self._loggers = loggers
        self._files = metrics, evaluations
        self._open()

    def _open(self) -> None:
        self._steps, self._evaluations = (file.open("a", encoding="utf-8") for file in self._files)

    def step(self, metrics: StepMetrics) -> None:
        """Write one step."""
        row = {name: _finite(value) for name, value in asdict(metrics).items()}
        self._steps.write(json.dumps(row) + "\n")
        if metrics.step % self._flush_every == 0:
            self._steps.flush()
        if self._loggers:
            shown = {f"train/{name}": getattr(metrics, name) for name in _SHOWN}
            shown |= {f"memory/{kind}": size for kind, size in metrics.memory.items()}
            self._add({name: value for name, value in shown.items() if value is not None}, metrics.step)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write what an evaluation after `step` steps found: "loss" in nats per target, the number of targets, and
        metrics."""
        row = {name: _finite(value) for name, value in values.items()}
        self._evaluations.write(json.dumps({"step": step, **row}) + "\n")
        self._evaluations.flush()
        self._add({f"eval/{name}": value for name, value in values.items() if isinstance(value, float)}, step)

    def _add(self, values: Mapping[str, float], step: int) -> None:
        for logger in self._loggers:
            logger.add(values, step)

    def flush(self) -> None:
        """Pass all steps written so far to the operating system."""
        self._steps.flush()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Close the files for the block, in which others write them. Lines that other tools were sent stay."""
        self._close()
        yield
        self._open()

    def _close(self) -> None:
        self._steps.close()
        self._evaluations.close()

    def close(self) -> None:
        """Close all files."""
        self._close()
        for logger in self._loggers:
            logger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finite(value: Any) -> Any:
    """Return a value as it is, or None for a number that JSON has no word for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    return MetricsWriter(directory.metrics, directory.evaluations, config.log.every, open_loggers(directory, config))
