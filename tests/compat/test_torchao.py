"""torchao's float8 training on sharded models, beside FSDP2. Skipped where torchao is not installed."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.compat import fsdp2 as ours
from tests.engine.rig import batch, on_ranks, squares

float8: Any = pytest.importorskip("torchao.float8")


class Block(nn.Module):
    """Sizes that float8's kernels take: multiples of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + added


class Net(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 32), nn.Linear(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.leave(x)  # type: ignore[no-any-return]


def losses(fsdp: types.ModuleType, recipe: str, bf16: bool, recomputes: bool) -> list[float]:
    """Of a script in which the linear layers of blocks compute in float8; "gathered": weights travel in it too."""
    torch.manual_seed(0)
    model: Any = Net(recomputes)
    if recipe == "gathered":
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    else:
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)  # processors have no matmul in float8
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, fqn: "blocks" in fqn)
    policy = torchs.MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else torchs.MixedPrecisionPolicy()
    for module in (*model.blocks, model):
        fsdp.fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(6):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss = squares(model, batch(2 * step + micro))
            loss.backward()
            found.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float8.precompute_float8_dynamic_scale_for_fsdp(model)
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "gathered"])
@on_ranks(2, timeout_s=120)
def test_float8_layers_train_as_with_fsdp2(recipe: str) -> None:
    plain = losses(torchs, recipe, bf16=True, recomputes=False)
    for recomputes in (False, True):
        assert losses(ours, recipe, bf16=True, recomputes=recomputes) == pytest.approx(plain, rel=1e-6)
    assert losses(ours, recipe, bf16=False, recomputes=True) == pytest.approx(
        losses(torchs, recipe, bf16=False, recomputes=True), rel=1e-6
    )
