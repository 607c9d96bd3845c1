"""Seeds by position on the tape, for the draws of a build that are made on a device."""

from __future__ import annotations

import torch
from torch import Tensor

_SEEDS = 2**63 - 1


class Seeds:
    """The seeds of a build's draws. Each draw has its own: the key of the build plus the draw's position on the tape.

    Positions differ, so no two draws of a build share a seed, even for a generator that uses only the lower 32 bits (as
    the CPU's does). The key is the next number of the CPU's generator: the same after the same `torch.manual_seed`, and
    another one for the next build.
    """

    def __init__(self, device: torch.device) -> None:
        """Take the key. Does not advance the CPU's generator."""
        self.device = device
        generator = torch.Generator()
        generator.set_state(torch.default_generator.get_state())
        self._key = int(torch.randint(_SEEDS, (), generator=generator, device="cpu"))
        self.after = generator.get_state()
        """State of the CPU's generator after the key is taken."""

    def of(self, source: int | Tensor) -> int:
        """Return the seed of a draw by its source: the operation that drew before it, or the generator's state at the
        start of the build. Draws with one source, because the build restored a state, give the same numbers."""
        place = 0 if isinstance(source, Tensor) else source + 1
        return (self._key + place) % _SEEDS
