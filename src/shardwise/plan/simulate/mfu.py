"""Model FLOPs utilisation: the operations that a formula gives for a model, over those that the device could have done.

There are several definitions (`DEFINITIONS`). The default counts every parameter, and attention as if nothing were
masked: 6 N + 12 L d s operations per token (Chowdhery and others, 2022, appendix B; forward once, backward twice), over
the dense peak of the compute dtype. Frozen parameters, which have no gradients, count 4 instead of 6. Recomputed
operations do not count, nor do experts that a token is not sent to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.errors import PlanError
from shardwise.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The sizes of a model that the formulas need."""

    parameters: int
    """Parameters that a token is computed with, tied ones counted once. In a mixture of experts, only the experts that
    a token is sent to."""
    embeddings: int
    """Parameters of input embeddings, which are looked up, not multiplied. 0 if they are tied to the head."""
    layers: int
    """The number of layers with attention."""
    width: int
    """The number of heads times their size."""
    trained: int | None = None
    """The part of `parameters` that is trained. None: all of them."""

    def products(self, parameters: int) -> int:
        """Return the operations per token of matrix products with so many parameters: 2 in forward, 2 for the gradients
        of their inputs, and 2 for the gradient of each that is trained."""
        return 4 * parameters + 2 * (parameters if self.trained is None else min(self.trained, parameters))

    def attention(self, seq_len: int) -> int:
        """Return the operations per token of attention in which nothing is masked."""
        return 12 * self.layers * self.width * seq_len


DEFINITIONS: dict[str, Callable[[Dimensions, int], float]] = {
    "palm": lambda model, seq_len: model.products(model.parameters) + model.attention(seq_len),
    "causal": lambda model, seq_len: model.products(model.parameters) + model.attention(seq_len) // 2,
    "no-embeddings": lambda model, seq_len: (
        model.products(model.parameters - model.embeddings) + model.attention(seq_len)
    ),
    "6n": lambda model, seq_len: model.products(model.parameters),
}
"""Operations per token, by name of the definition: palm is the one above; causal counts half of attention;
no-embeddings leaves the input embeddings out, as torchtitan does; 6n leaves attention out."""


def flops_per_token(model: Dimensions, seq_len: int, definition: str = "palm") -> float:
    """Return the operations per token, forward and backward. Raises PlanError for an unknown definition."""
    if definition not in DEFINITIONS:
        raise PlanError(
            f"unknown definition of MFU {definition!r}{did_you_mean(definition, DEFINITIONS)}; must be one of "
            f"{', '.join(DEFINITIONS)}"
        )
    return DEFINITIONS[definition](model, seq_len)


def mfu(tokens_per_s: float, model: Dimensions, seq_len: int, peak_flops: float, definition: str = "palm") -> float:
    """Return the model FLOPs utilisation of one device.

    Args:
        tokens_per_s: tokens per second of this device.
        model: the model's dimensions.
        seq_len: tokens of a sequence.
        peak_flops: dense peak of the compute dtype, operations per second.
        definition: one of `DEFINITIONS`.
    """
    return tokens_per_s * flops_per_token(model, seq_len, definition) / peak_flops
