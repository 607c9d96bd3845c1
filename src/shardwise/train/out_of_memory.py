"""When a step runs out of memory: what was planned, what is held, and the two cheapest ways out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import OutOfMemory, UserError
from shardwise.plan.report.report import parts
from shardwise.plan.search.evaluator import Evaluator
from shardwise.plan.search.exploration import available_bytes, gib, needed_bytes
from shardwise.policy.kinds import KINDS
from shardwise.train.config.job import hardware_here, job_of, source_of
from shardwise.train.config.models import TextShape
from shardwise.train.config.schema import Config
from shardwise.train.ranks import Ranks

if TYPE_CHECKING:
    from shardwise.plan.simulate.forecast import Forecast

_WAYS = 2
_SEARCH_S = 12.0
"""After this no further forecast is begun (those of large models take seconds each): peers wait in a collective."""
_MARGIN = 0.95
"""Of the memory that did not do, what a way out may need where the plan thought that all would fit."""


@dataclass(frozen=True, slots=True)
class Way:
    """A change of the configuration with which the run is forecast to fit."""

    changes: str
    """As overrides on the command line."""
    needs_bytes: int
    slowdown: float
    """Of the step for the same global batch: 0.1 is 10 % slower."""


def explained(
    error: torch.OutOfMemoryError, step: int, config: Config, text: TextShape, model: nn.Module, ranks: Ranks
) -> OutOfMemory:
    """The error to raise instead. Local: other ranks may be anywhere.

    Args:
        error: as torch raised it.
        step: counted from 1.
        config: fitted to its ranks, its strategy decided.
        text: the data's shape.
        model: sharded.
        ranks: this process among them.
    """
    said = " ".join(str(error).split()).split(" If reserved")[0][:300]
    head = f"step {step} ran out of memory on rank {ranks.rank}: {said}"
    held = sw.memory(model).now
    until_s = time.monotonic() + _SEARCH_S
    try:
        hardware = hardware_here(config, ranks.device)
        evaluate = Evaluator(source_of(config, text))
        planned = evaluate(job_of(config, ranks, hardware))
        found = sorted(_ways(config, planned, evaluate, ranks, until_s), key=lambda way: way.slowdown)
    except UserError as failure:  # a plan is a help here, and no plan is no reason to hide what happened
        return OutOfMemory("\n".join([head, *_table(None, held), f"no plan for this run: {failure}"]))
    return OutOfMemory("\n".join([head, *_table(planned, held), *_ways_out(found[:_WAYS], time.monotonic() > until_s)]))


def _table(planned: Forecast | None, held: Mapping[str, int]) -> list[str]:
    """Bytes by kind: the plan's at its peak, and what is held now."""
    expected = parts(planned) if planned is not None else {}
    kinds = [kind for kind in dict.fromkeys([*KINDS, *expected]) if expected.get(kind) or held.get(kind)]
    rows = [("GiB", "planned", "held now")]
    rows += [(kind, _cell(expected.get(kind)), _cell(held.get(kind))) for kind in kinds]
    rows.append(("all", _cell(sum(expected.values())), _cell(sum(held.values()))))
    if planned is None:
        return [f"  {name:<16}{here:>12}" for name, _, here in rows]
    where = " of ".join(filter(None, planned.peak_at))
    return [
        *(f"  {name:<16}{plan:>12}{here:>12}" for name, plan, here in rows),
        f"  of {gib(planned.usable_bytes)} GiB usable; the plan's peak is in {where}",
    ]


def _cell(nbytes: int | None) -> str:
    return "-" if nbytes is None else gib(nbytes)


def _ways_out(ways: list[Way], late: bool) -> list[str]:
    if not ways and late:
        return [f"Forecasts take longer than {_SEARCH_S:g} s here, so none was made of a way out: see shardwise plan."]
    if not ways:
        return ["No change of the batch, of recomputation or of the strategy is forecast to fit: use more ranks."]
    return ["The cheapest ways out, by forecast:"] + [
        f"  {way.changes}  ({gib(way.needs_bytes)} GiB, {_slower(way.slowdown)})" for way in ways
    ]


def _slower(slowdown: float) -> str:
    return f"{slowdown:.0%} slower" if slowdown >= 0.005 else "no slower"


def _ways(config: Config, planned: Forecast, evaluate: Evaluator, ranks: Ranks, until_s: float) -> Iterator[Way]:
    """Changes that are forecast to fit, alone where one does, else two together; those found by then."""
    has = available_bytes(planned)
    saved = int(planned.reserved_memory_bytes * (1 - _MARGIN))
    limit = needed_bytes(planned) - saved if needed_bytes(planned) <= has else has
    seen = False
    single = list(_changes(config))
    pairs = [
        first | second
        for n, first in enumerate(single)
        for second in single[n + 1 :]
        if not first.keys() & second.keys()
    ]
    for group in (single, pairs):
        for change in group:
            if time.monotonic() > until_s:
                return
            forecast = evaluate(job_of(_changed(config, change), ranks, planned.job.gpu))  # type: ignore[arg-type]
            if needed_bytes(forecast) <= limit:
                seen = True
                slowdown = forecast.step_time_s / planned.step_time_s - 1
                yield Way(" ".join(f"{key}={value}" for key, value in change.items()), needed_bytes(forecast), slowdown)
        if seen:
            return


def _changes(config: Config) -> Iterator[dict[str, str | int]]:
    """What can be changed without changing what is computed."""
    if config.train.activation_checkpointing == "none":
        for mode in ("selective-ops", "every-2", "full"):
            yield {"train.activation_checkpointing": mode}
    elif config.train.activation_checkpointing != "full":
        yield {"train.activation_checkpointing": "full"}
    size = config.train.micro_batch
    while size > 1 and size % 2 == 0:
        size //= 2
        yield {"train.micro_batch": size}
    if size == config.train.micro_batch > 1:
        yield {"train.micro_batch": 1}
    if config.parallel.strategy != "full_shard":
        yield {"parallel.strategy": "full_shard"}


def _changed(config: Config, change: Mapping[str, str | int]) -> Config:
    for dotted, value in change.items():
        section, _, key = dotted.partition(".")
        update = {key: value}
        if dotted == "parallel.strategy":
            update["shard_group"] = None  # type: ignore[assignment]
        config = config.model_copy(update={section: getattr(config, section).model_copy(update=update)})
    return config
