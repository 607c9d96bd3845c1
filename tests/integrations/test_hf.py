"""transformers' Trainer, stock (DDP on CPUs) and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.hf import Trainer
from tests.engine.rig import on_ranks
from tests.integrations.models import Tokens, fresh, llama


def arguments(directory: Path, **options: Any) -> transformers.TrainingArguments:
    usual: dict[str, Any] = {
        "output_dir": str(directory),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    return transformers.TrainingArguments(**{**usual, **options})


def trainer_of(kind: Any, directory: Path, model: nn.Module | None = None, shard: Any = None, **options: Any) -> Any:
    more = {} if kind is transformers.Trainer else {"shard": shard}
    return kind(
        model=model or llama(),
        args=arguments(directory, **options),
        train_dataset=Tokens(),
        eval_dataset=Tokens(12),
        **more,
    )


def losses_of(trainer: Any, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return sw.full_state_dict(model, rank0_only=False)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2, timeout_s=120)
def test_losses_and_norms_are_those_of_the_stock_trainer(tmp_path: Path, strategy: str) -> None:
    found = []
    for kind in (transformers.Trainer, Trainer):
        with fresh():
            trainer = trainer_of(kind, tmp_path, shard={"strategy": strategy}, max_steps=20)
            trainer.train()
            found.append((losses_of(trainer), losses_of(trainer, "grad_norm"), trainer.evaluate()["eval_loss"]))
    (stock, norms, evaluated), (losses, own_norms, own_evaluated) = found
    assert len(losses) == 20
    assert losses == pytest.approx(stock, rel=1e-5)
    assert own_norms == pytest.approx(norms, rel=1e-4)
    assert own_evaluated == pytest.approx(evaluated, rel=1e-5)
    assert isinstance(next(trainer.model.parameters()), sw.ShardedParameter)


@on_ranks(2, timeout_s=120)
def test_a_checkpoint_resumes_as_if_nothing_had_happened(tmp_path: Path) -> None:
    with fresh():
        straight = trainer_of(Trainer, tmp_path, save_strategy="steps", save_steps=3)
        straight.train()
    checkpoint = tmp_path / "checkpoint-3"
    sw.checkpoint.verify(checkpoint)
    assert {"trainer_state.json", "scheduler.pt", "training_args.bin"} <= {path.name for path in checkpoint.iterdir()}
    assert not (checkpoint / "optimizer.pt").exists()
    with fresh():  # another model, another strategy
        again = trainer_of(Trainer, tmp_path / "again", llama(seed=5), shard={"strategy": "shard_grad_op"})
        again.train(resume_from_checkpoint=str(checkpoint))
    same(weights(again.model), weights(straight.model))
    assert losses_of(again) == losses_of(straight)
    again.train(resume_from_checkpoint=str(checkpoint))  # the model is sharded already
    same(weights(again.model), weights(straight.model))


@on_ranks(2, timeout_s=120)
def test_a_checkpoint_of_the_stock_trainer_resumes(tmp_path: Path) -> None:
    with fresh():
        stock = trainer_of(transformers.Trainer, tmp_path, save_strategy="steps", save_steps=3)
        stock.train()
    with fresh():
        ours = trainer_of(Trainer, tmp_path / "ours", llama(seed=5))
        for _ in range(2):  # into a model that is not sharded yet, and into one that is
            ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
            assert losses_of(ours) == pytest.approx(losses_of(stock), rel=1e-5)


@on_ranks(2, timeout_s=120)
def test_the_best_model_at_the_end_and_what_is_saved(tmp_path: Path) -> None:
    with fresh():
        trainer = trainer_of(
            Trainer,
            tmp_path,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            greater_is_better=True,  # the first, then
        )
        trainer.train()
        evaluated = losses_of(trainer, "eval_loss")
        assert evaluated[0] > evaluated[-1]
        assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated[0], rel=1e-6)
        trainer.save_model(str(tmp_path / "final"))
        dist.barrier()
        found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "final")
        same(found.state_dict(), weights(trainer.model))
        best = transformers.LlamaForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
        same(best.state_dict(), weights(trainer.model))
    if dist.get_rank() == 0:
        assert len(list(tmp_path.glob("checkpoint-*"))) <= 2


@on_ranks(2, timeout_s=120)
def test_evaluating_and_predicting_need_no_training(tmp_path: Path) -> None:
    with fresh():
        expected = trainer_of(transformers.Trainer, tmp_path).evaluate()["eval_loss"]
    with fresh():
        trainer = trainer_of(Trainer, tmp_path)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
        assert trainer.predict(Tokens(12)).predictions.shape[0] == 12
        trainer.train()
        assert losses_of(trainer)[-1] < losses_of(trainer)[0]


@on_ranks(2, timeout_s=120)
def test_fsdp_of_the_arguments_is_understood(tmp_path: Path) -> None:
    config = {"reshard_after_forward": False, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    with fresh():
        trainer = trainer_of(Trainer, tmp_path, fsdp=True, fsdp_config=config, max_steps=2)
        trainer.train()
        assert trainer.accelerator.shardwise_plugin.strategy == "shard_grad_op"
        assert not trainer.is_fsdp_enabled
        assert isinstance(next(trainer.model.parameters()), sw.ShardedParameter)


@on_ranks(2)
def test_a_mistyped_option_is_told(tmp_path: Path) -> None:
    with fresh(), pytest.raises(ConfigError, match="unknown option 'stategy'; did you mean strategy"):
        trainer_of(Trainer, tmp_path, shard={"stategy": "full_shard"})


def adapted(seed: int = 0) -> nn.Module:
    model = llama(seed)
    torch.manual_seed(seed + 1)
    found: nn.Module = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    return found


@on_ranks(2, timeout_s=120)
def test_adapters(tmp_path: Path) -> None:
    """LoRA: the stock Trainer's losses; checkpoints hold adapters alone, resume, and are what PEFT loads."""
    found = []
    for kind in (transformers.Trainer, Trainer):
        with fresh():
            trainer = trainer_of(kind, tmp_path / kind.__module__, adapted(), save_strategy="steps", save_steps=3)
            trainer.train()
            found.append(losses_of(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    checkpoint = tmp_path / Trainer.__module__ / "checkpoint-3"
    assert (checkpoint / "adapter_model.safetensors").stat().st_size < 50_000
    assert not list(checkpoint.glob("model*.safetensors"))
    for _ in range(2):
        with fresh():
            again = trainer_of(Trainer, tmp_path / "again", adapted())
            again.train(resume_from_checkpoint=str(checkpoint))
            assert losses_of(again) == found[1]
    again.save_model(str(tmp_path / "final"))
    dist.barrier()
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "final")
    trained = weights(again.model)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, trained[name]), name


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
@on_ranks(2, timeout_s=120)
def test_prompts_are_saved_and_go_on(tmp_path: Path, kind: str) -> None:
    """PEFT computes what it saves of them with the model's own modules."""

    def prompted() -> nn.Module:
        model = llama(0)
        torch.manual_seed(1)
        found: nn.Module = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4))
        return found

    with fresh():
        trainer = trainer_of(Trainer, tmp_path / "run", prompted(), save_strategy="steps", save_steps=3)
        trainer.train()
    losses = losses_of(trainer)
    with sw.unsharded(trainer.model):
        expected = trainer.model.get_prompt_embedding_to_save("default")
    trainer.save_model(str(tmp_path / "final"))
    dist.barrier()
    saved = load_file(tmp_path / "final" / "adapter_model.safetensors")
    assert torch.equal(saved["prompt_embeddings"], expected)
    if kind == "PromptTuningConfig":  # of an encoder PEFT saves its outputs alone, to which nobody can go on
        with fresh():
            again = trainer_of(Trainer, tmp_path / "again", prompted())
            again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
        assert losses_of(again) == losses
