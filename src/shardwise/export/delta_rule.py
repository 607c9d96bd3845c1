"""Linear attention by the gated delta rule (arXiv:2412.06464), for prompts of any length.

transformers works through a prompt in pieces of 64 tokens, in a loop whose number of rounds a trace would fix. While a
model is traced, the function below takes the loop's place: the same sums, with a scan over the pieces.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

PIECE = 64
"""Tokens of a piece."""
_NAME = "torch_chunk_gated_delta_rule"
_EPSILON = 1e-6
"""Of the norm of queries and keys, as in transformers and flash-linear-attention."""


def modules(model: torch.nn.Module) -> set[Any]:
    """Return the modules of transformers whose loop a model runs, none for most models."""
    found = {sys.modules[type(part).__module__] for part in model.modules()}
    return {module for module in found if hasattr(module, _NAME)}


@contextlib.contextmanager
def of_any_length(model: torch.nn.Module) -> Iterator[None]:
    """Let a trace of a model hold for prompts of any length. Its own must have several pieces."""
    with contextlib.ExitStack() as stack:
        for module in modules(model):
            stack.enter_context(mock.patch.object(module, _NAME, gated_delta_rule))
        yield


def gated_delta_rule(  # noqa: PLR0913, PLR0917 - transformers' own
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = PIECE,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return what each token reads, [batch, length, heads, value width], and the state after the last.

    Args:
        query, key: [batch, length, key heads, key width], with as many heads as `value` or a divisor of their number.
        value: [batch, length, heads, value width].
        g: [batch, length, heads], the logarithm of how much of the state stays at each token.
        beta: [batch, length, heads], how much of what the state holds for a key is replaced.
        chunk_size: tokens of a piece, a power of two.
        initial_state: [batch, heads, key width, value width]; None = zeros.
        output_final_state: whether the state is wanted.
        use_qk_l2norm_in_kernel: whether queries and keys are divided by their norm first.
    """
    from torch._higher_order_ops import scan

    batch, length, heads, width = value.shape
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON) for x in (query, key))
    query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (query, key))
    query = query * query.shape[-1] ** -0.5

    def pieces(x: Tensor) -> Tensor:
        """Return [pieces, batch, heads, chunk_size, ...] of [batch, length, heads, ...]."""
        added = -length % chunk_size
        x = torch.cat([x.float(), x.new_zeros(batch, added, *x.shape[2:]).float()], 1)
        x = x.unflatten(1, (-1, chunk_size))
        return x.transpose(2, 3).transpose(0, 1).contiguous()

    query, key, value, decay, weight = (pieces(x) for x in (query, key, value, g, beta))
    decay, weight = decay.cumsum(-1), weight[..., None]
    place = torch.arange(chunk_size)
    later = place[:, None] >= place
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~later, float("-inf")).exp()
    solved = _inverse(((key * weight) @ key.mT * between).tril(-1))
    kept = decay[..., None].exp()
    steps = (
        query * kept,
        query @ key.mT * between,
        solved @ (value * weight),
        solved @ (key * weight * kept),
        key * (decay[..., -1:] - decay).exp()[..., None],
        kept[..., -1:, :],
    )

    def step(state: Tensor, piece: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        asked, within, written, held, by_key, stays = piece
        new = written - held @ state
        return state * stays + by_key.mT @ new, asked @ state + within @ new

    if initial_state is None:
        initial_state = torch.zeros(batch, heads, key.shape[-1], width)
    state, read = scan(step, initial_state.float(), steps)
    read = read.transpose(0, 1).transpose(2, 3).flatten(1, 2)[:, :length]
    return read, state if output_final_state else None


def _inverse(lower: Tensor) -> Tensor:
    """Return the inverse of 1 + a strictly lower triangular matrix, [..., size, size]; `size` is a power of two.

    By halves: the inverse of a block is known from those of its two halves and what is below their diagonal. Sums of
    powers would be shorter and lose all digits where keys repeat.
    """
    size = lower.shape[-1]
    place = torch.arange(size)
    solved, half = torch.eye(size), 1
    while half < size:
        same_block = (place[:, None] // (2 * half)) == (place // (2 * half))
        across = same_block & (place[:, None] // half != place // half)
        solved = solved - solved @ (lower * across) @ solved
        half *= 2
    return solved
