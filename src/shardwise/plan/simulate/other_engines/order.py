"""A recorded step in the order in which another engine would run it, from that engine's published design.

All of them gather a unit ahead of the one at work, as the recording does: FSDP1 under its limiter of two
(`limit_all_gathers`), FSDP2 one unit ahead implicitly in forward and explicitly in backward, DeepSpeed up to
`stage3_prefetch_bucket_size`. What differs is the end of a reduction: shardwise has the compute stream wait for it
before its slot is used again; the others have side streams do all of that, and
the compute stream waits once, at the end of backward. (FSDP: torch/distributed/fsdp/_runtime_utils.py,
`_post_backward_final_callback`; _fully_shard/_fsdp_param_group.py, `finalize_backward`. DeepSpeed: `overlap_comm`.)

What arrives is also not always where modules read it. FSDP2 copies every gather out into parameters, DeepSpeed joins
the ranks' parts, both on the compute stream; FSDP1 and shardwise compute in the gather's own buffer.
(_fsdp_collectives.py, `foreach_all_gather_copy_out`; deepspeed/runtime/zero/partition_parameters.py,
`AllGatherCoalescedHandle.wait`.) On their way out gradients are copied once by all of them, as the recording has it;
that FSDP1 casts beside computation is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwise.plan.dry_run.recording import Collective, Kernel, KernelKind, StepEvent, StepPhase, Wait

_COPIES_OUT = ("fsdp2", "deepspeed")


def ordered_as(engine: str, events: Iterable[StepEvent]) -> Iterator[StepEvent]:
    """The events of a step as `engine` (shardwise, fsdp1, fsdp2, deepspeed) would hand them out."""
    if engine == "shardwise":
        return iter(events)
    ordered = _waiting_once(events)
    return _copied_out(ordered) if engine in _COPIES_OUT else ordered


def _waiting_once(events: Iterable[StepEvent]) -> Iterator[StepEvent]:
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


def _copied_out(events: Iterable[StepEvent]) -> Iterator[StepEvent]:
    """After the wait for a gather, a kernel that reads and writes all of it."""
    gathers: dict[int, Collective] = {}
    for event in events:
        yield event
        if isinstance(event, Collective) and event.op == "all_gather" and event.ranks > 1:
            gathers[event.number] = event
        elif isinstance(event, Wait) and event.number in gathers:
            gather = gathers.pop(event.number)
            yield Kernel("copy_", KernelKind.MEMORY, 0, 2 * gather.nbytes, "", None, gather.unit, gather.phase)
