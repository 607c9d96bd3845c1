"""AdamW with both moments in bf16, rounded stochastically: four bytes of state per parameter instead of eight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.optim.adamw_pieces import AdamWInPieces, piece_of, updated
from shardwise.optim.rounding import key_of, random_bits, rounded

_STATE = ("exp_avg", "exp_avg_sq")
_BITS = 16
"""Random bits that one rounding to bf16 takes."""


class AdamWBF16(AdamWInPieces):
    """AdamW whose moments are kept in bf16. Parameters keep their dtype, and bf16 ones are rounded like the moments.

    All arithmetic is in fp32. Results kept in bf16 are rounded up or down at random, with odds that make them right on
    average. Rounded to nearest, a second moment would stop changing at beta2 = 0.999, and so would a weight whose
    updates are small. The random bits are a function of `seed`, the parameter's name, the step and the element's index:
    the same for any number of ranks, any strategy, after a resumption, and for an unsharded model.

    Args:
        params: parameters, or groups of them, as for torch's AdamW. A plain parameter's name is the one given with it,
            or else its position in its group.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        seed: seed of the rounding.

    Raises:
        ConfigError: a number is out of range.
    Source: arXiv:1711.05101 (AdamW), arXiv:2010.06192 (stochastic rounding in bf16).
    """

    chunk_numel = 2**24

    def _update(self, parameter: Tensor, name: str, group: dict[str, Any], prepared: None) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state.update({key: torch.zeros_like(parameter, dtype=torch.bfloat16) for key in _STATE})
        for key in _STATE:
            if state[key].dtype != torch.bfloat16:  # torch's load_state_dict casts it to the parameter's
                state[key] = state[key].to(torch.bfloat16)
        state["step"] += 1
        step: int = state["step"]
        assert parameter.grad is not None
        weights, gradient, first, second = map(piece_of, (parameter, parameter.grad, *(state[key] for key in _STATE)))
        offset = parameter.fragment.start if isinstance(parameter, ShardedParameter) else 0
        draw = key_of(group["seed"], name, step)
        for chunk in self._chunks(weights):  # each element takes about 40 bytes of temporary memory
            numbers = random_bits(offset + chunk.start, chunk.stop - chunk.start, draw, parameter.device)
            exact = first[chunk].float(), second[chunk].float()
            value = updated(weights[chunk], gradient[chunk], exact, step, group)
            first[chunk] = rounded(exact[0], numbers)
            second[chunk] = rounded(exact[1], numbers >> _BITS)
            weights[chunk] = rounded(value, numbers >> 2 * _BITS) if weights.dtype == torch.bfloat16 else value
