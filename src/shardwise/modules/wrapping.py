"""Which modules become units, and which unit owns each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.errors import ConfigError, LayoutError
from shardwise.modules.adapters import is_of_parameter
from shardwise.modules.site import Site

Units = None | int | Iterable[type[nn.Module]] | Callable[[str, nn.Module], bool]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers that are never called, so they are never units."""

LARGE = 0.5
"""An embedding or a head becomes a unit of its own if it has at least this share of the median unit's elements."""


class Together(nn.ModuleList):
    """Modules of one model that together become one unit."""


class SideBySide(nn.ModuleList):
    """Modules that were sharded one by one and now share one schedule and one arena."""


@dataclass
class UnitPlan:
    """A module that becomes a unit, with the parameters that it owns: (fqn, parameter, sites)."""

    fqn: str
    module: nn.Module
    ancestors: tuple[UnitPlan, ...]
    parameters: list[tuple[str, nn.Parameter, tuple[Site, ...]]] = field(default_factory=list)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are called: the module itself, or those inside a `Together`."""
        return list(self.module) if isinstance(self.module, Together) else [self.module]


def choose_units(model: nn.Module, units: Units) -> list[tuple[str, nn.Module]]:
    """Return the modules below `model` that become units, in module order. The model itself is always a unit too.

    Args:
        units: None = automatic; module classes; an int = the minimum numel of a unit; a callable (fqn, module) -> bool.
    Raises:
        ConfigError: none of the classes occurs in the model, or `units` is none of these.
        LayoutError: a parameter has no shape yet.
    """
    for fqn, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise LayoutError(
                f"{fqn} has no shape yet, because its module is lazy: call the model once on an example before sw.shard"
            )
    return _around_exchanges(model, _chosen(model, units))


def _around_exchanges(model: nn.Module, chosen: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the chosen units, with each one that PEFT wrapped for `target_parameters` replaced by its wrapper.

    The wrapper reads the module's parameter before it calls the module, so the parameter must be gathered by then.
    """
    around = {id(outer.base_layer): outer for outer in model.modules() if is_of_parameter(outer)}
    wanted = {id(module) for _, module in chosen}
    while inside := wanted & around.keys():
        wanted = (wanted - inside) | {id(around[inner]) for inner in inside}
    return _below(model, lambda fqn, module: id(module) in wanted)


def _chosen(model: nn.Module, units: Units) -> list[tuple[str, nn.Module]]:
    if units is None:
        return _automatic(model)
    if isinstance(units, bool) or (isinstance(units, int) and units < 1):
        raise ConfigError(f"units={units!r}: a number of parameters must be at least 1")
    if isinstance(units, int):
        return _by_size(model, units)
    if isinstance(units, type) or not callable(units):
        classes = (units,) if isinstance(units, type) else tuple(units) if isinstance(units, Iterable) else ()
        if not classes or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
            raise ConfigError(f"units={units!r}: must be module classes, a least number of parameters or a callable")
        chosen = _below(model, lambda fqn, module: isinstance(module, classes))
        if not chosen and not isinstance(model, classes):
            present = sorted({type(module).__name__ for module in model.modules()})
            raise ConfigError(
                f"units={[c.__name__ for c in classes]}: the model has no such module; it has {', '.join(present)}"
            )
        return chosen
    return _below(model, units)


def _below(model: nn.Module, wanted: Callable[[str, nn.Module], bool]) -> list[tuple[str, nn.Module]]:
    return [
        (fqn, module)
        for fqn, module in model.named_modules()
        if module is not model and not isinstance(module, CONTAINERS) and wanted(fqn, module)
    ]


def _automatic(model: nn.Module) -> list[tuple[str, nn.Module]]:
    names = {
        name
        for module in model.modules()
        for name in (getattr(module, "_no_split_modules", None) or ())
        if isinstance(name, str)
    }
    blocks = _outermost(_below(model, lambda fqn, module: type(module).__name__ in names and _has_parameters(module)))
    inputs = _input_embeddings(model)
    blocks = [(fqn, block) for fqn, block in blocks if inputs.isdisjoint(map(id, block.modules()))]
    if not blocks:
        blocks = _repeated_blocks(model)
    if not blocks:
        return []
    sizes = sorted(_numel(module) for _, module in blocks)
    least = max(1, int(LARGE * sizes[len(sizes) // 2]))
    inside = {id(module) for _, block in blocks for module in block.modules()}
    shared = _shared_parameters(model)
    large = _below(
        model,
        lambda fqn, module: (
            isinstance(module, (nn.Embedding, nn.Linear))
            and id(module) not in inside
            and _numel(module) >= least
            and not any(id(parameter) in shared for parameter in module.parameters())
        ),
    )
    chosen = {id(module) for _, module in (*blocks, *large)}
    return _below(model, lambda fqn, module: id(module) in chosen)


def _input_embeddings(model: nn.Module) -> set[int]:
    """Return the ids of embeddings that transformers models hand out (`get_input_embeddings`).

    Callers use them from anywhere, and would find them sharded if they were inside another unit.
    """
    found: set[int] = set()
    for module in model.modules():
        hand_out = getattr(module, "get_input_embeddings", None)
        if callable(hand_out):
            with suppress(NotImplementedError, AttributeError):  # models without one
                embedding = hand_out()
                if isinstance(embedding, nn.Embedding):
                    found.add(id(embedding))
    return found


def _outermost(units: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    kept: list[tuple[str, nn.Module]] = []
    for fqn, module in units:
        if not any(fqn.startswith(f"{outer}.") for outer, _ in kept):
            kept.append((fqn, module))
    return kept


def _repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost children of ModuleLists and Sequentials whose class occurs there more than once."""
    found = []
    for fqn, container in model.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        children = [(name, child) for name, child in container.named_children() if _has_parameters(child)]
        classes = Counter(type(child) for _, child in children)
        found += [
            (f"{fqn}.{name}" if fqn else name, child)
            for name, child in children
            if classes[type(child)] > 1 and not isinstance(child, CONTAINERS)
        ]
    return _outermost(found)


def _by_size(model: nn.Module, least: int) -> list[tuple[str, nn.Module]]:
    """Choose from the leaves up: a module becomes a unit if its parameters outside other units add up to `least`."""
    chosen: set[int] = set()

    def visit(module: nn.Module) -> int:
        numel = sum(p.numel() for p in module.parameters(recurse=False)) + sum(visit(c) for c in module.children())
        if numel >= least and not isinstance(module, CONTAINERS):
            chosen.add(id(module))
            return 0
        return numel

    visit(model)
    return _below(model, lambda fqn, module: id(module) in chosen)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shared_parameters(model: nn.Module) -> set[int]:
    """Return the ids of parameters that stand in more than one place."""
    held = (parameter for module in model.modules() for parameter in module._parameters.values())
    counts = Counter(id(parameter) for parameter in held if parameter is not None)
    return {key for key, count in counts.items() if count > 1}


def assign_parameters(
    model: nn.Module, chosen: Sequence[tuple[str, nn.Module]], skip: Callable[[nn.Parameter], bool]
) -> list[UnitPlan]:
    """Assign every parameter to the innermost unit around it; a tied one to the innermost unit around all its places.

    Returns the units in module order, the model first. Units without parameters are dropped, except the model.
    """
    plans: dict[int, UnitPlan] = {id(model): UnitPlan("", model, ())}
    users: dict[int, list[_Use]] = {}
    wanted = {id(module) for _, module in chosen}
    for fqn, module, around in _walk("", model, (), wanted, plans):
        for name, parameter in module._parameters.items():
            if parameter is not None and not skip(parameter):
                path = f"{fqn}.{name}" if fqn else name
                users.setdefault(id(parameter), []).append(_Use(path, parameter, Site(module, name), around))
    for uses in users.values():
        sites = {(id(use.site.module), use.site.name): use.site for use in uses}
        owner = _common([use.around for use in uses])
        owner.parameters.append((uses[0].fqn, uses[0].parameter, tuple(sites.values())))
    kept = [plan for plan in plans.values() if plan.parameters or plan.module is model]
    for plan in kept:
        plan.ancestors = tuple(ancestor for ancestor in plan.ancestors if ancestor in kept)
    return kept


def nesting(model: nn.Module, units: Iterable[nn.Module]) -> int:
    """Return the greatest number of other units that one unit is inside of, not counting the model itself. A module in
    several places counts where it is nested deepest."""
    inner = {id(module) for module in units} - {id(model)}

    def deepest(module: nn.Module) -> int:
        below = max(map(deepest, module.children()), default=0)
        return below + (id(module) in inner)

    return max(0, deepest(model) - 1)


class _Use(NamedTuple):
    """A place in the module tree that holds a parameter, and the units around it, outermost first."""

    fqn: str
    parameter: nn.Parameter
    site: Site
    around: tuple[UnitPlan, ...]


def _walk(
    fqn: str, module: nn.Module, around: tuple[UnitPlan, ...], wanted: set[int], plans: dict[int, UnitPlan]
) -> Iterator[tuple[str, nn.Module, tuple[UnitPlan, ...]]]:
    """Yield every place of every module, with the units around it. Adds a plan when a wanted module is first met."""
    if id(module) in wanted and id(module) not in plans:
        plans[id(module)] = UnitPlan(fqn, module, around)
    if id(module) in plans and plans[id(module)] not in around:
        around = (*around, plans[id(module)])
    yield fqn, module, around
    for name, child in module.named_children():
        yield from _walk(f"{fqn}.{name}" if fqn else name, child, around, wanted, plans)


def _common(chains: Sequence[tuple[UnitPlan, ...]]) -> UnitPlan:
    """Return the innermost unit that is in every chain."""
    common = chains[0]
    for chain in chains[1:]:
        length = 0
        while length < min(len(common), len(chain)) and common[length] is chain[length]:
            length += 1
        common = common[:length]
    return common[-1]
