"""What stands out in a run, each with one line of advice."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from shardwise.policy.kinds import STATE_KINDS
from shardwise.train.report.run_log import RunLog

_FEW = 20
"""Runs of fewer steps are not judged by how their steps change."""
_WARM_UP = 3
"""Steps at the beginning that allocate memory and learn the order of units."""
_SHARE_OF_SAVES, _SHARE_OF_EVALUATIONS = 0.05, 0.2
_SLOWER, _UNEVEN = 1.1, 1.5
_BESIDE_PLAN = 0.1
_RISE = 1.02
"""The held-out loss at the end over the lowest, from which on it counts as risen."""


class Finding(NamedTuple):
    """Something that stands out."""

    what: str
    advice: str


def findings(run: RunLog) -> list[Finding]:
    """Return what stands out in a run."""
    profiled = [Finding(one.what, one.advice) for one in run.profile.advice] if run.profile is not None else []
    return [*_of_the_end(run), *_of_losses(run), *_of_steps(run), *_of_time(run), *_of_memory(run), *profiled]


def _of_the_end(run: RunLog) -> Iterator[Finding]:
    if not run.is_finished:
        last, steps = run.step_numbers[-1], run.config["train"]["steps"]
        yield Finding(f"the run has not finished: {last:,} of {steps:,} steps", "start it again to continue")
    skipped = run.steps[-1].get("skipped_steps") or 0
    if skipped:
        yield Finding(
            f"{skipped:,} steps were skipped because the loss or the gradient norm was not finite",
            "lower train.lr, raise train.warmup_steps, or set train.clip",
        )
    back = run.steps[-1].get("rollbacks") or 0
    if back:
        yield Finding(
            f"{back:,} times the run went back to a checkpoint, because a loss was a spike or not finite",
            "rollbacks.jsonl says from where: look at the rows, or lower train.lr",
        )


def _of_losses(run: RunLog) -> Iterator[Finding]:
    losses = [loss for loss in run.column("loss") if loss is not None]
    tenth = max(1, len(losses) // 10)
    if len(losses) >= _FEW:
        first, last = (statistics.fmean(part) for part in (losses[:tenth], losses[-tenth:]))
        if last >= first:
            yield Finding(
                f"the loss did not fall: {first:.4g} in the first tenth of the steps, {last:.4g} in the last",
                "lower train.lr, raise train.warmup_steps, and look at the rows with `shardwise init`",
            )
    evaluated = [(row["loss"], row["step"]) for row in run.evaluations if row.get("loss") is not None]
    if evaluated:
        (least, step), (final, _) = min(evaluated), evaluated[-1]
        if final > _RISE * least:
            yield Finding(
                f"the held-out loss was lowest after step {step:,} ({least:.4g}) and rose to {final:.4g}",
                "it learns the rows by heart: set checkpoint.keep_best and train.patience, or train on more data",
            )


def _of_steps(run: RunLog) -> Iterator[Finding]:
    times = [row["step_time_s"] for row in run.steps][_WARM_UP:]
    if len(times) < _FEW:
        return
    tenth = max(1, len(times) // 10)
    first, last = (statistics.median(part) for part in (times[:tenth], times[-tenth:]))
    if last > _SLOWER * first:
        yield Finding(
            f"steps became slower: {first:.3g} s at first, {last:.3g} s at the end",
            "look for other programs on the machine, heat, or memory that is swapped",
        )
    slow = statistics.quantiles(times, n=20)[-1]
    if slow > _UNEVEN * run.step_time_s:
        yield Finding(
            f"steps are uneven: one in twenty took more than {slow:.3g} s, the median is {run.step_time_s:.3g} s",
            "`shardwise train --profile` tells whether ranks wait for data or for one another"
            if run.profile is None
            else "the profile tells whether ranks wait for data or for one another",
        )


def _of_time(run: RunLog) -> Iterator[Finding]:
    spent = run.time_spent
    total_s = sum(spent.values()) or 1.0
    saves, evaluations, lost = (
        spent.get(kind, 0.0) / total_s for kind in ("saves", "evaluations", "steps taken again")
    )
    if saves > _SHARE_OF_SAVES:
        yield Finding(f"saves took {saves:.0%} of the time", "set checkpoint.asynchronous = true, or save less often")
    if evaluations > _SHARE_OF_EVALUATIONS:
        yield Finding(f"evaluations took {evaluations:.0%} of the time", "raise train.eval_every")
    if lost > _SHARE_OF_SAVES:
        yield Finding(f"steps that were lost and taken again took {lost:.0%} of the time", "lower checkpoint.every")


def _of_memory(run: RunLog) -> Iterator[Finding]:
    planned, measured = run.facts.planned, run.peak
    if planned is None:
        return
    there, here = (sum(memory.get(kind, 0) for kind in STATE_KINDS) for memory in (planned.memory, measured))
    if there and here > (1 + _BESIDE_PLAN) * there:
        yield Finding(
            f"parameters, gradients and optimizer state took {here / there - 1:.0%} more memory than planned",
            "parameters that are left out of sharding, or views that are kept, take memory that no plan knows of",
        )
