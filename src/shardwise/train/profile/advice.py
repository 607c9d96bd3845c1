"""Advice for shares of a step that are out of bounds; for communication with the planner's estimate of the gain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from shardwise.errors import UserError
from shardwise.fsdp.strategy import Strategy
from shardwise.plan.dry_run.job import Job
from shardwise.plan.simulate.forecast import Forecast
from shardwise.train.run.profiles import (
    DATA,
    EVALUATING,
    OPTIMIZER,
    PEER,
    REST,
    SAVING,
    TRANSFER,
    Advice,
    Profile,
)

_BOUNDS = {TRANSFER: 0.3, PEER: 0.1, DATA: 0.05, OPTIMIZER: 0.25, SAVING: 0.05, EVALUATING: 0.2, REST: 0.2}
"""Shares from which on there is advice."""
_GAIN = 1.02
"""The least gain, as a factor, for which a change is proposed."""
_FURTHER_SLOTS = 2


def advise(profile: Profile, faster: Callable[[], str]) -> Iterator[Advice]:
    """Yield advice for each share that is out of bounds.

    Args:
        profile: the summary.
        faster: called if communication is; returns which setting to change.
    """
    shares = profile.mean_shares
    if profile.communication > _BOUNDS[TRANSFER]:
        yield Advice(f"communication takes {profile.communication:.0%} of a step", faster())
    if shares[PEER] > _BOUNDS[PEER]:
        slowest, steps_s = profile.slowest_rank, profile.step_time_s
        told = f"ranks wait for one another for {shares[PEER]:.0%} of a step"
        if profile.waited_for_s[slowest] > 0.6 * sum(profile.waited_for_s):
            mostly = profile.waited_for_s[slowest] / (len(profile.shares) - 1) / steps_s
            yield Advice(
                f"{told}, mostly for rank {slowest}, which takes {mostly:.0%} of the others' time",
                f"look at rank {slowest}'s machine: heat, other programs, a slower link or disk",
            )
        else:
            yield Advice(
                f"{told}, now for this one and now for that",
                "batches of unequal work, or too few cores: sequences of one length (data.packing), fewer ranks of a "
                "machine's cores",
            )
    simple = {
        DATA: "set data.streaming = false where the data fits into memory, or give each rank more cores",
        OPTIMIZER: "more tokens per step (train.global_batch) make it rarer",
        SAVING: "set checkpoint.asynchronous = true, or raise checkpoint.every",
        EVALUATING: "raise train.eval_every",
        REST: "the host is late: train.compile = true, or a larger train.micro_batch",
    }
    for name, advice in simple.items():
        if shares.get(name, 0.0) > _BOUNDS[name]:
            verb = "take" if name.endswith("s") else "takes"
            yield Advice(
                f"{'the optimizer' if name == OPTIMIZER else name} {verb} {shares[name]:.0%} of a step", advice
            )


def faster_settings(job: Job, forecast: Callable[[Job], Forecast]) -> str:
    """Return the change of one setting that the planner thinks gains most, in words.

    Args:
        job: the run's.
        forecast: the planner.

    Raises:
        UserError: the run itself cannot be planned.
    """
    before = forecast(job)
    best, gain = "", _GAIN
    for change in _changes(job):
        try:
            found = forecast(replace(job, **change))
        except UserError:  # nobody asked for it
            continue
        factor = found.tokens_per_s_per_gpu / before.tokens_per_s_per_gpu
        if found.fits and factor > gain:
            gain = factor
            more = (found.peak_memory_bytes - before.peak_memory_bytes) / 2**30
            gained = f"{factor - 1:.0%} more tokens per second by the planner's estimate"
            best = f"{_keys(job, change)}: {gained}, {more:+.2f} GiB"
    return best or "no single setting helps by the planner's estimate: faster links, or fewer ranks, would"


def _changes(job: Job) -> Iterator[dict[str, Any]]:
    """Yield changes of one setting each that make a step communicate less, or hide more of it."""
    yield {"micro_batch": 2 * job.micro_batch}
    if job.strategy is Strategy.FULL_SHARD:
        yield {"strategy": Strategy.SHARD_GRAD_OP}
        if job.nodes > 1:
            yield {"strategy": Strategy.HYBRID_SHARD, "shard_group": job.gpus_per_node}
    if not job.on_cpu and job.precision.param in {None, "float32", "fp32"}:
        yield {"precision": replace(job.precision, param="bf16")}
    if not job.on_cpu and job.precision.reduce not in {"bfloat16", "bf16"}:
        yield {"precision": replace(job.precision, reduce="bf16")}
    yield {"slots": job.slots + _FURTHER_SLOTS}


def _keys(job: Job, change: dict[str, Any]) -> str:
    """Return a change as the keys of a configuration."""
    if "precision" in change:
        name = "reduce_dtype" if change["precision"].param == job.precision.param else "param_dtype"
        return f'parallel.{name} = "bf16"'
    found = []
    for name, value in change.items():
        key = {"micro_batch": "train.micro_batch"}.get(name, f"parallel.{name}")
        found.append(f"{key} = " + (f'"{value.value}"' if isinstance(value, Strategy) else str(value)))
    return ", ".join(found)
