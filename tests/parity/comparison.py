"""When two runs count as the same, and whether a run could have told."""

from __future__ import annotations

import math

from torch import Tensor

from tests.parity.training import LEARNING_RATE, Outcome

TOLERANCE = 1e-5
"""Largest difference of a parameter after training. Ranks and reference take the same sums in the same order, so mostly
nothing differs at all. Where a kernel's sum depends on where its operands lie, or a hybrid's on the order of ranks, a
gradient differs in its last bits (1e-7 of itself), and AdamW hands that on as 1e-7 of a learning rate; where gradients
cancel out, as what is left (1e-10) divided by its eps (1e-6)."""

LOSS_TOLERANCE = 1e-5
"""Relative; of losses and gradient norms. A few units in the last place of fp32, over three steps."""

TELLING = 100 * TOLERANCE
"""A parameter that moved this far could not have ended within TOLERANCE of the reference by standing still."""

assert LEARNING_RATE > TELLING

_SHIFTS = ("k_proj.bias", "key.bias", "k_lin.bias")
"""A key's bias shifts all of a query's scores alike, which softmax ignores: its gradient is zero, but for rounding."""

SHIFT_TOLERANCE = 10 * TOLERANCE
"""For those: what AdamW makes of their gradients is rounding divided by its eps, and kernels round otherwise on another
processor (1.2e-5 was seen where the ranks of a hybrid sum in another order)."""


def mismatches(outcome: Outcome, reference: Outcome) -> list[str]:
    """What differs, in words; nothing if the runs are the same."""
    return [
        *_numbers("loss", outcome.losses, reference.losses),
        *_numbers("gradient norm", outcome.norms, reference.norms),
        *_tensors("initially", outcome.initial, reference.initial, 0.0),
        *_tensors("finally", outcome.final, reference.final, TOLERANCE),
    ]


def _numbers(what: str, ours: list[float], theirs: list[float]) -> list[str]:
    return [
        f"{what} of step {step}: {a} instead of {b}"
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if not math.isclose(a, b, rel_tol=LOSS_TOLERANCE)
    ]


def _tensors(moment: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> list[str]:
    if ours.keys() != theirs.keys():
        return [f"{moment}: names differ: {sorted(ours.keys() ^ theirs.keys())}"]
    found = []
    for name, value in theirs.items():
        if ours[name].shape != value.shape:
            found.append(f"{moment}: {name} has shape {tuple(ours[name].shape)}")
        elif value.numel():
            difference = float((ours[name].double() - value.double()).abs().max())
            allowed = SHIFT_TOLERANCE if tolerance and name.endswith(_SHIFTS) else tolerance
            if not difference <= allowed:  # NaN is a difference
                found.append(f"{moment}: {name} differs by {difference:.2e}")
    return found


def untold(reference: Outcome) -> list[str]:
    """Parameters that trained but moved too little for a wrong update to show."""
    moved = {
        name: float((reference.final[name].double() - initial.double()).abs().max())
        for name, initial in reference.initial.items()
        if initial.numel()
    }
    return [
        f"{name} moved by {by:.1e}" for name, by in moved.items() if 0 < by < TELLING and not name.endswith(_SHIFTS)
    ]
