"""What a case is given: the device, how much to do, and where to leave files."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.accelerator.row import Row

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Bench:
    """One run of one check, in a process of its own."""

    quick: bool
    """Sizes that only show that the case runs."""
    folder: Path
    """For files that belong to the result."""

    @cached_property
    def device(self) -> "torch.device":
        """The accelerator, or the CPU where there is none."""
        from benchmarks.accelerator.device import device_at_hand

        return device_at_hand()

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def is_small(self) -> bool:
        """Whether figures mean nothing here, so that sizes need not be those of a real model."""
        return self.quick or self.on_cpu


Case = Callable[[Bench], Iterable[Row]]
Cases = Mapping[str, Case]
"""The cases of a check, by name, in order. A case yields its rows as it has them; what it raises is a failure."""
