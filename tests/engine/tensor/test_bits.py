"""Sharding changes no bit of a tensor-parallel model: losses, gradients and weights are those of the same model, cut by
the same plan over the same tensor ranks, that is not sharded.

One process would be no reference to the bit: it computes a product in one sum that is cut here, and each tensor rank
adds up a part. Nothing else differs from the unsharded model. Local tensors have the same shapes, so the same kernels
compute with them; sums over the tensor axis are the same collectives of the same numbers; and the mean over data ranks
is taken in their order, of terms that are scaled first, which the reference does too. So numbers of ranks that are no
powers of two are exact as well. Updates are elementwise. In bf16 the reference computes with a copy that is rounded to
it, and terms of a mean are rounded before they are added. The norm of all gradients is not compared: it adds squares
piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import shardwise as sw
from tests.engine.rig import wide
from tests.engine.tensor.rig import Case, Model, build, column_and_row, gpt2, loss_of, sequence, vocabulary

BF16: dict[str, Any] = {"precision": sw.Precision(param="bfloat16")}
Local = dict[str, Tensor]
"""What a tensor rank has of tensors, by the names of parameters."""

CASES = (
    Case(column_and_row),
    Case(column_and_row, shape=(1, 2)),
    Case(column_and_row, model={"tied": True}),
    Case(vocabulary, strategy="shard_grad_op", micro_batches=2),
    Case(vocabulary, strategy="no_shard", model={"recompute": True}),
    Case(vocabulary, shape=(3, 2)),
    Case(column_and_row, shape=(2, 3)),
    Case(sequence),
    Case(sequence, shape=(2, 2, 2), strategy="hybrid_shard"),
    Case(vocabulary, shard=BF16),
    Case(sequence, strategy="shard_grad_op", shard=BF16),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_that_of_the_unsharded_tensor_parallel_model(ranks: Any, case: Case) -> None:
    ranks(case.world_size).run(_train, case)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("shard", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gpt2"])
def test_so_is_that_of_a_model_of_transformers(ranks: Any, name: str, shard: dict[str, Any]) -> None:
    ranks(4).run(_train_transformers, name, shard)


def _train(case: Case) -> None:
    mesh = case.mesh()

    def cut() -> Any:
        torch.manual_seed(0)
        model = Model(**case.model)
        return parallelize_module(model, mesh["tp"], dict(case.plan(model)))

    model = cut()
    sw.shard(model, case.strategy, mesh=case.data(mesh), **case.shard)
    _compare(case, mesh, cut, model, loss_of)


def _train_transformers(name: str, shard: dict[str, Any]) -> None:
    """Cut by the plan of transformers, GPT-2 by styles of a user's."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    case = Case(column_and_row, shard=shard)
    mesh = case.mesh()

    def whole() -> tuple[Any, Any]:
        torch.manual_seed(0)
        return gpt2() if name == "gpt2" else (build(name), "auto")

    def cut() -> Any:
        model, plan = whole()
        if plan == "auto":
            apply_tensor_parallelism(model, mesh["tp"], model._expand_parallel_plan(model.tp_plan))
            return model
        return parallelize_module(model, mesh["tp"], plan)

    model, plan = whole()
    sw.shard(model, mesh=mesh, tp_plan=plan, **shard)
    _compare(case, mesh, cut, model, lambda each, tokens: each(input_ids=tokens, labels=tokens).loss)


def _compare(
    case: Case, mesh: DeviceMesh, cut: Callable[[], Any], model: Any, loss: Callable[[Any, Tensor], Tensor]
) -> None:
    """Train it and one that `cut` makes for three steps. Each tensor group runs the whole batch through the latter."""
    reference = cut()
    computing = _rounded(cut()) if case.shard else reference
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False) for each in (reference, model)]
    own = dist.get_rank() // mesh["tp"].size()
    for step in range(3):
        everyone, _ = case.batches(mesh, step)
        total: Local = {}
        for copied, parameter in zip(computing.parameters(), reference.parameters(), strict=True):
            _local(copied).copy_(_local(parameter))
        for number in range(case.micro_batches):
            found = [_backward(computing, loss, tokens) for tokens in everyone[:, number]]
            mean = _mean([gradients for _, gradients in found], case)
            total = {name: total[name] + grad if total else grad for name, grad in mean.items()}
            value = loss(model, everyone[own, number])
            value.backward()
            assert torch.equal(value.detach(), found[own][0]), (value.item(), found[own][0].item())
        _same(model, {name: parameter.grad for name, parameter in model.named_parameters()}, total)
        for name, parameter in reference.named_parameters():
            parameter.grad = _placed_as(parameter, total[name])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _same(model, dict(model.named_parameters()), {name: _local(p) for name, p in reference.named_parameters()})


def _rounded(model: Any) -> Any:
    """Make a model's parameters bf16, and leave its buffers as they are."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made.setdefault(parameter, nn.Parameter(parameter.detach().bfloat16()))
                module._parameters[name] = made[parameter]
    return model


def _backward(reference: nn.Module, loss: Callable[[Any, Tensor], Tensor], tokens: Tensor) -> tuple[Tensor, Local]:
    """Return the loss of one data rank's tokens, and what this tensor rank has of its gradients."""
    value = loss(reference, tokens)
    value.backward()
    gradients: Local = {}
    for name, parameter in reference.named_parameters():
        grad: Any = parameter.grad
        assert grad is not None, name
        if isinstance(grad, DTensor):
            assert isinstance(parameter, DTensor)
            grad = grad.redistribute(parameter.device_mesh, parameter.placements)  # sums those of sequence shards
        gradients[name] = _local(grad).clone()
        parameter.grad = None
    return value.detach(), gradients


def _mean(gradients: list[Local], case: Case) -> Local:
    """Return the mean over data ranks: within each shard group in the order of its ranks, then over replicas."""
    shards = case.shape[-2]
    scaled = [{name: wide(grad * (1.0 / len(gradients))) for name, grad in each.items()} for each in gradients]
    groups = [scaled[start : start + shards] for start in range(0, len(scaled), shards)]
    return _added([_added(group) for group in groups])


def _added(terms: list[Local]) -> Local:
    total, *others = terms
    for other in others:
        total = {name: grad + other[name] for name, grad in total.items()}
    return total


def _local(tensor: Any) -> Tensor:
    local: Any = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return local.wait() if hasattr(local, "wait") else local


def _placed_as(parameter: Any, local: Tensor) -> Any:
    if not isinstance(parameter, DTensor):
        return local
    how = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, **how)


def _same(model: nn.Module, sharded: dict[str, Any], expected: Local) -> None:
    """Compare what the shard group holds together with a tensor rank's part, to the bit. Every rank must call this."""
    assert sharded.keys() == expected.keys()
    for name, value in sharded.items():
        placement = value.placement
        found = value.gather_flat().view(placement.local_shape if hasattr(placement, "spec") else placement.shape)
        assert torch.equal(found, expected[name]), f"{name}: off by {(found - expected[name]).abs().max()}"
