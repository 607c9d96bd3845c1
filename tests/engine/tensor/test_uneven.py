"""Sizes that a mesh of 2 x 2 does not divide."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardwise as sw
from tests.engine.rig import on_ranks
from tests.engine.tensor.rig import Case, Model, column_and_row


@on_ranks(4, timeout_s=120)
def test_sizes_that_the_mesh_does_not_divide() -> None:
    """`benchmarks/steps/uneven_tensor.py` has FSDP2 beside this. Of one feature, one tensor rank holds nothing."""
    for hidden in (1, 2, 3, 5, 6, 7, 9):
        case = Case(column_and_row, model={"hidden": hidden})
        mesh = case.mesh()
        plain, model = case.build(mesh)
        _assert_equal(model, plain)
        case.backward(mesh, plain, model, step=0)
        for own, sharded in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(sharded.grad.full_tensor(), own.grad, atol=1e-6, rtol=1e-4)
        other = Model(hidden)
        model.load_state_dict(other.state_dict())
        _assert_equal(model, other)


def _assert_equal(model: nn.Module, plain: nn.Module) -> None:
    full: dict[str, Tensor] = sw.full_state_dict(model, rank0_only=False)
    for (name, value), (_, sharded) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert isinstance(sharded, sw.ShardedParameter)
        assert torch.equal(sharded.full_tensor(), value), name
        assert torch.equal(full[name], value), name
