"""Answers as sentences and as plain data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from shardwise.plan.dry_run.job import Job
from shardwise.plan.report.report import amount, full_name
from shardwise.plan.search.advice import Advice
from shardwise.plan.search.exploration import (
    Candidate,
    gib,
    needed_bytes,
)
from shardwise.plan.simulate.forecast import Cost
from shardwise.policy.precision import short_dtype_name


def advice_sentences(advice: Sequence[Advice]) -> list[str]:
    """Say with which settings a model would fit, and how much memory and time each way takes."""
    starts = itertools.chain(["It would fit with"], itertools.repeat("Or with"))
    return [f"{start} {_advice_words(one)}" for start, one in zip(starts, advice, strict=False)]


def faster_sentence(advice: Advice) -> str:
    """Say with which axis a step is faster that waits for the network or recomputes."""
    recomputes = any("cp" in change.arguments for change in advice.changes)
    what = "recompute nothing, and be faster," if recomputes else "wait less for the network"
    return f"It would {what} with {_advice_words(advice)}"


def _advice_words(advice: Advice) -> str:
    found = advice.forecast
    keyless = [f"{change.flags} is no setting of `shardwise train`" for change in advice.changes if not change.keys]
    settings = "; ".join([*([advice.keys] if advice.keys else []), *keyless])
    waits = found.exposed_offload_s / found.step_time_s
    parts = {
        "per GPU": needed_bytes(found),
        "of each node's host memory": found.host_bytes_per_node,
        "of each node's disk": found.disk_bytes_per_node,
    }
    takes = ", ".join(f"{gib(nbytes)} GiB {where}" for where, nbytes in parts.items() if nbytes)
    waiting = f", {waits:.0%} of the step spent waiting for copies" if found.job.offload is not None else ""
    return (
        f"{advice.flags} ({settings}): {full_name(found.job)}: {takes}; "
        f"{found.tokens_per_s_per_gpu:,.0f} tokens/s per GPU{waiting}."
    )


def cost_sentence(cost: Cost, devices: int) -> str:
    """Say what a step, a million tokens and a day cost."""
    whole = f"a day of all {devices} GPUs" if devices > 1 else "a day"
    return (
        f"At {cost.per_device_hour:g} per GPU and hour, a step costs {amount(cost.per_step)}, a million tokens "
        f"{amount(cost.per_million_tokens)}, {whole} {amount(cost.per_day)}."
    )


def setting(job: Job) -> str:
    """Return the settings that all jobs of a search share, in one line."""
    precision = job.precision
    dtypes = "/".join(
        short_dtype_name(name) or "as stored" for name in (precision.param, precision.reduce, precision.master)
    )
    words = [
        f"{job.world_size} x {getattr(job.gpu, 'name', job.gpu)}" + (f" on {job.nodes} nodes" if job.nodes > 1 else ""),
        *([f"tp {job.tp} ({job.engine_ranks} x {job.tp} GPUs, {_reach(job, job.tp)})"] if job.tp > 1 else []),
        *([f"cp {job.cp} ({_reach(job, job.ranks_per_batch)})"] if job.cp > 1 else []),
        *([f"ep {job.ep} ({_reach(job, job.ep)})"] if job.ep > 1 else []),
        f"{job.seq_len:,} tokens per sequence" + (f", {job.slice_len:,} on a GPU" if job.cp > 1 else ""),
        f"{dtypes} (compute/reduce/master)",
        job.optimizer,
        f"{job.attention} attention",
    ]
    words += ["compiled"] if job.compile else []
    words += [f"offload {job.offload.words}"] if job.offload is not None else []
    words += ["optimizer steps in backward"] if job.optimizer_in_backward else []
    words += [f"as {job.engine} would run it"] if job.engine != "shardwise" else []
    return ", ".join(words)


def _reach(job: Job, ranks: int) -> str:
    """Say where so many consecutive ranks are."""
    return "inside a node" if job.nodes == 1 or job.gpus_per_node % ranks == 0 else "across nodes"


def candidate_dict(candidate: Candidate) -> dict[str, Any]:
    """Return one configuration of a search as plain data, for JSON."""
    job = candidate.job
    plain: dict[str, Any] = {
        **sharding_dict(job),
        "micro_batch": job.micro_batch,
        "accumulation": job.accumulation,
        "activation_checkpointing": job.activation_checkpointing,
        "verdict": candidate.outcome.name.lower(),
        "why": candidate.limited_by,
    }
    if candidate.forecast is not None:
        forecast = candidate.forecast
        plain |= {
            "needed_bytes": needed_bytes(forecast),
            "step_time_s": forecast.step_time_s,
            "tokens_per_s_per_gpu": forecast.tokens_per_s_per_gpu,
            "tokens_per_s_range": forecast.tokens_per_s_range,
        }
    return plain


def sharding_dict(job: Job) -> dict[str, Any]:
    """Return strategy, shard group and other axes as plain data, for JSON."""
    axes = {"cp": job.cp, "tp": job.tp, "ep": job.ep}
    return {"strategy": job.strategy.value, "shard_group": job.shard_group, **axes}


def gpus_and_nodes(job: Job) -> str:
    """Return a job's devices in words, such as "16 GPUs on 2 nodes"."""
    gpus = f"{job.world_size} GPU{'s' if job.world_size > 1 else ''}"
    return gpus if job.nodes == 1 else f"{gpus} on {job.nodes} nodes"


def count(parameters: int) -> str:
    """Format a number of parameters, such as "8.03 B"."""
    for size, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if parameters >= size:
            return f"{parameters / size:.2f} {name}"
    return f"{parameters:,}"
