"""Models with an optimizer that have taken steps, and everything they hold as full tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.fsdp.sharded_parameter import ShardedParameter
from tests.engine.cases import Case
from tests.engine.rig import Net, adamw, batch, squares

State = dict[str, Tensor]


class Buffered(Net):
    """Also a buffer, a 0-d parameter, an empty one, a frozen one of another dtype and a tied one."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(3).to(torch.bfloat16), requires_grad=False)
        self.again = nn.Linear(6, 3)
        self.again.weight = self.leave.weight
        self.register_buffer("seen", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x) * self.scale + self.again(x) + self.seen * self.frozen.float()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> Tensor:
    loss = squares(model, batch(index))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def build(case: Case, kind: Callable[[], nn.Module] = Buffered, seed: int = 7) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = case.shard(kind())
    return model, adamw([p for p in model.parameters() if p.requires_grad])


def train_and_save(case: Case, path: Path, **options: Any) -> State:
    """Two steps, then a checkpoint. Returns everything, from every rank."""
    model, optimizer = build(case)
    for index in range(2):
        step(model, optimizer, index)
    sw.checkpoint.save(path, model, optimizer, step=2, extra={"position": [0, 7]}, **options)
    return everything(model, optimizer)


def load_into(case: Case, path: Path, again: Path | None = None, **options: Any) -> State:
    """A fresh model and optimizer with what a checkpoint holds; saved `again` where that is asked for."""
    model, optimizer = build(case, seed=99)
    with torch.no_grad():
        model.get_buffer("seen").zero_()
    loaded = sw.checkpoint.load(path, model, optimizer)
    assert loaded == {"position": [0, 7]}
    assert loaded.step == 2
    if again is not None:
        sw.checkpoint.save(again, model, optimizer, step=2, extra=dict(loaded), **options)
    return everything(model, optimizer)


@torch.no_grad()
def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Full tensors of the model and the optimizer. Every rank must call this."""
    state = {name: _full(value) for name, value in model.state_dict(keep_vars=True).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}.{key}"] = _full(value)
    return state


def _full(value: Tensor) -> Tensor:
    return (value.detach().full_tensor() if isinstance(value, ShardedParameter) else value.detach()).clone()


def same(a: State, b: State, names: Sequence[str] | None = None) -> None:
    assert list(a) == list(b)
    for name in names or a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name
