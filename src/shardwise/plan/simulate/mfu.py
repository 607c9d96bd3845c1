"""Model FLOPs utilisation: the operations that a formula gives for a model, over those that the device could have done.

There are several definitions (`DEFINITIONS`). The default counts every parameter, and attention as if nothing were
masked: 6 N + 12 L d s operations per token (Chowdhery and others, 2022, appendix B; forward once, backward twice), over
the dense peak of the compute dtype. Recomputed operations do not count, nor do experts that a token is not sent to.
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


DEFINITIONS: dict[str, Callable[[Dimensions, int], float]] = {
    "palm": lambda model, seq_len: 6 * model.parameters + 12 * model.layers * model.width * seq_len,
    "causal": lambda model, seq_len: 6 * model.parameters + 6 * model.layers * model.width * seq_len,
    "no-embeddings": lambda model, seq_len: (
        6 * (model.parameters - model.embeddings) + 12 * model.layers * model.width * seq_len
    ),
    "6n": lambda model, seq_len: 6 * model.parameters,
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
