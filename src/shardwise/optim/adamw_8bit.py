"""AdamW with both moments in 8 bits: two bytes of state per parameter instead of eight."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import Placement, ShardedParameter
from shardwise.offload.portions import StateLayout
from shardwise.optim.adamw_pieces import AdamWInPieces, piece_of, updated
from shardwise.optim.block_placement import cuts_at, of_blocks
from shardwise.optim.eight_bits import BLOCK_NUMEL, NOISE_BITS, Code, blocks_of
from shardwise.optim.rounding import key_of, random_bits, rounded
from shardwise.sharded.extensions.optimizer_state import cut_state

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""By name of the moment: whether it is signed."""
_Codes = dict[torch.device, dict[str, Code]]
"""By device and name of the moment: its code."""


class AdamW8bit(AdamWInPieces):
    """AdamW whose moments are kept in 8 bits: 2.03 bytes of state per parameter.

    Each moment of a parameter is stored as uint8 codes in the parameter's shape, such as `exp_avg_codes`, and one fp32
    scale for each block of 256 elements, such as `exp_avg_scales`: see `eight_bits`. Parameters of fewer than 4,096
    elements have fp32 moments. All arithmetic is in fp32. The first moment is rounded to nearest, the second
    stochastically, with odds that make it right on average, because otherwise it would never fall; bf16 parameters are
    rounded stochastically too. The random bits are a function of `seed`, the parameter's name, the step and the
    element's index, and no block is cut, so the numbers are the same for any number of ranks, any strategy, after a
    resumption, and for an unsharded model.

    So that no block is cut, shard with `sw.shard(model, align=sw.optim.AdamW8bit.BLOCK_NUMEL)`.

    Args:
        params: parameters, or groups of them, as for torch's AdamW. A plain parameter's name is the one given with it,
            or else its position in its group.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        seed: seed of the rounding.

    Raises:
        ConfigError: a number is out of range. UsageError, also from `step`, before anything is updated: a parameter was
            sharded without `align`.
    Source: arXiv:1711.05101 (AdamW), arXiv:2110.02861 (moments in blocks of 8 bits).
    """

    BLOCK_NUMEL = BLOCK_NUMEL
    """Elements in a block."""
    SMALL_NUMEL = 4096
    """Parameters of fewer (global) elements have fp32 moments."""
    keeps_state_dtypes = True
    """Whether a load keeps the stored dtypes of state, instead of casting it to the parameter's dtype."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does. Raises UsageError for a parameter that was sharded without `align`."""
        super().add_param_group(param_group)
        try:
            self._check()
        except UsageError:
            self.param_groups.pop()
            raise

    def _check(self) -> None:
        for parameter in chain(*(group["params"] for group in self.param_groups)):
            if not isinstance(parameter, ShardedParameter) or not self._has_blocks(parameter):
                continue
            if not cuts_at(parameter.placement, BLOCK_NUMEL):
                raise UsageError(
                    f"AdamW8bit keeps moments in blocks of {BLOCK_NUMEL} elements, and {parameter.fqn!r} is cut inside "
                    "a block: call sw.shard(model, align=sw.optim.AdamW8bit.BLOCK_NUMEL)"
                )
            if parameter.placement.part is not None:
                raise UsageError(f"AdamW8bit of {parameter.fqn!r}, which is tensor-parallel: use AdamW or AdamWBF16")

    def _has_blocks(self, parameter: Tensor) -> bool:
        return parameter.numel() >= self.SMALL_NUMEL

    # A step -----------------------------------------------------------------------------------------------------------

    def _prepare(self) -> _Codes:
        self._check()
        devices = {parameter.device for group in self.param_groups for parameter in group["params"]}
        return {device: {key: Code.on(device, signed) for key, signed in _MOMENTS.items()} for device in devices}

    def _update(self, parameter: Tensor, name: str, group: dict[str, Any], prepared: _Codes) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._new_state(parameter))
        state["step"] += 1
        assert parameter.grad is not None
        weights, gradient = piece_of(parameter), piece_of(parameter.grad)
        kept = {key: piece_of(value) for key, value in state.items() if key != "step"}
        offset = parameter.fragment.start if isinstance(parameter, ShardedParameter) else 0
        key, codes = key_of(group["seed"], name, state["step"]), prepared[parameter.device]
        for chunk in self._chunks(weights):  # whole blocks; each element takes about 60 bytes of temporary memory
            blocks = slice(chunk.start // BLOCK_NUMEL, blocks_of(chunk.stop))
            numbers = random_bits(offset + chunk.start, chunk.stop - chunk.start, key, parameter.device)
            first, second = (_MomentRange(kept, moment, code, chunk, blocks) for moment, code in codes.items())
            moments = first.read(), second.read()
            value = updated(weights[chunk], gradient[chunk], moments, state["step"], group)
            first.write(moments[0], numbers)
            second.write(moments[1], numbers)
            weights[chunk] = rounded(value, numbers >> NOISE_BITS) if weights.dtype == torch.bfloat16 else value

    def _new_state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"step": 0}
        if isinstance(parameter, ShardedParameter):
            for name, (placement, dtype) in self.first_state(parameter).items():
                piece = torch.zeros(placement.fragment.numel, dtype=dtype, device=parameter.device)
                state[name] = ShardedParameter(piece, placement)
        else:
            for name, (shape, dtype) in self._tensors(parameter).items():
                state[name] = torch.zeros(shape, dtype=dtype, device=parameter.device)
        return state

    # What state there is ----------------------------------------------------------------------------------------------

    def _tensors(self, parameter: Tensor) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the (global) shape and the dtype of each state tensor, by name."""
        shape, blocks = tuple(parameter.shape), (blocks_of(parameter.numel()),)
        if not self._has_blocks(parameter):
            return dict.fromkeys(_MOMENTS, (shape, torch.float32))
        parts = {"codes": (shape, torch.uint8), "scales": (blocks, torch.float32)}
        return {f"{moment}_{part}": tensor for moment in _MOMENTS for part, tensor in parts.items()}

    def first_state(self, parameter: ShardedParameter) -> dict[str, StateLayout]:
        """Return the layout of the state tensors that a parameter's first step makes. Does not communicate."""
        return {
            name: StateLayout(self.state_placement(parameter, shape) or parameter.placement, dtype)
            for name, (shape, dtype) in self._tensors(parameter).items()
        }

    def state_placement(self, parameter: Tensor, shape: tuple[int, ...]) -> Placement | None:
        """Return how state of that shape of a parameter is cut, or None if like the parameter. Does not communicate."""
        if not isinstance(parameter, ShardedParameter) or not self._has_blocks(parameter):
            return None
        is_of_blocks = shape == (blocks_of(parameter.numel()),)
        return of_blocks(parameter.placement, BLOCK_NUMEL) if is_of_blocks else None

    # State from elsewhere ---------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this optimizer's own state_dict, or an unsharded model's with full tensors, without changing any bit.

        Each rank keeps its pieces of full tensors. Every rank must be given equal numbers. Does not communicate.
        Raises UsageError for pieces that were cut differently, and for another optimizer's state.
        """
        keys = chain(*(group["params"] for group in state_dict["param_groups"]))
        parameters = dict(zip(keys, chain(*(group["params"] for group in self.param_groups)), strict=False))
        given = [(parameters[key], values) for key, values in state_dict["state"].items() if key in parameters]
        for parameter, values in given:
            self._check_names(parameter, values)
        placed = {parameter: self.cut_state(parameter, values) for parameter, values in given}
        super().load_state_dict({**state_dict, "state": {}})  # it would cast state to the parameters' dtype
        self.state.update(placed)

    def cut_state(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of one parameter as this rank keeps it. Every rank must be given equal numbers.

        Does not communicate. Raises as `load_state_dict`.
        """
        if isinstance(parameter, ShardedParameter):
            return cut_state(parameter, state, self.state_placement)
        return {n: value.to(parameter.device) if isinstance(value, Tensor) else value for n, value in state.items()}

    def _check_names(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        names = {"step", *self._tensors(parameter)}
        if state and set(state) != names:
            which = f"{parameter.fqn!r} " if isinstance(parameter, ShardedParameter) else ""
            raise UsageError(
                f"the state given for a parameter {which}of shape {tuple(parameter.shape)} is {sorted(state)}, but "
                f"AdamW8bit keeps {sorted(names)}: it belongs to another optimizer, so begin with fresh state"
            )


class _MomentRange(NamedTuple):
    """Some elements of one moment, beginning with a block."""

    kept: Mapping[str, Tensor]
    moment: str
    code: Code
    elements: slice
    blocks: slice

    def read(self) -> Tensor:
        """Return the elements in fp32: decoded, or a view of a moment that is kept in fp32."""
        if self.moment in self.kept:
            return self.kept[self.moment][self.elements]
        return self.code.decode(*self._tensors)

    def write(self, numbers: Tensor, noise: Tensor) -> None:
        """Write back the tensor that `read` returned and the caller changed. A view needs no write."""
        if self.moment not in self.kept:
            self.code.encode(numbers, *self._tensors, noise)

    @property
    def _tensors(self) -> tuple[Tensor, Tensor]:
        codes, scales = self.kept[f"{self.moment}_codes"], self.kept[f"{self.moment}_scales"]
        return codes[self.elements], scales[self.blocks]
