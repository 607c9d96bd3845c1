"""Sharding changes no bit of a tensor-parallel model: losses, gradients and weights are those of the same model, cut by
the same plan over the same tensor ranks, that is not sharded.

One process would be no reference to the bit: it computes a product in one sum that is cut here, and each tensor rank
adds up a part. Nothing else differs from the unsharded model. Local tensors have the same shapes, so the same kernels
compute with them; sums over the tensor axis are the same collectives of the same numbers; and the mean over data ranks
is taken in their order, of terms that are scaled first, which the reference does too. So numbers of ranks that are no
powers of two are exact as well. Updates are elementwise. The norm of all gradients is not compared: it adds squares
piece by piece.
"""

from __future__ import annotations

import copy
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
from tests.engine.tensor.rig import Case, Model, build, column_and_row, loss_of, sequence, vocabulary

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
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_that_of_the_unsharded_tensor_parallel_model(ranks: Any, case: Case) -> None:
    ranks(case.world_size).run(_train, case)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_so_is_that_of_a_model_cut_by_the_plan_of_transformers(ranks: Any, name: str) -> None:
    ranks(4).run(_train_llama, name)


def _train(case: Case) -> None:
    mesh = case.mesh()
    torch.manual_seed(0)
    reference = Model(**case.model)
    model = copy.deepcopy(reference)
    for each in (reference, model):
        parallelize_module(each, mesh["tp"], dict(case.plan(each)))
    sw.shard(model, case.strategy, mesh=case.data(mesh), **case.shard)
    _compare(case, mesh, reference, model, loss_of)


def _train_llama(name: str) -> None:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    case = Case(column_and_row)
    mesh = case.mesh()
    reference, model = build(name), build(name)
    apply_tensor_parallelism(reference, mesh["tp"], reference._expand_parallel_plan(reference.tp_plan))
    sw.shard(model, mesh=mesh, tp_plan="auto")
    _compare(case, mesh, reference, model, lambda each, tokens: each(input_ids=tokens, labels=tokens).loss)


def _compare(case: Case, mesh: DeviceMesh, reference: Any, model: Any, loss: Callable[[Any, Tensor], Tensor]) -> None:
    """Train both for three steps. Each tensor group runs the whole batch through its unsharded model."""
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False) for each in (reference, model)]
    own = dist.get_rank() // mesh["tp"].size()
    for step in range(3):
        everyone, _ = case.batches(mesh, step)
        total: Local = {}
        for number in range(case.micro_batches):
            found = [_backward(reference, loss, tokens) for tokens in everyone[:, number]]
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
    scaled = [{name: grad * (1.0 / len(gradients)) for name, grad in each.items()} for each in gradients]
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
