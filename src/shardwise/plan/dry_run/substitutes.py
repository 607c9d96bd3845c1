"""Functions of transformers that look at numbers, exchanged for what they find in full, unpadded sequences.

Fake tensors have no numbers; transformers then prepares for the worst: masks of [seq_len, seq_len], and with them other
attention kernels than training takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

Substitute = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Given a function, what takes its place."""


def _one_document(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


def _unpadded(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda padding_mask, *args, **kwargs: own(None, *args, **kwargs)


def _half_only(own: Callable[..., Any]) -> Callable[..., Any]:
    """torch knows the shape of a grouped product of bf16 alone; the fallback's is known for every dtype."""
    return lambda x, *args, **kwargs: x.dtype is torch.bfloat16 and own(x, *args, **kwargs)


_SUBSTITUTES: dict[tuple[str, str], Substitute] = {
    ("transformers.masking_utils", "find_packed_sequence_indices"): _one_document,
    ("transformers.masking_utils", "_ignore_causal_mask_sdpa"): _unpadded,
    ("transformers.masking_utils", "_ignore_bidirectional_mask_sdpa"): _unpadded,
    ("transformers.integrations.moe", "_can_use_grouped_mm"): _half_only,
}
"""By module and function. Where a version of transformers has not got one, it is left out."""


@contextmanager
def full_sequences() -> Iterator[None]:
    """Inside, the substitutes are in place."""
    with ExitStack() as stack:
        for (module_name, name), substitute in _SUBSTITUTES.items():
            module = sys.modules.get(module_name)
            own = getattr(module, name, None)
            if own is not None:
                setattr(module, name, substitute(own))
                stack.callback(setattr, module, name, own)
        yield
