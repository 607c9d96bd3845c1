"""A recorded step in the order in which another engine would run it, from that engine's published design.

All of them gather a unit ahead of the one at work, as the recording does: FSDP1 under its limiter of two
(`limit_all_gathers`), FSDP2 one unit ahead implicitly in forward and explicitly in backward, DeepSpeed up to
`stage3_prefetch_bucket_size`. What differs is the end of a reduction: shardwise has the compute stream wait for it
before its slot is used again; the others have side streams do all of that, and
the compute stream waits once, at the end of backward. (FSDP: torch/distributed/fsdp/_runtime_utils.py,
`_post_backward_final_callback`; _fully_shard/_fsdp_param_group.py, `finalize_backward`. DeepSpeed: `overlap_comm`.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwise.plan.events import Collective, Event, Kernel, Phase, Wait


def ordered_as(engine: str, events: Iterable[Event]) -> Iterator[Event]:
    """The events of a step as `engine` (shardwise, fsdp1, fsdp2, deepspeed) would hand them out."""
    return iter(events) if engine == "shardwise" else _waiting_once(events)


def _waiting_once(events: Iterable[Event]) -> Iterator[Event]:
    reductions: set[int] = set()
    open_waits: list[Wait] = []
    for event in events:
        if isinstance(event, Collective) and event.op != "all_gather" and event.phase is not Phase.OPTIMIZER:
            reductions.add(event.number)
        if isinstance(event, Wait) and event.number in reductions:
            open_waits.append(event)
            continue
        over = isinstance(event, Kernel | Collective) and event.phase in (Phase.OPTIMIZER, Phase.FORWARD)
        if over and open_waits:
            yield from open_waits
            open_waits.clear()
        yield event
    yield from open_waits
