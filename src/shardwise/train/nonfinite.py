"""Where a step's numbers stopped being finite: its micro-batches are computed again, and every module is watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.train.process.ranks import Ranks


class Origin(NamedTuple):
    """A place at which a number is not finite. The least one, over all ranks, is where it began."""

    phase: int
    """0: in a forward. 1: in a backward."""
    order: int
    """In a forward, the micro-batch. In a backward, minus the parameter's place in the model: the last comes first."""
    rank: int
    words: str


def where_it_began(model: nn.Module, micro_batches: Sequence[Callable[[], object]], ranks: Ranks) -> str:
    """Compute a step again and return, in words, where it stops being finite. Every rank must call this.

    Args:
        model: its weights are those from before the step, and its gradients are there to be overwritten.
        micro_batches: each runs forward and backward of one.
        ranks: this process's place in the run.
    """
    found: list[Origin] = []
    batch = 0
    with _watched(model, lambda words: found.append(Origin(0, batch, ranks.rank, f"{words}, micro-batch {batch + 1}"))):
        for batch, compute in enumerate(micro_batches):  # noqa: B007 - is read above
            compute()
    gradients = [(place, fqn) for place, (fqn, one) in enumerate(model.named_parameters()) if _is_bad(_held(one.grad))]
    if gradients:
        place, fqn = gradients[-1]
        found.append(Origin(1, -place, ranks.rank, f"the gradient of {fqn}"))
    every = [origin for of_rank in ranks.all_gather_object(found[:1]) for origin in of_rank]
    if not every:
        return "computed again, all activations and gradients are finite, as where a model is not deterministic"
    first = min(every)
    return f"it began in {first.words}, rank {first.rank}"


@contextmanager
def _watched(model: nn.Module, note: Callable[[str], None]) -> Iterator[None]:
    """Call `note` for the first module, in the order in which they end, with a number that is not finite. Compiled
    modules run uncompiled inside, because graphs call no hooks."""
    names = {module: name or "the model" for name, module in model.named_modules()}
    compiled = {module: module._compiled_call_impl for module in names}
    has_found = False

    def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal has_found
        if has_found or not _is_bad(output):
            return
        has_found = True
        own = [f"{names[module]}.{name}" for name, one in module._parameters.items() if _is_bad(_held(one))]
        if own:
            note(f"the weights: {own[0]}")
        elif _is_bad((args, kwargs)):
            note(f"what {names[module]} was given")
        else:
            note(f"the output of {names[module]}")

    handles = [module.register_forward_hook(look, with_kwargs=True) for module in names]
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
