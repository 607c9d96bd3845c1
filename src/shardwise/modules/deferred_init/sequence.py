"""The positions of generators in the order of a recorded build's draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_MARK = 0x5EED_0F_A_0000_0000
"""While a build is recorded, seeds from this number on stand for positions in the sequence."""


class RandomSequence:
    """Positions of generators in the order of draws while recording, and the generator states that replay still needs.

    A position ("place") is the index of the operation that drew last, or a generator state if the build set one since.
    Recording draws nothing, so a generator's own state says nothing about its position. Instead it is seeded with a
    mark that stands for the position, and that follows the state if the build saves and restores it (`fork_rng`). Any
    other seed was set by the build itself.
    """

    def __init__(self) -> None:
        self.known: dict[int, Tensor] = {}
        """Generator states after operations that drew, by operation."""
        self.ends: list[tuple[torch.Generator, int | Tensor]] = []
        self._marks: dict[int, int | Tensor] = {}
        self._generators: dict[int, torch.Generator] = {}
        self._expected: Counter[int] | None = None
        """By operation: how many draws will be replayed from its state. None until known; then all states are kept."""
        self._latest: dict[int, int] = {}
        """By generator id: the operation after which its newest known state was taken."""

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
        """A context in which generators may be used; afterwards they have their marks again."""
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
