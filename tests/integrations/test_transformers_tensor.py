"""Models that transformers has cut over a tensor axis as it loaded them, which takes accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

import shardwise as sw
from shardwise.errors import ConfigError, LayoutError, MeshError
from tests.engine.rig import on_ranks
from tests.engine.tensor.rig import build, forget_meshes


def _load(path: Path, **sizes: int) -> Any:
    """Load a model that transformers divides over ranks itself."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**sizes))


def _save_first(name: str, path: Path) -> None:
    if dist.get_rank() == 0:
        build(name).save_pretrained(path)
    dist.barrier()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3", "mixtral"))])
@on_ranks(2, timeout_s=120)
def test_a_model_that_transformers_has_cut_over_its_tensor_axis(name: str, tmp_path: Path) -> None:
    forget_meshes()
    _save_first(name, tmp_path / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").train()
    model = _load(tmp_path / "model", tp_size=2).train()
    with pytest.raises(
        ConfigError, match=r"transformers has cut this \w+ForCausalLM as it loaded it: leave tp_plan out"
    ):
        sw.shard(model, mesh=sw.mesh(tp=2), tp_plan="auto")
    with pytest.raises(MeshError, match=r"a DTensor over ranks \[0, 1\], .* again: pass mesh= the data axes alone"):
        sw.shard(model)
    sw.shard(model, mesh=sw.mesh(tp=2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(2):
        ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(step))
        losses = [each(input_ids=ids, labels=ids).loss for each in (plain, model)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        for (key, expected), (_, sharded) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            scale, found = expected.grad.abs().max().item(), sharded.grad.full_tensor()
            torch.testing.assert_close(
                found, expected.grad, atol=1e-3 * scale, rtol=0, msg=lambda m, k=key: f"{k}: {m}"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = sw.full_state_dict(model, rank0_only=False)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(full[key], value, atol=1e-5, rtol=1e-4)
    if dist.get_rank() == 0:  # alone: transformers waits for all ranks where it has divided the model
        model.save_pretrained(tmp_path / "saved", state_dict=full)
        written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
        assert all(torch.equal(written[key], value) for key, value in full.items())


@on_ranks(4, timeout_s=120)
def test_a_model_that_transformers_has_divided_over_data_ranks_too_is_refused(tmp_path: Path) -> None:
    forget_meshes()
    _save_first("llama", tmp_path)
    with pytest.raises(RuntimeError, match="requires 2 processes, but world_size is 4"):
        _load(tmp_path, tp_size=2)  # the ranks that are left must be FSDP2's
    for sizes in ({"fsdp_size": 2}, {"dp_replicate_size": 2}):
        model = _load(tmp_path, tp_size=2, **sizes)
        words = r"transformers has sharded this FSDPLlamaForCausalLM itself: load it without .*=sw.mesh\(tp=...\)"
        for plan in (None, "auto"):
            with pytest.raises(LayoutError, match=words):
                sw.shard(model, mesh=sw.mesh(tp=2), tp_plan=plan)
