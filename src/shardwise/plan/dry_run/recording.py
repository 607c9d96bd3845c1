"""The events of one rank in a step, in order: kernels, memory, collectives. Recorded by a dry run, then replayed.

A `Recording` is plain data: the same events give the peak of live bytes (add allocations up), what a caching
allocator reserves (replay them against its rules) and the step's time (put kernels and collectives on streams).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, get_args

from shardwise.plan.dry_run.job import Job


class StepPhase(enum.Enum):
    """Where in a step something happens."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """A forward run again inside backward, for checkpointed activations."""
    OPTIMIZER = "optimizer"


class KernelKind(enum.Enum):
    """What limits a kernel, roughly: each kind has an efficiency of its own."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"
    """Pointwise, reductions, copies, gathers of rows: limited by bytes moved."""


GROUPED = frozenset({"_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward"})
"""Products of mixtures of experts, torch's and transformers'."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation."""

    name: str
    """Of the ATen operator, such as `mm`."""
    kind: KernelKind
    flops: int
    """Multiply-adds count twice; 0 where they do not matter."""
    bytes_moved: int
    """Read and written once each."""
    dtype: str
    """That it computes in: "bf16", "fp16", "fp32", ..."""
    matmul: tuple[int, int, int, int] | None
    """(batch, m, n, k) of a matrix product; of attention (batch x heads, queries, keys, head_dim)."""
    module: str
    """fqn of the innermost module."""
    phase: StepPhase
    stream: str = ""
    """Where a group's slices are written, then for the gather that comes next there, or of its reductions; else the one
    that computes."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """A block of memory comes to life."""

    block: int
    """Never used again for another block."""
    nbytes: int
    """As asked for; the device's allocator rounds."""
    kind: str
    """One of the kinds of memory that `sw.memory` knows, or `ON_HOST`."""
    module: str
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class Free:
    """Its last reference is gone."""

    block: int


def slices_of(group: str) -> str:
    """The stream on which this rank's slices are written for a group's gathers."""
    return f"{group} slices"


def gathers_of(group: str) -> str:
    """The stream of a group's gathers."""
    return f"{group} gathers"


def reductions_of(group: str) -> str:
    """The stream of a group's reductions."""
    return f"{group} sums"


@dataclass(frozen=True, slots=True)
class Collective:
    """Handed to a communication stream; it begins when it is issued and everything earlier on its stream is over."""

    number: int
    op: str
    """all_gather, reduce_scatter, all_reduce or all_to_all."""
    group: str
    """shard, replicate or secondary."""
    nbytes: int
    """Of the whole buffer: unsharded, padded, in the dtype that travels. Of an all_to_all what this rank sends."""
    ranks: int
    """In the group."""
    unit: str
    phase: StepPhase

    @property
    def stream(self) -> str:
        """The one that it is handed to."""
        return gathers_of(self.group) if self.op == "all_gather" else reductions_of(self.group)


AWAY, BACK = "away", "back"
"""From the device to its host, and back."""
ON_HOST = "host"
"""The kind of blocks of memory that are the host's, beside `policy.kinds.KINDS`."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """What a block keeps for backward goes to the host, or comes back: once all that computes so far is over, behind
    the copies before it."""

    number: int
    """Among those of collectives."""
    way: str
    """AWAY or BACK."""
    nbytes: int
    module: str
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class Wait:
    """Compute goes on when the collective is over, and what its stream was given behind it; or the copy."""

    number: int


@dataclass(frozen=True, slots=True)
class Fence:
    """The stream that computes, and may write the shards, is ordered with the one that reads them for gathers."""

    what: str
    """written: reads from here on wait for what computes so far. settled: what computes from here on waits for them."""
    group: str
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class Exchange:
    """The hosts of a group tell each other something. The host goes on when it has heard from all; no device waits."""

    group: str
    ranks: int
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class UnitMark:
    """A moment in a unit's life, for replaying the step as another engine would run it."""

    what: str
    """gather (its parameters are wanted now), release, grads (its last gradient is there), reduced; where its step is
    taken in backward, step and stepped around that."""
    unit: str
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a parameter is there, whole and in the compute dtype. shardwise frees the block once it is copied
    into a reduce slot; others keep it until all of the unit's are there."""

    block: int
    unit: str


StepEvent = Kernel | Allocate | Free | Collective | HostCopy | Wait | Fence | Exchange | UnitMark | Gradient

EVENT_FIELDS: dict[type[StepEvent], tuple[str, ...]] = {
    kind: tuple(known.name for known in fields(kind)) for kind in get_args(StepEvent)
}
"""Names of fields, by kind of event."""


def changed(event: StepEvent, **changes: Any) -> Any:
    """`dataclasses.replace`, at a third of its price."""
    make: Callable[..., StepEvent] = type(event)
    return make(*[changes[name] if name in changes else getattr(event, name) for name in EVENT_FIELDS[type(event)]])


def renumbered(events: Iterable[StepEvent]) -> tuple[StepEvent, ...]:
    """The same events with blocks of memory and collectives numbered in the order in which they come. So two recordings
    of the same step are equal, whatever the process did before."""
    blocks: dict[int, int] = {}
    collectives: dict[int, int] = {}
    found: list[StepEvent] = []
    for event in events:
        if isinstance(event, Allocate | Free | Gradient):
            found.append(changed(event, block=blocks.setdefault(event.block, len(blocks) + 1)))
        elif isinstance(event, Collective | HostCopy | Wait):
            found.append(changed(event, number=collectives.setdefault(event.number, len(collectives) + 1)))
        else:
            found.append(event)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Facts:
    """The sizes of a model that the usual formulas need. All counts are global."""

    name: str
    """Of the model's class."""
    params: int
    """Elements of all parameters; tied ones count once."""
    trainable: int
    """Of those, elements that are trained."""
    layers: int
    """Blocks of the kind that there are most of."""
    width: int
    """Of the hidden states that one block hands to the next."""
    embeddings: int
    """Elements of input embeddings that are no head's as well."""
    sequence: int
    """Tokens of one sequence as blocks see them: of an image, its patches."""
    unit_bytes: dict[str, int]
    """By unit's fqn ("" is the root): its gathered parameters, unsharded, padded, in the compute dtype."""
    unit_reduce_bytes: dict[str, int]
    """By unit's fqn: its gradients, unsharded, padded, in the dtype that travels."""
    unit_shard_bytes: dict[str, int]
    """By unit's fqn: this rank's masters."""
    unit_trained_bytes: dict[str, int]
    """By unit's fqn: of those, what is trained."""
    kept_bytes: dict[str, int]
    """By compiled block's fqn: bytes that it keeps from a micro-batch's forward for its backward; empty without
    compilation. The events are those of operations one by one all the same."""

    def tokens_per_rank(self, job: Job) -> int:
        """Of one step."""
        return self.sequence * job.micro_batch * job.accumulation


@dataclass(frozen=True, slots=True)
class Recording:
    """One steady-state step of one rank."""

    job: Job
    facts: Facts
    events: tuple[StepEvent, ...]
    """First an Allocate of phase SETUP for every block that lives when the step begins; then the step: micro-batches
    (forward, backward), clipping, optimizer, zero_grad. What lives afterwards is what lived before."""
    rank: int = 0
