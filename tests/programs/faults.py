"""Mistakes an engine could make, planted on every rank: after how many random programs is each found?

    python tests/programs/faults.py [--programs 500] [--seed 0] [FAULT ...]

A program finds a fault if it ends in anything but OK with the fault and in OK without. Prints one line a fault, MISSED
where none did, GONE where the engine has no such seam any more, and exits with 1 for either.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "src")]

import torch

import shardwise as sw
from tests.programs.drawing import program_of
from tests.programs.fleet import Fleet, Result
from tests.programs.program import Program
from tests.programs.running import Outcome, Report, run

Change = Callable[..., Any]


class SeamGone(Exception):
    """Where a fault would be planted is nothing of that name."""


def at(seam: str, change: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """`module:Class.name`, or `module:name`, below shardwise is `change(what it was)` inside."""
    module, _, path = seam.partition(":")
    *owners, name = path.split(".")
    try:
        owner = importlib.import_module(f"shardwise.{module}")
        for step in owners:
            owner = getattr(owner, step)
        original = inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        raise SeamGone(f"shardwise has no {seam} any more: plant this fault elsewhere ({error})") from None
    changed = change(original.__func__ if isinstance(original, staticmethod) else original)
    return patch.object(owner, name, staticmethod(changed) if isinstance(original, staticmethod) else changed)


@contextmanager
def all_of(*patches: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        yield


def of_cpu_collectives(method: str, change: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    return all_of(
        at(f"comm.backends.shared_memory.collectives:ShmCollectives.{method}", change),
        at(f"comm.backends.gloo:GlooCollectives.{method}", change),
    )


# Faults ---------------------------------------------------------------------------------------------------------------


def dropped_reduction() -> AbstractContextManager[Any]:
    """A sum that is to be added to what is there goes nowhere."""

    def change(original: Change) -> Change:
        def reduce_scatter(self: Any, buffer: Any, reductions: Any, label: int = 0) -> Any:
            lost = [dataclasses.replace(r, out=r.out.clone()) if r.accumulate else r for r in reductions]
            return original(self, buffer, tuple(lost), label)

        return reduce_scatter

    return of_cpu_collectives("reduce_scatter", change)


def slot_claimed_early() -> AbstractContextManager[Any]:
    """A reduce slot is claimed while a sum is under way in it."""

    def take(original: Change) -> Change:
        return lambda self, arena, unit: arena.choices(unit)[0]

    def claim_slot(original: Change) -> Change:
        def claim(self: Any, slot: Any, unit: Any) -> Any:
            slot.free()
            slot.take(unit)
            return slot

        return claim

    def claim_buffer(original: Change) -> Change:
        return lambda self, buffer: None if buffer.kind.value == "reduce" else original(self, buffer)

    return all_of(
        at("fsdp.reducer:Reducer.find_slot", take),
        at("fsdp.reducer:Reducer.claim", claim_slot),
        of_cpu_collectives("claim", claim_buffer),
    )


def stale_gather() -> AbstractContextManager[Any]:
    """What was gathered before the optimizer's step counts as fresh."""
    return at("fsdp.parameter_group:UnitParameters.is_fresh", lambda original: property(lambda self: True))


def used_flag_lost() -> AbstractContextManager[Any]:
    """A rank goes by its own word on which parameters were used."""

    def change(original: Change) -> Change:
        def agree(self: Any, point: Any, flags: bytes = b"") -> bytes:
            original(self, point, flags)
            return flags

        return agree

    return at("comm.collective_log:CollectiveLog.agree", change)


def skipped_call_not_passed() -> AbstractContextManager[Any]:
    """What hooks do not tell of is not made up for: a unit that this rank skipped is neither gathered nor reduced."""

    def change(original: Change) -> Change:
        def walk_back(self: Any, position: int = 0) -> Any:
            passed = list(original(self, position))
            return passed[-1:] if position else passed

        return walk_back

    return at("fsdp.schedule:ForwardPass.walk_back", change)


def overwritten_gradient() -> AbstractContextManager[Any]:
    """A second gradient of a parameter takes the place of the first."""
    from shardwise.fsdp.gradients import ScaledAddition

    return at("fsdp.gradients:ScaledAddition.add", lambda original: ScaledAddition.write)


def wrong_world_size() -> AbstractContextManager[Any]:
    """Gradients are scaled by the size of the shard group."""
    from shardwise.fsdp.gradients import ScaledAddition

    def change(original: Change) -> Change:
        def init(self: Any, mesh: Any, *more: Any, **named: Any) -> None:
            original(self, mesh, *more, **named)
            self.mean = ScaledAddition(1.0 / mesh.shard.world_size)

        return init

    return at("fsdp.reducer:Reducer.__init__", change)


def late_gradient_dropped() -> AbstractContextManager[Any]:
    """What came while a unit had no reduce slot is forgotten."""
    return at("fsdp.gradients:UnitGradients._add_late", lambda original: lambda self, slot: self._late.clear())


def released_too_early() -> AbstractContextManager[Any]:
    """When a unit's forward is over, the memory of those around it is given back too."""

    def change(original: Change) -> Change:
        def post_forward(self: Any, unit: Any, output: Any) -> Any:
            result = original(self, unit, output)
            for around in unit.ancestors:
                slot = around.parameters.slot
                if slot is not None and not around.parameters.is_pinned:
                    slot.collectives.release(slot.buffer)
            return result

        return post_forward

    return at("engine.checked:CheckedEngine.post_forward", change)


def wrong_offset() -> AbstractContextManager[Any]:
    """The last rank's slice lies one element off."""

    def change(original: Change) -> Change:
        def all_gather(self: Any, buffer: Any, regions: Any, label: int = 0) -> Any:
            for region in regions if self.rank == self.world_size - 1 > 0 else ():
                start = region.start + self.rank * region.shard_bytes
                own = buffer.bytes[start : start + region.shard_bytes]
                own.copy_(own.roll(4))
            return original(self, buffer, regions, label)

        return all_gather

    return of_cpu_collectives("all_gather", change)


def no_sync_forgotten() -> AbstractContextManager[Any]:
    """What waits is dropped where `sw.no_sync` ends."""
    true_no_sync = sw.no_sync

    @contextmanager
    def no_sync(model: torch.nn.Module) -> Iterator[None]:
        with true_no_sync(model):
            yield
        model.zero_grad()

    return patch.object(sw, "no_sync", no_sync)


def replicas_skipped() -> AbstractContextManager[Any]:
    """Replicas do not hear of each other's gradients."""

    def change(original: Change) -> Change:
        def all_reduce(self: Any, tensor: Any, op: str = "sum", *after: Any, **named: Any) -> Any:
            if "after" in named or after:
                return named.get("after", *after)
            return original(self, tensor, op, **named)

        return all_reduce

    return of_cpu_collectives("all_reduce", change)


def old_gradients_left() -> AbstractContextManager[Any]:
    """Where no gradient came, what the slot held before counts as one."""
    return at("fsdp.gradients:UnitGradients._zero_missing", lambda original: lambda self, slot: None)


def local_norm() -> AbstractContextManager[Any]:
    """Clipping goes by a rank's own pieces."""

    def change(original: Change) -> Change:
        return lambda pieces, placements, *more: original(pieces, [None] * len(pieces), *more)

    return at("optim.clip:global_norms", change)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    fault.__name__: fault
    for fault in (
        dropped_reduction, slot_claimed_early, skipped_call_not_passed,
        stale_gather, used_flag_lost, overwritten_gradient, wrong_world_size, late_gradient_dropped,
        released_too_early, wrong_offset, no_sync_forgotten, replicas_skipped, old_gradients_left, local_norm,
    )
}  # fmt: skip


def faulty(program: Program, directory: str, fault: str) -> Report:
    """As `running.run`, with a fault planted on this rank."""
    with FAULTS[fault]():
        return run(program, directory)


# Searching ------------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    from tests.programs import faults  # ranks find functions by a name that can be imported

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(FAULTS)}; all by default")
    parser.add_argument("--programs", type=int, default=500, help="to try, at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    options = parser.parse_args(arguments)
    missed = 0
    with Fleet() as fleet:
        for name in options.faults or FAULTS:
            start = time.monotonic()
            try:
                with FAULTS[name]():
                    pass
                seed, result = _search(fleet, faults.faulty, name, range(options.seed, options.seed + options.programs))
            except SeamGone as error:
                said = f"GONE: {error}"
                missed += 1
            else:
                said = f"MISSED in {options.programs}"
                missed += result is None
                if result is not None:
                    said = f"found by program {seed - options.seed + 1} (seed {seed}): {result.outcome.name}: "
                    said += result.worst.said[:90]
            print(f"{name:22} {said} [{time.monotonic() - start:.0f} s]", flush=True)
    return int(missed > 0)


def _search(fleet: Fleet, runner: Callable[..., Report], name: str, seeds: range) -> tuple[int, Result | None]:
    for seed in seeds:
        program = program_of(seed)
        result = fleet.run(program, runner, name)
        if result.outcome not in (Outcome.OK, Outcome.INVALID) and fleet.run(program).outcome is Outcome.OK:
            return seed, result
    return -1, None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
