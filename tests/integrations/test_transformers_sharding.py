"""transformers' own sharding (`DistributedConfig`): its plans and configurations are taken, its models are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

import shardwise as sw
from shardwise.engine.lookup import engine_of
from shardwise.errors import ConfigError, LayoutError
from shardwise.integrations.hf import Trainer
from tests.engine.rig import on_ranks
from tests.integrations.models import Tokens, fresh, llama
from tests.ranks import RankPools


def arguments(directory: Path, **options: Any) -> transformers.TrainingArguments:
    usual: dict[str, Any] = {
        "output_dir": str(directory),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    return transformers.TrainingArguments(**{**usual, **options})


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def native(path: Path, **sizes: int) -> Any:
    """A model that transformers itself shards."""
    return transformers.LlamaForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**sizes))


def units(model: Any) -> list[str]:
    engine = engine_of(model)
    assert engine is not None
    return [unit.fqn for unit in engine.units]


def test_units_are_those_of_the_model_s_plan() -> None:
    model = sw.shard(llama(), units="transformers")
    assert units(model) == ["", "model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]  # no norm alone
    changed = llama()
    changed.fsdp_plan = {"model.layers.*.mlp": "free_full_weight", "lm_head": "keep_full_weight"}
    assert units(sw.shard(changed, units="transformers")) == ["", "model.layers.0.mlp", "model.layers.1.mlp", "lm_head"]
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))  # type: ignore[arg-type]
    inner = "base_model.model.model"
    assert f"{inner}.layers.1" in units(sw.shard(adapted, units="transformers"))
    with pytest.raises(
        ConfigError, match=r"Linear has no fsdp_plan, which models of transformers have: leave units out"
    ):
        sw.shard(torch.nn.Linear(2, 2), units="transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=16, **sizes))
    with pytest.raises(ConfigError, match="names no module of BertModel: leave units out"):
        sw.shard(bert, units="transformers")


@on_ranks(2, timeout_s=180)
def test_the_trainer_with_a_distributed_config_trains_as_transformers_does(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        llama().save_pretrained(tmp_path / "model")
    dist.barrier()
    sizes = {"fsdp_size": 2}
    with fresh():
        stock = transformers.Trainer(
            model=native(tmp_path / "model", **sizes), args=arguments(tmp_path), train_dataset=Tokens()
        )
        stock.train()
    with fresh():
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
        shard = DistributedConfig(**sizes)
        ours = Trainer(model=model, args=arguments(tmp_path), train_dataset=Tokens(), shard=shard)
        ours.train()
    assert losses_of(ours) == pytest.approx(losses_of(stock), rel=1e-5)
    assert units(ours.model)[1:3] == ["model.embed_tokens", "model.layers.0"]


@on_ranks(2, timeout_s=180)
def test_what_transformers_has_sharded_is_refused_by_name(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        llama().save_pretrained(tmp_path / "model")
    dist.barrier()
    model = native(tmp_path / "model", fsdp_size=2)
    words = (
        r"transformers has sharded this FSDPLlamaForCausalLM itself: load it without distributed_config and .* or leave"
    )
    with pytest.raises(LayoutError, match=words):
        sw.shard(model)
    with fresh(), pytest.raises(LayoutError, match=words):
        Trainer(model=model, args=arguments(tmp_path), train_dataset=Tokens())
    with fresh(), pytest.raises(ValueError, match="Resuming is not supported for models sharded at load time"):
        transformers.Trainer(  # what the next test does
            model=model, args=arguments(tmp_path, save_strategy="steps", save_steps=3), train_dataset=Tokens()
        )


@on_ranks(2, timeout_s=180)
def test_a_trainer_refuses_what_transformers_has_cut_over_its_tensor_axis(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        llama().save_pretrained(tmp_path / "model")
    dist.barrier()
    model = native(tmp_path / "model", tp_size=2)
    with fresh(), pytest.raises(LayoutError, match="over its axis 'tp': this trainer gives each rank its own batches"):
        Trainer(model=model, args=arguments(tmp_path), train_dataset=Tokens())


def _train(folder: Path, config: DistributedConfig, resumes: bool, accumulation: int) -> tuple[list[float], Any]:
    """Train to step 6, from the beginning or from the checkpoint at 3. Returns the losses and one of the weights."""
    with fresh():
        options = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": accumulation}
        trainer = Trainer(
            model=llama(), args=arguments(folder / "out", **options), train_dataset=Tokens(), shard=config
        )
        trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-3") if resumes else None)
        return losses_of(trainer), sw.full_state_dict(trainer.model, rank0_only=False)["lm_head.weight"]


@pytest.mark.parametrize("after", [DistributedConfig(fsdp_size=2), DistributedConfig(fsdp_size=2, dp_replicate_size=2)])
def test_such_a_run_is_saved_and_resumed(after: DistributedConfig, ranks: RankPools, tmp_path: Path) -> None:
    """On the same ranks to the bit, and on others with the same batch."""
    losses, weight = ranks(2).run(_train, tmp_path, DistributedConfig(fsdp_size=2), False, 2, timeout_s=120)[0]
    number = after.dp_size
    again, same = ranks(number).run(_train, tmp_path, after, True, 4 // number, timeout_s=120)[0]
    assert len(again) == len(losses) == 6
    if number == 2:
        assert again == losses
        assert torch.equal(same, weight)
    else:
        assert again == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(same, weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DistributedConfig(fsdp_size=4), "dp_replicate_size is 4, but the number of ranks is 1"),
        (
            DistributedConfig(fsdp_size=2, ep_size=2),
            "ep_size = 2: not supported by this trainer: use",
        ),
        (DistributedConfig(tp_size=2), "tp_size = 2: this trainer gives each rank its own batches"),
        (DistributedConfig(fsdp_plan={"lm_head": "keep_full_weight"}), "set fsdp_plan on the model instead"),
    ],
)
def test_configurations_that_cannot_be_taken(config: DistributedConfig, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        Trainer(model=llama(), args=arguments(tmp_path), train_dataset=Tokens(), shard=config)
