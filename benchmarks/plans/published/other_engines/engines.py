"""The recorded step as FSDP1 or DeepSpeed would run it: its memory and the order of its events.

What each allocates, and when, was read in its published source; nothing is fitted to measurements.

| | shardwise, as recorded | fsdp1 | deepspeed |
|---|---|---|---|
| gathered | slots | one flat buffer; the next unit's is prefetched in backward | parameters; those that are soon used again stay |
| gradients | are copied into slots as they come | are kept until the unit's backward is over, then joined in one flat buffer | are copied into buckets; this rank's part is kept in the compute dtype and cast to fp32 one sub-group at a time in the step |
| reduction | two slots | a cast of the flat buffer, if reduced in another dtype | two buckets |
| the host launches a gather | a unit ahead | when the unit is called; in backward a unit ahead | a unit ahead |
| the device begins it | when its slot, one of three, is free | as recorded; the host waits for the last release but one (`limit_all_gathers`) | as recorded |
| gathered parameters | are used in place | are used in place | are copied out on the compute stream |
| the compute stream waits for a reduction | before its slot, one of two, is used again | when backward ends | when backward ends |
| hosts | exchange messages | do not | do not |

Sources: torch/distributed/fsdp/_runtime_utils.py (`_unshard`, `_post_backward_final_callback`), _flat_param.py,
_limiter_utils.py; deepspeed/runtime/zero/stage3.py (`overlap_comm`), partitioned_param_coordinator.py,
partition_parameters.py (`AllGatherCoalescedHandle.wait`). That FSDP1 casts gradients beside computation is left out.
"""  # noqa: E501 - a table

from collections.abc import Iterator

from benchmarks.plans.published.other_engines.job import PublishedJob
from shardwise.plan.dry_run.recording import Collective, StepEvent, StepPhase, UnitMark
from shardwise.plan.simulate.other_engines.fsdp2 import Ddp, is_ddp
from shardwise.plan.simulate.other_engines.model import EngineModel
from shardwise.plan.simulate.other_engines.order import (
    Events,
    HostWait,
    copied_out,
    gathering_when_called,
    waiting_once,
    without_exchanges,
)
from shardwise.plan.simulate.other_engines.replay import GATHER, REDUCE, EngineReplay

_LIVE_NUMEL = 1_000_000_000
"""DeepSpeed: the most parameters that stay gathered (`max_live_parameters`, `max_reuse_distance`)."""
_BUCKET_NUMEL = 50_000_000
"""DeepSpeed: elements of a reduce bucket (`reduce_bucket_size` "auto" of its integrations is the width squared)."""
_SUBGROUP_NUMEL = 1_000_000_000
"""DeepSpeed: elements that the optimizer updates at once (`sub_group_size`)."""


class _Fsdp1(EngineReplay):
    """FullyShardedDataParallel with its defaults: BACKWARD_PRE prefetching, limit_all_gathers."""

    gathers_on = GATHER
    reduces_on = REDUCE

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
            cast = self.take(self.reduce_bytes(unit), "reduce_slots", REDUCE)
            self.give(flat)
        self.keep_shard(unit)
        self.give(flat if cast is None else cast)


class _DeepSpeed(EngineReplay):
    """DeepSpeed's ZeRO: a copy in the compute dtype beside masters in fp32 (or another dtype)."""

    def begin(self) -> None:
        job, facts = self.recording.job, self.recording.facts
        compute, ranks = sum(facts.unit_bytes.values()), job.shard_ranks
        self.itemsize = 2 if (job.precision.param or "") in {"bfloat16", "float16"} else 4
        self.resident = not job.strategy.reshards_after_forward
        self.take(compute if self.resident else compute // ranks, "param_shards")
        self.take(compute if job.strategy.has_full_gradients else compute // ranks, "grad_shards")
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
        keeps_weights = isinstance(job, PublishedJob) and job.keeps_gathered_weights
        if keeps_weights and job.activation_checkpointing == "none":
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


def limited(events: Events) -> Iterator[StepEvent | HostWait]:
    """Before a gather, let the host wait until the device has released the unit of the last release but one."""
    released: list[str] = []
    for event in events:
        if isinstance(event, Collective) and event.op == "all_gather" and event.ranks > 1 and len(released) > 1:
            yield HostWait(released[-2])
        elif isinstance(event, UnitMark) and event.what == "release":
            released.append(event.unit)
        yield event


FSDP1 = EngineModel(
    "fsdp1",
    lambda recording: (Ddp if is_ddp(recording) else _Fsdp1)(recording),
    (without_exchanges, waiting_once, gathering_when_called, limited),
)
DEEPSPEED = EngineModel("deepspeed", _DeepSpeed, (without_exchanges, waiting_once, copied_out))
