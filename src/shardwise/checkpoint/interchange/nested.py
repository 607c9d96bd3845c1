"""A checkpoint as users of torch nest it: `{"model": {...}, "optimizer": {"state": ..., "param_groups": ...}, ...}`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.checkpoint.format import names_json
from shardwise.checkpoint.format.local_tensor import DTYPES
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.interchange.carried import Carried, Tensors
from shardwise.checkpoint.interchange.rearranged import as_in_memory

FILE_NAMES = "file_names"
"""Key of what the tensors of the model are called in files, as text: that of `names.json`."""


def nested_state(carried: Carried, tensor: Callable[[Tensors, StoredTensor], Any]) -> dict[str, Any]:
    """`model` by name, `optimizer` by fqn as `get_optimizer_state_dict` gives it, `step`, and `extra` if there is one.

    The model is as `state_dict()` has it in memory, as far as that is known: of tied tensors all names are there, with
    the very same value.

    Args:
        tensor: what to put for each tensor. Numbers that the optimizer keeps as tensors are plain tensors.
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
    if carried.names:
        state[FILE_NAMES] = names_json.encode(carried.names).decode()
    return state


def _value(carried: Carried, value: Any, tensor: Callable[[Tensors, StoredTensor], Any]) -> Any:
    if not isinstance(value, dict):
        return value
    if "scalar" in value:
        return torch.full(value["shape"], value["scalar"], dtype=DTYPES[value["dtype"]], device="cpu")
    return tensor(carried.state, carried.state.stored[value["tensor"]])
