"""`parallel.strategy = "auto"`: plan the fastest strategy that fits before the run; compare it with the run
afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from shardwise.errors import PlanError, UserError
from shardwise.plan.hardware.calibration import QUICK, calibrate
from shardwise.plan.hardware.devices import Hardware
from shardwise.plan.report.report import full_name
from shardwise.plan.search.exploration import (
    Candidate,
    Evaluate,
    Objective,
    gib,
    needed_bytes,
    nothing_fits,
    ranked,
)
from shardwise.plan.search.space import Sweep, search_space
from shardwise.plan.search.sweeps import explore_sweep
from shardwise.train.build.job import arguments_of, forecasters_of, hardware_here, job_of
from shardwise.train.build.models import TextShape
from shardwise.train.config.schema import Config
from shardwise.train.process.ranks import Ranks

if TYPE_CHECKING:
    from shardwise.plan.simulate.forecast import Forecast


@dataclass(frozen=True, slots=True)
class Outlook:
    """The plan's forecast of the run."""

    words: str
    """The chosen strategy and its forecast, in one sentence."""
    memory: Mapping[str, int]
    """Bytes by kind at the peak of a step."""
    step_time_s: float
    exposed_comm_s: float
    """Seconds of a step in which computation waits for communication."""
    device: str
    """The title of the device that was planned for."""
    is_this_device: bool = True
    """False if that is a packaged description of some processor, whose times are not this one's."""


def settle(config: Config, text: TextShape, ranks: Ranks) -> tuple[Config, Outlook | None]:
    """Replace "auto" by the strategy that a plan recommends. Every rank must call this.

    Rank 0 plans and sends the result to the others. CPU ranks first measure the machine together, for about three
    seconds, unless `parallel.hardware` is set.

    Returns:
        The configuration with a strategy, and the forecast; the same on every rank. If the strategy is not "auto", the
        given configuration and None.

    Raises:
        PlanError: nothing fits, or the model cannot be planned. Raised on every rank.
    """
    if config.parallel.strategy != "auto":
        return config, None
    hardware: Hardware | None = None
    if ranks.device.type == "cpu" and config.parallel.hardware is None:
        hardware = calibrate(ranks.device, QUICK)

    def plan() -> tuple[Config, Outlook] | PlanError:
        try:
            return choose(config, text, ranks, hardware or hardware_here(config, ranks.device))
        except PlanError as error:
            return error

    planned = ranks.on_first(plan)
    if isinstance(planned, PlanError):
        raise planned
    return planned


def choose(config: Config, text: TextShape, ranks: Ranks, hardware: Hardware) -> tuple[Config, Outlook]:
    """Replace "auto" by the strategy that a plan for the given device recommends. Not collective.

    Raises:
        PlanError: nothing fits, or the model cannot be planned.
    """
    try:
        best = _best(config, text, ranks, hardware)
    except UserError as error:
        raise PlanError(f'parallel.strategy="auto": {error}') from error
    choice = {"strategy": best.job.strategy.value, "shard_group": best.job.shard_group}
    parallel = config.parallel.model_copy(update=choice)
    return config.model_copy(update={"parallel": parallel}), _outlook(best)


def outlook_of(config: Config, text: TextShape, ranks: Ranks) -> Outlook:
    """Return the forecast of a run whose strategy is decided. Not collective. Raises UserError for a run that cannot be
    planned."""
    job = job_of(config, ranks, hardware_here(config, ranks.device))
    is_this_device = ranks.device.type != "cpu" or config.parallel.hardware is not None
    with forecasters_of(config, text) as forecasters:
        return replace(_outlook(forecasters(job)), is_this_device=is_this_device)


def _best(config: Config, text: TextShape, ranks: Ranks, hardware: Hardware) -> Forecast:
    """Return the forecast of the fastest strategy that fits. Raises PlanError if none fits."""
    objective = Objective.TOKENS_PER_S

    def explored(sweep: Sweep, evaluate: Evaluate) -> list[Candidate]:
        return [*explore_sweep(sweep, evaluate, None, objective)]

    sweeps = search_space(arguments_of(config, ranks, hardware)).sweeps
    with forecasters_of(config, text) as forecasters:
        found = forecasters.run([partial(explored, sweep) for sweep in sweeps])
    exploration = ranked(itertools.chain.from_iterable(found), objective, None)
    if exploration.best is None:
        raise nothing_fits(exploration)
    return exploration.best


def _outlook(best: Forecast) -> Outlook:
    words = (
        f"planned: {full_name(best.job)}; {gib(needed_bytes(best))} GiB of a device's {gib(best.usable_bytes)}, "
        f"{best.step_time_s:.3g} s per step"
    )
    return Outlook(words, dict(best.memory), best.step_time_s, best.exposed_comm_s, best.job.hardware.title)
