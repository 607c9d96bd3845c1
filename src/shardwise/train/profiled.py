"""A trainer that profiles some of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardwise.errors import one_line
from shardwise.model_tools.event_log import shadowed
from shardwise.train.build.job import forecasters_of, hardware_here, job_of
from shardwise.train.config.schema import Config
from shardwise.train.data.micro_batch import MicroBatch
from shardwise.train.loss import StepWeights
from shardwise.train.profile.advice import advise, faster_settings
from shardwise.train.profile.rank_file import STEP
from shardwise.train.profile.session import NoProfile, Session, lines
from shardwise.train.run.directory import RunDirectory
from shardwise.train.run.metrics import MetricsWriter
from shardwise.train.run.preflight import PROFILE_FROM
from shardwise.train.run.profiles import COMPUTE, DATA, EVALUATING, OPTIMIZER, SAVING, TRACE, Profile
from shardwise.train.trainer import Trainer


def kind_for(config: Config) -> type[Trainer] | None:
    """Return the class whose object trains as a configuration says that asks for a profile; None for others."""
    return ProfiledTrainer if config.log.profile else None


class ProfiledTrainer(Trainer):
    """Profiles `log.profile` steps, from the third of the launch on: the first allocates, the second learns the order
    of units."""

    _session: Session | None = None

    def run(self, directory: RunDirectory) -> None:
        """Train as `Trainer.run`. Every rank must call this."""
        self._directory = directory
        try:
            super().run(directory)
        finally:
            if self._session is not None:  # the run has ended before its last profiled step
                self._session.close()
        if self.taken - self.first_step < PROFILE_FROM + self.config.log.profile:
            self.console.say(
                f"no profile: this launch took {self.taken - self.first_step} steps, and profiles the "
                f"{self.config.log.profile} after its first {PROFILE_FROM}"
            )

    def step(self, step: int) -> None:
        """Take a step, and begin or end the profile around it. Every rank must call this."""
        if step - self.first_step == PROFILE_FROM and self._session is None:
            self._session = Session(self.model, self.ranks)
        with self._noting(STEP), ExitStack() as stack:
            if self._session is not None:
                stack.enter_context(shadowed(self.batches, "batch", self._reading))
            super().step(step)

    def _report(self, writer: MetricsWriter | None, left: int) -> bool:
        """Report steps as `Trainer._report`, and end the profile after its last step. Every rank must call this."""
        last = self.first_step + PROFILE_FROM + self.config.log.profile
        if self._session is None or self.taken < last:
            return super()._report(writer, left)
        if super()._report(writer, 0):  # before the time that follows, which is of no step
            return True
        session, self._session = self._session, None
        self._conclude(session, last + 1 - self.config.log.profile)
        return False

    def _conclude(self, session: Session, first_step: int) -> None:
        """Write the profile and print its summary, or why there is none: training goes on without. Every rank must call
        this."""
        self.console.doing("writing the profile")
        try:
            profile = session.end(self._directory.profile, first_step)
            told = session.work(lambda: [] if profile is None else self._advised(profile))
        except NoProfile as error:
            told = [f"no profile: {error}"]
        for line in told:
            self.console.say(line)

    def _advised(self, profile: Profile) -> list[str]:
        """Write the summary, with advice, and return it in words. Not collective."""
        advised = replace(profile, advice=tuple(advise(profile, self._faster)))
        advised.write(self._directory.profile)
        return lines(advised, self._directory.profile / TRACE)

    def _faster(self) -> str:
        """Return the change of one setting that gains most. Not collective."""
        try:
            job = job_of(self.config, self.ranks, hardware_here(self.config, self.ranks.device))
            with forecasters_of(self.config, self.task.shape) as forecasters:
                return faster_settings(job, forecasters)
        except Exception as error:  # the profile is worth having without
            return f"no plan of this run can be made ({one_line(error)})"

    def _noting(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self._session is None else self._session.log.noting(what)

    def _reading(self, own: Any) -> Any:
        def batch(step: int) -> Any:
            with self._noting(DATA):
                return own(step)

        return batch

    def _accumulate(self, batches: Sequence[MicroBatch], weights: StepWeights) -> Tensor:
        with self._noting(COMPUTE):
            return super()._accumulate(batches, weights)

    def _clip(self) -> Tensor | None:
        with self._noting(OPTIMIZER):
            return super()._clip()

    def _update(self, skips: Tensor) -> None:
        with self._noting(OPTIMIZER):
            super()._update(skips)

    def _save(self, *arguments: Any) -> None:
        with self._noting(SAVING):
            super()._save(*arguments)

    def _evaluate(self, *arguments: Any) -> bool:
        with self._noting(EVALUATING):
            return super()._evaluate(*arguments)
