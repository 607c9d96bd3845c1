"""A tape: what building a module computes, recorded on tensors without memory, replayed in parts on real ones.

Every operation is kept with the storages it reads and writes; views need no record, since an argument is described by
its place in a storage. The random numbers of a build form one sequence, so a part that is replayed alone needs the
generator's state at each of its draws. Draws in between are made and thrown away, one at a time. A tape that is given
seeds needs none of that: each draw begins at a seed of its own, on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise import accelerators
from shardwise.modules.deferred_init.memory import RealStorages
from shardwise.modules.deferred_init.op import Draw, Op, View
from shardwise.modules.deferred_init.seeds import Seeds
from shardwise.modules.deferred_init.sequence import RandomSequence

_BLANK = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
"""Give memory and no values."""
_OVERWRITES = frozenset({
    "normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_",
    "geometric_",
})  # fmt: skip
"""Write all of `self` and do not look at it before."""


class Unrecordable(Exception):
    """A build does something that cannot be replayed."""


class Dependencies(NamedTuple):
    """Operations that some tensors depend on, in order."""

    views: tuple[View, ...]
    order: tuple[int, ...]
    last_draw: int


class Tape(TorchDispatchMode):
    """Records what happens inside `recording`, then replays parts of it.

        tape = Tape()
        with tape.recording():
            model = build()                         # fake tensors on the CPU; nothing is drawn
        parts = tape.cut([[model.a], [model.b]])
        [a], [b] = (tape.play(part) for part in parts)
        tape.finish()                               # generators are where a real build would have left them

    A value that Python asks for while recording (`.item()`, `if tensor:`) is computed then, from what it depends on.

    With `seeds`, what depends on draws is computed on their device, from other numbers than a real build's; all else on
    the CPU, and so are draws for which the build has set a seed, a state or a generator itself.
    """

    def __init__(self, seeds: Seeds | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seeds = seeds
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._ops: list[Op] = []
        self._numbers: dict[int, int] = {}
        """Of storages, by their address, which a weak reference keeps from being used again."""
        self._storages: list[StorageWeakRef] = []
        self._nbytes: list[int] = []
        self._writers: list[list[int]] = []
        """By storage: the operations that wrote to it."""
        self._warm: tuple[int, RealStorages] = (0, self._new_memory())
        """What lay in storages that are still in use, as of an operation: left by the last value asked for."""
        self._sequence = RandomSequence()
        self._began: Tensor | None = None
        """The default generator's state when recording began."""
        self._drew: Callable[[int], object] = lambda nbytes: None
        """Called with the bytes of each draw that goes on from a state."""

    # Recording --------------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record everything that happens inside, on fake CPU tensors. The default generator stays as it was until
        parts are replayed, also if an exception leaves."""
        before = self._began = torch.default_generator.get_state()
        self._sequence.mark(torch.default_generator, before)
        FakeTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
        try:
            with torch.device("cpu"), torch.enable_grad(), self._fakes, self:
                yield
        except BaseException:
            torch.default_generator.set_state(before)
            raise
        finally:
            del FakeTensor.__deepcopy__
            self._warm = (0, self._new_memory())
        self._sequence.end()
        torch.default_generator.set_state(before)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Inside `recording`: if an exception leaves, no number was drawn as far as later operations are concerned."""
        with _disable_current_modes():
            before = torch.default_generator.get_state()
        try:
            yield
        except BaseException:
            torch.default_generator.set_state(before)
            raise

    def is_written(self, tensor: Tensor) -> bool:
        """Whether a recorded tensor has values: anything was written to its storage."""
        return bool(self._writers[self._view(tensor).storage])

    def is_drawn(self, tensor: Tensor) -> bool:
        """Whether a recorded tensor depends on random numbers."""
        order = self._slice([(self._view(tensor).storage, len(self._ops))])
        return any(self._ops[i].draw is not None for i in order)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, named = tree_map_only(Tensor, self._argument, (args, kwargs))
        changed = _changed(func, given, named)
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._ask(func, given, named)
        if torch.Tag.inplace_view not in func.tags:
            self._note(func, given, named, changed, out)
        return out

    def _argument(self, tensor: Tensor) -> View | Tensor:
        return self._view(tensor) if isinstance(tensor, FakeTensor) else tensor

    def _view(self, tensor: Tensor) -> View:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
            raise Unrecordable(f"a {tensor.layout} tensor on {tensor.device}")
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(StorageWeakRef(storage))
            self._nbytes.append(storage.nbytes())
            self._writers.append([])
        elif self._nbytes[number] != storage.nbytes():
            raise Unrecordable("a storage that changes its size")
        return View(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _note(self, func: Any, args: Any, kwargs: Any, changed: list[View], out: Any) -> None:
        known = len(self._storages)
        results = [self._view(tensor) for tensor in tree_leaves(out) if isinstance(tensor, FakeTensor)]
        fresh = tuple(view if view.storage >= known else None for view in results)
        name = func._schema.name.partition("::")[2]
        if name in _BLANK or not (changed or any(fresh)):
            return
        looked_at = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, View)]
        if name in _OVERWRITES:
            looked_at = [view for view in looked_at if view is not changed[0]]
        writes = {view.storage for view in (*changed, *fresh) if view is not None}
        draw = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator") or torch.default_generator
            source = self._sequence.place(generator)
            nbytes = sum(view.nbytes for view in (*changed, *fresh) if view is not None)
            draw = Draw(generator, source, self._is_free(source), nbytes)
            self._sequence.mark(generator, len(self._ops))
        for storage in writes:
            self._writers[storage].append(len(self._ops))
        self._ops.append(
            Op(
                func,
                args,
                kwargs,
                frozenset(view.storage for view in looked_at),
                frozenset(writes),
                not changed or (name in _OVERWRITES and self._is_whole(changed[0])),
                fresh,
                draw,
            )
        )

    def _is_free(self, source: int | Tensor) -> bool:
        """Whether what is drawn next goes on from where the build began, and from no seed or state that it set."""
        if isinstance(source, Tensor):
            return source is self._began
        draw = self._ops[source].draw
        return draw is not None and draw.is_free

    def _is_whole(self, view: View) -> bool:
        numel, expected = 1, True
        for size, stride in zip(reversed(view.size), reversed(view.stride), strict=True):
            expected = expected and (stride == numel or size == 1)
            numel *= size
        return expected and numel * view.dtype.itemsize == self._nbytes[view.storage]

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The real result of an operation whose result Python needs to know."""
        wanted = [leaf.storage for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, View)]
        now = len(self._ops)
        with _disable_current_modes(), torch.no_grad(), self._sequence.paused():
            order = self._slice((storage, now) for storage in wanted)
            since, memory = self._warm
            device = self._device_of(order)
            rest = self._slice([(storage, now) for storage in wanted], since, memory)
            stale = any(i < since and not self._ops[i].touched.isdisjoint(memory) for i in rest)
            if memory.device != device or stale:
                memory = self._new_memory(device)
            else:
                order = rest
            self._perform(order, memory, lambda s: s in wanted or not self._storages[s].expired())
            args, kwargs = memory.arguments(args, kwargs)
            out = tree_map_only(Tensor, Tensor.cpu, func(*args, **kwargs))
            memory.drop([storage for storage in memory if self._storages[storage].expired()])
            self._warm = now, memory
        return tree_map_only(Tensor, self._constant, out)

    def _constant(self, value: Tensor) -> Tensor:
        fake = self._fakes.from_tensor(value, static_shapes=True)
        self._note(torch.ops.aten.clone.default, (value,), {}, [], fake)
        return fake

    # Replaying --------------------------------------------------------------------------------------------------

    def cut(self, wanted: Sequence[Sequence[Tensor]]) -> list[Dependencies]:
        """By list of recorded tensors: what to replay for them, now that everything is recorded."""
        parts = []
        for tensors in wanted:
            views = tuple(self._view(tensor) for tensor in tensors)
            order = tuple(self._slice([(view.storage, len(self._ops)) for view in views]))
            last_draw = max((i for i in order if self._ops[i].draw is not None), default=-1)
            parts.append(Dependencies(views, order, last_draw))
        draws = [self._ops[i].draw for part in parts for i in part.order]
        self._sequence.expect(draw.source for draw in draws if draw is not None)
        return parts

    @torch.no_grad()
    def play(self, part: Dependencies) -> list[Tensor]:
        """The real tensors of a part. Without seeds, cheapest in the order of `last_draw`, where no number is drawn
        twice."""
        wanted = {view.storage for view in part.views}
        memory = self._new_memory(self._device_of(part.order))
        self._perform(part.order, memory, wanted.__contains__)
        return [memory.real(view) for view in part.views]

    @torch.no_grad()
    def finish(self) -> None:
        """Set generators to the state that they would have after a real build; with seeds, one that has drawn to where
        the key was taken."""
        for generator, source in self._sequence.ends:
            if self._seeds is not None and not isinstance(source, Tensor) and self._is_free(source):
                generator.set_state(self._seeds.after)
            else:
                generator.set_state(self._state_after(source))

    def watch_draws(self, total: Callable[[int], Callable[[int], object]]) -> None:
        """Give `total` the bytes that are left to draw; what it returns is called with those of each draw."""
        draws = [op.draw for i, op in enumerate(self._ops) if i not in self._sequence.known]
        self._drew = total(sum(draw.nbytes for draw in draws if draw is not None))

    def _new_memory(self, device: torch.device = accelerators.CPU) -> RealStorages:
        return RealStorages(self._nbytes, device)

    def _device_of(self, order: Iterable[int]) -> torch.device:
        """Where operations are done that are replayed together."""
        draws = (self._ops[i].draw for i in order)
        if self._seeds is not None and any(draw is not None and draw.is_free for draw in draws):
            return self._seeds.device
        return accelerators.CPU

    def _slice(self, wanted: Iterable[tuple[int, int]], since: int = 0, memory: Container[int] = ()) -> list[int]:
        """Operations that storages depend on, each before the operation given with it; storages in `memory` hold what
        operations before `since` wrote."""
        chosen: set[int] = set()
        seen: set[tuple[int, int]] = set()
        pending = list(wanted)
        while pending:
            storage, before = pending.pop()
            if (storage, before) in seen:
                continue
            seen.add((storage, before))
            start = since if storage in memory else 0
            for i in reversed(self._writers[storage]):
                if i >= before:
                    continue
                if i < start:
                    break
                if i not in chosen:
                    chosen.add(i)
                    pending += [(read, i) for read in self._ops[i].reads]
                if self._ops[i].replaces:
                    break
        return sorted(chosen)

    def _perform(self, order: Sequence[int], memory: RealStorages, keep: Callable[[int], bool]) -> None:
        """Run operations in order; storages are freed after the last one that touches them, unless kept."""
        last = {storage: i for i in order for storage in self._ops[i].touched}
        for i in order:
            op = self._ops[i]
            if op.draw is None:
                memory.run(op)
            elif self._seeds is not None and op.draw.is_free:
                memory.run(op, self._seeds.of(op.draw.source))
            else:
                self._draw(i, self._state_after(op.draw.source), memory)
                self._sequence.served(op.draw.source)
            memory.drop([storage for storage in op.touched if last[storage] == i and not keep(storage)])

    def _draw(self, index: int, state: Tensor, memory: RealStorages) -> Tensor:
        """Run an operation that draws, from a state of its generator. Returns the state after it."""
        op = self._ops[index]
        assert op.draw is not None
        op.draw.generator.set_state(state)
        memory.run_on_cpu(op)
        self._drew(op.draw.nbytes)
        return self._sequence.reached(index, op.draw.generator)

    def _state_after(self, source: int | Tensor) -> Tensor:
        """The generator's state after an operation that drew: what lies between it and a known state is drawn."""
        skipped: list[int] = []
        while not isinstance(source, Tensor) and source not in self._sequence.known:
            skipped.append(source)
            draw = self._ops[source].draw
            assert draw is not None
            source = draw.source
        state = source if isinstance(source, Tensor) else self._sequence.known[source]
        for i in reversed(skipped):
            memory = self._new_memory()
            reads = self._ops[i].reads
            if reads:  # how many numbers it takes may depend on them
                self._perform(self._slice((read, i) for read in reads), memory, reads.__contains__)
            state = self._draw(i, state, memory)
        return state


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """`copy.deepcopy` of a recorded tensor. Torch's would copy the mode that records it too, and leave that."""
    copied: Tensor | None = memo.get(id(tensor))
    if copied is None:
        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        copied = nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
        memo[id(tensor)] = copied
    return copied


def _changed(func: Any, args: Any, kwargs: Any) -> list[View]:
    """Arguments that an operation writes to."""
    changed: list[View] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            changed += [leaf for leaf in tree_leaves(value) if leaf is not None]
    if not all(isinstance(view, View) for view in changed):
        raise Unrecordable(f"{func} writes to a tensor from outside")
    return changed
