"""What the device stands still for in the steps of `exposed.py`, and how much changes of our order would gain. No GPU.

    python benchmarks exposed_changes --gpus 8           # Llama-3 8B, micro-batch 1 x 8192, bf16, no recomputation

First every stall of a hundredth of a millisecond or more, ours and FSDP2's. Then the step with our recording changed,
as though the engine issued it so, which it does not:

- norms first: the stream that computes waits for the reductions of the embedding and the root only when the norms of
  all other gradients are computed;
- reduced together, gathered together: the root's few parameters travel with the embedding's, in one launch.

Last the step with other units, for both engines, which whoever trains can have (`units=`):

- first block in parts: the parts of the block that is needed first (attention, MLP) are units in its place;
- first block, nested: the largest of them (MLP) is a unit inside it.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import nn

from benchmarks.plans.exposed import ENGINES, cells, job_of
from shardwise.engine.setup.planners import planners_for
from shardwise.fsdp.shard import choose_units
from shardwise.plan.dry_run.recording import Collective, Kernel, Recording, StepEvent, StepPhase, Wait
from shardwise.plan.dry_run.step import record
from shardwise.plan.models.source import resolve
from shardwise.plan.simulate.forecast import forecast_of
from shardwise.plan.simulate.timeline import Timeline

HEADER = ("change", "engine", "step, ms", "exposed", "late", "idle")
LEAST_S = 1e-5
ROOT = ""


def reductions(events: Iterable[StepEvent]) -> list[Collective]:
    """Of gradients, in their order; the last two are of what is needed first, the embedding and the root."""
    return [e for e in events if isinstance(e, Collective) and e.op == "reduce_scatter"]


def norms_first(recording: Recording) -> Recording:
    """The last two reductions are waited for between the norms of other gradients and theirs."""
    last = {collective.number: collective.unit for collective in reductions(recording.events)[-2:]}
    sizes = recording.facts.unit_trained_bytes
    share = sum(sizes[unit] for unit in last.values()) / sum(sizes.values())
    waits: list[StepEvent] = []
    changed: list[StepEvent] = []
    for event in recording.events:
        if isinstance(event, Wait) and event.number in last:
            waits.append(event)
        elif isinstance(event, Kernel) and event.name == "_foreach_norm" and event.phase is StepPhase.OPTIMIZER:
            theirs = round(event.bytes_moved * share)
            others = replace(event, bytes_moved=event.bytes_moved - theirs)
            changed += [others, *waits, replace(event, bytes_moved=theirs)]
        else:
            changed.append(event)
    return replace(recording, events=tuple(changed))


def reduced_together(recording: Recording) -> Recording:
    """The root's gradients are in the last but one reduction's launch."""
    first, root = reductions(recording.events)[-2:]
    return _together(recording, root, first)


def gathered_together(recording: Recording) -> Recording:
    """The root's parameters are in the launch of the second gather, which forward then waits for at once."""
    root, second = [e for e in recording.events if isinstance(e, Collective) and e.op == "all_gather"][:2]
    return _together(recording, root, second)


def _together(recording: Recording, root: Collective, other: Collective) -> Recording:
    if root.unit != ROOT:
        raise SystemExit(f"{root.op} of {root.unit!r}: the model's root has no parameters of its own to send along")
    events: list[StepEvent] = []
    for event in recording.events:
        if event is other:
            events.append(replace(other, nbytes=other.nbytes + root.nbytes))
        elif not (event is root or (isinstance(event, Wait) and event.number == root.number)):
            events.append(event)
    return replace(recording, events=tuple(events))


CHANGES: dict[str, tuple[Callable[[Recording], Recording], ...]] = {
    "norms first": (norms_first,),
    "reduced together": (reduced_together,),
    "gathered together": (gathered_together,),
    "reduced and gathered together": (reduced_together, gathered_together),
    "all three": (norms_first, reduced_together, gathered_together),
}


def finer(builder: Callable[[], nn.Module], nested: bool) -> Callable[[str, nn.Module], bool]:
    """`units=` with the parts of the first block in its place, or `nested`, with its largest part a unit inside it."""
    with torch.device("meta"):
        chosen = choose_units(builder(), planners_for(None))
    first, block = next((fqn, module) for fqn, module in chosen if next(module.children(), None) is not None)
    parts = {
        f"{first}.{name}": sum(parameter.numel() for parameter in child.parameters())
        for name, child in block.named_children()
        if next(child.children(), None) is not None
    }
    names = {fqn for fqn, _ in chosen}
    names = names | {max(parts, key=lambda fqn: parts[fqn])} if nested else (names - {first}) | parts.keys()
    return lambda fqn, module: fqn in names


def simulated(recording: Recording, engine: str) -> Timeline:
    """The step of one engine."""
    return forecast_of(replace(recording, job=replace(recording.job, engine=engine))).timeline


def show(change: str, engine: str, timeline: Timeline) -> None:
    """A row."""
    print(f"| {' | '.join([change, engine, *cells(timeline)[:4]])} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", help="(%(default)s)")
    parser.add_argument("--gpu", default="h100-sxm-80gb", help="(%(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--seq-len", type=int, default=8192, help="(%(default)s)")
    options = parser.parse_args()
    job = job_of(options.gpu, options.gpus, options.seq_len)
    builder = resolve(options.model).builder(job.attention)
    recording = record(builder, job)
    steps = {engine: simulated(recording, engine) for engine in ENGINES}
    for engine, timeline in steps.items():
        for stall in timeline.stalls:
            if stall.end_s - stall.start_s >= LEAST_S:
                what = f"{stall.op} of {stall.unit or 'the root, or of norms'}"
                print(f"{engine}: at {stall.start_s * 1e3:.1f} ms {(stall.end_s - stall.start_s) * 1e3:.2f}, {what}")
    print(f"\n| {' | '.join(HEADER)} |\n|---|---|{'---:|' * (len(HEADER) - 2)}")
    for engine, timeline in steps.items():
        show("none", engine, timeline)
    for change, functions in CHANGES.items():
        changed = recording
        for function in functions:
            changed = function(changed)
        show(change, "shardwise", simulated(changed, "shardwise"))
    for change, nested in (("first block in parts", False), ("first block, nested", True)):
        divided = record(builder, replace(job, units=finer(builder, nested)))
        for engine in ENGINES:
            show(change, engine, simulated(divided, engine))
    return 0
