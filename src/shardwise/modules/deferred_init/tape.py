"""A tape: what building a module computes, recorded on tensors without memory, replayed in parts on real ones.

Every operation is kept with the storages it reads and writes; views need no record, since an argument is described by
its place in a storage. The random numbers of a build form one sequence, so a part that is replayed alone needs the
generator's state at each of its draws. Draws in between are made and thrown away, one at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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

Memory = dict[int, torch.UntypedStorage]
"""Real storages by the number of the recorded ones."""

_BLANK = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
"""Give memory and no values."""
_OVERWRITES = frozenset({
    "normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_",
    "geometric_",
})  # fmt: skip
"""Write all of `self` and do not look at it before."""
_MARK = 0x5EED_0F_A_0000_0000
"""Seeds from here on stand for a place in the sequence while a build is recorded."""


class Unrecordable(Exception):
    """A build does something that cannot be replayed."""


@dataclass(frozen=True, slots=True)
class _View:
    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Draw:
    generator: torch.Generator
    source: int | Tensor
    """The operation that drew before this one, or the state that somebody set since."""


@dataclass(frozen=True, slots=True)
class _Op:
    func: Callable[..., Any]
    args: Any
    """A tree with views for recorded tensors; others are constants."""
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    replaces: bool
    """Nothing that was written before to the storages it writes remains."""
    outputs: tuple[_View | None, ...]
    """By tensor that it returns: where that lies, if in a storage of its own."""
    draw: _Draw | None


class Part(NamedTuple):
    """Operations that some tensors depend on, in order."""

    views: tuple[_View, ...]
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
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._ops: list[_Op] = []
        self._numbers: dict[int, int] = {}
        """Of storages, by their address, which a weak reference keeps from being used again."""
        self._storages: list[StorageWeakRef] = []
        self._nbytes: list[int] = []
        self._writers: list[list[int]] = []
        """By storage: the operations that wrote to it."""
        self._warm: tuple[int, Memory] = (0, {})
        """What lay in storages that are still in use, as of an operation: left by the last value asked for."""
        self._sequence = _Sequence()

    # Recording --------------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record everything that happens inside, on fake CPU tensors. The default generator stays as it was until
        parts are replayed, also if an exception leaves."""
        before = torch.default_generator.get_state()
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
            self._warm = (0, {})
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

    def _argument(self, tensor: Tensor) -> _View | Tensor:
        return self._view(tensor) if isinstance(tensor, FakeTensor) else tensor

    def _view(self, tensor: Tensor) -> _View:
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
        return _View(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _note(self, func: Any, args: Any, kwargs: Any, changed: list[_View], out: Any) -> None:
        known = len(self._storages)
        results = [self._view(tensor) for tensor in tree_leaves(out) if isinstance(tensor, FakeTensor)]
        fresh = tuple(view if view.storage >= known else None for view in results)
        name = func._schema.name.partition("::")[2]
        if name in _BLANK or not (changed or any(fresh)):
            return
        looked_at = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _View)]
        if name in _OVERWRITES:
            looked_at = [view for view in looked_at if view is not changed[0]]
        writes = {view.storage for view in (*changed, *fresh) if view is not None}
        draw = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator") or torch.default_generator
            draw = _Draw(generator, self._sequence.place(generator))
            self._sequence.mark(generator, len(self._ops))
        for storage in writes:
            self._writers[storage].append(len(self._ops))
        self._ops.append(
            _Op(
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

    def _is_whole(self, view: _View) -> bool:
        numel, expected = 1, True
        for size, stride in zip(reversed(view.size), reversed(view.stride), strict=True):
            expected = expected and (stride == numel or size == 1)
            numel *= size
        return expected and numel * view.dtype.itemsize == self._nbytes[view.storage]

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The real result of an operation whose result Python needs to know."""
        wanted = [leaf.storage for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _View)]
        now = len(self._ops)
        with _disable_current_modes(), torch.no_grad(), self._sequence.paused():
            since, memory = self._warm
            order = self._slice([(storage, now) for storage in wanted], since, memory)
            if any(i < since and not memory.keys().isdisjoint(_touched(self._ops[i])) for i in order):
                memory = {}
                order = self._slice([(storage, now) for storage in wanted])
            self._perform(order, memory, lambda s: s in wanted or not self._storages[s].expired())
            args, kwargs = tree_map_only(_View, partial(self._real, memory), (args, kwargs))
            out = func(*args, **kwargs)
            self._warm = now, {s: memory[s] for s in memory if not self._storages[s].expired()}
        return tree_map_only(Tensor, self._constant, out)

    def _constant(self, value: Tensor) -> Tensor:
        fake = self._fakes.from_tensor(value, static_shapes=True)
        self._note(torch.ops.aten.clone.default, (value,), {}, [], fake)
        return fake

    # Replaying --------------------------------------------------------------------------------------------------

    def cut(self, wanted: Sequence[Sequence[Tensor]]) -> list[Part]:
        """By list of recorded tensors: what to replay for them, now that everything is recorded."""
        parts = []
        for tensors in wanted:
            views = tuple(self._view(tensor) for tensor in tensors)
            order = tuple(self._slice([(view.storage, len(self._ops)) for view in views]))
            last_draw = max((i for i in order if self._ops[i].draw is not None), default=-1)
            parts.append(Part(views, order, last_draw))
        draws = [self._ops[i].draw for part in parts for i in part.order]
        self._sequence.expect(draw.source for draw in draws if draw is not None)
        return parts

    @torch.no_grad()
    def play(self, part: Part) -> list[Tensor]:
        """The real tensors of a part. Cheapest in the order of `last_draw`, where no number is drawn twice."""
        wanted = {view.storage for view in part.views}
        memory: Memory = {}
        self._perform(part.order, memory, wanted.__contains__)
        return [self._real(memory, view) for view in part.views]

    @torch.no_grad()
    def finish(self) -> None:
        """Set generators to the state that they would have after a real build."""
        for generator, source in self._sequence.ends:
            generator.set_state(self._state_after(source))

    def _slice(self, wanted: Iterable[tuple[int, int]], since: int = 0, memory: Iterable[int] = ()) -> list[int]:
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

    def _perform(self, order: Sequence[int], memory: Memory, keep: Callable[[int], bool]) -> None:
        """Run operations in order; storages are freed after the last one that touches them, unless kept."""
        last = {storage: i for i in order for storage in _touched(self._ops[i])}
        for i in order:
            op = self._ops[i]
            if op.draw is None:
                self._run(op, memory)
            else:
                state = self._state_after(op.draw.source)
                self._draw(i, state, memory)
                self._sequence.served(op.draw.source)
            for storage in _touched(op):
                if last[storage] == i and not keep(storage):
                    memory.pop(storage, None)

    def _run(self, op: _Op, memory: Memory) -> None:
        args, kwargs = tree_map_only(_View, partial(self._real, memory), (op.args, op.kwargs))
        results = [tensor for tensor in tree_leaves(op.func(*args, **kwargs)) if isinstance(tensor, Tensor)]
        of_constants = any(isinstance(leaf, Tensor) for leaf in tree_leaves((op.args, op.kwargs)))
        for view, tensor in zip(op.outputs, results, strict=True):
            if view is None:
                continue
            storage = tensor.untyped_storage()
            laid_out = (tensor.stride(), tensor.storage_offset()) == (view.stride, view.offset)
            if not of_constants and laid_out and storage.nbytes() == self._nbytes[view.storage]:
                memory[view.storage] = storage
            else:  # an alias of a constant, which later operations may write to, or another layout than was recorded
                self._real(memory, view).copy_(tensor)

    def _real(self, memory: Memory, view: _View) -> Tensor:
        if view.storage not in memory:
            blank = torch.empty(self._nbytes[view.storage], dtype=torch.uint8, device="cpu")
            memory[view.storage] = blank.untyped_storage()
        real = torch.empty(0, dtype=view.dtype, device="cpu")
        return real.set_(memory[view.storage], view.offset, view.size, view.stride)

    def _draw(self, index: int, state: Tensor, memory: Memory) -> Tensor:
        """Run an operation that draws, from a state of its generator. Returns the state after it."""
        op = self._ops[index]
        assert op.draw is not None
        op.draw.generator.set_state(state)
        self._run(op, memory)
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
            memory: Memory = {}
            reads = self._ops[i].reads
            if reads:  # how many numbers it takes may depend on them
                self._perform(self._slice((read, i) for read in reads), memory, reads.__contains__)
            state = self._draw(i, state, memory)
        return state


class _Sequence:
    """Where generators are in the order of draws, while recording, and states that replaying still needs.

    Recording draws nothing, so a generator's own state says nothing about its place. It is given a seed that stands
    for the place instead, which goes wherever the build takes the state (`fork_rng`); other seeds are the build's own.
    """

    def __init__(self) -> None:
        self.known: dict[int, Tensor] = {}
        """States after operations that drew."""
        self.ends: list[tuple[torch.Generator, int | Tensor]] = []
        self._marks: dict[int, int | Tensor] = {}
        self._generators: dict[int, torch.Generator] = {}
        self._expected: Counter[int] | None = None
        """By operation: how many replayed draws continue from it. None while that is not known, so all are kept."""
        self._latest: dict[int, int] = {}
        """By generator: the operation that its newest state is from."""

    def mark(self, generator: torch.Generator, place: int | Tensor) -> None:
        seed = _MARK + len(self._marks)
        self._marks[seed] = place
        self._generators[id(generator)] = generator
        generator.manual_seed(seed)

    def place(self, generator: torch.Generator) -> int | Tensor:
        marked = self._marks.get(generator.initial_seed())
        if marked is not None:
            return marked
        with _disable_current_modes():
            return generator.get_state()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Generators may be used inside; they have their marks back afterwards."""
        states = [(generator, generator.get_state()) for generator in self._generators.values()]
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)

    def end(self) -> None:
        self.ends = [(generator, self.place(generator)) for generator in self._generators.values()]

    def expect(self, sources: Iterable[int | Tensor]) -> None:
        everything = (*sources, *(place for _, place in self.ends))
        self._expected = Counter(place for place in everything if not isinstance(place, Tensor))
        newest = set(self._latest.values())
        self.known = {i: state for i, state in self.known.items() if i in newest or self._expected[i]}

    def reached(self, index: int, generator: torch.Generator) -> Tensor:
        state = self.known[index] = generator.get_state()
        before = self._latest.get(id(generator), index)
        self._latest[id(generator)] = index
        if before != index:
            self._drop(before)
        return state

    def served(self, source: int | Tensor) -> None:
        if self._expected is not None and not isinstance(source, Tensor):
            self._expected[source] -= 1
            if source not in self._latest.values():
                self._drop(source)

    def _drop(self, index: int) -> None:
        if self._expected is not None and self._expected[index] <= 0:
            self.known.pop(index, None)


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """`copy.deepcopy` of a recorded tensor. Torch's would copy the mode that records it too, and leave that."""
    copied: Tensor | None = memo.get(id(tensor))
    if copied is None:
        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        copied = nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
        memo[id(tensor)] = copied
    return copied


def _touched(op: _Op) -> frozenset[int]:
    return op.reads | op.writes


def _changed(func: Any, args: Any, kwargs: Any) -> list[_View]:
    """Arguments that an operation writes to."""
    changed: list[_View] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            changed += [leaf for leaf in tree_leaves(value) if leaf is not None]
    if not all(isinstance(view, _View) for view in changed):
        raise Unrecordable(f"{func} writes to a tensor from outside")
    return changed
