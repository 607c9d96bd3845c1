"""The memory of a recorded step under another engine: its buffers instead of shardwise's slots and gradient shards.

What each engine allocates, and when, was read in its published source; nothing is fitted to measurements.

| engine | gathered | gradients | reduction | source |
|---|---|---|---|---|
| fsdp1 | one flat buffer; the next unit's is prefetched in backward | kept until the unit's backward is over, then joined in one flat buffer | cast of that, if reduced in another dtype | torch/distributed/fsdp/_runtime_utils.py, _flat_param.py |
| fsdp2 | the gather's buffer and a copy as parameters; the next unit's buffer is prefetched in backward | kept until the unit's backward is over | a flat copy in the reduce dtype, until the next unit's | torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _fsdp_collectives.py |
| deepspeed | parameters; those that are soon used again stay | copied into buckets; this rank's part is kept in the compute dtype and cast to fp32 one sub-group at a time in the step | two buckets | deepspeed/runtime/zero/stage3.py, partitioned_param_coordinator.py |

`no_shard` under fsdp1 and fsdp2 is DistributedDataParallel (torch/nn/parallel/distributed.py,
torch/csrc/distributed/c10d/reducer.cpp): every parameter's gradient is held twice, permanently in a bucket and as
`.grad` until the step, both in the parameters' own dtype. If that is not the compute dtype, casts of parameters are
kept for backward, as autocast does.

In all three engines the root's parameters, once gathered, stay until its backward is over; in fsdp2, as torchtitan sets
it, so do those of the last unit.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from shardwise.plan.dry_run.recording import Allocate, Free, Gradient, Recording, StepEvent, StepPhase, UnitMark
from shardwise.plan.simulate.other_engines.float8 import GATHERS, is_of_a_block
from shardwise.plan.simulate.other_engines.kept_blocks import with_kept_blocks
from shardwise.policy.strategy import Strategy

_COMPUTE, _GATHER, _REDUCE = 0, 1, 2
"""The streams on which blocks are allocated."""
_SLOTS = frozenset({"gathered_slots", "reduce_slots"})
_LIVE_NUMEL = 1_000_000_000
"""DeepSpeed: the most parameters that stay gathered (`max_live_parameters`, `max_reuse_distance`)."""
_BUCKET_NUMEL = 50_000_000
"""DeepSpeed: elements of a reduce bucket (`reduce_bucket_size` "auto" of its integrations is the width squared)."""
_SUBGROUP_NUMEL = 1_000_000_000
"""DeepSpeed: elements that the optimizer updates at once (`sub_group_size`)."""


@dataclass(frozen=True, slots=True)
class EngineAllocations:
    """A recorded step with the allocations of the job's engine; its collectives stay as recorded."""

    events: tuple[StepEvent, ...]
    streams: Mapping[int, int] = field(default_factory=dict)
    """By block, the stream on which it is requested, if that is not the compute stream."""
    late: Collection[int] = ()
    """Blocks that another stream still reads when they are freed (`record_stream`)."""


def engine_allocations(recording: Recording) -> EngineAllocations:
    """Return the recorded step with the allocations that the job's engine would make."""
    engines: dict[str, Callable[[Recording], _EngineReplay]] = {
        "fsdp1": _Fsdp1,
        "fsdp2": _Fsdp2,
        "deepspeed": _DeepSpeed,
    }
    recording = with_kept_blocks(recording)
    if recording.job.engine == "shardwise":
        return EngineAllocations(recording.events)
    job = recording.job
    if job.strategy is Strategy.NO_SHARD and job.world_size > 1 and job.engine in {"fsdp1", "fsdp2"}:
        return _Ddp(recording).replayed()
    return engines[job.engine](recording).replayed()


@dataclass
class _EngineReplay:
    """Replays a step with another engine's allocations. Subclasses override what is done at each moment of the step."""

    gathers_on: ClassVar[int] = _COMPUTE
    """The stream on which parameters are allocated."""
    reduces_on: ClassVar[int] = _COMPUTE
    """The stream on which reduced gradients are allocated."""

    recording: Recording
    out: list[StepEvent] = field(default_factory=list)
    gradients: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By unit: blocks of gradients that are computed but not reduced yet."""
    parameters: dict[str, int] = field(default_factory=dict)
    """By unit: the block of its gathered parameters."""
    grad_shards: list[int] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    """Units in the order in which forward needs them."""
    streams: dict[int, int] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    _next: int = -1000
    _kept: set[int] = field(default_factory=set)
    """Blocks of gradients whose recorded Free is left out, because the engine frees them at another time."""
    phase: StepPhase = StepPhase.SETUP
    module: str = ""

    def __post_init__(self) -> None:
        events = self.recording.events
        wanted = [
            e.unit for e in events if isinstance(e, UnitMark) and e.what == "gather" and e.phase is StepPhase.FORWARD
        ]
        self.order = [unit for unit in dict.fromkeys(wanted) if unit]

    def replayed(self) -> EngineAllocations:
        dropped: set[int] = set()
        self.begin()
        for event in self.recording.events:
            if isinstance(event, Allocate):
                self._meet(event.phase, event.module)
                if event.phase is StepPhase.SETUP and (event.kind in _SLOTS or event.kind == "grad_shards"):
                    dropped.add(event.block)
                    continue
            elif isinstance(event, Free):
                if event.block in dropped or event.block in self._kept:
                    continue
            elif isinstance(event, Gradient):
                if event.block not in self._kept:
                    self._kept.add(event.block)
                    self.gradients[event.unit].append(event.block)
            elif isinstance(event, UnitMark):
                self._meet(event.phase, event.unit)
                self._mark(event)
            self.out.append(event)
        self.end_backward()
        self.end()
        return EngineAllocations(tuple(self.out), self.streams, self.late)

    def _meet(self, phase: StepPhase, module: str) -> None:
        if phase is StepPhase.OPTIMIZER and self.phase is not phase:
            self.end_backward()
            self.phase = phase
            self.step()
        self.phase, self.module = phase, module

    def _mark(self, event: UnitMark) -> None:
        if event.what == "gather":
            self.gather(event.unit)
        elif event.what == "release":
            if event.phase in (StepPhase.BACKWARD, StepPhase.RECOMPUTE):
                self.leave_backward(event.unit)
            elif not self.stays(event.unit):
                self.drop_parameters(event.unit)
            if not event.unit and event.phase is StepPhase.FORWARD:
                self.end_forward()
        elif event.what == "grads":
            self.reduce(event.unit)

    # Moments that subclasses override -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Allocate the blocks that live for the whole step."""

    def gather(self, unit: str) -> None:
        """Allocate a unit's parameters, which are needed now, unless they are gathered already."""
        if unit not in self.parameters:
            self.parameters[unit] = self.take(self.param_bytes(unit), "gathered_slots", self.gathers_on)

    def stays(self, unit: str) -> bool:
        """Whether a unit stays gathered after its forward."""
        job = self.recording.job
        keeps = job.reshard_after_forward is False or (job.reshard_after_forward is None and job.strategy.keeps_params)
        return not unit or keeps

    def end_forward(self) -> None:
        """Called when the root's forward is over."""

    def leave_backward(self, unit: str) -> None:
        """Called when a unit's backward is over."""
        self.drop_parameters(unit)

    def reduce(self, unit: str) -> None:
        """Called when a unit has all its gradients."""

    def end_backward(self) -> None:
        """Called when all reductions are over."""

    def step(self) -> None:
        """Called when the optimizer's step begins."""

    def end(self) -> None:
        """Free the gradient shards."""
        for block in self.grad_shards:
            self.give(block)
        self.grad_shards.clear()

    # Blocks -------------------------------------------------------------------------------------------------------

    def take(self, nbytes: int, kind: str, stream: int = _COMPUTE) -> int:
        self._next -= 1
        self.out.append(Allocate(self._next, max(1, nbytes), kind, self.module, self.phase))
        if stream != _COMPUTE:
            self.streams[self._next] = stream
        return self._next

    def give(self, block: int | None) -> None:
        if block is not None:
            self.out.append(Free(block))

    def drop_parameters(self, unit: str) -> None:
        if unit in self.parameters:
            self.give(self.parameters.pop(unit))

    def drop_gradients(self, unit: str) -> None:
        for block in self.gradients.pop(unit, ()):
            self.give(block)

    def keep_shard(self, unit: str) -> None:
        """Allocate this rank's part of a unit's gradients, which lives from its first reduction until after the
        step."""
        if len(self.grad_shards) < len(self.recording.facts.unit_bytes):
            nbytes = self.recording.facts.unit_shard_bytes[unit]
            self.grad_shards.append(self.take(nbytes, "grad_shards", self.reduces_on))

    def param_bytes(self, unit: str) -> int:
        halved = self.recording.job.float8 == GATHERS and is_of_a_block(unit)
        return self.recording.facts.unit_bytes[unit] // (2 if halved else 1)

    def reduce_bytes(self, unit: str) -> int:
        return self.recording.facts.unit_reduce_bytes[unit]

    def before(self, unit: str) -> str | None:
        """Return the unit that backward needs after `unit`; None after the last."""
        if not unit:
            return self.order[-1] if self.order else None
        position = self.order.index(unit) if unit in self.order else 0
        return self.order[position - 1] if position else None


class _Fsdp1(_EngineReplay):
    """FullyShardedDataParallel with its defaults: BACKWARD_PRE prefetching, limit_all_gathers."""

    gathers_on = _GATHER
    reduces_on = _REDUCE

    def drop_parameters(self, unit: str) -> None:
        """Free a unit's parameters, marked as late: the compute stream may still read them, and `limit_all_gathers`
        lets those of two units be in memory."""
        if unit in self.parameters:
            self.late.add(self.parameters[unit])
        super().drop_parameters(unit)

    def gather(self, unit: str) -> None:
        super().gather(unit)
        ahead = self.before(unit) if self.phase is StepPhase.BACKWARD else None
        if ahead is not None and ahead not in self.parameters and unit:
            super().gather(ahead)

    def reduce(self, unit: str) -> None:
        flat = self.take(self.param_bytes(unit), "reduce_slots")  # autograd joins the gradients of the views
        self.late.add(flat)
        self.drop_gradients(unit)
        self.drop_parameters(unit)
        cast = None
        if self.reduce_bytes(unit) != self.param_bytes(unit):
            cast = self.take(self.reduce_bytes(unit), "reduce_slots", _REDUCE)
            self.give(flat)
        self.keep_shard(unit)
        self.give(flat if cast is None else cast)


class _Fsdp2(_EngineReplay):
    """`fully_shard`: implicit prefetching forward, explicit prefetching of one unit backward."""

    reduces_on = _REDUCE

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
            self.landing[unit] = self.take(self.param_bytes(unit), "gathered_slots", _GATHER)

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


class _Ddp(_EngineReplay):
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


class _DeepSpeed(_EngineReplay):
    """DeepSpeed's ZeRO: a copy in the compute dtype beside masters in fp32 (or another dtype)."""

    def begin(self) -> None:
        job, facts = self.recording.job, self.recording.facts
        compute, ranks = sum(facts.unit_bytes.values()), job.shard_ranks
        self.itemsize = 2 if (job.precision.param or "") in {"bfloat16", "float16"} else 4
        self.resident = job.strategy.keeps_params
        self.take(compute if self.resident else compute // ranks, "param_shards")
        self.take(compute if job.strategy.keeps_grads else compute // ranks, "grad_shards")
        for _ in range(2):
            self.take(_BUCKET_NUMEL * self.itemsize, "reduce_slots")

    def gather(self, unit: str) -> None:
        if not self.resident:
            super().gather(unit)

    def stays(self, unit: str) -> bool:
        """Whether a unit stays gathered after its forward: if it is soon used again, after at most `_LIVE_NUMEL`
        parameters. If activations are kept (`keeps_gathered_weights`), every unit does: torch's linear layer saves its
        weight's transpose for backward, and with it the gathered memory. DeepSpeed's linear layer, which replaces it in
        models built in `deepspeed.zero.Init`, does not (deepspeed/runtime/zero/linear.py)."""
        job = self.recording.job
        if job.keeps_gathered_weights and job.activation_checkpointing == "none":
            return True
        later = self.order[self.order.index(unit) + 1 :] if unit in self.order else []
        numel = 2 * sum(self.param_bytes(name) for name in later) // self.itemsize
        return not unit or numel <= _LIVE_NUMEL

    def reduce(self, unit: str) -> None:
        self.drop_gradients(unit)

    def step(self) -> None:
        """Allocate and free the gradients of one sub-group in the masters' dtype, if that is not the compute dtype."""
        numel = sum(self.recording.facts.unit_shard_bytes.values()) // self.master_itemsize
        if self.master_itemsize != self.itemsize:
            self.give(self.take(min(numel, _SUBGROUP_NUMEL) * self.master_itemsize, "temporaries"))

    @property
    def master_itemsize(self) -> int:
        """Bytes of an element of the masters."""
        facts, ranks = self.recording.facts, self.recording.job.shard_ranks
        numel = sum(facts.unit_bytes.values()) // self.itemsize
        return round(sum(facts.unit_shard_bytes.values()) * ranks / numel)
