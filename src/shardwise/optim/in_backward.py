"""`optimizer_in_backward`: optimizer steps taken during backward, so that gradients need not be kept."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.engine.checked import CheckedEngine
from shardwise.engine.extensions.backward_steps import attach as attach_steps
from shardwise.engine.extensions.backward_steps import serves
from shardwise.engine.extensions.custom_reduction import settings_of
from shardwise.engine.extensions.offloaded import OffloadedGradient, stores_of_gradients
from shardwise.engine.lookup import engines_below
from shardwise.engine.setup.torch_patches import with_state
from shardwise.errors import UsageError
from shardwise.fsdp.operations import updates_nothing
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.fsdp.unit import Unit
from shardwise.offload.shard_store import ShardStore
from shardwise.offload.stores import attach, of_owner
from shardwise.optim.clip import clip as clip_parameters
from shardwise.optim.whole_matrix import WholeMatrixOptimizer
from shardwise.sharded.extensions.partial_step import by_owner, empty_view


def optimizer_in_backward(model: nn.Module, optimizer: Optimizer, clip: float | None = None) -> None:
    """Let each backward take the optimizer's step, unit by unit. Every rank must call this, between steps.

    A unit steps once its gradient is reduced and complete, and then the gradient's memory is freed: only one unit's
    reduced gradient exists at a time. If a gradient comes late (a weight that several units read), its step is taken
    when backward ends. Weights and state are bitwise those of a step after backward; `.grad` is None after backward.
    `optimizer.step()` then updates nothing, but runs its hooks and closure, and `zero_grad()` finds nothing. Learning
    rates are read from the optimizer's groups when backward reaches a unit, so a scheduler's `step()` after backward
    works as usual, and so do `state_dict()` and checkpoints.

    Args:
        model: sharded, or a module around several sharded ones.
        optimizer: any elementwise one of torch's, over sharded parameters of this model only. With several optimizers,
            call this once for each.
        clip: the largest norm of one unit's gradients, each unit scaled separately; not the norm of all gradients,
            which is known only after backward. None: no clipping.

    Raises:
        UsageError: a parameter of the optimizer is not sharded or belongs to another model, gradients of a unit are not
            reduced in each backward, the optimizer updates whole matrices, or this was called for it before. Afterwards
            `sw.no_sync`, `sw.clip_grad_norm_` and `sw.GradScaler` raise it for the model's parameters.

    If a backward raises after some units have stepped, training forwards and saves raise UsageError until all weights
    have been written again (`sw.checkpoint.load`). torch's own `clip_grad_norm_` finds no gradients. Strategies with
    full-size gradients (SHARD_OPTIMIZER) keep those. `Offload(gradients="cpu")` has no effect, and a warning says so.
    Costs one exchange between hosts for each unit.
    """
    engines = engines_below(model)
    for engine in engines:
        engine.clear_up()
    if any(serves(engine, optimizer) for engine in engines):
        raise UsageError(
            f"sw.optimizer_in_backward was already called for this {type(optimizer).__name__}: call it once"
        )
    if isinstance(optimizer, WholeMatrixOptimizer):
        raise UsageError(
            "sw.optimizer_in_backward with an optimizer of sw.optim.whole_matrix, which updates whole matrices in an "
            "exchange of its own: leave one of the two out"
        )
    _check_parameters(engines, optimizer)
    for unit in (unit for engine in engines for unit in engine.units):
        settings = settings_of(unit)
        if not (settings.now and settings.over_replicas):
            raise UsageError(
                f"sw.optimizer_in_backward takes a step in each backward, but gradients of {unit} are not "
                "reduced in each backward: turn that on first (sync_gradients, sync_replicas)"
            )
    for engine in engines:
        engine.reducer.slots.allocates_gradients = False
        for unit in engine.units:
            for group in unit.groups:
                group.gradients.release()
        clips = None if clip is None else partial(clip_parameters, max_norm=float(clip))
        attach_steps(engine).add(optimizer, clips)
    if _keep_here(unit for unit in by_owner(optimizer) if isinstance(unit, Unit)) and engines[0].is_rank0:
        warnings.warn(
            "shardwise: Offload(gradients='cpu') has no effect with sw.optimizer_in_backward, which frees each "
            "gradient on the device as soon as its unit has stepped: leave one of the two out",
            stacklevel=2,
        )
    optimizer.register_step_pre_hook(_nothing_left)
    with_state.add(optimizer)


def _keep_here(units: Iterable[Unit]) -> bool:
    """Keep the units' gradients on the device until their step, and free the rings of those that were offloaded.
    Returns whether any were."""
    stores: dict[ShardStore, None] = {}
    for unit in units:
        stores |= stores_of_gradients(unit)
        for group in unit.groups:
            if isinstance(group.gradients, OffloadedGradient):
                group.gradients.stay()
        attach(unit, of_owner(unit)._replace(gradients=None))
    for store in stores:
        store.release()
    return bool(stores)


def _check_parameters(engines: list[CheckedEngine], optimizer: Optimizer) -> None:
    units = {unit for engine in engines for unit in engine.units}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not isinstance(parameter, ShardedParameter):
                raise UsageError(
                    f"sw.optimizer_in_backward: this {type(optimizer).__name__} has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not sharded (ignored=), so no unit's backward would step it: "
                    "give it an optimizer of its own"
                )
            if parameter.unit not in units:
                raise UsageError(
                    f"sw.optimizer_in_backward: {parameter.fqn!r} of this {type(optimizer).__name__} is not a "
                    "parameter of the model"
                )


def _nothing_left(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Step pre-hook: let `optimizer.step()` run on a view without parameters, because backward has taken the step."""
    for unit in by_owner(optimizer):
        engine = getattr(unit, "listener", None)
        if not isinstance(engine, CheckedEngine) or not serves(engine, optimizer):
            raise UsageError(
                "the model was sharded again, as a part of another one, after sw.optimizer_in_backward, so its "
                "backward takes no steps: call sw.optimizer_in_backward after the last sw.shard"
            )
    updates_nothing(optimizer)
    return (empty_view(optimizer), *args[1:]), kwargs
