"""What other engines launch in another order than the recorded step: changes that models of engines apply in turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwise.plan.dry_run.recording import (
    Collective,
    Exchange,
    Fence,
    Kernel,
    KernelKind,
    StepEvent,
    StepPhase,
    UnitMark,
    Wait,
    slices_of,
)


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host waits until the device has released the unit. Only in other engines: shardwise's host does not wait."""

    unit: str


Events = Iterable[StepEvent | HostWait]
# Copies that engines make have names that end in "_" like those of in-place operations, so that none counts as fused.


def without_exchanges(events: Events) -> Iterator[StepEvent | HostWait]:
    """Leave out exchanges between hosts and fences of kind "settled": other engines order their streams by the waits
    for gathers."""
    for event in events:
        if not isinstance(event, Exchange) and not (isinstance(event, Fence) and event.what == "settled"):
            yield event


def waiting_once(events: Events) -> Iterator[StepEvent | HostWait]:
    """Move all waits for reductions to the end of backward."""
    reductions: set[int] = set()
    open_waits: list[Wait] = []
    for event in events:
        if isinstance(event, Collective) and event.op != "all_gather" and event.phase is not StepPhase.OPTIMIZER:
            reductions.add(event.number)
        if isinstance(event, Wait) and event.number in reductions:
            open_waits.append(event)
            continue
        over = isinstance(event, Kernel | Collective) and event.phase in (StepPhase.OPTIMIZER, StepPhase.FORWARD)
        if over and open_waits:
            yield from open_waits
            open_waits.clear()
        yield event
    yield from open_waits


def gathering_when_called(events: Events) -> Iterator[StepEvent | HostWait]:
    """In forward, launch a gather and the kernels that write its slice only when the gather is waited for."""
    held: list[Kernel | Collective] = []
    for event in events:
        if isinstance(event, Kernel | Collective) and _gathers_in_forward(event):
            held.append(event)
            continue
        if isinstance(event, Wait) and any(isinstance(e, Collective) and e.number == event.number for e in held):
            number = None
            while number != event.number:
                handed_out = held.pop(0)
                number = handed_out.number if isinstance(handed_out, Collective) else None
                yield handed_out
        elif isinstance(event, Kernel | Collective) and event.phase is not StepPhase.FORWARD:
            yield from held  # predicted for backward
            held.clear()
        yield event
    yield from held


def _gathers_in_forward(event: Kernel | Collective) -> bool:
    of_a_gather = bool(event.stream) if isinstance(event, Kernel) else event.op == "all_gather"
    return of_a_gather and event.phase is StepPhase.FORWARD


def copied_out(events: Events) -> Iterator[StepEvent | HostWait]:
    """After the wait for a gather, add a kernel that copies all of it."""
    gathers: dict[int, Collective] = {}
    for event in events:
        yield event
        if isinstance(event, Collective) and event.op == "all_gather" and event.ranks > 1:
            gathers[event.number] = event
        elif isinstance(event, Wait) and event.number in gathers:
            yield _copy(gathers.pop(event.number), "copy_out_")


def _copy(gather: Collective, name: str, share: float = 1.0, stream: str = "") -> Kernel:
    nbytes = round(2 * gather.nbytes * share)
    return Kernel(name, KernelKind.MEMORY, 0, nbytes, "", None, gather.unit, gather.phase, stream)


def released_by_copies(events: Events) -> Iterator[StepEvent | HostWait]:
    """Replace releases by those of FSDP2, whose gathers wait for a copy-out: in forward for that of the last gather but
    one, in backward for that of the last. With three slots a gather waits until the unit three gathers before it is
    released, so a copy-out releases the unit for which the right gather waits."""
    units: list[str] = []
    for event in events:
        if isinstance(event, UnitMark) and event.what == "release":
            continue
        yield event
        if isinstance(event, Kernel) and event.name == "copy_out_":
            units.append(event.module)
            released = units[-2:-1] if event.phase is StepPhase.FORWARD else units[-3:-1]
            for unit in released:
                yield UnitMark("release", unit, event.phase)


def copied_in(events: Events) -> Iterator[StepEvent | HostWait]:
    """Before a gather, add a kernel that copies the cast slice into its buffer."""
    for event in events:
        if isinstance(event, Collective) and event.op == "all_gather" and event.ranks > 1:
            yield _copy(event, "copy_in_", 1 / event.ranks, slices_of(event.group))
        yield event


def reducing_whole(events: Events) -> Iterator[StepEvent | HostWait]:
    """Copy a unit's gradients in with one kernel, after the reduction before is over."""
    copied, before = 0, None
    for event in events:
        if isinstance(event, Kernel) and event.name == "_foreach_copy_" and event.phase is StepPhase.BACKWARD:
            copied += event.bytes_moved
            continue
        if isinstance(event, Collective) and event.op == "reduce_scatter" and event.phase is not StepPhase.OPTIMIZER:
            if before is not None:
                yield Wait(before)
            if copied:
                yield Kernel("chunk_cat_", KernelKind.MEMORY, 0, copied, "", None, event.unit, event.phase)
            copied, before = 0, event.number
        yield event
