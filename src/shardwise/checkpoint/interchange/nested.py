"""Checkpoints as users of torch nest them: `{"model": {...}, "optimizer": {"state": ..., "param_groups": ...}, ...}`.

The known forms are those that users of torch write: `model` / `state_dict` and `optimizer` / `optim` side by side,
perhaps inside one more dict (`app`); torchtitan's model at the top level beside `optimizer`; a bare state_dict.
Optimizer state is matched by fqn, never by position.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from shardwise.checkpoint.format import names_json, optimizer_state
from shardwise.checkpoint.format.training_json import is_json
from shardwise.checkpoint.interchange.checkpoint_contents import CheckpointContents, LazyTensor, LazyTensors
from shardwise.checkpoint.interchange.rearranged import as_in_memory, as_stored
from shardwise.errors import CheckpointError
from shardwise.sharded.extensions.optimizer_state import NUMBERS

Key = tuple[str | int, ...]
"""The keys that lead to a value through nested dicts (names) and lists (numbers)."""


def dotted(key: Key) -> str:
    """Join the names and numbers of a key with dots."""
    return ".".join(map(str, key))


# Writing --------------------------------------------------------------------------------------------------------------


FILE_NAMES = "file_names"
"""Key of the text of `names.json`: the names of the model's tensors in files."""
EXACT_EXTRA = "extra_json"
"""Key of `extra` as JSON text, present if `extra` has something that a nested state_dict loses."""


def nested_state(contents: CheckpointContents) -> dict[str, Any]:
    """Return `model` by name, `optimizer` by fqn as `get_optimizer_state_dict` gives it, `step`, and `extra` if there
    is one. Tensors are lazy, but for numbers that the optimizer keeps as tensors.

    The model is as `state_dict()` has it in memory, as far as that is known: all names of a tied tensor are there, with
    the very same value.
    """
    try:
        state: dict[str, Any] = {"model": dict(as_in_memory(contents.model, contents.names))}
    except ValueError as error:
        raise CheckpointError(f"{names_json.NAME} is damaged: {error}") from None
    if contents.optimizer is not None:
        state["optimizer"] = {
            "state": {
                fqn: {kind: _value(contents, value) for kind, value in values.items()}
                for fqn, values in contents.optimizer["state"].items()
            },
            "param_groups": [
                {**{key: value for key, value in group.items() if key != "fqns"}, "params": list(group["fqns"])}
                for group in contents.optimizer["groups"]
            ],
        }
    state["step"] = contents.step
    if contents.extra:
        state["extra"] = contents.extra
        if _has_empty(contents.extra):
            state[EXACT_EXTRA] = json.dumps(contents.extra)
    if contents.names:
        state[FILE_NAMES] = names_json.encode(contents.names).decode()
    return state


def _value(contents: CheckpointContents, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "scalar" in value:
        return optimizer_state.number(value, value["shape"], torch.device("cpu"))
    if value["tensor"] not in contents.state:
        raise CheckpointError(f"the optimizer's state has no tensor {value['tensor']!r}")
    return contents.state[value["tensor"]]


def _has_empty(value: Any) -> bool:
    """Return whether a dict or list without items is in it, which torch's own format has no place for."""
    if not isinstance(value, (dict, list)):
        return False
    return not value or any(_has_empty(item) for item in (value.values() if isinstance(value, dict) else value))


# Reading --------------------------------------------------------------------------------------------------------------


V = TypeVar("V")
_MODEL = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optimizers")
_STEPS = (("step",), ("train_state", "step"), ("training_state", "step"))


def parse(values: Mapping[Key, Any], refused: Mapping[Key, str], with_optimizer: bool = True) -> CheckpointContents:
    """Interpret a nested state_dict.

    Args:
        values: every value by its `Key`; tensors are lazy, a list of plain values is one value.
        refused: values that are not plain, each with the reason why it was not read.

    Raises CheckpointError if there is no model in it, or its optimizer state cannot be told apart by fqn.
    """
    wrapper = _wrapper(values)
    rest = {_under(wrapper, key): value for key, value in values.items()}
    unread = {_under(wrapper, key): why for key, why in refused.items()}
    has_sections = any(key[0] in {*_MODEL, *_OPTIMIZER} and len(key) > 1 for key in rest)
    step = _take_step(rest, has_sections)
    file_names = rest.pop((FILE_NAMES,), None)
    model = _take_model(rest)
    optimizer: dict[str, Any] | None = None
    state: LazyTensors = {}
    of_optimizer, of_unread = _taken(rest), _taken(unread)
    if with_optimizer and (of_optimizer or of_unread):
        for key, why in of_unread.items():
            raise CheckpointError(f"{dotted(key)} of its optimizer: {why}; use --model-only")
        optimizer, state = _Optimizer({key[1:]: value for key, value in of_optimizer.items()}, model).read()
    extra, left_out = _extra(rest)
    contents = CheckpointContents(
        model, state, optimizer, step, extra, left_out=(*left_out, *(dotted(key) for key in unread))
    )
    try:  # the names that shardwise's files had before it was converted; unless it has changed since
        most = sum(tensor.numel for tensor in model.values())
        names = names_json.decode(file_names, most) if isinstance(file_names, str) else []
        return replace(contents, model=as_stored(model, names), names=names) if names else contents
    except ValueError:
        return contents


def _wrapper(values: Mapping[Key, Any]) -> str | None:
    """Return the key of the one dict around everything that torch's recipes have (`app`); None if there is none."""
    keys = [key for key, value in values.items() if isinstance(value, LazyTensor)]
    if any((key[0] in _MODEL and len(key) > 1) or len(key) == 1 for key in keys):
        return None
    around = {key[0] for key in keys if len(key) > 2 and key[1] in _MODEL}
    return str(around.pop()) if len(around) == 1 else None


def _under(wrapper: str | None, key: Key) -> Key:
    return key[1:] if wrapper is not None and key[0] == wrapper and len(key) > 1 else key


def _take_step(values: dict[Key, Any], has_sections: bool) -> int:
    """Return the training's step; 0 if it is unknown. A tensor of a bare state_dict is always the model's."""
    for key in _STEPS:
        value = values.get(key)
        if isinstance(value, LazyTensor) and value.shape == () and (len(key) > 1 or has_sections):
            value = value.load().item()
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            if key == ("step",):
                del values[key]
            return value
    return 0


def _take_model(values: dict[Key, Any]) -> dict[str, LazyTensor]:
    """Take the model's tensors, and return them by name."""
    tensors = [key for key, value in values.items() if isinstance(value, LazyTensor)]
    prefix = next((name for name in _MODEL if any(key[0] == name and len(key) > 1 for key in tensors)), None)
    of_model = [key for key in tensors if (len(key) == 1 if prefix is None else key[0] == prefix and len(key) > 1)]
    model = {dotted(key[prefix is not None :]): values.pop(key) for key in of_model}
    if not model:
        raise CheckpointError("it has no model: no tensors at its top level or below 'model' or 'state_dict'")
    if len(model) < len(of_model):
        raise CheckpointError("it has two tensors with the same name once nested names are joined with dots")
    return model


def _taken(entries: dict[Key, V]) -> dict[Key, V]:
    """Take the optimizer's entries out of `entries` and return them."""
    return {key: entries.pop(key) for key in list(entries) if len(key) > 1 and key[0] in _OPTIMIZER}


def _extra(values: Mapping[Key, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return what JSON can hold, nested as it was, and the names of the rest. A tensor of one element becomes a
    number."""
    extra: dict[Any, Any] = {}
    left_out = []
    for key, value in values.items():
        plain = value.load().item() if isinstance(value, LazyTensor) and value.numel == 1 else value
        if not is_json(plain):
            left_out.append(dotted(key))
            continue
        inner = extra
        for part in key[:-1]:
            inner = inner.setdefault(part, {})
        inner[key[-1]] = plain
    extra = {str(name): _with_lists(value) for name, value in extra.items()}
    given = extra.pop("extra", None)  # that `sw.checkpoint.save` was given, if shardwise wrote this file
    exact = extra.pop(EXACT_EXTRA, None)
    if isinstance(exact, str):
        given = json.loads(exact)
    return ({**extra, **given} if isinstance(given, dict) else extra or None), left_out


def _with_lists(value: Any) -> Any:
    """Return the value with lists for the dicts by position that flattening makes of lists, and with strings as
    keys."""
    if not isinstance(value, dict):
        return value
    inside = {key: _with_lists(item) for key, item in value.items()}
    if inside and all(isinstance(key, int) for key in inside) and sorted(inside) == list(range(len(inside))):
        return [inside[position] for position in range(len(inside))]
    return {str(key): item for key, item in inside.items()}


class _Optimizer:
    """Reads an optimizer's state_dict by fqn: nested or flattened, groups as a list or by parameter."""

    def __init__(self, values: Mapping[Key, Any], model: LazyTensors) -> None:
        self._model = model
        of_groups = {key: value for key, value in values.items() if str(key[0]).split(".")[0] == "param_groups"}
        self._groups, self._fqns = _groups({key: _plain(key, value) for key, value in of_groups.items()})
        of_state = {key: value for key, value in values.items() if key not in of_groups}
        self._tensors = {self._owner(key): v for key, v in of_state.items() if isinstance(v, LazyTensor)}
        self._values = {
            self._owner(key): value
            for key, value in of_state.items()
            if str(key[0]).split(".")[0] == "state" and is_json(value)
        }

    def read(self) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
        """Return the optimizer's document in `training.json`, and its tensors."""
        state: dict[str, dict[str, Any]] = {fqn: {} for group in self._groups for fqn in group["fqns"]}
        named: dict[str, LazyTensor] = {}
        numbers = self._numbers()
        for (fqn, kind), tensor in self._tensors.items():
            shape = self._model[fqn].shape
            value: Any = {"tensor": f"{fqn}.{kind}"}
            if tensor.shape == shape and not (shape == () and kind in numbers):
                named[f"{fqn}.{kind}"] = tensor
            elif tensor.numel == 1:
                dtype = tensor.stored(f"{fqn}.{kind}").dtype
                value = {"scalar": tensor.load().item(), "dtype": dtype, "shape": list(tensor.shape)}
            else:
                raise CheckpointError(
                    f"optimizer state {fqn}.{kind} of shape {tensor.shape} is neither a number nor of the shape "
                    f"of its parameter, {shape}: use --model-only"
                )
            state.setdefault(fqn, {})[kind] = value
        for (fqn, kind), value in self._values.items():
            state.setdefault(fqn, {})[kind] = value
        dtypes = {fqn: self._model[fqn].stored(fqn).dtype for fqn in state if fqn in self._model}
        return {"class": "unknown", "groups": self._groups, "dtypes": dtypes, "state": state}, named

    def _numbers(self) -> set[str]:
        """Return the names of state that is one number for each parameter, as parameters that are not numbers
        themselves show."""
        numbers: set[str] = set()
        shaped: set[str] = set()
        for (fqn, kind), tensor in self._tensors.items():
            if self._model[fqn].shape != ():
                (shaped if tensor.shape else numbers).add(kind)
        return numbers | (NUMBERS - shaped)

    def _owner(self, key: Key) -> tuple[str, str]:
        """Return (fqn, name) of one value of the state."""
        way = dotted(key)
        owner, _, name = way.removeprefix("state.").rpartition(".")
        fqn = self._fqns.get(owner, owner)
        if not way.startswith("state.") or not owner:
            raise CheckpointError(f"its optimizer has {way!r}, which is not state of a parameter: use --model-only")
        if fqn not in self._model and fqn.isdecimal():
            raise CheckpointError(
                "its optimizer state is stored by position, without names of parameters: save it with "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, build the optimizer from "
                "model.named_parameters(), or use --model-only"
            )
        if fqn not in self._model:
            raise CheckpointError(
                f"its optimizer has state of {fqn!r}, which its model does not have: use --model-only"
            )
        return fqn, name


def _plain(key: Key, value: Any) -> Any:
    """Return a value of a parameter group; a learning rate that is a tensor as a number."""
    if not isinstance(value, LazyTensor):
        return value
    if value.numel != 1:
        raise CheckpointError(f"{dotted(key)!r} of shape {value.shape} must be a single number")
    return value.load().item()


def _groups(values: Mapping[Key, Any]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the parameter groups, and the fqns of parameters that their state knows by position."""
    listed: dict[int, dict[str, Any]] = {}
    by_fqn: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key[0] == "param_groups" and len(key) == 3 and isinstance(key[1], int):
            listed.setdefault(key[1], {})[str(key[2])] = value
        elif dotted(key).startswith("param_groups."):
            fqn, _, option = dotted(key).removeprefix("param_groups.").rpartition(".")
            by_fqn.setdefault(fqn, {})[option] = value
    whole = values.get(("param_groups",))
    groups: list[dict[str, Any]] = whole if isinstance(whole, list) else [group for _, group in sorted(listed.items())]
    if not groups:
        return _grouped(by_fqn), {}
    found, fqns = [], {}
    for group in groups:
        members, names = list(group.get("params", ())), group.get("param_names")
        if names is not None and len(names) == len(members):
            fqns.update({str(member): str(name) for member, name in zip(members, names, strict=True)})
            members = list(names)
        found.append({**_options(group), "fqns": [str(member) for member in members]})
    return found, fqns


def _grouped(by_fqn: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups: parameters with equal options form one."""
    groups: dict[str, dict[str, Any]] = {}
    for fqn, options in by_fqn.items():
        kept = _options(options)
        groups.setdefault(json.dumps(kept, sort_keys=True), {**kept, "fqns": []})["fqns"].append(fqn)
    return list(groups.values())


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options without its parameters, as JSON has them."""
    options = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
    for key, value in options.items():
        options[key] = list(value) if isinstance(value, tuple) else value
        if not is_json(options[key]):
            raise CheckpointError(f"the optimizer's option {key!r} is a {type(value).__name__}: use --model-only")
    return options
