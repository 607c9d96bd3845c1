"""Where a step's numbers stopped being finite: its micro-batches are computed again, and every module is watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.train.process.ranks import Ranks


class Origin(NamedTuple):
    """A place at which a number is not finite. The least one, over all ranks, is where it began.

    Ranks that compute on the same batch exchange numbers in the middle of it, so that those of one rank are soon on
    all. They call the same modules in the same order: the count of what came before tells who had it first.
    """

    micro_batch: int
    """Counted from 0; of the sums over ranks, the number of micro-batches."""
    phase: Phase
    before: int
    """How many modules had ended, or gradients been computed, when it was found."""
    depth: int
    """Of what was looked at then: 0 a module's weights, 1 what it was given, 2 its output, which other ranks may have
    a part in."""
    rank: int
    words: str


class Phase(IntEnum):
    """What a micro-batch does, in order, and what comes after all of them."""

    FORWARD = 0
    BACKWARD = 1
    SUM = 2


def where_it_began(model: nn.Module, micro_batches: Sequence[Callable[[], object]], ranks: Ranks) -> str:
    """Compute a step again and return, in words, where it stops being finite. Every rank must call this.

    Args:
        model: its weights are those from before the step, and its gradients are there to be overwritten.
        micro_batches: each runs forward and backward of one.
        ranks: this process's place in the run.
    """
    found: list[Origin] = []
    batch = 0

    def note(phase: Phase, before: int, depth: int, words: str) -> None:
        found.append(Origin(batch, phase, before, depth, ranks.rank, f"{words}, micro-batch {batch + 1}"))

    with _watched(model, note):
        for batch, compute in enumerate(micro_batches):  # noqa: B007 - is read above
            compute()
    for fqn, one in () if found else model.named_parameters():
        if _is_bad(_held(one.grad)):
            words = f"the sum over ranks and micro-batches of the gradient of {fqn}"
            found.append(Origin(len(micro_batches), Phase.SUM, 0, 0, ranks.rank, words))
    every = [origin for of_rank in ranks.all_gather_object(found[:1]) for origin in of_rank]
    if not every:
        return "computed again, all activations and gradients are finite, as where a model is not deterministic"
    first = min(every)
    return f"it began in {first.words}, rank {first.rank}"


@contextmanager
def _watched(model: nn.Module, note: Callable[[Phase, int, int, str], None]) -> Iterator[None]:
    """Call `note` for the first module, in the order in which they end, with a number that is not finite, or for the
    first such gradient, before it is summed over ranks. Compiled modules run uncompiled inside, because graphs call no
    hooks."""
    names = {module: name or "the model" for name, module in model.named_modules()}
    compiled = {module: module._compiled_call_impl for module in names}
    counts = {Phase.FORWARD: 0, Phase.BACKWARD: 0}
    has_found = False

    def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal has_found
        counts[Phase.FORWARD] += 1
        if has_found or not _is_bad(output):
            return
        has_found = True
        own = [f"{names[module]}.{name}" for name, one in module._parameters.items() if _is_bad(_held(one))]
        if own:
            note(Phase.FORWARD, counts[Phase.FORWARD], 0, f"the weights: {own[0]}")
        elif _is_bad((args, kwargs)):
            note(Phase.FORWARD, counts[Phase.FORWARD], 1, f"what {names[module]} was given")
        else:
            note(Phase.FORWARD, counts[Phase.FORWARD], 2, f"the output of {names[module]}")

    def look_back(fqn: str, grad: Tensor) -> None:
        nonlocal has_found
        counts[Phase.BACKWARD] += 1
        if not has_found and _is_bad(grad):
            has_found = True
            note(Phase.BACKWARD, counts[Phase.BACKWARD], 0, f"the gradient of {fqn}")

    handles = [module.register_forward_hook(look, with_kwargs=True) for module in names]
    trained = [(fqn, one) for fqn, one in model.named_parameters() if one.requires_grad]
    handles += [one.register_hook(partial(look_back, fqn)) for fqn, one in trained]
    try:
        for module in names:
            module._compiled_call_impl = None
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, call in compiled.items():
            module._compiled_call_impl = call


def _held(one: Tensor | None) -> Tensor | None:
    """Return the numbers of a parameter or gradient that this rank holds."""
    return one.local if isinstance(one, ShardedParameter) else one


def _is_bad(values: object) -> bool:
    """Whether a floating-point tensor among the values has a number that is not finite, on this rank: of DTensors, only
    its own part is looked at, since ranks do not look at the same places."""
    local = [getattr(one, "_local_tensor", one) for one in tree_leaves(values) if isinstance(one, Tensor)]
    return any(one.is_floating_point() and not bool(torch.isfinite(one.detach()).all()) for one in local)
