"""`parallel.strategy = "auto"`: the fastest strategy that fits, planned before the run and compared with it after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import PlanError, UserError
from shardwise.plan.hardware.calibration import QUICK, calibrate
from shardwise.plan.hardware.devices import Hardware
from shardwise.plan.report.report import full_name
from shardwise.plan.search.evaluator import Evaluator
from shardwise.plan.search.exploration import Objective, explore_family, gib, needed_bytes, nothing_fits, ranked
from shardwise.plan.search.space import search_space
from shardwise.train.build.job import arguments_of, hardware_here, source_of
from shardwise.train.build.models import TextShape
from shardwise.train.config.schema import Config
from shardwise.train.process.ranks import Ranks

if TYPE_CHECKING:
    from shardwise.plan.simulate.forecast import Forecast


@dataclass(frozen=True, slots=True)
class Outlook:
    """The plan's forecast of the run."""

    words: str
    """The choice and its forecast, in a sentence."""
    memory: Mapping[str, int]
    """Bytes by kind at the peak."""
    step_time_s: float


def settle(config: Config, text: TextShape, ranks: Ranks) -> tuple[Config, Outlook | None]:
    """Replace "auto" by the strategy that a plan recommends. Every rank must call this.

    Rank 0 plans and tells the others. On CPU ranks all measure the machine first, for about three seconds.

    Returns:
        The configuration with a strategy, and the outlook; the same on every rank. The given configuration, and None,
        where the strategy is not "auto".

    Raises:
        PlanError: nothing fits, or the model cannot be planned. On every rank.
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
    """Replace "auto" by the strategy that a plan for a device recommends. Not collective.

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


def _best(config: Config, text: TextShape, ranks: Ranks, hardware: Hardware) -> Forecast:
    """The fastest strategy's forecast. Raises PlanError where none fits."""
    evaluate = Evaluator(source_of(config, text))
    objective = Objective.TOKENS_PER_S
    families = search_space(arguments_of(config, ranks, hardware)).families
    candidates = [c for family in families for c in explore_family(family, evaluate, None, objective)]
    exploration = ranked(candidates, objective, None)
    if exploration.best is None:
        raise nothing_fits(exploration)
    return exploration.best


def _outlook(best: Forecast) -> Outlook:
    words = (
        f"planned: {full_name(best.job)}; {gib(needed_bytes(best))} GiB of a device's {gib(best.usable_bytes)}, "
        f"{best.step_time_s:.3g} s a step"
    )
    return Outlook(words, dict(best.memory), best.step_time_s)
