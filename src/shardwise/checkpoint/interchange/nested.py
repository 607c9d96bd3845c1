"""Checkpoints as users of torch nest them: `{"model": {...}, "optimizer": {"state": ..., "param_groups": ...}, ...}`.

The known forms are those that users of torch write: `model` / `state_dict` and `optimizer` / `optim` side by side,
perhaps inside one more dict (`app`); torchtitan's model at the top level beside `optimizer`; a bare state_dict.
Optimizer state is matched by fqn, never by position.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from shardwise.checkpoint.format import names_json
from shardwise.checkpoint.format.local_tensor import DTYPES
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.format.training_json import is_json
from shardwise.checkpoint.interchange.carried import Carried, Selection, Tensors
from shardwise.checkpoint.interchange.dcp_metadata import Key, dotted
from shardwise.checkpoint.interchange.rearranged import as_in_memory, as_stored
from shardwise.errors import CheckpointError
from shardwise.sharded.optimizer_state import NUMBERS

# Writing --------------------------------------------------------------------------------------------------------------


FILE_NAMES = "file_names"
"""Key of the text of `names.json`: the names of the model's tensors in files."""
EXACT_EXTRA = "extra_json"
"""Key of `extra` as JSON text, present if `extra` has something that a nested state_dict loses."""


def nested_state(carried: Carried, tensor: Callable[[Tensors, StoredTensor], Any]) -> dict[str, Any]:
    """Return `model` by name, `optimizer` by fqn as `get_optimizer_state_dict` gives it, `step`, and `extra` if there
    is one.

    The model is as `state_dict()` has it in memory, as far as that is known: all names of a tied tensor are there, with
    the very same value.

    Args:
        tensor: returns what to put for each tensor. Numbers that the optimizer keeps as tensors become plain tensors.
    """
    in_memory = as_in_memory(carried.model, carried.names)
    model = {name: tensor(in_memory, stored) for name, stored in in_memory.stored.items()}
    for named in carried.names:
        model.update(dict.fromkeys(named.names[1:], model[named.names[0]]))
    state: dict[str, Any] = {"model": model}
    if carried.optimizer is not None:
        state["optimizer"] = {
            "state": {
                fqn: {kind: _value(carried, value, tensor) for kind, value in values.items()}
                for fqn, values in carried.optimizer["state"].items()
            },
            "param_groups": [
                {**{key: value for key, value in group.items() if key != "fqns"}, "params": list(group["fqns"])}
                for group in carried.optimizer["groups"]
            ],
        }
    state["step"] = carried.step
    if carried.extra:
        state["extra"] = carried.extra
        if _has_empty(carried.extra):
            state[EXACT_EXTRA] = json.dumps(carried.extra)
    if carried.names:
        state[FILE_NAMES] = names_json.encode(carried.names).decode()
    return state


def _value(carried: Carried, value: Any, tensor: Callable[[Tensors, StoredTensor], Any]) -> Any:
    if not isinstance(value, dict):
        return value
    if "scalar" in value:
        return torch.full(value["shape"], value["scalar"], dtype=DTYPES[value["dtype"]], device="cpu")
    return tensor(carried.state, carried.state.stored[value["tensor"]])


# Reading --------------------------------------------------------------------------------------------------------------


V = TypeVar("V")
_MODEL = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optimizers")
_STEPS = (("step",), ("train_state", "step"), ("training_state", "step"))
_INTEGERS = frozenset({"I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"})


@dataclass(frozen=True)
class Tree:
    """A nested state_dict, flattened: every value by its `Key`."""

    tensors: Tensors
    """Named by their keys, joined with dots."""
    keys: Mapping[Key, str]
    """The key of each tensor -> its name in `tensors`."""
    values: Mapping[Key, Any]
    """Everything but tensors. A list of plain values is one value."""
    refused: Mapping[Key, str] = field(default_factory=dict)
    """Values that are not plain, each with the reason why it was not read."""


def sort_out(tree: Tree, with_optimizer: bool = True) -> Carried:
    """Interpret a tree as a checkpoint.

    Raises CheckpointError if there is no model in it, or its optimizer state cannot be told apart by fqn.
    """
    return _Sorting(tree).carried(with_optimizer)


class _Sorting:
    def __init__(self, tree: Tree) -> None:
        wrapper = _wrapper(tree)
        self._tree = tree
        self._keys = {_under(wrapper, key): name for key, name in tree.keys.items()}
        self._values = {_under(wrapper, key): value for key, value in tree.values.items()}
        self._refused = {_under(wrapper, key): why for key, why in tree.refused.items()}
        self._left_out: list[str] = []
        self._has_sections = any(
            key[0] in {*_MODEL, *_OPTIMIZER} and len(key) > 1 for key in (*self._keys, *self._values)
        )

    def carried(self, with_optimizer: bool) -> Carried:
        file_names = self._values.pop((FILE_NAMES,), None)
        model = self._model()
        optimizer, state = self._optimizer(model, with_optimizer)
        step, extra = self._step(), self._extra()
        self._left_out += [dotted(key) for key in (*self._keys, *self._refused)]
        carried = Carried(
            Selection(self._tree.tensors, model),
            Selection(self._tree.tensors, state),
            optimizer,
            step,
            extra,
            left_out=tuple(self._left_out),
        )
        return carried if file_names is None else _named_as_files(carried, file_names)

    def _model(self) -> dict[str, str]:
        """Take the model's tensors out of the keys. Returns their names in the tree, by their names in the model."""
        prefix = next((k for k in _MODEL if any(key[0] == k and len(key) > 1 for key in self._keys)), None)
        if prefix is None:
            found = [key for key in self._keys if len(key) == 1 and not self._is_step(key)]
            keys: dict[str, Key] = {str(key[0]): key for key in found}
        else:
            keys = {dotted(key[1:]): key for key in self._keys if key[0] == prefix and len(key) > 1}
        if not keys:
            raise CheckpointError("it has no model: no tensors at its top level or below 'model' or 'state_dict'")
        return {name: self._keys.pop(key) for name, key in keys.items()}

    def _is_step(self, key: Key) -> bool:
        """Return whether a tensor is the training's step. In a bare state_dict it is always the model's."""
        saved = self._tree.tensors.stored[self._keys[key]]
        is_number = saved.shape == () and saved.dtype in _INTEGERS
        return key in _STEPS and is_number and (len(key) > 1 or self._has_sections)

    def _optimizer(self, model: Mapping[str, str], wanted: bool) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Take the optimizer out of the tree. Returns its document and tensors; (None, {}) without one or if not
        `wanted`."""
        tensors, values, refused = _taken(self._keys), _taken(self._values), _taken(self._refused)
        if not wanted or not (tensors or values or refused):
            return None, {}
        for key, why in refused.items():
            raise CheckpointError(f"{dotted(key)} of its optimizer: {why}; use --model-only")
        reading = _Optimizer({key[1:]: value for key, value in values.items()}, self._tree.tensors, model)
        return reading.read({key[1:]: name for key, name in tensors.items()})

    def _step(self) -> int:
        for key in _STEPS:
            value = self._values.get(key)
            if key in self._keys and self._is_step(key):
                value = _number(self._tree.tensors, self._keys[key])
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                if key == ("step",):
                    self._values.pop(key, None)
                    self._keys.pop(key, None)
                return value
        return 0

    def _extra(self) -> dict[str, Any] | None:
        """Return all other values that JSON can hold, nested as they were; a tensor of one element becomes a number."""
        tensors = self._tree.tensors
        for key in [key for key, name in self._keys.items() if tensors.stored[name].numel == 1]:
            self._values[key] = _number(tensors, self._keys.pop(key))
        extra: dict[Any, Any] = {}
        for key, value in self._values.items():
            if not is_json(value):
                self._left_out.append(dotted(key))
            else:
                inner = extra
                for part in key[:-1]:
                    inner = inner.setdefault(part, {})
                inner[key[-1]] = value
        extra = {str(name): _with_lists(value) for name, value in extra.items()}
        given = extra.pop("extra", None)  # that `sw.checkpoint.save` was given, if shardwise wrote this file
        exact = extra.pop(EXACT_EXTRA, None)
        if isinstance(exact, str):
            given = json.loads(exact)
        return {**extra, **given} if isinstance(given, dict) else extra or None


def _with_lists(value: Any) -> Any:
    """Return the value with lists for the dicts by position that flattening makes of lists, and with strings as
    keys."""
    if not isinstance(value, dict):
        return value
    inside = {key: _with_lists(item) for key, item in value.items()}
    if inside and all(isinstance(key, int) for key in inside) and sorted(inside) == list(range(len(inside))):
        return [inside[position] for position in range(len(inside))]
    return {str(key): item for key, item in inside.items()}


def _has_empty(value: Any) -> bool:
    """Return whether a dict or list without items is in it, which torch's own format has no place for."""
    if not isinstance(value, (dict, list)):
        return False
    return not value or any(_has_empty(item) for item in (value.values() if isinstance(value, dict) else value))


def _taken(entries: dict[Key, V]) -> dict[Key, V]:
    """Take the optimizer's entries out of `entries` and return them."""
    return {key: entries.pop(key) for key in list(entries) if len(key) > 1 and key[0] in _OPTIMIZER}


def _named_as_files(carried: Carried, file_names: Any) -> Carried:
    """Return the checkpoint with the names that shardwise's files had before it was converted; as it is if it has
    changed since."""
    try:
        found = names_json.decode(file_names)
        return replace(carried, model=as_stored(carried.model, found), names=found)
    except ValueError:
        return carried


class _Optimizer:
    """Reads an optimizer's state_dict by fqn: nested or flattened, groups as a list or by parameter."""

    def __init__(self, values: dict[Key, Any], source: Tensors, model: Mapping[str, str]) -> None:
        self._source = source
        self._model = model
        self._values = values
        self._groups: list[dict[str, Any]] = []
        self._fqns: dict[str, str] = {}

    def read(self, tensors: dict[Key, str]) -> tuple[dict[str, Any], dict[str, str]]:
        for key in [key for key in tensors if key[0] == "param_groups" or str(key[0]).startswith("param_groups.")]:
            self._values[key] = _number(self._source, tensors.pop(key))  # a learning rate that is a tensor
        self._read_groups()
        state: dict[str, dict[str, Any]] = {fqn: {} for group in self._groups for fqn in group["fqns"]}
        named: dict[str, str] = {}
        numbers = self._numbers(tensors)
        for key, name in tensors.items():
            fqn, kind = self._owner(key)
            saved = self._source.stored[name]
            shape = self._shape(fqn)
            if saved.shape == shape and not (shape == () and kind in numbers):
                named[f"{fqn}.{kind}"] = name
                state.setdefault(fqn, {})[kind] = {"tensor": f"{fqn}.{kind}"}
            elif saved.numel == 1:
                value = _number(self._source, name)
                state.setdefault(fqn, {})[kind] = {"scalar": value, "dtype": saved.dtype, "shape": list(saved.shape)}
            else:
                raise CheckpointError(
                    f"optimizer state {fqn}.{kind} of shape {saved.shape} is neither a number nor of the shape "
                    f"of its parameter, {shape}: use --model-only"
                )
        for key, value in self._values.items():
            if str(key[0]).split(".")[0] == "state" and is_json(value):
                fqn, kind = self._owner(key)
                state.setdefault(fqn, {})[kind] = value
        dtypes = {fqn: self._source.stored[self._model[fqn]].dtype for fqn in state if fqn in self._model}
        return {"class": "unknown", "groups": self._groups, "dtypes": dtypes, "state": state}, named

    def _shape(self, fqn: str) -> tuple[int, ...]:
        return self._source.stored[self._model[fqn]].shape

    def _numbers(self, tensors: Mapping[Key, str]) -> set[str]:
        """Return the names of state that is one number for each parameter, as parameters that are not numbers
        themselves show."""
        numbers: set[str] = set()
        shaped: set[str] = set()
        for key, name in tensors.items():
            fqn, kind = self._owner(key)
            if self._shape(fqn) != ():
                (shaped if self._source.stored[name].shape else numbers).add(kind)
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

    def _read_groups(self) -> None:
        listed: dict[int, dict[str, Any]] = {}
        by_fqn: dict[str, dict[str, Any]] = {}
        for key, value in self._values.items():
            if key[:1] == ("param_groups",) and len(key) == 3 and isinstance(key[1], int):
                listed.setdefault(key[1], {})[str(key[2])] = value
            elif dotted(key).startswith("param_groups."):
                fqn, _, option = dotted(key).removeprefix("param_groups.").rpartition(".")
                by_fqn.setdefault(fqn, {})[option] = value
        whole = self._values.get(("param_groups",))
        if isinstance(whole, list):
            listed = dict(enumerate(whole))
        if listed:
            self._groups = [self._listed(group) for _, group in sorted(listed.items())]
        else:
            self._groups = _grouped(by_fqn)

    def _listed(self, group: dict[str, Any]) -> dict[str, Any]:
        members = list(group.get("params", ()))
        names = group.get("param_names")
        if names is not None and len(names) == len(members):
            self._fqns.update({str(member): str(name) for member, name in zip(members, names, strict=True)})
            members = list(names)
        return {**_options(group), "fqns": [str(member) for member in members]}


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


def _number(source: Tensors, name: str) -> Any:
    stored = source.stored[name]
    if stored.numel != 1:
        raise CheckpointError(f"{name!r} of shape {stored.shape} must be a single number")
    return source.read(name, 0, 1).item()


def _wrapper(tree: Tree) -> str | None:
    """Return the key of the one dict around everything that torch's recipes have (`app`); None if there is none."""
    keys = list(tree.keys)
    if any(key[0] in _MODEL and len(key) > 1 for key in keys) or any(len(key) == 1 for key in keys):
        return None
    around = {key[0] for key in keys if len(key) > 2 and key[1] in _MODEL}
    return str(around.pop()) if len(around) == 1 else None


def _under(wrapper: str | None, key: Key) -> Key:
    return key[1:] if wrapper is not None and key[0] == wrapper and len(key) > 1 else key
