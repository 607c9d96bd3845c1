"""The recorded step as FSDP2 would run it, or DistributedDataParallel if nothing is sharded.

What it allocates, and when, was read in its published source; nothing is fitted to measurements.

| | shardwise, as recorded | FSDP2 |
|---|---|---|
| gathered parameters | are used in place | the gather's buffer is copied out to parameters; in backward the next unit's buffer is prefetched |
| the host launches a gather | a unit ahead | when the unit is called; in backward a unit ahead |
| the device begins it | when its slot, one of three, is free | after the copy-out of the last gather but one; in backward of the last gather |
| own slices are, before the gather | cast into its buffer | cast, then copied |
| gradients | are copied in as they come, at least 16 MiB at a time | are kept until the unit's backward is over, then copied at once, in the reduce dtype |
| the compute stream waits for a reduction | before its slot, one of two, is used again | before the next one's gradients are copied in |
| hosts | exchange messages | do not |

Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (`wait_for_unshard`, `post_backward`,
`finalize_backward`), _fsdp_collectives.py (`foreach_all_gather`, `foreach_all_gather_copy_out`, `foreach_reduce`).

`no_shard` is DistributedDataParallel (torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp): every
parameter's gradient is held twice, permanently in a bucket and as `.grad` until the step, both in the parameters' own
dtype. If that is not the compute dtype, casts of parameters are kept for backward, as autocast does.

The root's parameters, once gathered, stay until its backward is over; as torchtitan sets it, so do those of the last
unit.
"""  # noqa: E501 - a table

from __future__ import annotations

from shardwise.fsdp.strategy import Strategy
from shardwise.plan.dry_run.recording import Recording, StepPhase
from shardwise.plan.simulate.other_engines.model import EngineModel
from shardwise.plan.simulate.other_engines.order import (
    copied_in,
    copied_out,
    gathering_when_called,
    reducing_whole,
    released_by_copies,
    waiting_once,
    without_exchanges,
)
from shardwise.plan.simulate.other_engines.replay import GATHER, REDUCE, EngineReplay


def is_ddp(recording: Recording) -> bool:
    """Whether the job is left to DistributedDataParallel."""
    return recording.job.strategy is Strategy.NO_SHARD and recording.job.engine_ranks > 1


class _Fsdp2(EngineReplay):
    """`fully_shard`: implicit prefetching forward, explicit prefetching of one unit backward."""

    reduces_on = REDUCE

    def begin(self) -> None:
        self.landing: dict[str, int] = {}
        """By unit: the buffer that its gather writes."""
        self.deferred: int | None = None
        """In forward, the last gather's buffer, kept until the next one is copied out."""
        self.reducing: int | None = None

    def gather(self, unit: str) -> None:
        if unit not in self.parameters:
            self._land(unit)
            self.give(self.deferred)
            self.deferred = None
            super().gather(unit)
            landed = self.landing.pop(unit)
            if self.phase is StepPhase.FORWARD:
                self.deferred = landed
            else:
                self.give(landed)
        ahead = self.before(unit) if self.phase is StepPhase.BACKWARD else None
        if ahead is not None and ahead not in self.parameters:
            self._land(ahead)

    def _land(self, unit: str) -> None:
        if unit not in self.landing:
            self.landing[unit] = self.take(self.param_bytes(unit), "gathered_slots", GATHER)

    def stays(self, unit: str) -> bool:
        return super().stays(unit) or unit in self.order[-1:]

    def end_forward(self) -> None:
        self.give(self.deferred)
        self.deferred = None

    def reduce(self, unit: str) -> None:
        self.drop_parameters(unit)
        self.end_backward()
        self.reducing = self.take(self.reduce_bytes(unit), "reduce_slots")
        self.drop_gradients(unit)
        self.keep_shard(unit)

    def end_backward(self) -> None:
        self.give(self.reducing)
        self.reducing = None


class Ddp(EngineReplay):
    """DistributedDataParallel with its defaults; buckets of any size hold every gradient."""

    def begin(self) -> None:
        self.take(sum(self.recording.facts.unit_shard_bytes.values()), "reduce_slots")

    def gather(self, unit: str) -> None:
        """Allocate a cast of the parameters, if one is needed. Otherwise modules compute with the parameters."""
        if self.param_bytes(unit) != self.recording.facts.unit_shard_bytes[unit]:
            super().gather(unit)

    def stays(self, unit: str) -> bool:
        return True

    def reduce(self, unit: str) -> None:
        self.drop_gradients(unit)
        self.keep_shard(unit)


FSDP2 = EngineModel(
    "fsdp2",
    lambda recording: (Ddp if is_ddp(recording) else _Fsdp2)(recording),
    (
        without_exchanges,
        waiting_once,
        gathering_when_called,
        copied_in,
        copied_out,
        released_by_copies,
        reducing_whole,
    ),
)
