"""PEFT's LoRA beside tensor parallelism, compared with the same adapters in one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ConfigError
from tests.engine.rig import on_ranks
from tests.engine.tensor import rig
from tests.engine.tensor.rig import Model, build, forget_meshes, loss_of

peft = pytest.importorskip("peft")


@dataclass(frozen=True)
class Adapted:
    """A model with adapters, how it is cut, and over how many ranks."""

    name: str
    ranks: int = 4
    strategy: str = "full_shard"
    options: Mapping[str, Any] = field(default_factory=dict)
    wrap: bool = True

    def __str__(self) -> str:
        return "-".join([self.name, self.strategy, *self.options])

    @property
    def is_toy(self) -> bool:
        return hasattr(rig, self.name)

    def build(self) -> Any:
        torch.manual_seed(0)
        model: Any = Model() if self.is_toy else build(self.name)
        options = {
            "r": 3,
            "init_lora_weights": False,
            "target_modules": ["up", "down"] if self.is_toy else "all-linear",
        }
        config = peft.LoraConfig(**options | dict(self.options))
        return (peft.get_peft_model if self.wrap else _injected)(model, config)

    @property
    def plan(self) -> Any:
        return getattr(rig, self.name)(Model()) if self.is_toy else "auto"

    def loss(self, model: Any, tokens: Tensor) -> Tensor:
        return loss_of(model, tokens) if self.is_toy else model(input_ids=tokens, labels=tokens).loss


def _injected(model: nn.Module, config: Any) -> Any:
    return peft.inject_adapter_in_model(config, model)


CASES = (
    Adapted("column_and_row"),
    Adapted("sequence", strategy="shard_optimizer"),
    Adapted("llama", options={"lora_bias": False, "use_rslora": True}, wrap=False),
    Adapted("llama-uneven", options={"target_modules": ["q_proj", "up_proj", "down_proj", "lm_head"]}),
    Adapted("llama", options={"modules_to_save": ["lm_head"], "target_modules": ["o_proj", "embed_tokens"]}),
    Adapted("qwen3", strategy="no_shard"),
    Adapted("phi3"),
)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_gradients_are_those_of_one_process(ranks: Any, case: Adapted) -> None:
    ranks(case.ranks).run(_train, case)


def _train(case: Adapted) -> None:
    forget_meshes()
    plain = case.build()
    model = copy.deepcopy(plain)
    mesh = sw.mesh(tp=2)
    sw.shard(model, case.strategy, mesh=mesh, tp_plan=case.plan)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    data_ranks, own = mesh["dp_shard"].size(), mesh["dp_shard"].get_local_rank()
    for step in range(2):
        tokens = torch.randint(31, (data_ranks, 2, 8), generator=torch.Generator().manual_seed(step))
        losses = torch.stack([case.loss(plain, rows) for rows in tokens])
        losses.mean().backward()
        loss = case.loss(model, tokens[own])
        loss.backward()
        torch.testing.assert_close(loss, losses[own], rtol=1e-5, atol=1e-6)
        for (key, expected), (_, sharded) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert (expected.grad is None) == (sharded.grad is None), key
            if expected.grad is not None:
                scale = expected.grad.abs().max().item()
                found = sharded.grad.full_tensor()
                torch.testing.assert_close(
                    found, expected.grad, atol=1e-4 * scale + 1e-9, rtol=0, msg=lambda m, k=key: f"{k}: {m}"
                )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore::UserWarning")
@on_ranks(2)
def test_adapters_drop_whole_inputs_equally_and_cut_ones_differently() -> None:
    forget_meshes()
    case = Adapted("llama", options={"lora_dropout": 0.5})
    model = case.build().train()
    sw.shard(model, mesh=sw.mesh(tp=2), tp_plan="auto")
    masks: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            masks[name] = []
            module.register_forward_hook(lambda _, args, output, found=masks[name]: found.append(output != 0))
    tokens = torch.arange(16).view(2, 8)
    for _ in range(2):
        case.loss(model, tokens).backward()
    every: list[Any] = [None, None]
    dist.all_gather_object(every, ({name: torch.stack(each) for name, each in masks.items()}, torch.get_rng_state()))
    (one, state), (other, its_state) = every
    assert len(one) == 14
    assert torch.equal(state, its_state)
    for name, mask in one.items():
        is_cut = "o_proj" in name or "down_proj" in name
        agreeing = (mask == other[name]).float().mean()
        assert 0.3 < agreeing < 0.7 if is_cut else agreeing == 1, name
        assert not torch.equal(*mask)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grads: list[Any] = [None, None]
            dist.all_gather_object(grads, parameter.grad.full_tensor())
            assert torch.equal(*grads), name


def _save_adapter(path: Path, tp: int) -> None:
    """Numbers of their own, equal at every mesh."""
    forget_meshes()
    model = Adapted("llama-uneven").build()
    sw.shard(model, mesh=sw.mesh(tp=tp), tp_plan="auto" if tp > 1 else None)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    generator = torch.Generator().manual_seed(1)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        for tensor in (parameter.detach(), optimizer.state[parameter]["exp_avg"]):
            tensor.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer.state[parameter]["exp_avg_sq"].fill_(1)
    sw.checkpoint.save(path, model, optimizer, adapter=True)
    kept = sw.full_state_dict(model, rank0_only=False)
    with torch.no_grad():
        for parameter in optimizer.state:
            parameter.zero_()
            optimizer.state[parameter]["exp_avg"].zero_()
    sw.checkpoint.load(path.parent / "0", model, optimizer)
    assert all(torch.equal(value, kept[name]) for name, value in sw.full_state_dict(model, rank0_only=False).items())
    assert all(optimizer.state[parameter]["exp_avg"].full_tensor().count_nonzero() for parameter in optimizer.state)
    found = model.eval()(input_ids=torch.arange(6)[None]).logits
    torch.save((kept, found), path / f"{dist.get_rank()}.pt")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_files_of_adapters_are_those_of_one_process(ranks: Any, tmp_path: Path) -> None:
    for number, (world_size, tp) in enumerate(((1, 1), (4, 2))):
        ranks(world_size).run(_save_adapter, tmp_path / str(number), tp)
        files = [file for file in (tmp_path / "0").iterdir() if file.suffix == ".safetensors"]
        assert len(files) == 2
        for file in files:
            assert (tmp_path / str(number) / file.name).read_bytes() == file.read_bytes()
    loaded = peft.PeftModel.from_pretrained(build("llama-uneven"), tmp_path / "1")
    kept, found = torch.load(tmp_path / "1" / "0.pt")
    assert {name for name in kept if "lora_" in name} <= loaded.state_dict().keys()
    torch.testing.assert_close(loaded.eval()(input_ids=torch.arange(6)[None]).logits, found, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@on_ranks(2)
def test_adapters_that_cannot_follow_are_refused() -> None:
    forget_meshes()
    mesh = sw.mesh(tp=2)
    for name, options, message in (
        ("llama", {"use_dora": True}, r"PEFT's peft.Linear cannot follow 'model.layers.0.self_attn.q_proj', which is"),
        ("mixtral", {"target_parameters": ["mlp.experts.gate_up_proj"]}, "PEFT's adapter of single parameters of"),
    ):
        with pytest.raises(ConfigError, match=message):
            sw.shard(Adapted(name, options=options).build(), mesh=mesh, tp_plan="auto")
    model = Adapted("llama").build()
    with pytest.raises(ConfigError, match="frozen='nf4' of DTensors is not supported"):
        sw.shard(model, mesh=mesh, tp_plan="auto", precision=sw.Precision(frozen="nf4"))
    with torch.device("meta"):
        model = Adapted("llama", options={"init_lora_weights": True}).build()
    torch.manual_seed(0)
    sw.shard(model, mesh=mesh, tp_plan="auto")
    expected = Adapted("llama", options={"init_lora_weights": True}).build().state_dict()
    assert all(torch.equal(v, expected[n]) for n, v in sw.full_state_dict(model, rank0_only=False).items())
