"""A tape: the operations that build a module, recorded on tensors without memory and replayed in parts on real ones.

Each operation is recorded with the storages that it reads and writes. Views need no record, since an argument is
described by its place in a storage. The random numbers of a build form one sequence, so to replay a part alone the tape
needs the generator's state at each of its draws; to reach it, draws in between are made one at a time and discarded. A
tape with seeds needs none of this: each draw has a seed of its own, on a device.
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
"""Operations that allocate memory without writing it."""
_OVERWRITES = frozenset({
    "normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_",
    "geometric_",
})  # fmt: skip
"""Operations that write all of `self` and do not read it."""


class Unrecordable(Exception):
    """A build does something that the tape cannot record and replay."""


class Dependencies(NamedTuple):
    """The operations that some tensors depend on, in order."""

    views: tuple[View, ...]
    order: tuple[int, ...]
    last_draw: int


class Tape(TorchDispatchMode):
    """Records the operations inside `recording`, then replays parts of them.

        tape = Tape()
        with tape.recording():
            model = build()                         # fake tensors on the CPU; nothing is drawn
        parts = tape.cut([[model.a], [model.b]])
        [a], [b] = (tape.play(part) for part in parts)
        tape.finish()                               # generators have the state that a real build leaves

    A value that Python needs while recording (`.item()`, `if tensor:`) is computed at once, from its dependencies.

    With `seeds`, tensors that depend on draws are computed on the device of the seeds, from other random numbers than
    in a real build. All other tensors are computed on the CPU, and so are draws for which the build itself set a seed,
    a state or a generator.
    """

    def __init__(self, seeds: Seeds | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seeds = seeds
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._ops: list[Op] = []
        self._numbers: dict[int, int] = {}
        """Numbers of storages, by address. A weak reference in `_storages` keeps an address from being reused."""
        self._storages: list[StorageWeakRef] = []
        self._nbytes: list[int] = []
        self._writers: list[list[int]] = []
        """By storage: the operations that write to it, in order."""
        self._warm: tuple[int, RealStorages] = (0, self._new_memory())
        """An operation, and storages with their contents before it: left by the last value that Python needed."""
        self._sequence = RandomSequence()
        self._began: Tensor | None = None
        """State of the default generator when recording began."""
        self._drew: Callable[[int], object] = lambda nbytes: None
        """Called with the bytes of each draw that is made from a generator state, not from a seed of `Seeds`."""

    # Recording --------------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all operations inside, on fake CPU tensors. Afterwards the default generator has its previous state,
        also after an exception; only replaying parts changes it."""
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
        """A context inside `recording`. After an exception the sequence of draws is as if nothing inside had drawn."""
        with _disable_current_modes():
            before = torch.default_generator.get_state()
        try:
            yield
        except BaseException:
            torch.default_generator.set_state(before)
            raise

    def is_written(self, tensor: Tensor) -> bool:
        """Whether a recorded tensor has values, that is, anything was written to its storage."""
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
        """Whether a draw continues from the state that the build began with, not from one that the build itself set."""
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
        """Compute the real result of an operation whose value Python needs, and return it as a recorded constant."""
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
        """Return for each list of recorded tensors the operations to replay. Call it after recording has ended."""
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
        """Replay a part and return its real tensors. Without seeds, playing parts in the order of `last_draw` is
        cheapest: then no number is drawn twice."""
        wanted = {view.storage for view in part.views}
        memory = self._new_memory(self._device_of(part.order))
        self._perform(part.order, memory, wanted.__contains__)
        return [memory.real(view) for view in part.views]

    @torch.no_grad()
    def finish(self) -> None:
        """Set generators to the state that they have after a real build. With seeds, one whose draws were made from
        these gets the state after the key was taken."""
        for generator, source in self._sequence.ends:
            if self._seeds is not None and not isinstance(source, Tensor) and self._is_free(source):
                generator.set_state(self._seeds.after)
            else:
                generator.set_state(self._state_after(source))

    def watch_draws(self, total: Callable[[int], Callable[[int], object]]) -> None:
        """Call `total` with the bytes left to draw; what it returns is then called with the bytes of each draw."""
        draws = [op.draw for i, op in enumerate(self._ops) if i not in self._sequence.known]
        self._drew = total(sum(draw.nbytes for draw in draws if draw is not None))

    def _new_memory(self, device: torch.device = accelerators.CPU) -> RealStorages:
        return RealStorages(self._nbytes, device)

    def _device_of(self, order: Iterable[int]) -> torch.device:
        """Return the device on which operations that are replayed together run."""
        draws = (self._ops[i].draw for i in order)
        if self._seeds is not None and any(draw is not None and draw.is_free for draw in draws):
            return self._seeds.device
        return accelerators.CPU

    def _slice(self, wanted: Iterable[tuple[int, int]], since: int = 0, memory: Container[int] = ()) -> list[int]:
        """Return the operations that storages depend on, in order.

        Args:
            wanted: pairs of a storage and an operation before which its contents are wanted.
            since: an operation; storages in `memory` already hold the results of all operations before it.
            memory: numbers of storages.
        """
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
        """Run operations in order. Each storage is freed after the last one that touches it, unless `keep` is true."""
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
        """Run an operation that draws, from a given state of its generator. Returns the state after it."""
        op = self._ops[index]
        assert op.draw is not None
        op.draw.generator.set_state(state)
        memory.run_on_cpu(op)
        self._drew(op.draw.nbytes)
        return self._sequence.reached(index, op.draw.generator)

    def _state_after(self, source: int | Tensor) -> Tensor:
        """Return the generator's state after an operation that draws, making all draws since the last known state."""
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
            if reads:  # how many numbers it draws may depend on them
                self._perform(self._slice((read, i) for read in reads), memory, reads.__contains__)
            state = self._draw(i, state, memory)
        return state


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return a `copy.deepcopy` of a recorded tensor. Torch's own would also copy the mode and so stop recording."""
    copied: Tensor | None = memo.get(id(tensor))
    if copied is None:
        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        copied = nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
        memo[id(tensor)] = copied
    return copied


def _changed(func: Any, args: Any, kwargs: Any) -> list[View]:
    """Return the arguments that an operation writes to."""
    changed: list[View] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            changed += [leaf for leaf in tree_leaves(value) if leaf is not None]
    if not all(isinstance(view, View) for view in changed):
        raise Unrecordable(f"{func} writes to a tensor from outside")
    return changed
