"""An optimizer by fully qualified names: its groups, the scalars of its state, and the tensors of its state."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.format.local_tensor import DTYPES, NAMES, Piece, piece_of
from shardwise.checkpoint.format.training_json import check_json
from shardwise.checkpoint.names.wrappers import unwrapped_name
from shardwise.errors import CheckpointError, UsageError
from shardwise.fsdp.sharded_parameter import SHARDED_ATTRIBUTE, ShardedParameter, types_of_lists
from shardwise.offload.step import host_step_of, store_of
from shardwise.sharded.extensions.optimizer_state import NUMBERS

_BY_POSITION = {"params", "param_names"}
"""Keys of a group that list its parameters, or their names, in an order that only this optimizer has."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """An optimizer as it is saved: JSON, and tensors named `<fqn>.<state name>`."""

    document: dict[str, Any]
    """A copy: "class", "groups" (options, with "fqns"), "dtypes" of parameters by fqn, and "state": fqn -> name -> a
    number or {"tensor": its name}."""
    pieces: list[Piece]


def fqns_of(model: nn.Module) -> dict[int, str]:
    """Return the first name, in `model`, of each of its parameters, by the parameter's id. It is not `p.fqn` if the
    module that was sharded is a part of the model, or torch.compile or checkpoint_wrapper is around it."""
    return {id(parameter): unwrapped_name(name) for name, parameter in model.named_parameters()}


def class_of(optimizer: Optimizer) -> str:
    """Return the name for the kind of state that the optimizer keeps: its `class_name` if it has one, otherwise its
    class's name."""
    name: str = getattr(optimizer, "class_name", type(optimizer).__name__)
    return name


def named_groups(model: nn.Module, optimizer: Optimizer) -> list[list[tuple[str, Tensor]]]:
    """Return, for each group, its parameters with their fqns. Raises UsageError for one that is not the model's."""
    fqns = fqns_of(model)
    groups: list[list[tuple[str, Tensor]]] = []
    for number, group in enumerate(optimizer.param_groups):
        groups.append([])
        for parameter in group["params"]:
            sharded = getattr(parameter, SHARDED_ATTRIBUTE, parameter)
            if id(sharded) not in fqns:
                raise UsageError(
                    f"group {number} of this {type(optimizer).__name__} has a parameter of shape "
                    f"{tuple(parameter.shape)} that the model does not have: build the optimizer from "
                    "model.parameters()"
                )
            groups[-1].append((fqns[id(sharded)], sharded))
    return groups


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> OptimizerState:
    """Return the optimizer's groups, options and state. No communication; shares its tensors' memory.

    Raises UsageError, naming it, for state or an option that can be saved neither as JSON nor as a tensor of its
    parameter's shape, and for state that belongs to no parameter.
    """
    groups: list[dict[str, Any]] = []
    state: dict[str, dict[str, Any]] = {}
    pieces: list[Piece] = []
    named = named_groups(model, optimizer)
    for group, members in zip(optimizer.param_groups, named, strict=True):
        options = {key: _option(key, value) for key, value in group.items() if key not in _BY_POSITION}
        groups.append({**options, "fqns": [fqn for fqn, _ in members]})
        for fqn, parameter in members:
            if fqn in state:
                raise UsageError(
                    f"this {type(optimizer).__name__} has the parameter {fqn!r} twice: its state cannot be saved by "
                    "name. Give the optimizer each parameter once"
                )
            state[fqn] = {}
            for name, value in optimizer.state.get(parameter, {}).items():
                state[fqn][name] = _value(f"{fqn}.{name}", value, parameter, pieces, places_state(optimizer))
    _check_owners(optimizer, named)
    dtypes = {fqn: NAMES[parameter.dtype] for members in named for fqn, parameter in members}
    return OptimizerState({"class": class_of(optimizer), "groups": groups, "dtypes": dtypes, "state": state}, pieces)


def _check_owners(optimizer: Optimizer, named: list[list[tuple[str, Tensor]]]) -> None:
    """Raise UsageError for state that belongs to no parameter: state is saved by parameter, so it would be lost."""
    owners = {id(parameter) for members in named for _, parameter in members}
    for key, values in optimizer.state.items():
        if id(key) in owners or (isinstance(values, dict) and not values):  # reading creates empty dicts
            continue
        what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
        raise UsageError(
            f"this {type(optimizer).__name__} has state of {what}, which is not a parameter of its groups, so it "
            "cannot be saved by name: keep it in a group's options, or save it as `extra`"
        )


def _option(key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    value = list(value) if isinstance(value, tuple) else value
    check_json(value, f"the optimizer's option {key!r}")
    return copy.deepcopy(value)


def places_state(optimizer: Optimizer) -> bool:
    """Return whether the optimizer itself places state that has another shape than its parameter
    (`state_placement`)."""
    return hasattr(optimizer, "state_placement")


def _value(name: str, value: Any, parameter: Tensor, pieces: list[Piece], any_shape: bool) -> Any:
    """Return the JSON form of one value of the state; a tensor is appended to `pieces`.

    `any_shape`: accept a tensor of any shape if the parameter is not sharded.
    """
    if isinstance(value, ShardedParameter) and type(parameter) in types_of_lists:
        pieces.append(piece_of((name,), value))
        return {"tensor": name}
    if isinstance(value, dict):  # in the document a dict stands for a tensor
        raise UsageError(
            f"optimizer state {name!r} is a dict, which cannot be saved: keep its values as separate state"
        )
    if not isinstance(value, Tensor):
        check_json(value, f"optimizer state {name!r}")
        return copy.deepcopy(value)
    if value.numel() == 1 and not value.is_complex() and not isinstance(value, ShardedParameter):
        return {"scalar": value.item(), "dtype": NAMES[value.dtype], "shape": list(value.shape)}
    if (any_shape or value.shape == parameter.shape) and not isinstance(parameter, ShardedParameter):
        pieces.append(piece_of((name,), value))
        return {"tensor": name}
    raise UsageError(
        f"optimizer state {name!r} of shape {tuple(value.shape)} is neither a number nor of the shape of its "
        f"parameter, {tuple(parameter.shape)}: it cannot be saved for another number of ranks"
    )


# Giving it back -------------------------------------------------------------------------------------------------------


def saved_names(model: nn.Module, fqns: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Return, for each of the parameters' fqns, the name that its state was saved under, if it was saved.

    Earlier versions named state from the module that was given to `sw.shard`: such a name counts if it can be no other
    parameter's.
    """
    stored = {unwrapped_name(name): name for name in saved}
    earlier = {
        unwrapped_name(name): unwrapped_name(parameter.fqn) if isinstance(parameter, ShardedParameter) else name
        for name, parameter in model.named_parameters()
    }
    owners = Counter(name for both in earlier.items() for name in set(both))
    found: dict[str, str] = {}
    for fqn in fqns:
        before = earlier[fqn]
        name = fqn if fqn in stored or owners[before] > 1 else before
        if name in stored:
            found[fqn] = stored[name]
    return found


def options_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved group's options, without the names of its parameters, which may be grouped differently now."""
    return {key: value for key, value in saved.items() if key not in {"fqns", *_BY_POSITION}}


def may_be(before: Any, value: Any) -> bool:
    """Return whether an option of a group, which has one value, may get a saved one: numbers stay numbers, and a tuple
    its length."""
    if isinstance(before, tuple):
        return isinstance(value, list) and len(value) == len(before)
    is_number = isinstance(before, int | float | Tensor) and not isinstance(before, bool)
    return not (is_number and isinstance(value, str | list | dict))


def restore_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Write a saved group's options into a group of the same kind of optimizer."""
    for key, value in options_of(saved).items():
        before = group.get(key)
        if isinstance(before, Tensor):
            before.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(before, tuple) else value


def number(saved: Mapping[str, Any], shape: Sequence[int], device: torch.device) -> Tensor:
    """Return a saved number as a tensor of a shape. Raises CheckpointError if its dtype does not hold it."""
    try:
        return torch.full(tuple(shape), saved["scalar"], dtype=DTYPES[saved["dtype"]], device=device)
    except (RuntimeError, OverflowError) as error:
        raise CheckpointError(f"the optimizer's number {saved['scalar']!r} is no {saved['dtype']}: {error}") from None


def scalar(name: str, saved: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return a saved number as the tensor that the optimizer expects: on the parameter's device if its step is fused or
    capturable, otherwise on the CPU.

    `name`: of the state. State in the shape of a one-element parameter that was not sharded when it was saved is now
    sharded like the parameter.
    """
    if isinstance(parameter, ShardedParameter) and name not in NUMBERS and tuple(saved["shape"]) == parameter.shape:
        return ShardedParameter(number(saved, (parameter.fragment.numel,), parameter.device), parameter.placement)
    device = parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    return number(saved, saved["shape"], device)


def target_for(
    optimizer: Optimizer, parameter: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """Return a tensor to read state into, uninitialised: with the parameter's shape and sharding, on the tier if the
    state is kept there; or with `shape` if the optimizer places its state itself (`state_placement`). The optimizer's
    current value is reused if shape, dtype and sharding agree, so that state is not held twice."""
    present = optimizer.state.get(parameter, {}).get(name)
    if isinstance(parameter, ShardedParameter):
        return _sharded_target(optimizer, parameter, (name, present), dtype, shape)
    wanted = shape if places_state(optimizer) else tuple(parameter.shape)
    same = present if isinstance(present, Tensor) and not isinstance(present, ShardedParameter) else None
    if same is not None and (tuple(same.shape), same.dtype) == (wanted, dtype):
        return same
    if wanted != parameter.shape:
        return torch.empty(wanted, dtype=dtype, device=parameter.device)
    return torch.empty_like(parameter.detach(), dtype=dtype)


def _sharded_target(
    optimizer: Optimizer,
    parameter: ShardedParameter,
    named: tuple[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> Tensor:
    """Do the work of `target_for` for a sharded parameter. `named`: the state's name and its current value."""
    name, present = named
    own_placement = getattr(optimizer, "state_placement", None)
    own = None if own_placement is None else own_placement(parameter, shape)
    store = store_of(parameter)
    is_stepped = parameter.requires_grad or parameter.grad is not None  # others have no space on a tier
    if store is not None and is_stepped and (own is None or hasattr(optimizer, "first_state")):
        target = store.place(optimizer, parameter, name)
        if target is None or target.dtype != dtype:
            raise UsageError(
                f"optimizer state {name!r} of {parameter.fqn!r} in {dtype} has no place {store.tier.where}: "
                "load it into an optimizer of the same kind and options, or leave offload.optimizer out"
            )
        return target
    placement = own or parameter.placement
    device = parameter.device if host_step_of(parameter) is None else torch.device("cpu")
    alike = (placement.shape, dtype, device)
    if isinstance(present, ShardedParameter) and (present.shape, present.dtype, present.device) == alike:
        return present
    return ShardedParameter(torch.empty(placement.fragment.numel, dtype=dtype, device=device), placement)
