"""Random numbers by place: what an operation of a build draws when it draws on a device."""

from __future__ import annotations

import torch
from torch import Tensor

_SEEDS = 2**63 - 1


class Seeds:
    """Each draw of a build begins at a seed of its own: a key of the build's, plus the draw's place on the tape.

    Places differ, so no two draws of a build begin at the same seed, also where a generator uses the lower 32 bits
    alone (the CPU's). The key is the number that the CPU's generator would give next: the same after the same
    `torch.manual_seed`, another one for the next build.
    """

    def __init__(self, device: torch.device) -> None:
        """Leaves the generator alone."""
        self.device = device
        generator = torch.Generator()
        generator.set_state(torch.default_generator.get_state())
        self._key = int(torch.randint(_SEEDS, (), generator=generator, device="cpu"))
        self.after = generator.get_state()
        """The CPU's generator once the key is taken."""

    def of(self, source: int | Tensor) -> int:
        """The seed of a draw that goes on from an operation, or from the state that the build began with. Draws that
        go on from the same one, because the build has set the state back, draw the same."""
        place = 0 if isinstance(source, Tensor) else source + 1
        return (self._key + place) % _SEEDS
