"""Dropout of tensor-parallel models: equal on the ranks of a tensor group where activations are whole, and different
where each has its own part."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

import shardwise as sw
from tests import device
from tests.engine.rig import on_ranks
from tests.engine.tensor.rig import VOCAB, WIDTH, Model, forget_meshes, loss_of
from tests.ranks import RankPools

PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


class DropoutBlock(nn.Module):
    """An MLP with dropout of its hidden features, which the tensor axis cuts, and of its output, which it does not."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.down(self.inner(F.gelu(self.up(x)))))


def _model(hidden: int, recompute: bool = False) -> Model:
    torch.manual_seed(0)
    model = Model(hidden, recompute=recompute)
    model.blocks = nn.ModuleList(DropoutBlock(hidden) for _ in range(3))
    sw.shard(model, mesh=sw.mesh(tp=2), tp_plan=PLAN)
    return model


def _by_rank(value: Tensor) -> list[Tensor]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value.detach())
    return found


def _keep(masks: list[Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
    masks.append(output != 0)


@on_ranks(4)
def test_masks_differ_where_features_are_cut_and_are_equal_elsewhere() -> None:
    forget_meshes()
    model = _model(hidden=24)
    masks: dict[str, list[Tensor]] = {"inner": [], "outer": []}
    for block in model.blocks:
        for name, found in masks.items():
            getattr(block, name).register_forward_hook(partial(_keep, found))
    tokens = torch.arange(32).view(4, 8) % VOCAB
    torch.manual_seed(dist.get_rank() // 2)
    for _ in range(2):
        loss_of(model, tokens).backward()
    assert len(masks["inner"]) == 6
    inner, outer = [_by_rank(torch.stack(masks[name])) for name in masks]
    assert torch.equal(outer[0], outer[1])
    assert torch.equal(outer[2], outer[3])
    assert not torch.equal(outer[0], outer[2])
    for a, b in ((0, 1), (2, 3), (0, 2)):
        assert 0.4 < (inner[a] == inner[b]).float().mean() < 0.6, "as of independent draws"
    drawn = [*inner[0], *inner[1]]  # of each layer and forward
    for i, one in enumerate(drawn):
        assert all(0.4 < (one == other).float().mean() < 0.6 for other in drawn[:i])


@on_ranks(2)
def test_ranks_still_agree_after_draws_of_different_sizes_and_after_an_error() -> None:
    forget_meshes()
    model = _model(hidden=24)
    for block in model.blocks:
        block.inner.register_forward_hook(_draw_unevenly)
    tokens = torch.arange(32).view(4, 8) % VOCAB
    torch.manual_seed(1)
    losses = []
    for step in range(3):
        if step == 1:
            handle = model.blocks[1].inner.register_forward_hook(_fail)
            with pytest.raises(ZeroDivisionError):
                model(tokens)
            handle.remove()
            assert torch.equal(*_by_rank(torch.get_rng_state()))
        loss = loss_of(model, tokens)
        loss.backward()
        losses.append(loss.item())
        assert torch.equal(*_by_rank(torch.get_rng_state()))
    assert len(set(losses)) == 3
    grads = _by_rank(model.norm.weight.grad.full_tensor())
    assert torch.equal(*grads)


def _draw_unevenly(*_: object) -> None:
    torch.rand(5 + dist.get_rank())


def _fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("stops_in_region", [False, True])
def test_recomputation_draws_the_same_again(ranks: RankPools, stops_in_region: bool) -> None:
    ranks(2).run(_recomputes, stops_in_region)


def _recomputes(stops_in_region: bool) -> None:
    forget_meshes()
    tokens = torch.arange(32).view(4, 8) % VOCAB
    found = []
    for recompute in (False, True):
        model = _model(hidden=24, recompute=recompute)
        if stops_in_region:  # the row-wise layer is the last that saves a tensor, and recomputation stops there
            for block in model.blocks:
                block.outer = nn.Identity()
        torch.manual_seed(1)
        loss_of(model, tokens).backward()
        loss_of(model, tokens).backward()
        found.append([p.grad.full_tensor() for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(kept, again) for kept, again in zip(*found, strict=True))


def _cut_before(model: Model) -> None:
    mesh = init_device_mesh(device.kind(), (1, 2), mesh_dim_names=("dp_shard", "tp"))
    plan = {"blocks.*.up": ColwiseParallel(use_local_output=False), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    sw.shard(model, mesh=mesh["dp_shard"])


def _cut_along_the_sequence(model: Model) -> None:
    whole, along = Replicate(), Shard(1)
    plan = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=along),
        "blocks.*.up": ColwiseParallel(input_layouts=along, use_local_output=False),
        "blocks.*.down": RowwiseParallel(output_layouts=along),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=along, output_layouts=whole),
    }
    sw.shard(model, mesh=sw.mesh(tp=2), tp_plan=plan)


@pytest.mark.parametrize("cut", [_cut_before, _cut_along_the_sequence])
def test_ranks_go_on_alike_after_dropout_of_parts_of_different_sizes(ranks: RankPools, cut: Any) -> None:
    ranks(2).run(_drops_from_uneven_parts, cut)


def _drops_from_uneven_parts(cut: Any) -> None:
    """Of 23 features a rank has 12, the other 11. If their states went apart, so would replicated parameters."""
    tokens = torch.arange(32).view(4, 8) % VOCAB
    losses: list[list[float]] = []
    for recompute in (False, True):
        forget_meshes()
        torch.manual_seed(0)
        model = Model(23, recompute=recompute)
        model.blocks = nn.ModuleList(DropoutBlock(23) for _ in range(3))
        cut(model)
        masks: list[Tensor] = []
        model.blocks[2].outer.register_forward_hook(partial(_keep, masks))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(1)
        losses.append([])
        for _ in range(3):
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(*_by_rank(torch.get_rng_state()))
            losses[-1].append(loss.item())
        assert torch.equal(*_by_rank(torch.stack(masks)))
        assert not torch.equal(masks[0], masks[-1])
        for name, parameter in model.named_parameters():
            if "norm" in name or "down.bias" in name:
                assert torch.equal(*_by_rank(parameter.local)), name
    assert losses[0] == losses[1], "recomputation draws the same again"


@pytest.mark.filterwarnings("ignore::UserWarning")
@on_ranks(2)
def test_a_transformers_model_with_dropout() -> None:
    forget_meshes()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.GPTNeoXConfig(
        **sizes, vocab_size=VOCAB, attention_dropout=0.3, hidden_dropout=0.3, attn_implementation="eager"
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    sw.shard(model, mesh=sw.mesh(tp=2), tp_plan="auto")
    weights: list[Tensor] = []
    for layer in model.gpt_neox.layers:
        layer.attention.register_forward_hook(lambda module, args, output: weights.append(output[1] != 0))
    tokens = torch.arange(32).view(4, 8) % VOCAB
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second = _by_rank(torch.stack(weights))
    assert not torch.equal(first, second), "heads of two ranks drop other weights"
    for name, parameter in model.named_parameters():
        if "norm" in name or "embed" in name or "dense.bias" in name:
            one, other = _by_rank(parameter.local)
            assert torch.equal(one, other), name
