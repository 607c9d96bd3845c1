"""Accelerate's scripts, with its stock Accelerator (DDP on CPUs) and with ours."""

from __future__ import annotations

import inspect
import os
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
)
from torch import nn
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.errors import ConfigError, UsageError
from shardwise.integrations.accelerate import Accelerator, ShardwisePlugin
from tests.engine.rig import on_ranks
from tests.integrations.models import Tokens, fresh, llama


class Script:
    """A user's training script, whatever its Accelerator is."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 100)
        batches = DataLoader(Tokens(), batch_size=4)
        self.model, self.optimizer, self.batches, self.schedule = accelerator.prepare(
            model, optimizer, batches, schedule
        )

    def train(self, epochs: int) -> list[float]:
        losses = []
        for _ in range(epochs):
            for batch in self.batches:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                losses.append(self.accelerator.gather_for_metrics(loss.detach()[None]).mean().item())
        return losses


def ours(**options: Any) -> Script:
    return Script(Accelerator(shardwise_plugin=ShardwisePlugin(**options), gradient_accumulation_steps=2))


@pytest.mark.parametrize("model_first", [True, False])
@on_ranks(2)
def test_an_optimizer_that_was_built_first_is_handed_over(model_first: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for made in (model, optimizer) if model_first else (optimizer, model):
        accelerator.prepare(made)
    assert optimizer.param_groups[0]["params"] == [*model.parameters()]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_losses_are_those_of_the_stock_accelerator(strategy: str) -> None:
    with fresh():
        stock = Script(accelerate.Accelerator(gradient_accumulation_steps=2)).train(3)
    with fresh():
        losses = ours(strategy=strategy).train(3)
    assert len(losses) == 24
    assert losses == pytest.approx(stock, rel=1e-5)
    assert losses[-1] < 0.9 * losses[0]


@on_ranks(2)
def test_bf16_is_near_the_stock_accelerators() -> None:
    with fresh():
        stock = Script(accelerate.Accelerator(mixed_precision="bf16")).train(3)
    with fresh():
        script = Script(Accelerator(mixed_precision="bf16"))
        losses = script.train(3)
    assert losses == pytest.approx(stock, rel=2e-2)
    assert all(parameter.dtype == torch.float32 for parameter in script.model.parameters())


@on_ranks(2)
def test_a_saved_state_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    with fresh():
        script = ours()
        script.train(1)
        script.accelerator.save_state(str(tmp_path / "state"))
        script.accelerator.save_state(str(tmp_path / "state"))  # over the first
        straight = script.train(1)
    sw.checkpoint.verify(tmp_path / "state" / "shardwise")
    with fresh():
        again = ours(strategy="shard_grad_op")
        again.accelerator.load_state(str(tmp_path / "state"))
        assert again.train(1) == straight
        assert again.schedule.get_last_lr() == script.schedule.get_last_lr()


@on_ranks(2)
def test_hooks_of_the_users_see_models_and_the_weights_that_accelerate_writes(tmp_path: Path) -> None:
    seen = []
    with fresh():
        script = ours()
        script.accelerator.register_save_state_pre_hook(lambda *arguments: seen.append(arguments))
        script.accelerator.save_state(str(tmp_path / "state"))
    ((models, weights, _),) = seen
    assert models == [script.model]
    assert weights == []


@on_ranks(2)
def test_full_weights_for_saving(tmp_path: Path) -> None:
    with fresh():
        script = ours()
        state = script.accelerator.get_state_dict(script.model)
        names = set(state)  # save_pretrained empties it
        model = script.accelerator.unwrap_model(script.model)
        model.save_pretrained(
            tmp_path / "plain",
            state_dict=state,
            is_main_process=script.accelerator.is_main_process,
            save_function=script.accelerator.save,
        )
        script.accelerator.save_model(script.model, str(tmp_path / "by-accelerate"))
        script.accelerator.wait_for_everyone()
    if dist.get_rank() == 0:
        expected = llama().state_dict()
        assert names == set(expected)
        found = type(model).from_pretrained(tmp_path / "plain").state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert (tmp_path / "by-accelerate" / "model.safetensors").is_file()
    else:
        assert not names


@on_ranks(2)
def test_a_model_is_sharded_once_and_also_for_evaluation() -> None:
    with fresh():
        accelerator = Accelerator()
        model = llama()
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        assert prepared is model is accelerator.prepare(model)
        assert accelerator.unwrap_model(model) is model
        assert all(isinstance(parameter, sw.ShardedParameter) for parameter in model.parameters())
        assert accelerator.distributed_type.value == "MULTI_CPU"


@on_ranks(2)
def test_the_plugin_has_every_argument_of_shard() -> None:
    names = set(inspect.signature(sw.shard).parameters) - {"model"}
    assert {field.name for field in fields(ShardwisePlugin)} - names == {"ignored_modules", "activation_checkpointing"}
    assert names <= {field.name for field in fields(ShardwisePlugin)}
    model = llama()
    ShardwisePlugin(align=256).shard(model, "no")
    fragments = [parameter.placement.fragment for parameter in model.parameters()]
    assert fragments
    assert not any(fragment.offset % 256 for fragment in fragments)


@on_ranks(2)
def test_what_an_fsdp_plugin_asks_for() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=True,
    )
    with fresh():
        accelerator = Accelerator(fsdp_plugin=plugin)
        assert accelerator.shardwise_plugin.strategy == "shard_grad_op"
        assert accelerator.shardwise_plugin.activation_checkpointing == "full"
        model = accelerator.prepare(llama())
        assert [row.fqn for row in sw.describe(model).units] == ["", "model.layers.0", "model.layers.1"]
        assert not accelerator.is_fsdp2
    for asked in (True, False):
        with fresh():
            accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=asked))
            expected = sw.Offload(params="cpu", optimizer="cpu", gradients="cpu") if asked else None
            assert accelerator.shardwise_plugin.offload == expected


@on_ranks(2)
def test_what_an_fsdp_plugin_asks_for_in_vain() -> None:
    options = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecodrLayer"]}
    with (
        fresh(),
        pytest.raises(ConfigError, match=r"no module of class 'LlamaDecodrLayer'; did you mean LlamaDecoderLayer"),
    ):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**options)).prepare(llama())
    with fresh(), pytest.raises(UsageError, match=r"param_init_fn would not be called; .*reset_parameters\(\)"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(param_init_fn=lambda module: None))
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)
    with (
        fresh(),
        pytest.raises(UsageError, match="comm_hook='power_sgd' is not supported, because hooks of DDP see no"),
    ):
        Accelerator(kwargs_handlers=[hook])


@on_ranks(2)
def test_a_model_compiled_before_it_is_prepared_is_saved(tmp_path: Path) -> None:
    with fresh():
        accelerator = Accelerator()
        model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), backend="eager")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        found = []
        for turn in range(3):
            if turn == 1:
                accelerator.save_state(str(tmp_path))
            loss = model(torch.ones(2, 4)).sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if len(found) == 2:
                accelerator.load_state(str(tmp_path))
        assert found[0] != found[1] == found[2]
        names = {"0.weight", "0.bias", "1.weight", "1.bias"} if dist.get_rank() == 0 else set()
        assert set(accelerator.get_state_dict(model)) == names


@on_ranks(2)
def test_a_backward_is_reduced_inside_no_sync_where_that_is_asked() -> None:
    found = []
    for kind in (accelerate.Accelerator, Accelerator):
        with fresh():
            torch.manual_seed(0)
            accelerator = kind(mixed_precision="fp16")  # on CPUs nothing to Accelerate
            model, optimizer = accelerator.prepare(linear := nn.Linear(4, 1), torch.optim.SGD(linear.parameters(), 0.1))
            ranks_own = torch.full((2, 4), 1.0 + dist.get_rank())
            with accelerator.no_sync(model):
                first, second = model(ranks_own).sum(), model(2 * ranks_own).pow(2).sum()
                accelerator.backward(first)
                with accelerator.trigger_sync_in_backward(model):
                    accelerator.backward(second)
            optimizer.step()
            found.append(model(ranks_own).sum().item())
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@on_ranks(2)
def test_what_accelerates_launcher_leaves_in_the_environment() -> None:
    left = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "1000",
    }
    with fresh(), mock.patch.dict(os.environ, left):
        accelerator = Accelerator()
        assert os.environ["ACCELERATE_USE_FSDP"] == "true"
        assert accelerator.shardwise_plugin.strategy == "hybrid_shard"
        assert accelerator.shardwise_plugin.units == 1000
        assert getattr(accelerator.state, "fsdp_plugin", None) is None


@on_ranks(2)
def test_what_cannot_be_had_is_told(tmp_path: Path) -> None:
    with fresh():
        accelerator = Accelerator()
        with pytest.raises(UsageError, match="sharded ranks step together"), accelerator.join_uneven_inputs([]):
            pass
        model = accelerator.prepare(llama())
        accelerator.prepare(*(torch.optim.SGD([next(model.parameters())], lr=0.1) for _ in range(2)))
        with pytest.raises(UsageError, match="one optimizer for each sharded model"):
            accelerator.save_state(str(tmp_path / "state"))
        assert not (tmp_path / "state").exists()
