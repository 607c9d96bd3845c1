"""Checkpoints as other programs write them, and what is in them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.checkpoint.states import State, step
from tests.engine.rig import Net, adamw
from tests.engine.tensor.rig import Case as TensorCase
from tests.engine.tensor.rig import Model as TensorModel
from tests.engine.tensor.rig import loss_of

Form = Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], dict[str, Any]]


def nested(model: dict[str, Any], optimizer: dict[str, Any], flat: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer}


def app(model: dict[str, Any], optimizer: dict[str, Any], flat: dict[str, Any]) -> dict[str, Any]:
    """torch's recipe: a Stateful around both."""
    return {"app": {"model": model, "optim": optimizer}, "epoch": 3}


def torchtitan(model: dict[str, Any], optimizer: dict[str, Any], flat: dict[str, Any]) -> dict[str, Any]:
    return {
        **model,
        "optimizer": flat,
        "train_state": {"step": torch.tensor(2, dtype=torch.int32), "ntokens_seen": torch.tensor(640)},
        "lr_scheduler": {"last_epoch": 2},
    }


FORMS: dict[str, Form] = {"nested": nested, "app": app, "torchtitan": torchtitan}


def fsdp2(seed: int, steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
    )
    for index in range(steps):
        step(model, optimizer, index)
    return model, optimizer


def save_fsdp2_with_tp(form: str, case: TensorCase, path: Path) -> State:
    """A DCP directory of a model that FSDP2 shards beside a tensor axis, and what is in it."""
    mesh = case.mesh()
    torch.manual_seed(0)
    plain = TensorModel(**case.model)
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tp"], dict(case.plan(model)))
    for block in model.blocks:
        fully_shard(block, mesh=case.data(mesh))
    fully_shard(model, mesh=case.data(mesh))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)  # so that weights stay as they are
    loss_of(model, case.batches(mesh, 0)[1][0]).backward()
    optimizer.step()
    dcp.save(in_form(form, model, optimizer), checkpoint_id=path)
    return whole(model, optimizer) | plain.state_dict()


def in_form(form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state, listed = get_state_dict(model, optimizer)
    _, flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return FORMS[form](state, listed, flat)


def save_fsdp2(form: str, path: Path) -> State:
    """Two steps on every rank, a DCP directory, and what is in it."""
    model, optimizer = fsdp2(seed=3, steps=2)
    dcp.save(in_form(form, model, optimizer), checkpoint_id=path)
    return whole(model, optimizer)


def load_fsdp2(form: str, path: Path) -> State:
    """As training with FSDP2 resumes."""
    model, optimizer = fsdp2(seed=4)
    state = in_form(form, model, optimizer)
    state = {key: state[key] for key in state if key not in {"epoch", "train_state", "lr_scheduler"}}
    dcp.load(state, checkpoint_id=path)
    names = [name for name, _ in model.named_parameters()]
    weights = {name: state[name] for name in names} if form == "torchtitan" else state["model"]
    flat = StateDictOptions(flatten_optimizer_state_dict=form == "torchtitan")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"], options=flat)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    return whole(model, optimizer)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    state = {name: _full(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}.{key}"] = _full(value)
    return state


def _full(value: Any) -> Tensor:
    full: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone()


def stored(path: Path) -> State:
    """Everything in a checkpoint of shardwise, by other means than shardwise's."""
    state = {
        name: tensor for file in sorted(path.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }
    for file in sorted(path.glob("optimizer*.safetensors")):
        state.update(load_file(file))
    training = json.loads((path / "training.json").read_text())
    for fqn, values in ((training["optimizer"] or {}).get("state") or {}).items():
        for name, value in values.items():
            if "scalar" in value:
                dtype = {"F32": torch.float32}[value["dtype"]]
                state[f"{fqn}.{name}"] = torch.full(value["shape"], value["scalar"], dtype=dtype)
    return state
