"""The gradients of one unit on their way, from the leaf to the shard's gradient.

A gradient is copied (cast, on CPUs scaled) into the unit's reduce slot as it arrives, on a device together with others
that follow, and the leaf drops it. One that arrives while the unit has no slot, perhaps on some ranks only, waits in
memory of its own and joins the next slot that the unit has. What holds:

- a key (group, parameter) is `written` only while the unit has a slot, which then holds the sum of its gradients;
- the places of other keys hold leftovers of another unit until `complete` zeroes them;
- `complete` takes the slot off the unit in the same move, so nothing is added to a slot that is being reduced;
- `late` is empty while the unit has a slot: late gradients are added first, before those that come later;
- every gradient is known to `statuses` until it is written to `.grad` or forgotten.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.fsdp.collectives import FP32_BYTES, ScaleFactors, bring
from shardwise.fsdp.parameter_group import Group
from shardwise.fsdp.slots import Slot

# Sums of gradients ----------------------------------------------------------------------------------------------------

# A gradient and the buffer that it is added to may differ in dtype. A CPU operation on two dtypes allocates memory for
# the operand that it casts, and one with `out=` of another dtype computes in the inputs' dtype: 1/3 of a bf16 gradient
# would be rounded to bf16 before it is written to an fp32 buffer. Therefore casts go through scratch memory, a chunk at
# a time.

CHUNK_NUMEL = 256 * 1024
"""Elements summed or cast at a time, so that one wide chunk and its inputs stay in a core's cache."""

LEAST_BATCH_BYTES = 16 * 2**20
"""Bytes of gradients that may wait for one launch of copies on a device, however small their unit. Copying this much
takes about 15 us, which hides a launch."""
MOST_BATCH_BYTES = 256 * 2**20
"""Bytes of gradients that may wait, however large their unit: of a whole model that is one unit, for example."""
_BATCH_SHARE = 2
"""Between the two, the part of a slot's gradients that may wait, as a divisor."""
_LARGE_SHARE = 3
"""The part of what may wait, as a divisor, from which a gradient is large: it is copied at once, with all that wait.
Large ones (a transformer's MLP) tend to come first in a unit's backward, when most activations still exist, and small
ones last, when they cost nothing at the peak."""


class Scratch:
    """Scratch memory by dtype, as large as the largest request so far, so that steady-state steps allocate nothing."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, Tensor] = {}

    def __call__(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Return `numel` elements, 1-D, on the CPU. They are valid until the next call with the same dtype."""
        if dtype not in self._memory or self._memory[dtype].numel() < numel:
            with torch.inference_mode(False):
                self._memory[dtype] = torch.empty(numel, dtype=dtype, device="cpu")
        return self._memory[dtype][:numel]

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(memory.nbytes for memory in self._memory.values())


class ScaledAddition:
    """Computes target (+)= scale * source. Tensors must not require gradients: then autograd records nothing, and no
    mode has to be switched.

    This is how CPU ranks collect gradients: each is scaled while it is copied and so is in a core's cache.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._factors: dict[torch.dtype, Tensor] = {}
        self._memory = Scratch()

    @property
    def scratch_bytes(self) -> int:
        """Bytes held now."""
        return self._memory.nbytes + sum(factor.nbytes for factor in self._factors.values())

    def write(self, target: Tensor, source: Tensor) -> None:
        """Compute target[:] = scale * source in the wider dtype of the two, rounded once."""
        dtype = target.dtype
        if source.dtype == dtype:
            factor = self._factors.get(dtype)
            if factor is None:
                factor = self._factor(dtype)
            # Multiplying by a factor that is itself rounded to a narrow dtype would round twice.
            if dtype.itemsize >= FP32_BYTES or factor.item() == self._scale:
                torch.mul(source, factor, out=target)
                return
        wide = torch.promote_types(target.dtype, source.dtype)
        if target.dtype == wide != source.dtype:
            target.copy_(source)
            target.mul_(self._factor(wide))
        else:
            wide = torch.promote_types(wide, torch.float32)
            for part, term in _chunks(target, source):
                part.copy_(self._memory(wide, term.numel()).copy_(term).mul_(self._factor(wide)))

    def add(self, target: Tensor, source: Tensor) -> None:
        """Compute target += scale * source in the wider dtype of the two."""
        self._add(target, source, self._scale)

    def flush(self) -> None:
        """Finish all writes: when this returns, every source is in its target."""

    def scale_of_sum(self, dtype: torch.dtype) -> float:
        """Return the factor by which sums of targets over ranks still have to be multiplied."""
        return 1.0

    def settle(self, total: Tensor, summed: Tensor, accumulate: bool) -> None:
        """Compute total[:] = (total if accumulate else 0) + summed; `summed` is a sum of targets over ranks."""
        if accumulate:
            self._add(total, summed, 1.0)
        else:
            total.copy_(summed)

    def _add(self, target: Tensor, source: Tensor, scale: float) -> None:
        if target.dtype == source.dtype:
            target.add_(source, alpha=scale)
            return
        wide = torch.promote_types(target.dtype, source.dtype)
        for part, term in _chunks(target, source):
            if part.dtype == wide:
                part.add_(self._memory(wide, term.numel()).copy_(term), alpha=scale)
            else:
                total = self._memory(wide, part.numel()).copy_(part)
                part.copy_(total.add_(term, alpha=scale))

    def _factor(self, dtype: torch.dtype) -> Tensor:
        """Return the scale as a 0-d CPU tensor: with a Python number, torch would create one in each call."""
        if dtype not in self._factors:
            with torch.inference_mode(False):
                self._factors[dtype] = torch.tensor(self._scale, dtype=dtype, device="cpu")
        return self._factors[dtype]


class BatchedAddition(ScaledAddition):
    """The same for an accelerator, where each operation costs a launch: one launch copies several gradients, and none
    scales them.

    Sources are only remembered, and so keep their memory, until a large one comes, they add up to half of their slot
    (within LEAST_BATCH_BYTES and MOST_BATCH_BYTES), or `flush` is called. So a unit takes a few launches, and what
    waits is little beside its slot and beside activations. Instead of the gradients, sums over ranks are scaled, which
    have only 1 / world_size as many elements; except in fp16, where unscaled sums could overflow.
    """

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self._waiting: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        """Targets and sources, by the dtypes of both: torch copies lists of mixed dtypes one tensor at a time."""
        self._waiting_bytes = 0
        self._device_factors = ScaleFactors()

    def write(self, target: Tensor, source: Tensor) -> None:
        """Compute target[:] = source; in fp16, scale * source. It may be written only in `flush`."""
        if target.dtype == torch.float16:
            torch.mul(source, self._scale, out=target)
            return
        targets, sources = self._waiting.setdefault((target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)
        self._waiting_bytes += source.nbytes
        limit_bytes = _limit_bytes(target, source)
        large_bytes = max(LEAST_BATCH_BYTES, limit_bytes // _LARGE_SHARE)
        if self._waiting_bytes >= limit_bytes or source.nbytes >= large_bytes:
            self.flush()

    def add(self, target: Tensor, source: Tensor) -> None:
        """Compute target += source; in fp16, target += scale * source."""
        self.flush()  # the target may still have to be written
        target.add_(source, alpha=self._scale if target.dtype == torch.float16 else 1.0)

    def flush(self) -> None:
        """Write all remembered sources to their targets, in one operation for each pair of dtypes."""
        for targets, sources in self._waiting.values():
            torch._foreach_copy_(targets, sources)
        self._waiting.clear()
        self._waiting_bytes = 0

    def scale_of_sum(self, dtype: torch.dtype) -> float:
        """Return the scale; 1 in fp16."""
        return 1.0 if dtype == torch.float16 else self._scale

    def settle(self, total: Tensor, summed: Tensor, accumulate: bool) -> None:
        """Compute total[:] = (total if accumulate else 0) + summed * scale_of_sum(summed.dtype)."""
        bring(summed, total, accumulate, self.scale_of_sum(summed.dtype), self._device_factors)


def _limit_bytes(target: Tensor, source: Tensor) -> int:
    """Return how many bytes of gradients in the source's dtype may wait to be copied to the target's slot."""
    slot_numel = target.untyped_storage().nbytes() // target.itemsize
    return min(MOST_BATCH_BYTES, max(LEAST_BATCH_BYTES, slot_numel * source.itemsize // _BATCH_SHARE))


def _chunks(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield corresponding 1-D parts of both tensors; `target` must be contiguous."""
    into, terms = target.view(-1), source.reshape(-1)
    for start in range(0, into.numel(), CHUNK_NUMEL):
        yield into[start : start + CHUNK_NUMEL], terms[start : start + CHUNK_NUMEL]


# Gradients of a unit --------------------------------------------------------------------------------------------------

Key = tuple[int, int]
"""(group, parameter) of a unit."""


class GradientStatus(enum.IntEnum):
    """What became of a parameter's gradient in a backward. Ranks agree on the greatest."""

    UNUSED = 0
    REDUCED = 1
    WAITS = 2
    """It arrived and is not reduced yet."""


class UnitGradients:
    """A unit's gradients between autograd and `.grad`."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.keys: list[Key] = [(g, i) for g, group in enumerate(groups) for i in range(len(group.fqns))]
        self.slot: Slot[Any] | None = None
        """The reduce slot that gradients are collected in now."""
        self.reduce_bytes = 0
        """Bytes that the gradients take in a reduce slot, in the reduce dtype."""
        self.scaled: ScaledAddition
        """Adds gradients to those in a slot. Set before the first one arrives."""
        self._written: set[Key] = set()
        self._late: dict[Key, Tensor] = {}
        """Gradients that arrived while there was no slot; cast and scaled as in a slot."""
        self._used: defaultdict[Key, int] = defaultdict(int)
        """How many gradients of each parameter arrived since they were last written to `.grad`, or kept."""
        self._views: dict[int, list[list[Tensor]]] = {}
        """By `id` of a slot: views of the places of gradients in it, by group."""
        self._open_views: list[list[Tensor]] = []
        """The views of `slot`, while there is one."""
        self._observer: Callable[[Tensor], None] | None = None
        self.place()

    def observe(self, observer: Callable[[Tensor], None]) -> None:
        """Call `observer` with every gradient as it arrives."""
        self._observer = observer

    def place(self) -> None:
        """Lay the trainable groups one after another in the unit's reduce slots."""
        self.reduce_bytes = 0
        for group in self.groups:
            self.reduce_bytes = group.place_gradients(self.reduce_bytes)
        self._views.clear()
        self._open_views = []

    # Collecting -------------------------------------------------------------------------------------------------------

    def open(self, slot: Slot[Any]) -> None:
        """Collect in `slot`, which the unit holds. Late gradients go there first."""
        assert self.slot is None, "gradients are collected in one slot at a time"
        self.slot = slot
        self._open_views = self._views_of(slot)
        self._add_late(slot)
        for group in self.groups:
            group.gradients.read_ahead()

    def close(self) -> None:
        """Free the slot. Callers make sure that no gradient in it is needed any more."""
        if self.slot is not None:
            self.slot.free()
            self.slot = None

    def forget_slots(self) -> None:
        """Drop all reduce slots, and what lies in them."""
        self.slot = None
        self._views.clear()
        self._open_views = []

    def add(self, key: Key, grad: Tensor) -> None:
        """Add `grad`, cast, to its place in the slot, or to memory of its own if there is no slot; the first one
        overwrites. On a device it may be copied only in `scaled.flush()`."""
        if self._observer is not None:
            self._observer(grad)
        if grad.is_sparse:
            grad = grad.to_dense()
        grad = self.groups[key[0]].own_gradient(key[1], grad)
        self._used[key] += 1
        if self.slot is None:
            is_first = key not in self._late
            if is_first:
                dtype = self.groups[key[0]].dtypes.reduce
                self._late[key] = torch.empty(grad.shape, dtype=dtype, device=grad.device)
            view = self._late[key]
        else:
            view = self._open_views[key[0]][key[1]]
            is_first = key not in self._written
            self._written.add(key)
        (self.scaled.write if is_first else self.scaled.add)(view, grad)
        if self.slot is None:
            self.scaled.flush()  # a late gradient may join a slot at any time

    def complete(self) -> Slot[Any]:
        """Take the slot off the unit and return it, ready to be reduced: gradients that did not arrive are zeros."""
        slot = self.slot
        assert slot is not None
        assert not self._late, "late gradients join a slot when it is opened"
        self._zero_missing(slot)
        self._written.clear()
        self.slot = None
        return slot

    def _add_late(self, slot: Slot[Any]) -> None:
        # Copied, not added: nothing is written without a slot, so the places hold leftovers of another unit.
        for (g, i), late in self._late.items():
            self._views_of(slot)[g][i].copy_(late)
        self._written.update(self._late)
        self._late.clear()

    def _zero_missing(self, slot: Slot[Any]) -> None:
        if len(self._written) == len(self.keys):
            return
        places = ((g, i, view) for g, views in enumerate(self._views_of(slot)) for i, view in enumerate(views))
        missing = [view for g, i, view in places if (g, i) not in self._written]
        if missing:
            torch._foreach_zero_(missing)

    def _views_of(self, slot: Slot[Any]) -> list[list[Tensor]]:
        """Return views of the places of gradients in `slot`, by group; cached; none for frozen groups."""
        views = self._views.get(id(slot))
        if views is None:
            views = [group.gradient_views(slot) if group.trainable else [] for group in self.groups]
            self._views[id(slot)] = views
        return views

    # Writing ----------------------------------------------------------------------------------------------------------

    @property
    def unreduced(self) -> set[Key]:
        """Gradients that have arrived and are not reduced yet."""
        return {*self._written, *self._late}

    def statuses(self) -> bytes:
        """Return the `GradientStatus` of each parameter's gradient on this rank: bytes, in the order of `keys`."""
        if self._written or self._late:
            return bytes(map(self._status, self.keys))
        return bytes([key in self._used for key in self.keys])  # UNUSED or REDUCED: nothing waits

    def arrivals(self, key: Key) -> int:
        """Return how many gradients of the parameter have arrived on this rank."""
        return self._used.get(key, 0)

    def _status(self, key: Key) -> GradientStatus:
        if key in self._written or key in self._late:
            return GradientStatus.WAITS
        return GradientStatus.REDUCED if key in self._used else GradientStatus.UNUSED

    def write_grads(self, statuses: Sequence[int]) -> None:
        """Write the gradient of every parameter that some rank used to its `.grad`; the others keep what they had."""
        for (g, i), status in zip(self.keys, statuses, strict=True):
            group = self.groups[g]
            if status and group.gradients.by_parameter:  # `GradientStatus.UNUSED` is 0
                group.sharded[i].receive_grad(group.gradients.by_parameter[i])
        self._used.clear()
        for group in self.groups:
            group.gradients.end_backward()

    def forget_arrivals(self) -> None:
        """Count the gradients of the next backward, because those that have arrived are kept."""
        self._used.clear()

    def forget(self, keys: Sequence[Key]) -> None:
        """Drop these gradients unless they have been written to `.grad`. No communication."""
        for key in keys:
            self._late.pop(key, None)
            self._used.pop(key, None)
        self._written.difference_update(keys)
