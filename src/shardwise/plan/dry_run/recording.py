"""What a dry run yields: the events of one step, and the facts about its model."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.plan.dry_run.events import StepEvent
from shardwise.plan.dry_run.job import Job


@dataclass(frozen=True, slots=True)
class Facts:
    """What formulas of the field ask of a model. All counts are global."""

    name: str
    """Of the model's class."""
    params: int
    """Elements of all parameters; tied ones count once."""
    trainable: int
    """Of those, elements that are trained."""
    layers: int
    """Blocks of the kind that there are most of."""
    width: int
    """Of what one block hands to the next."""
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
    kept_bytes: dict[str, int]
    """By compiled block's fqn: what it keeps from a micro-batch's forward for its backward; empty without compilation.
    The events are those of operations one by one all the same."""

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
