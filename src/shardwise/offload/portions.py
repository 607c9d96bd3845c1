"""Portions: parameters whose optimizer state is read, updated and written together, and where that state is stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise import accelerators, device_tools
from shardwise.errors import ConfigError
from shardwise.files.direct import PAGE_BYTES
from shardwise.fsdp.layout import round_up
from shardwise.fsdp.sharded_parameter import Placement, ShardedParameter
from shardwise.sharded.extensions.partial_step import step_some

BUFFERS = 4
"""Buffers of the ring: one is computed with, one or two are read ahead, one or two are written back."""
_ALIGN_BYTES = 64
_LEAST_RING_BYTES = 64 * 2**20


class StateLayout(NamedTuple):
    """The layout of one state tensor on the tier."""

    placement: Placement
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's piece."""
        return self.placement.fragment.numel * self.dtype.itemsize


State = Mapping[str, StateLayout]
"""The sharded tensors of one parameter's optimizer state, by name."""


@dataclass(frozen=True, eq=False)
class Portion:
    """Some parameters of one unit, whose state is stored in consecutive whole pages."""

    parameters: tuple[ShardedParameter, ...]
    start: int
    """First byte on the tier."""
    nbytes: int
    places: Mapping[tuple[ShardedParameter, str], tuple[int, StateLayout]]
    """By parameter and name of the state tensor: its first byte, counted from `start`, and its layout."""


def probe(optimizer: Optimizer, group: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.dtype]:
    """Return the names and dtypes of the state tensors that a step gives a parameter of this dtype.

    Runs the optimizer's own step on a stand-in of two elements. Leaves the random number generators as they were.
    """
    stand_in = nn.Parameter(torch.zeros(2, dtype=dtype, device=device))
    stand_in.grad = torch.zeros(2, dtype=dtype, device=device)
    selected = [[stand_in] if number == group else [] for number in range(len(optimizer.param_groups))]
    state: dict[Any, dict[str, Any]] = defaultdict(dict)
    with device_tools.seeded(accelerators.CPU, 0), device_tools.seeded(device, 0):
        step_some(optimizer, selected, state)
    return {
        name: value.dtype
        for name, value in state[stand_in].items()
        if isinstance(value, Tensor) and value.shape == stand_in.shape
    }


def bytes_of(state: State) -> int:
    """Return the bytes that one parameter's state takes on this rank, aligned."""
    return sum(round_up(layout.nbytes, _ALIGN_BYTES) for layout in state.values())


def ring_bytes_for(asked: int | None, needs: Mapping[ShardedParameter, State]) -> int:
    """Return the size of the ring in bytes. Raises ConfigError, which names the least size, if `asked` is too small."""
    largest = max(needs, key=lambda parameter: bytes_of(needs[parameter]))
    least = BUFFERS * round_up(bytes_of(needs[largest]), PAGE_BYTES)
    if asked is None:
        return max(least, _LEAST_RING_BYTES)
    if asked < least:
        raise ConfigError(
            f"offload.ring_bytes={asked}: the ring must hold {BUFFERS} times a rank's state of its largest parameter, "
            f"{largest.fqn!r}: at least {least} bytes ({-(-least // 2**20)} MiB)"
        )
    return asked // (BUFFERS * PAGE_BYTES) * BUFFERS * PAGE_BYTES


def portions_of(
    units: Iterable[Sequence[ShardedParameter]],
    needs: Mapping[ShardedParameter, State],
    buffer_bytes: int,
    start: int,
) -> list[Portion]:
    """Cut each unit's parameters into portions that fit in a buffer, stored one after another from byte `start` on."""
    portions: list[Portion] = []
    for unit in units:
        run: list[ShardedParameter] = []
        for parameter in unit:
            if run and sum(bytes_of(needs[p]) for p in (*run, parameter)) > buffer_bytes:
                portions.append(_portion(run, needs, start))
                start += portions[-1].nbytes
                run = []
            run.append(parameter)
        if run:
            portions.append(_portion(run, needs, start))
            start += portions[-1].nbytes
    return portions


def _portion(parameters: Sequence[ShardedParameter], needs: Mapping[ShardedParameter, State], start: int) -> Portion:
    places, offset = {}, 0
    for parameter in parameters:
        for name, layout in needs[parameter].items():
            places[parameter, name] = offset, layout
            offset += round_up(layout.nbytes, _ALIGN_BYTES)
    return Portion(tuple(parameters), start, round_up(offset, PAGE_BYTES), places)
