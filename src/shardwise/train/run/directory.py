"""`runs/<name>/`: the files of a run."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.publish.commit import CHECKPOINTS, FINAL
from shardwise.errors import ConfigError
from shardwise.train.config.files import dump_toml
from shardwise.train.config.schema import Config

_MEMORY_ID = "memory-id"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run's files. Only rank 0 writes there."""

    path: Path

    @property
    def config(self) -> Path:
        """File with the resolved configuration."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """File with one JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """File with one JSON object per evaluation: step, loss in nats per target, targets, metrics."""
        return self.path / "evaluations.jsonl"

    @property
    def rollbacks(self) -> Path:
        """File with one JSON object per return to a checkpoint (`rollbacks.Rollback`). There is none without."""
        return self.path / "rollbacks.jsonl"

    @property
    def launches(self) -> Path:
        """File with the launches of the run, as `run.launches` writes it."""
        return self.path / "launches.jsonl"

    @property
    def facts(self) -> Path:
        """File with one JSON object: what the last launch found out about the model and its ranks."""
        return self.path / "facts.json"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.path / "report.html"

    @property
    def profile(self) -> Path:
        """Directory of what `--profile` wrote."""
        return self.path / "profile"

    @property
    def answers(self) -> Path:
        """Directory with a file of the answers of each evaluation by generation."""
        return self.path / "answers"

    @property
    def tensorboard(self) -> Path:
        """Directory of TensorBoard's files."""
        return self.path / "tensorboard"

    @property
    def wandb_id(self) -> Path:
        """File with the id of the run in Weights & Biases."""
        return self.path / "wandb-id"

    @property
    def memory_id(self) -> str:
        """What tells the copies of this run in memory from those of any other, also of one that had this directory
        before; empty if the run has none."""
        try:
            found = (self.path / _MEMORY_ID).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            return ""
        return found if re.fullmatch("[0-9a-f]{16}", found) else ""

    def made_memory_id(self) -> str:
        """Return `memory_id`, a new one if there is none or nothing is left of the run that had it. Raises ConfigError
        if the directory cannot be written."""
        if self.memory_id and (self.metrics.exists() or self.checkpoints.exists()):
            return self.memory_id
        partial = self.path / f"{_MEMORY_ID}.partial"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            partial.write_text(secrets.token_hex(8), encoding="ascii")
            partial.replace(self.path / _MEMORY_ID)
        except OSError as error:
            raise ConfigError(f"cannot write the run directory {self.path}: {error.strerror}") from None
        return self.memory_id

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints `step-NNNNNN/`."""
        return self.path / CHECKPOINTS

    @property
    def final(self) -> Path:
        """Directory of the trained model. It appears at the end of the run, complete."""
        return self.path / FINAL

    @property
    def is_finished(self) -> bool:
        """Whether `final` exists. Raises ConfigError if the directory cannot be read."""
        try:
            return self.final.is_dir()
        except OSError as error:
            raise ConfigError(f"cannot read the run directory {self.path}: {error.strerror}") from None

    @property
    def steps_taken(self) -> int:
        """Number of steps taken, by the last complete line of `metrics`; 0 without one. Raises ConfigError if the file
        cannot be read or the line is damaged."""
        try:
            lines = self.metrics.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise ConfigError(f"cannot read {self.metrics}: {error.strerror}") from None
        return _step(lines[-1], f"{self.metrics}, line {len(lines)}") if lines else 0

    def begin(self, config: Config, steps: int = 0) -> bool:
        """Create the directory and write the configuration.

        Args:
            steps: number of steps that a resumed run has taken. Lines and answers of later steps are dropped, because
                these steps are taken again.

        Returns:
            Whether metrics of an unfinished run existed and were dropped because the run starts anew.

        Raises:
            ConfigError: the directory cannot be written, or a log in it is damaged; the message names the line.
        """
        try:
            dropped = self.metrics.exists() and not steps
            self.path.mkdir(parents=True, exist_ok=True)
            self.config.write_text(dump_toml(config), encoding="utf-8")
            self.facts.unlink(missing_ok=True)
            self._keep(steps)
            if not steps:
                for directory in (self.tensorboard, self.profile):
                    shutil.rmtree(directory, ignore_errors=True)
                for file in (self.wandb_id, self.launches, self.rollbacks, self.report):
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write the run directory {self.path}: {error.strerror}") from None
        return dropped

    def go_back(self, steps: int, rollbacks: Sequence[Mapping[str, Any]]) -> None:
        """Drop what was written about steps after `steps`, and write how the run went back so far. Raises as
        `begin`."""
        try:
            self._keep(steps)
            self.rollbacks.write_text("".join(json.dumps(one) + "\n" for one in rollbacks), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the run directory {self.path}: {error.strerror}") from None

    def _keep(self, steps: int) -> None:
        """Drop the lines and answers of steps after `steps`."""
        for log in (self.metrics, self.evaluations):
            _keep(log, steps)
        for answers in self.answers.glob("step-*.jsonl"):
            if not steps or int(answers.stem.removeprefix("step-")) > steps:
                answers.unlink()

    def write_answers(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write what the model answered after `step` steps, one JSON object per line; return the file. Raises
        ConfigError if it cannot be written."""
        file = self.answers / f"step-{step:06d}.jsonl"
        partial = file.with_suffix(".partial")
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        try:
            self.answers.mkdir(exist_ok=True)
            partial.write_text("".join(lines), encoding="utf-8", errors="surrogatepass")
            partial.replace(file)
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from None
        return file

    @contextmanager
    def writing_final(self) -> Iterator[Path]:
        """Yield a directory to fill, which is renamed to `final` when the block ends without an error."""
        partial = self.path / "final.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(self.final, ignore_errors=True)  # a finished run that was resumed has one already
        partial.rename(self.final)


def _keep(log: Path, steps: int) -> None:
    """Drop all lines about steps after `steps`, and an incomplete last line of a run that was killed."""
    if not steps:
        log.unlink(missing_ok=True)
    elif log.exists():
        *whole, _ = log.read_bytes().split(b"\n")
        kept = [line + b"\n" for number, line in enumerate(whole, 1) if _step(line, f"{log}, line {number}") <= steps]
        partial = log.with_name(f"{log.name}.partial")
        partial.write_bytes(b"".join(kept))
        partial.replace(log)


def _step(line: bytes, where: str) -> int:
    """Return the step that a line of a log is about. Raises ConfigError, naming `where`, for a damaged line."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where}: is not a JSON object with a step ({type(error).__name__}: {error}); remove the line, or "
            "move the file away, and start again"
        ) from None
