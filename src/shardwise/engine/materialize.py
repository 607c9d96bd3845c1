"""Giving a model built on the meta device its numbers, one unit's full weights at a time.

Modules are initialised children first, as constructors do, from one random stream that is the same on every rank
whatever the world size: modules of a transformers model by its `_init_weights`, others by their `reset_parameters`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from shardwise.engine.group import inherit
from shardwise.engine.wrapping import UnitPlan
from shardwise.errors import LayoutError

Initialise = Callable[[nn.Module], object]


def on_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def materialize(
    model: nn.Module, plans: list[UnitPlan], device: torch.device, shard: Callable[[UnitPlan], None]
) -> None:
    """Initialise every unit and hand it to `shard` as soon as its last module is done.

    Full weights of one unit, and of the units around it, exist at a time. Local; ranks must start from the same random
    state. Raises LayoutError for a tensor that nothing initialises.
    """
    holders: dict[int, list[UnitPlan]] = defaultdict(list)
    left: Counter[int] = Counter()
    for plan in plans:
        for module in {id(site.module): site.module for _, _, sites in plan.parameters for site in sites}.values():
            holders[id(module)].append(plan)
            left[id(plan)] += 1
    allocated: set[int] = set()
    for module, initialise in list(_children_first(model, _by_reset)):
        for plan in holders[id(module)]:
            if id(plan) not in allocated:
                allocated.add(id(plan))
                _allocate_parameters(plan, device)
        blank = _allocate_buffers(module, device)
        blank += [(name, p) for name, p in module._parameters.items() if p is not None and hasattr(p, _BLANK)]
        if blank or not any(True for _ in module.parameters(recurse=False)):
            _initialise(module, initialise, blank)
        for plan in holders[id(module)]:
            left[id(plan)] -= 1
            if left[id(plan)] == 0:
                shard(plan)


_BLANK = "_shardwise_blank"


def _children_first(module: nn.Module, initialise: Initialise) -> Iterator[tuple[nn.Module, Initialise]]:
    """A transformers model inside another model initialises its own part."""
    if hasattr(module, "_init_weights") and hasattr(module, "initialize_weights"):
        initialise = module._init_weights  # type: ignore[assignment]
    for child in module.children():
        yield from _children_first(child, initialise)
    yield module, initialise


def _by_reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()


def _allocate_parameters(plan: UnitPlan, device: torch.device) -> None:
    """Full, uninitialised parameters in place of the meta ones."""
    for index, (fqn, parameter, sites) in enumerate(plan.parameters):
        if parameter.is_meta:
            real = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            inherit(real, parameter)
            setattr(real, _BLANK, True)
            for site in sites:
                site.module._parameters[site.name] = real
            plan.parameters[index] = (fqn, real, sites)


def _allocate_buffers(module: nn.Module, device: torch.device) -> list[tuple[str, Tensor]]:
    blank: list[tuple[str, Tensor]] = []
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            real = module._buffers[name] = torch.empty_like(buffer, device=device)
            blank.append((name, real))
    return blank


def _initialise(module: nn.Module, initialise: Initialise, blank: list[tuple[str, Tensor]]) -> None:
    versions = [tensor._version for _, tensor in blank]
    with torch.no_grad():
        initialise(module)
    for (name, tensor), version in zip(blank, versions, strict=True):
        current = module._parameters.get(name, module._buffers.get(name))
        if current is tensor and tensor._version == version and tensor.numel():
            raise LayoutError(
                f"{type(module).__name__}.{name} was built on the meta device and nothing initialised it: give the "
                "module a reset_parameters() that does, or build the model on a real device"
            )
        if hasattr(tensor, _BLANK):
            delattr(tensor, _BLANK)
