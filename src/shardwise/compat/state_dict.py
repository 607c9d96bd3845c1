"""`torch.distributed.checkpoint.state_dict` for models that `sw.shard` has sharded: same names, signatures and results.

Without `full_state_dict` the values are `ShardedParameter`s, which `torch.distributed.checkpoint` saves and loads in
place. Models without anything sharded, and their optimizers, are passed on to torch's own functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from shardwise.checkpoint.names.wrappers import unwrapped, unwrapped_name
from shardwise.engine.extensions.backward_steps import serves
from shardwise.engine.lookup import engine_of, engines_below
from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.modules.deferred_init.deferral import give_buffers
from shardwise.offload.step import step_with_stores
from shardwise.sharded.extensions.optimizer_state import cut_state

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

Optimizers = Optimizer | Iterable[Optimizer]


# Getting --------------------------------------------------------------------------------------------------------------


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the model's state_dict. Every rank must call this with `full_state_dict`; without it nothing is sent.

    With `full_state_dict` tensors are full; with `cpu_offload` too, they are on the CPU of rank 0 alone, and other
    ranks get an empty dict.
    """
    options = options or StateDictOptions()
    if engine_of(model) is None:
        return torchs.get_model_state_dict(model, submodules=submodules, options=options)
    model = unwrapped(model)
    state = _held(model)
    wanted = _names_below(model, submodules)
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = {unwrapped_name(name) for name, parameter in parameters if not parameter.requires_grad}
    names = [name for name in state if wanted(name) and not (options.ignore_frozen_params and name in frozen)]
    found = {name: _handed_out(state[name], options) for name in names}
    found = found if _gets_values(options) else {}
    if submodules and not options.keep_submodule_prefixes:
        (prefix,) = _prefixes(model, submodules)
        found = {name.removeprefix(prefix): value for name, value in found.items()}
    return found


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return optimizers' state and groups by fully qualified names. Every rank must call this with `full_state_dict`.

    For an optimizer that has not stepped, returns the state that it would begin with, to load into; the optimizer
    itself stays without state.
    """
    options = options or StateDictOptions()
    if engine_of(model) is None:
        return torchs.get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options)
    model = unwrapped(model)
    wanted = _names_below(model, submodules)
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in _each(optimizers):
        names = _names(model, optimizer)
        with _with_state(model, optimizer):
            for group in optimizer.param_groups:
                members = [(names[id(p)], p) for p in group["params"]]
                kept = [name for name, p in members if wanted(name) and _is_kept(p, options)]
                settings = {key: _handed_out(value, options) for key, value in group.items() if key != "params"}
                groups.append({**settings, "params": kept})
                for name, parameter in members:
                    if name in kept and optimizer.state.get(parameter):
                        values = optimizer.state[parameter]
                        state[name] = {key: _handed_out(value, options) for key, value in values.items()}
    if not _gets_values(options):
        return {}
    return (
        _flattened(state, groups) if options.flatten_optimizer_state_dict else {"state": state, "param_groups": groups}
    )


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state_dicts of model and optimizers. Every rank must call this with `full_state_dict`."""
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


def _handed_out(value: Any, options: StateDictOptions) -> Any:
    """Return a value of a state_dict in the form that the options ask for. Collective for a sharded tensor with
    `full_state_dict`."""
    if isinstance(value, Tensor):
        value = value.detach()
    if isinstance(value, ShardedParameter):
        if not options.full_state_dict:
            return value
        full = value.full_tensor()
        if not _gets_values(options):
            return None
        return full.cpu() if options.cpu_offload else full
    if isinstance(value, Tensor) and (options.full_state_dict or options.cpu_offload):
        # Full state is a snapshot: step counters and buffers go on changing.
        return value.to("cpu" if options.cpu_offload else value.device, copy=options.full_state_dict)
    return value


def _gets_values(options: StateDictOptions) -> bool:
    """Whether this rank gets values: full state on the CPU goes to rank 0 alone, as in torch."""
    alone = options.full_state_dict and options.cpu_offload and dist.is_initialized()
    return not alone or dist.get_rank() == 0


def _is_kept(parameter: Tensor, options: StateDictOptions) -> bool:
    return parameter.requires_grad or not options.ignore_frozen_params


# Setting --------------------------------------------------------------------------------------------------------------


def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> _IncompatibleKeys:
    """Load a state_dict of full tensors, equal on every rank, or of `ShardedParameter`s. Every rank must call this.

    With `broadcast_from_rank0` only rank 0's is read, and it is sent one tensor at a time.
    """
    options = options or StateDictOptions()
    engine = engine_of(model)
    if engine is None:
        return torchs.set_model_state_dict(model, dict(model_state_dict), options=options)
    model = unwrapped(model)
    give_buffers(model, engine.mesh.device)  # `fully_shard` leaves buffers on the meta device
    if not options.broadcast_from_rank0:
        own = {unwrapped_name(name): name for name in model.state_dict(keep_vars=True)}
        fitting = {own.get(unwrapped_name(name), name): value for name, value in model_state_dict.items()}
        report = model.load_state_dict(fitting, strict=options.strict)
        return _IncompatibleKeys(*([*map(unwrapped_name, names)] for names in report))
    targets = _held(model)
    given = {unwrapped_name(name): value for name, value in model_state_dict.items()}
    names: list[str] = _from_rank0(list(given))
    missing, unexpected = ([n for n in a if n not in b] for a, b in ((targets, set(names)), (names, targets)))
    if options.strict and (missing or unexpected):
        raise RuntimeError(
            f"set_model_state_dict of {type(model).__name__}: missing {missing}, unexpected {unexpected}; to "
            "load what fits, use StateDictOptions(strict=False)"
        )
    for name in names:
        if name in targets:
            target = targets[name]
            full = _received(given.get(name), engine.mesh.device)
            _check_shape(name, full, target)
            _write(full, target)
    return _IncompatibleKeys(missing, unexpected)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load state and options, given by fully qualified names, into optimizers. Every rank must call this.

    With `broadcast_from_rank0` only rank 0's is read, and it is sent one tensor at a time.
    """
    options = options or StateDictOptions()
    if engine_of(model) is None:
        torchs.set_optimizer_state_dict(model, optimizers, dict(optim_state_dict), options=options)
        return
    for optimizer in _each(optimizers):
        optimizer.load_state_dict(loadable_state_dict(model, optimizer, optim_state_dict, options))


def loadable_state_dict(
    model: nn.Module, optimizer: Optimizer, given: Mapping[str, Any], options: StateDictOptions
) -> dict[str, Any]:
    """Return state and options, given by names, as `optimizer.load_state_dict` takes them. Every rank must call this
    with `broadcast_from_rank0`."""
    names, given = _names(unwrapped(model), optimizer), _by_plain_names(given)
    is_flat = bool(given) and "param_groups" not in given
    state, groups = _unflattened(given, names, optimizer) if is_flat else _parts(given)
    if options.broadcast_from_rank0:
        state, groups = _cut_from_rank0(state, optimizer, names), _from_rank0(groups)
    return _by_position(optimizer, names, state, groups, options.strict)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """Load the state_dicts of model and optimizers. Every rank must call this."""
    incompatible = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return incompatible


def _by_position(
    optimizer: Optimizer,
    names: Mapping[int, str],
    state: Mapping[str, Any],
    groups: Mapping[str, Mapping[str, Any]],
    strict: bool,
) -> dict[str, Any]:
    """Return a state_dict for `Optimizer.load_state_dict`, with parameters by their position in this optimizer."""
    position = 0
    by_position: dict[str, Any] = {"state": {}, "param_groups": []}
    for group in optimizer.param_groups:
        members = [names[id(parameter)] for parameter in group["params"]]
        missing = [name for name in members if name not in groups]
        if missing and strict:
            raise UsageError(
                f"set_optimizer_state_dict: no state is given for {missing[0]!r} (and {len(missing) - 1} more)"
            )
        known = next((groups[name] for name in members if name in groups), group)
        saved = {key: value for key, value in known.items() if key != "params"}
        by_position["param_groups"].append({**saved, "params": list(range(position, position + len(members)))})
        for name in members:
            if name in state:
                by_position["state"][position] = {key: _own(value) for key, value in state[name].items()}
            position += 1
    return by_position


def _own(value: Any) -> Any:
    """Copy a plain tensor, because torch's optimizers would count their steps in the caller's."""
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, ShardedParameter) else value


def _parts(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]:
    """Return the state by name, and by name the group that the parameter is in."""
    groups = {name: group for group in given.get("param_groups", ()) for name in group["params"]}
    return given.get("state", {}), groups


def _flattened(state: Mapping[str, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    flat = {f"state.{name}.{key}": value for name, values in state.items() for key, value in values.items()}
    for group in groups:
        options = {key: value for key, value in group.items() if key != "params"}
        flat |= {f"param_groups.{name}.{key}": value for name in group["params"] for key, value in options.items()}
    return flat


def _unflattened(
    given: Mapping[str, Any], names: Mapping[int, str], optimizer: Optimizer
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return state and groups by name from the single-level dict that `_flattened` makes."""
    state: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for name in (names[id(parameter)] for parameter in group["params"]):
            options = {key: given[full] for key in group if (full := f"param_groups.{name}.{key}") in given}
            if options:
                groups[name] = options
            prefix = f"state.{name}."
            values = {key.removeprefix(prefix): value for key, value in given.items() if key.startswith(prefix)}
            values = {key: value for key, value in values.items() if "." not in key}
            if values:
                state[name] = values
    return state, groups


# From rank 0 ----------------------------------------------------------------------------------------------------------


def _from_rank0(value: Any) -> Any:
    """Return rank 0's value, which must be picklable. Every rank must call this."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _received(value: Any, device: torch.device) -> Any:
    """Return rank 0's value; a tensor arrives full, on `device`. Every rank must call this."""
    is_first = dist.get_rank() == 0
    what = _from_rank0((value.shape, value.dtype) if is_first and isinstance(value, Tensor) else None)
    if what is None:
        return _from_rank0(value)
    shape, dtype = what
    full = value.detach().to(device).contiguous() if is_first else torch.empty(shape, dtype=dtype, device=device)
    dist.broadcast(full, src=0)
    return full


def _cut_from_rank0(given: Mapping[str, Any], optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return this rank's pieces of the state, by name, that was given on rank 0. Every rank must call this."""
    is_first = dist.get_rank() == 0
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    state: dict[str, Any] = {}
    for name, key in _from_rank0([(name, key) for name, values in given.items() for key in values]):
        if name in parameters:
            device = getattr(parameters[name], "stored_device", parameters[name].device)
            value = _received(given[name][key] if is_first else None, device)
            value = value.cpu() if isinstance(value, Tensor) and value.ndim == 0 else value
            state.setdefault(name, {}).update(_cut(optimizer, parameters[name], {key: value}))
    return state


def _cut(optimizer: Optimizer, parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter as this rank keeps it."""
    if hasattr(optimizer, "cut_state"):  # the optimizer places its state itself
        placed: dict[str, Any] = optimizer.cut_state(parameter, state)
        return placed
    return cut_state(parameter, state) if isinstance(parameter, ShardedParameter) else state


def _check_shape(name: str, full: Any, target: Tensor) -> None:
    if not isinstance(full, Tensor) or full.shape != target.shape:
        what = tuple(full.shape) if isinstance(full, Tensor) else type(full).__name__
        raise UsageError(f"set_model_state_dict: {name!r} is given as {what}, but the model has {tuple(target.shape)}")


@torch.no_grad()
def _write(full: Tensor, target: Tensor) -> None:
    if isinstance(target, ShardedParameter):
        target.write(target.placement.piece(full))
    else:
        target.copy_(full)


# Names and state ------------------------------------------------------------------------------------------------------


def _held(model: nn.Module) -> dict[str, Any]:
    """Return the tensors of the model's state_dict themselves, by name."""
    state = model.state_dict(keep_vars=True)  # keep_vars: FSDP1's class too then gives sharded tensors
    return {unwrapped_name(name): value for name, value in state.items()}


def _by_plain_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state, flat or not, with names as the functions here write them."""
    if not given or "param_groups" not in given:
        return {unwrapped_name(key): value for key, value in given.items()}
    groups = [{**group, "params": [*map(unwrapped_name, group["params"])]} for group in given["param_groups"]]
    return {"state": {unwrapped_name(n): v for n, v in given.get("state", {}).items()}, "param_groups": groups}


def _each(optimizers: Optimizers) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def _names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """Return the names of an optimizer's parameters by id. Raises UsageError for one that is not the model's."""
    names = {id(parameter): unwrapped_name(name) for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UsageError(
                    f"group {number} of this {type(optimizer).__name__} has a parameter of shape "
                    f"{tuple(parameter.shape)} that the model does not have: build the optimizer from "
                    "model.parameters()"
                )
    return names


def _prefixes(model: nn.Module, submodules: set[nn.Module]) -> list[str]:
    names = [unwrapped_name(name) for name, module in model.named_modules() if module in submodules]
    return [f"{name}." if name else "" for name in names]


def _names_below(model: nn.Module, submodules: set[nn.Module] | None) -> Any:
    """Return a predicate: whether a name lies in one of the submodules. True for all if none are given."""
    prefixes = tuple(_prefixes(model, submodules)) if submodules else ("",)
    return lambda name: name.startswith(prefixes)


@contextmanager
def _with_state(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Inside, give an optimizer that has not stepped the state that its first step would begin with."""
    if any(optimizer.state.values()):
        yield
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:  # so that no weight changes
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    try:
        if any(serves(engine, optimizer) for engine in engines_below(model)):  # its step() updates nothing
            with torch.no_grad():
                step_with_stores(optimizer, [group["params"] for group in optimizer.param_groups])
        else:
            optimizer.step()
        for values in optimizer.state.values():
            if isinstance(values.get("step"), Tensor):
                values["step"].zero_()
            elif "step" in values:
                values["step"] = 0
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.state.clear()
