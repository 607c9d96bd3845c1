"""Parameters whose class defines what is gathered (FSDP2's all-gather extensions), compared with the same casts in one
process."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.compat import fsdp2
from shardwise.engine.lookup import require_engine
from shardwise.errors import DifferentModelsError, LayoutError, UsageError
from tests.engine.rig import adamw, batch, on_ranks, squares

aten = torch.ops.aten


class Box(Tensor):
    """A wrapper of one tensor. Operations that only view it return another Box; all others work on plain tensors."""

    KEPT: Any = (aten.detach.default, aten.new_zeros.default, aten.view.default, aten.t.default)
    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, *_: Any, dtype: torch.dtype | None = None) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=dtype or inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor, *others: Any, dtype: torch.dtype | None = None) -> None:
        self.held, self.others = inner, others

    def number(self) -> Tensor:
        return self.held

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0]
        if func in cls.KEPT:
            return cls(func(first.held, *args[1:], **(kwargs or {})), *first.others, dtype=first.dtype)
        args, kwargs = tree_map_only(cls, cls.number, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> Any:
        return ["held"], (self.others, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["held"], *context[0], dtype=context[1])


class Narrow(Box):
    """A parameter that is gathered in bf16, and computed with in its own dtype."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.held.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, came: Any, beside: Any, dtype: Any, *, out: Tensor | None = None) -> Any:
        if out is None:
            return came[0].to(dtype), came
        out.copy_(came[0])
        return None


class Halves(Box):
    """The gathered form of Scaled: numbers in bf16 with a scale."""

    def number(self) -> Tensor:
        greatest: Tensor = self.others[0][0]
        return self.held.to(self.dtype) * greatest


class Scaled(Box):
    """A parameter that is gathered in bf16, divided by its greatest absolute value over all ranks."""

    def fsdp_pre_all_gather(self, mesh: Any, shape: Any, stride: Any, module: nn.Module, policy: Any) -> Any:
        assert isinstance(module, nn.Linear)
        assert module.weight.shape == shape
        assert mesh.ndim == 1
        assert (self.shape[1:], policy.reduce_dtype) == (shape[1:], None)
        greatest = self.held.abs().amax() if self.held.numel() else torch.zeros(())
        torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
        greatest = greatest.clamp(1e-6)
        return (self.held.div(greatest).to(torch.bfloat16),), greatest

    def fsdp_post_all_gather(self, came: Any, beside: Any, dtype: Any, *, out: Any = None) -> Any:
        if out is None:
            return Halves(came[0], [beside], dtype=dtype), came
        out.others[0][0] = beside
        return None


class Rounded(torch.autograd.Function):
    """The rounding of a class applied to a whole weight. Gradients pass through unchanged."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kind: type) -> Tensor:
        if kind is Narrow:
            return weight.to(torch.bfloat16).to(weight.dtype)
        greatest = weight.abs().amax().clamp(1e-6)
        return weight.div(greatest).to(torch.bfloat16).to(weight.dtype) * greatest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class Layers(nn.Module):
    """A model with weights of five rows, which some ranks hold fewer of."""

    def __init__(self, kind: type, is_plain: bool, recomputes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 if i == 0 else 5, 5) for i in range(5))
        self.is_plain, self.recomputes = is_plain, recomputes
        self.kind: Any = kind
        layers: Any = () if is_plain else self.layers
        for layer in layers:
            layer.weight = nn.Parameter(self.kind(layer.weight.detach()))

    def apply_layer(self, layer: Any, x: Tensor) -> Tensor:
        rounded: Any = Rounded.apply
        x = linear(x, rounded(layer.weight, self.kind), layer.bias) if self.is_plain else layer(x)
        return x + torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.recomputes:
                x = checkpoint(self.apply_layer, layer, x, use_reentrant=False)
            else:
                x = self.apply_layer(layer, x)
        return x


def built(kind: type, is_plain: bool, recomputes: bool = False) -> Any:
    torch.manual_seed(3)
    return Layers(kind, is_plain, recomputes)


def sharded(kind: type, recomputes: bool = False, **options: Any) -> Any:
    model = built(kind, False, recomputes)
    for layer in model.layers:
        fsdp2.fully_shard(layer, **options)
    return fsdp2.fully_shard(model, **options)


@pytest.mark.parametrize("kind", [Narrow, Scaled])
@pytest.mark.parametrize("recomputes", [False, True])
@on_ranks(1, 2, 3, timeout_s=120)
def test_numbers_are_those_of_the_cast_in_one_process(kind: type, recomputes: bool) -> None:
    world_size = torch.distributed.get_world_size()
    for keeps in (False, True):
        plain, model = built(kind, True), sharded(kind, recomputes, reshard_after_forward=not keeps)
        optimizers = [adamw(each.parameters()) for each in (plain, model)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that something kept a slot's memory
            for step in range(3):
                for micro in range(2):
                    model.set_requires_gradient_sync(micro == 1)
                    own = squares(model, batch(2 * step + micro))
                    own.backward()
                    losses = [squares(plain, batch(2 * step + micro, rank)) for rank in range(world_size)]
                    for loss in losses:
                        loss.div(world_size).backward()
                    assert own == losses[torch.distributed.get_rank()]
                for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
                    ours.grad.copy_(theirs.grad)  # sums in another order: steps from here on are alike
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                full = sw.full_state_dict(model, rank0_only=False)
                assert all(torch.equal(full[name], value) for name, value in plain.state_dict().items())


@on_ranks(2)
def test_what_travels_is_in_the_slot_and_nothing_else() -> None:
    sizes = {}
    for kind in (Narrow, Scaled, None):
        model = sharded(kind) if kind else fsdp2.fully_shard(built(Narrow, True))
        squares(model, batch(0)).backward()
        sizes[kind] = [unit.parameters.unsharded_bytes for unit in require_engine(model).units]
    # 25 elements and 5 of a bias in fp32, to multiples of 64 bytes: beside each other, or the 30 rows of bf16 alone
    assert sizes[Narrow][1:] == [64 + 128 + 64] * 4 + [64 + 128 + 64]
    assert sizes[Scaled][1:] == [64 + 64] * 5


@on_ranks(2)
def test_saved_tensors_of_the_class_are_handles() -> None:
    model = sharded(Scaled)
    squares(model, batch(0)).backward()
    kept: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = squares(model, batch(1))
    assert not any(isinstance(tensor, Halves) for tensor in kept)
    loss.backward()


@on_ranks(2)
def test_from_the_meta_device() -> None:
    with torch.device("meta"):
        model: Any = Layers(Scaled, False, False)
    fsdp2.fully_shard(model)
    model.to_empty(device="cpu")
    plain = built(Scaled, True)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model(batch(0)), plain(batch(0)))


@on_ranks(2)
def test_what_cannot_be_is_refused() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(TwoTensor(model[0].weight.detach(), model[0].weight.detach()))
    TwoTensor.fsdp_pre_all_gather = TwoTensor.fsdp_post_all_gather = lambda *_: None  # type: ignore[attr-defined]
    with pytest.raises(LayoutError, match=r"one plain tensor of the same shape and dtype, not for \['a', 'b'\]"):
        fsdp2.fully_shard(model)
    with pytest.raises(UsageError, match=r"copy.deepcopy.*'layers.0.weight'"):
        copy.deepcopy(sharded(Narrow))
    with torch.device("meta"):
        on_meta = Layers(Narrow, False, False)
    with pytest.raises(LayoutError, match=r"'layers.0.weight' defines its own all_gather and is on the meta device"):
        sw.shard(on_meta)
    rank = torch.distributed.get_rank()
    with pytest.raises(DifferentModelsError, match="ranks built different models"):
        fsdp2.fully_shard(built(Scaled if rank else Narrow, is_plain=not rank))
