"""The events of one rank in a step, in order: kernels, memory, collectives. Recorded by a dry run, then replayed.

A `Recording` is plain data. The same events give the peak of live bytes (by adding up allocations), the bytes that a
caching allocator reserves (by replaying them against its rules) and the step's time (by simulating streams).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardwise.plan.dry_run.job import Job


class StepPhase(enum.Enum):
    """The part of a step in which something happens."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """A forward that is run again in backward, for checkpointed activations."""
    OPTIMIZER = "optimizer"


class KernelKind(enum.Enum):
    """Roughly what limits a kernel; each kind has an efficiency of its own."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"
    """Pointwise operations, reductions, copies, gathers of rows: limited by bytes moved."""


GROUPED = frozenset({"_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward"})
"""Grouped products, of mixtures of experts, in torch and transformers."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation that runs on the device."""

    name: str
    """Name of the ATen operator, such as `mm`."""
    kind: KernelKind
    flops: int
    """Operations; a multiply-add counts as two. 0 for kernels whose operations do not matter."""
    bytes_moved: int
    """Bytes read and written, each once."""
    dtype: str
    """The dtype in which it computes: "bf16", "fp16", "fp32", ..."""
    matmul: tuple[int, int, int, int] | None
    """(batch, m, n, k) of a matrix product; (batch x heads, queries, keys, head_dim) of attention."""
    module: str
    """fqn of the innermost module that runs it; "" outside of modules."""
    phase: StepPhase
    stream: str = ""
    """The stream of a group on which slices are written, for the next gather, or that of its reductions. "": the
    compute stream."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """A block of memory is allocated."""

    block: int
    """The block's number, which no other block has."""
    nbytes: int
    """Bytes as requested; the device's allocator rounds them."""
    kind: str
    """One of the kinds of memory that `sw.memory` knows, or `ON_HOST`."""
    module: str
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class Free:
    """A block of memory is freed, because its last reference is gone."""

    block: int


def slices_of(group: str) -> str:
    """Return the stream on which this rank's slices are written for a group's gathers."""
    return f"{group} slices"


def gathers_of(group: str) -> str:
    """Return the stream of a group's gathers."""
    return f"{group} gathers"


def reductions_of(group: str) -> str:
    """Return the stream of a group's reductions."""
    return f"{group} sums"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective on a communication stream. It begins when it is launched and everything before it on its stream is
    over."""

    number: int
    op: str
    """all_gather, reduce_scatter, all_reduce or all_to_all."""
    group: str
    """shard, replicate, secondary, `SAME_EXPERTS` or, for norms of parameters that are cut, `TENSOR` or `EXPERTS`."""
    nbytes: int
    """Bytes of the whole buffer: unsharded, padded, in the dtype that is sent. For an all_to_all, what this rank
    sends."""
    ranks: int
    """The number of ranks in the group."""
    unit: str
    phase: StepPhase

    @property
    def stream(self) -> str:
        """The stream on which it runs."""
        return gathers_of(self.group) if self.op == "all_gather" else reductions_of(self.group)


TENSOR = "tensor"
"""The group of ranks that share each matrix product."""
CONTEXT = "context"
"""The group of ranks that share each sequence."""
EXPERTS = "experts"
"""The group of ranks that hold different experts."""
SAME_EXPERTS = "same experts"
"""The group of ranks that hold different slices of the same experts."""


@dataclass(frozen=True, slots=True)
class ActivationCollective:
    """A collective of activations or of their gradients over the ranks that work on the same batch, or that hold
    different experts. It is launched by the model's code, so it belongs to no unit and runs on a stream of its own."""

    number: int
    """Numbered together with the engine's collectives."""
    op: str
    """all_gather, reduce_scatter, all_reduce or all_to_all."""
    nbytes: int
    """Bytes of the whole buffer. For an all_to_all, what this rank sends."""
    ranks: int
    unit: str
    """fqn of the module that launches it."""
    phase: StepPhase
    group: str
    """`TENSOR`, `CONTEXT` or `EXPERTS`."""

    @property
    def stream(self) -> str:
        """The stream on which it runs."""
        return self.group


AWAY, BACK = "away", "back"
"""Directions of a copy: from the device to its host, and back."""
ON_HOST = "host"
"""The kind of blocks of host memory, in addition to `policy.kinds.KINDS`."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy of what a block saves for backward, to the host or back. It begins when the computation so far and the
    copies before it are over."""

    number: int
    """Copies are numbered together with collectives."""
    way: str
    """AWAY or BACK."""
    nbytes: int
    module: str
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class Wait:
    """Computation waits until a copy is over, or a collective and what was launched behind it on its stream so far."""

    number: int


@dataclass(frozen=True, slots=True)
class Fence:
    """The compute stream, which may write the shards, is ordered with the stream that reads them for gathers."""

    what: str
    """written: reads from here on wait for the computation so far. settled: computation from here on waits for the
    reads so far."""
    group: str
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class Exchange:
    """The hosts of a group exchange a message. The host waits until it has heard from all; no device waits."""

    group: str
    ranks: int
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class HostRead:
    """The host reads values from the device: it waits for the computation so far, and launches nothing meanwhile."""

    phase: StepPhase


@dataclass(frozen=True, slots=True)
class UnitMark:
    """A moment in a unit's life, used to replay the step as another engine would run it."""

    what: str
    """gather (its parameters are needed now), release, grads (its last gradient is computed), reduced; if the optimizer
    steps in backward, step before and stepped after that."""
    unit: str
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a parameter is computed, at full size and in the compute dtype. shardwise frees the block once it
    is copied into a reduce slot; other engines keep it until the unit has all its gradients."""

    block: int
    unit: str


StepEvent = (
    Kernel
    | Allocate
    | Free
    | Collective
    | ActivationCollective
    | HostCopy
    | Wait
    | Fence
    | Exchange
    | HostRead
    | UnitMark
    | Gradient
)


def renumbered(events: Iterable[StepEvent]) -> tuple[StepEvent, ...]:
    """Return the same events with blocks of memory, and collectives and copies, numbered in the order in which they
    occur. So two recordings of the same step are equal, whatever the process did before."""
    blocks: dict[int, int] = {}
    collectives: dict[int, int] = {}
    found: list[StepEvent] = []
    for event in events:
        if isinstance(event, Allocate | Free | Gradient):
            found.append(replace(event, block=blocks.setdefault(event.block, len(blocks) + 1)))
        elif isinstance(event, Collective | ActivationCollective | HostCopy | Wait):
            found.append(replace(event, number=collectives.setdefault(event.number, len(collectives) + 1)))
        else:
            found.append(event)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes of a model that forecasts and the usual formulas need. Counts of elements are global."""

    name: str
    """Name of the model's class."""
    params: int
    """Elements of all parameters; tied ones count once."""
    trainable: int
    """Elements of trainable parameters."""
    layers: int
    """The number of blocks of the most common class."""
    width: int
    """Width of the hidden states between blocks."""
    embeddings: int
    """Elements of input embeddings that are not tied to a head."""
    sequence: int
    """Tokens of one sequence as blocks see them; for an image, its patches."""
    unit_bytes: dict[str, int]
    """By unit's fqn ("" is the root): bytes of its gathered parameters, unsharded, padded, in the compute dtype."""
    unit_reduce_bytes: dict[str, int]
    """By unit's fqn: bytes of its gradients, unsharded, padded, in the dtype that is sent."""
    unit_shard_bytes: dict[str, int]
    """By unit's fqn: bytes of this rank's masters."""
    unit_trained_bytes: dict[str, int]
    """By unit's fqn: bytes of this rank's trainable masters."""
    kept_bytes: dict[str, int]
    """By compiled block's fqn: bytes that it saves in a micro-batch's forward for its backward; empty without
    compilation. The recorded events are those of eager mode in any case."""
    unused: int = 0
    """Elements of trainable parameters that got no gradient, such as those for images in a step of text."""
    smaller_units: tuple[tuple[tuple[str, ...], int], ...] = ()
    """Names of classes for `units=` with the slots that they need at least, each with less to gather at a time than the
    one before."""
    cut_evenly_by: int = 1
    """A number of ranks that can share each matrix product by the model's own plan, as any divisor can: what its
    numbers of heads have in common. 1: it has no plan; 0: it has one, and any number can."""
    sliced_evenly_by: int = 1
    """A number of ranks that can share each sequence, as any divisor can: the heads of attention on a rank. 1:
    sequences cannot be sliced."""
    experts_divided_by: int = 1
    """A number of ranks that can divide the experts, as any divisor can. 1: there are none, or no plan for them."""
    package_kernels: str = ""
    """Functions that run as one kernel because a package for GPUs has one, with the packages."""

    def tokens_per_rank(self, job: Job) -> int:
        """Return the number of tokens of a rank in one step."""
        return self.sequence * job.micro_batch * job.accumulation


@dataclass(frozen=True, slots=True)
class Recording:
    """One steady-state step of one rank."""

    job: Job
    facts: Facts
    events: tuple[StepEvent, ...]
    """First an Allocate of phase SETUP for every block that lives when the step begins; then the step: micro-batches
    (forward, backward), clipping, optimizer, zero_grad. After it the same memory lives as before it."""
    rank: int = 0
