"""The configurations of a search: strategies x shard groups x micro-batches x checkpointing x accumulation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import ConfigError, PlanError
from shardwise.fsdp.strategy import Strategy
from shardwise.plan.dry_run.job import Job
from shardwise.policy.recomputation import Recomputation
from shardwise.policy.strategies import strategy_of

LARGEST_MICRO_BATCH = 64
"""The largest micro-batch that a search tries on its own; `largest_micro_batch` goes on."""
_SEARCHED = ("strategy", "shard_group", "micro_batch", "activation_checkpointing", "accumulation")
"""Arguments that are searched where they are left out."""
_MODES = ("none", "selective-ops", "every-2", "full")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Jobs that differ only in their batches and in what they recompute."""

    base: Job
    modes: tuple[str, ...]
    """Kinds of activation checkpointing; "none" is first if it is one of them."""
    batches: tuple[tuple[int, int], ...]
    """(micro-batch, accumulation), the smallest micro-batch first."""

    def job(self, mode: str, micro_batch: int, accumulation: int) -> Job:
        """Return one of the sweep's jobs."""
        return replace(self.base, activation_checkpointing=mode, micro_batch=micro_batch, accumulation=accumulation)

    @property
    def size(self) -> int:
        """The number of configurations."""
        return len(self.modes) * len(self.batches)


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The configurations of a search, and the invalid ones."""

    sweeps: tuple[Sweep, ...]
    """At least one."""
    left_out: tuple[tuple[Job, str], ...]
    """(job without the conflicting arguments, reason) for each strategy that the other arguments rule out."""

    @property
    def size(self) -> int:
        """The number of valid configurations."""
        return sum(sweep.size for sweep in self.sweeps)


def search_space(arguments: Mapping[str, Any], global_batch: int | None = None) -> SearchSpace:
    """Return every configuration that a search considers.

    Args:
        arguments: of `sw.plan.forecast`. One value fixes a field, a list of values gives the choices. Where `strategy`,
            `shard_group`, `micro_batch`, `activation_checkpointing` or `accumulation` is absent or None, it is
            searched. Other fields may be lists too.
        global_batch: sequences of a step over all ranks; accumulation follows from it.

    Raises:
        PlanError: the batch cannot be divided; the message names the nearest ones that can.
        ConfigError: an invalid value, or one that no strategy allows.
    """
    choices = {name: _values(name, value) for name, value in arguments.items() if value is not None}
    searched = {name: choices.pop(name, None) for name in _SEARCHED}
    found, left_out = [], []
    for values in itertools.product(*choices.values()):
        base = Job.of(**dict(zip(choices, values, strict=True)))
        batches = _batches(base, searched["micro_batch"], searched["accumulation"], global_batch)
        modes = _modes(searched["activation_checkpointing"])
        for strategy, group in _shardings(base, searched["strategy"], searched["shard_group"]):
            job = replace(base, strategy=strategy, shard_group=group, reshard_after_forward=None, ep=1)
            try:
                whole = replace(job, reshard_after_forward=base.reshard_after_forward, ep=base.ep)
            except ConfigError as error:
                left_out.append((job, str(error)))
            else:
                found.append(Sweep(whole, modes, batches))
    if not found:
        raise ConfigError(left_out[0][1])
    return SearchSpace(tuple(found), tuple(left_out))


def _values(name: str, value: Any) -> tuple[Any, ...]:
    """Return the choices that an argument gives: those of a list or tuple, else the value itself."""
    if not isinstance(value, list | tuple):
        return (value,)
    if not value:
        raise ConfigError(f"{name}={value!r} leaves nothing to search: give at least one value, or leave it out")
    return tuple(dict.fromkeys(value))


def _modes(asked: Iterable[str] | None) -> tuple[str, ...]:
    modes = _MODES if asked is None else tuple(asked)
    for mode in modes:
        Recomputation.parse(mode)
    return tuple(sorted(modes, key=lambda mode: mode != "none"))


def _shardings(
    base: Job, strategies: Sequence[Strategy | str] | None, groups: Sequence[int | None] | None
) -> list[tuple[Strategy, int | None]]:
    """Return the (strategy, shard group) pairs to search."""
    if strategies is None and base.engine_ranks == 1:
        frees = base.offload is not None and base.offload.params is not None  # full_shard frees gathered slots
        strategies = (Strategy.FULL_SHARD,) if frees else (Strategy.NO_SHARD,)
    asked = list(dict.fromkeys(strategy_of(strategy) for strategy in (strategies or tuple(Strategy))))
    takes_groups = [strategy for strategy in asked if strategy.sharded and strategy.replicated]
    if groups is not None and strategies is None:
        asked = takes_groups  # because a shard group was asked for
    found: list[tuple[Strategy, int | None]] = []
    for strategy in asked:
        if strategy in takes_groups:
            own: Sequence[int | None] = groups or _groups(base)
            found += [(strategy, group) for group in (own or ([None] if strategies else []))]
        else:  # if no strategy takes a group, Job raises for it
            found.append((strategy, groups[0] if groups and not takes_groups else None))
    return found


def _groups(base: Job) -> list[int]:
    """Return the shard groups to search: parts of a node if there is only one, else whole nodes; never all ranks."""
    smallest = 2 if base.nodes == 1 else max(2, base.gpus_per_node // base.ranks_per_batch)
    ranks = base.data_ranks
    sizes = [smallest * 2**k for k in range(ranks.bit_length())]
    return [size for size in sizes if 1 < size < ranks and ranks % size == 0 and size * base.cp % base.ep == 0]


def _batches(
    base: Job, micro_batches: Sequence[int] | None, accumulations: Sequence[int] | None, global_batch: int | None
) -> tuple[tuple[int, int], ...]:
    """Return (micro-batch, accumulation) pairs, the smallest micro-batch first. If the optimizer steps in backward,
    only pairs asked for explicitly accumulate, and `Job` rejects those."""
    if base.optimizer_in_backward and accumulations is None:
        accumulations = (1,)
    if global_batch is None:
        sizes = micro_batches or [2**k for k in range(LARGEST_MICRO_BATCH.bit_length())]
        pairs = set(itertools.product(sizes, accumulations or (1,)))
        return tuple(sorted(pairs, key=lambda pair: (pair[0], -pair[1])))
    world = base.data_ranks
    per_rank = _divided(
        global_batch, world, f"{world} {'data ' if base.ranks_per_batch > 1 else ''}rank{'s' if world > 1 else ''}"
    )
    if micro_batches is None:
        micro_batches = [n for n in range(1, min(per_rank, LARGEST_MICRO_BATCH) + 1) if per_rank % n == 0]
    found = []
    for size in micro_batches:
        if len(micro_batches) == 1 or per_rank % size == 0:
            steps = _divided(global_batch, size * world, f"micro-batch x ranks = {size} x {world} = {size * world}")
            if accumulations is None or steps in accumulations:
                found.append((size, steps))
    if not found:
        raise PlanError(
            f"none of the micro-batches {', '.join(map(str, micro_batches))} makes a global batch of "
            f"{global_batch} on {world} ranks"
            + (f" in {' or '.join(map(str, accumulations))} micro-batches" if accumulations else "")
            + "; leave micro-batch and accumulation out, so that the search chooses them"
        )
    return tuple(sorted(found))


def _divided(global_batch: int, whole: int, words: str) -> int:
    if global_batch < 1:
        raise PlanError(f"a global batch of {global_batch}: must be a whole number of at least 1")
    if global_batch < whole or global_batch % whole:
        below = global_batch // whole * whole
        near = f"{below} or {below + whole}" if below else str(whole)
        raise PlanError(f"a global batch of {global_batch} is not a multiple of {words}; use {near}")
    return global_batch // whole
