"""The message when a step runs out of memory: planned bytes, bytes held now, and ways out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import OutOfMemory, UserError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.report.report import parts
from shardwise.plan.search.advice import Change, ways_out
from shardwise.plan.search.exploration import Evaluate, gib, needed_bytes
from shardwise.plan.search.search import Question
from shardwise.policy.kinds import KINDS
from shardwise.train.build.job import arguments_of, forecasters_of, hardware_here, job_of, source_of
from shardwise.train.build.models import TextShape
from shardwise.train.config.schema import Config
from shardwise.train.process.ranks import Ranks

if TYPE_CHECKING:
    from shardwise.plan.simulate.forecast import Forecast

_LOOKS_FOR_S = 5.0
"""Seconds after which no further forecast is begun: other ranks wait until this one ends."""
_LESS = 0.1
"""Share of the planned bytes by which a smaller configuration is smaller."""


def explained(
    error: torch.OutOfMemoryError, step: int, config: Config, text: TextShape, model: nn.Module, ranks: Ranks
) -> OutOfMemory:
    """Return the error to raise instead of `error`. Does not communicate, because other ranks may be anywhere.

    Args:
        error: as torch raised it.
        step: counted from 1.
        config: fitted to its ranks, with the strategy decided.
        text: the sizes that the data requires.
        model: the sharded model.
        ranks: this process's place in the run.
    """
    cause = " ".join(str(error).split()).split(" If reserved")[0][:300]
    lines = [f"step {step} ran out of memory on rank {ranks.rank}: {cause}"]
    held = sw.memory(model).now
    try:
        job = job_of(config, ranks, hardware_here(config, ranks.device))
        with forecasters_of(config, text) as forecasters:
            planned = forecasters(job)
            lines += _table(planned, held)
            budget_bytes = needed_bytes(planned) - int(_LESS * planned.reserved_memory_bytes)
            arguments = arguments_of(config, ranks, job.hardware)
            question = Question(source_of(config, text).build or {}, arguments, budget_bytes=budget_bytes)
            lines.append(_smaller(question, planned, forecasters, config.run_directory / "config.toml"))
    except UserError as failure:  # without a plan, the rest is still worth reading
        lines += [*_table(None, held), f"no plan for this run: {failure}"]
    return OutOfMemory("\n".join([*lines, f"To use less memory: {', '.join(_ways_out(config))}"]))


def _smaller(question: Question, planned: Forecast, evaluate: Evaluate, file: Path) -> str:
    """Return a line with the first way out that the planner finds, in settings to copy, or, if that takes too long,
    with the command that goes on looking. `file`: the run's configuration."""
    until_s = time.monotonic() + _LOOKS_FOR_S

    known = {repr(planned.job): planned}  # devices cannot be hashed

    def in_time(job: Job) -> Forecast:
        name = repr(job)
        if name not in known:
            if time.monotonic() > until_s:
                raise TimeoutError
            known[name] = evaluate(job)
        return known[name]

    found = None
    with suppress(Exception):  # out of time, or a plan that fails: neither may hide what has happened
        found = next(ways_out(question, planned.job, in_time, _is_a_setting), None)
    if found is None:
        return f"`shardwise plan --from {file}` looks for a configuration that needs less"
    needs, instead = gib(needed_bytes(found.forecast)), gib(needed_bytes(planned))
    return f"The next smaller configuration, which by the plan needs {needs} GiB instead of {instead}: {found.keys}"


def _is_a_setting(change: Change) -> bool:
    """Whether the run can be given this change as it is, on the ranks that it has."""
    return bool(change.keys) and not any(words in change.keys for words in ("parallel.ranks", "torchrun", "..."))


def _ways_out(config: Config) -> Iterator[str]:
    """Yield changes of the configuration that need less memory without changing the result."""
    if config.train.activation_checkpointing not in {"full", "offload"}:
        yield "train.activation_checkpointing=full"
    size = config.train.micro_batch
    if size > 1:
        smaller = size // 2 if size % 2 == 0 else 1
        yield f"train.micro_batch={smaller} with train.global_batch={config.train.global_batch}"
    if config.parallel.strategy != "full_shard":
        yield "parallel.strategy=full_shard"
    yield "more ranks (`shardwise plan` forecasts what fits)"


def _table(planned: Forecast | None, held: Mapping[str, int]) -> list[str]:
    """Return the lines of a table of bytes by kind: planned at the plan's peak, and held now."""
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
