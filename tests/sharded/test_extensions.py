"""Sharded parameters without what attaches to them: they train, and refuse other operations."""

import subprocess
import sys
import textwrap

import pytest

from shardwise.registry import _names, registered

ALONE = """
    from shardwise import registry
    registry._names.clear()

    import sys
    import torch
    from torch import nn
    from shardwise.errors import UsageError
    from shardwise.fsdp.layout import build_layout
    from shardwise.fsdp import operations
    from shardwise.fsdp.sharded_parameter import Placement, ShardedParameter

    assert not [name for name in sys.modules if name.startswith("shardwise.sharded.extensions.")]

    class Group:
        rank, world_size, device = 0, 1, torch.device("cpu")

    plain = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), ())]
    layout = build_layout([(str(i), tuple(p.shape)) for i, p in enumerate(plain)], 1, 4)

    def sharded(tensor, index):
        return ShardedParameter(tensor.detach().reshape(-1).clone(), Placement(layout, index, Group()))

    ours = [nn.Parameter(sharded(tensor, i)) for i, tensor in enumerate(plain)]
    for kind in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        optimizers = [torch.optim.AdamW(some, lr=0.1, **kind) for some in (plain, ours)]
        for _ in range(2):
            for i, (theirs, own) in enumerate(zip(plain, ours)):
                theirs.grad = torch.randn(theirs.shape)
                own.grad = sharded(theirs.grad, i)
            norms = [nn.utils.clip_grad_norm_(some, 0.5, foreach=True) for some in (plain, ours)]
            assert torch.equal(*norms), norms
            for optimizer in optimizers:
                optimizer.step()
            assert all(torch.equal(own.local.view(own.shape), theirs) for own, theirs in zip(ours, plain))

    for refused in (lambda p: p.sum(), lambda p: p @ p.T, lambda p: nn.init.normal_(p), lambda p: p + torch.ones(3, 4)):
        try:
            refused(ours[0])
        except UsageError as error:
            assert "'0'" in str(error), error
        else:
            raise AssertionError("not refused")
"""


def test_they_train_alone() -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(ALONE)], check=True)


@pytest.mark.parametrize("seam", sorted(_names))
def test_all_that_attaches_is_there(seam: str) -> None:
    assert len(registered(seam)) == len(_names[seam])
