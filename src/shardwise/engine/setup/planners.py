"""Which modules of a model become units: the planners that `sw.shard` picks by its `units=` and by the model."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.errors import ConfigError, LayoutError
from shardwise.fsdp.shard import (
    CONTAINERS,
    Named,
    Planner,
    has_parameters,
    modules_below,
    outermost,
    repeated_blocks,
)

TRANSFORMERS = "transformers"
"""Value of `units=` for the plan of a model of transformers."""
Units = None | int | str | Iterable[type[nn.Module]] | Callable[[str, nn.Module], bool]

LARGE = 0.5
"""An embedding or a head becomes a unit of its own if it has at least this share of the median unit's elements."""


class GroupedUnit(nn.ModuleList):
    """Modules of one model that together become one unit."""


class Blocks(nn.ModuleList):
    """Modules that were sharded one by one and now share one schedule and one arena."""


def planners_for(units: Units) -> list[Planner]:
    """Return the planners that choose the modules below a model that become units. The model itself is always one too.

    Args:
        units: None = automatic; module classes; an int = the minimum numel of a unit; a callable (fqn, module) -> bool;
            "transformers" = the modules that a model of transformers names in its plan for FSDP2.

    Raises ConfigError if `units` is none of these. The planners raise ConfigError if none of the classes occurs in the
    model, or it has no plan, and LayoutError if a parameter has no shape yet.
    """
    asked: list[Planner]
    if units is None:
        asked = [blocks_of_transformers, repeated_blocks, large_ends]
    elif isinstance(units, bool) or (isinstance(units, int) and units < 1):
        raise ConfigError(f"units={units!r}: a number of parameters must be at least 1")
    elif isinstance(units, int):
        asked = [_of_size(units)]
    elif units == TRANSFORMERS:
        asked = [_of_transformers_plan]
    elif isinstance(units, type) or not callable(units):
        asked = [_of_classes(units)]
    else:
        asked = [_that(units)]
    return [_check_shapes, *asked, *([_around_parameter_wrappers] if "peft" in sys.modules else ())]


def _check_shapes(model: nn.Module, chosen: Sequence[Named]) -> Sequence[Named]:
    for fqn, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise LayoutError(
                f"{fqn} has no shape yet, because its module is lazy: call the model once on an example before sw.shard"
            )
    return chosen


def _that(wanted: Callable[[str, nn.Module], bool]) -> Planner:
    return lambda model, chosen: modules_below(model, wanted)


def _of_classes(units: object) -> Planner:
    classes = (units,) if isinstance(units, type) else tuple(units) if isinstance(units, Iterable) else ()
    if not classes or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
        raise ConfigError(
            f"units={units!r}: must be module classes, a least number of parameters, a callable or {TRANSFORMERS!r}"
        )

    def choose(model: nn.Module, chosen: Sequence[Named]) -> Sequence[Named]:
        found = modules_below(model, lambda fqn, module: isinstance(module, classes))
        if not found and not isinstance(model, classes):
            present = sorted({type(module).__name__ for module in model.modules()})
            raise ConfigError(
                f"units={[c.__name__ for c in classes]}: the model has no such module; it has {', '.join(present)}"
            )
        return found

    return choose


def _of_size(least: int) -> Planner:
    """Choose from the leaves up: a module becomes a unit if its parameters outside other units add up to `least`."""

    def choose(model: nn.Module, chosen: Sequence[Named]) -> Sequence[Named]:
        large: set[int] = set()

        def visit(module: nn.Module) -> int:
            numel = sum(p.numel() for p in module.parameters(recurse=False)) + sum(visit(c) for c in module.children())
            if numel >= least and not isinstance(module, CONTAINERS):
                large.add(id(module))
                return 0
            return numel

        visit(model)
        return modules_below(model, lambda fqn, module: id(module) in large)

    return choose


def _of_transformers_plan(model: nn.Module, chosen: Sequence[Named]) -> Sequence[Named]:
    """Choose the modules of a model's `fsdp_plan`, which transformers puts together from `_fsdp_plan` of its class and
    `base_model_fsdp_plan` of its configuration.

    FSDP2 gathers the last norm and the head together. Here a norm, small beside the blocks, stays with the root, which
    is gathered anyway.
    """
    plans = [(fqn, plan) for fqn, module in model.named_modules() if (plan := vars(module).get("_fsdp_plan"))]
    if not plans:
        raise ConfigError(
            f"units={TRANSFORMERS!r}: {type(model).__name__} has no fsdp_plan, which models of transformers have: "
            "leave units out for the repeated blocks"
        )
    outer, plan = plans[0]
    wanted = {f"{outer}.{name}" if outer else name for name in plan}
    found = modules_below(
        model, lambda fqn, module: (fqn in wanted or _LAYER.sub(".*", fqn) in wanted) and has_parameters(module)
    )
    if not found:
        raise ConfigError(
            f"units={TRANSFORMERS!r}: fsdp_plan ({', '.join(plan)}) names no module of {type(model).__name__}: leave "
            "units out for the repeated blocks, or set model.fsdp_plan"
        )
    least = _SMALL * max(_numel(module) for _, module in found)
    return [(fqn, module) for fqn, module in found if _numel(module) >= least]


_LAYER = re.compile(r"\.\d+(?=\.|$)")
"""The number of a layer in a name, for which a plan has `*`."""
_SMALL = 0.01
"""A module of a plan with less than this share of the largest one's elements is no unit of its own."""


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def blocks_of_transformers(model: nn.Module, chosen: Sequence[Named]) -> Sequence[Named]:
    """Choose the outermost modules of the classes that transformers models list in `_no_split_modules`, without those
    that contain an embedding which a model hands out."""
    names = {
        name
        for module in model.modules()
        for name in (getattr(module, "_no_split_modules", None) or ())
        if isinstance(name, str)
    }
    if not names:
        return chosen
    blocks = modules_below(model, lambda fqn, module: type(module).__name__ in names and has_parameters(module))
    inputs = _input_embeddings(model)
    return [(fqn, block) for fqn, block in outermost(blocks) if inputs.isdisjoint(map(id, block.modules()))]


def _input_embeddings(model: nn.Module) -> set[int]:
    """Return the ids of embeddings that transformers models hand out (`get_input_embeddings`).

    Callers use them from anywhere, and would find them sharded if they were inside another unit.
    """
    found: set[int] = set()
    for module in model.modules():
        getter = getattr(module, "get_input_embeddings", None)
        if callable(getter):
            with suppress(NotImplementedError, AttributeError):  # models without one
                embedding = getter()
                if isinstance(embedding, nn.Embedding):
                    found.add(id(embedding))
    return found


def _around_parameter_wrappers(model: nn.Module, chosen: Sequence[Named]) -> Sequence[Named]:
    """Replace each chosen unit that PEFT wrapped for `target_parameters` by its wrapper.

    The wrapper reads the module's parameter before it calls the module, so the parameter must be gathered by then.
    """
    from shardwise.modules.adapters import is_of_parameter  # only for those who have imported PEFT

    around = {id(outer.base_layer): outer for outer in model.modules() if is_of_parameter(outer)}
    wanted = {id(module) for _, module in chosen}
    while inside := wanted & around.keys():
        wanted = (wanted - inside) | {id(around[inner]) for inner in inside}
    return modules_below(model, lambda fqn, module: id(module) in wanted)


def nesting(model: nn.Module, units: Iterable[nn.Module]) -> int:
    """Return the greatest number of other units that one unit is inside of, not counting the model itself. A module in
    several places counts where it is nested deepest."""
    inner = {id(module) for module in units} - {id(model)}

    def deepest(module: nn.Module) -> int:
        below = max(map(deepest, module.children()), default=0)
        return below + (id(module) in inner)

    return max(0, deepest(model) - 1)


def large_ends(model: nn.Module, chosen: Sequence[Named]) -> Sequence[Named]:
    """Add embeddings and linear layers outside the chosen units that have at least `LARGE` of the median unit's
    elements, and no parameter that stands in a second place as well."""
    if not chosen:
        return chosen
    sizes = sorted(_numel(module) for _, module in chosen)
    least = max(1, int(LARGE * sizes[len(sizes) // 2]))
    inside = {id(module) for _, block in chosen for module in block.modules()}
    shared = _shared_parameters(model)
    large = modules_below(
        model,
        lambda fqn, module: (
            isinstance(module, (nn.Embedding, nn.Linear))
            and id(module) not in inside
            and _numel(module) >= least
            and not any(id(parameter) in shared for parameter in module.parameters())
        ),
    )
    return [*chosen, *large]


def _shared_parameters(model: nn.Module) -> set[int]:
    """Return the ids of parameters that stand in more than one place."""
    held = (parameter for module in model.modules() for parameter in module._parameters.values())
    counts = Counter(id(parameter) for parameter in held if parameter is not None)
    return {key for key, count in counts.items() if count > 1}
