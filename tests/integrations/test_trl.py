"""TRL's trainers, which derive from transformers', with the mixin and without."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

import shardwise as sw
from shardwise.engine.lookup import engine_of
from shardwise.integrations.hf import ShardwiseTrainerMixin
from tests.engine.rig import count, on_ranks, recording
from tests.integrations.models import VOCABULARY, Tokens, fresh, llama


class SFTTrainer(ShardwiseTrainerMixin, trl.SFTTrainer):
    pass


class DPOTrainer(ShardwiseTrainerMixin, trl.DPOTrainer):
    pass


def numbers() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that knows numbers."""
    words = ["<pad>", "<eos>", *map(str, range(VOCABULARY - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def usual(directory: Path) -> dict[str, Any]:
    return {
        "output_dir": str(directory),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
    }


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@on_ranks(2, timeout_s=180)
def test_supervised_fine_tuning(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"input_ids": Tokens().rows.tolist()})
    found = []
    for kind in (trl.SFTTrainer, SFTTrainer):
        with fresh():
            config = trl.SFTConfig(**usual(tmp_path), max_length=None)
            trainer = kind(model=llama(), args=config, train_dataset=rows, processing_class=numbers())
            found.append(losses_of(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert isinstance(next(trainer.model.parameters()), sw.ShardedParameter)


@on_ranks(2, timeout_s=180)
def test_preferences(tmp_path: Path) -> None:
    """DPO, with a reference model, which is sharded too."""
    rows = Dataset.from_list(
        [{"prompt": f"{n} {n + 1}", "chosen": f" {n + 2} {n + 3}", "rejected": f" {n} {n}"} for n in range(40)]
    )
    found = []
    for kind in (trl.DPOTrainer, DPOTrainer):
        with fresh():
            model = llama()
            trainer = kind(
                model=model,
                ref_model=copy.deepcopy(model),
                args=trl.DPOConfig(**usual(tmp_path)),
                train_dataset=rows,
                processing_class=numbers(),
            )
            found.append(losses_of(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[1][-1] < found[1][0]
    assert isinstance(next(trainer.ref_model.parameters()), sw.ShardedParameter)


@pytest.mark.parametrize("units", [None, "transformers"], ids=["head in the root", "head alone"])
@on_ranks(2, timeout_s=180)
def test_the_head_is_gathered_once_for_the_chunks_of_the_loss(tmp_path: Path, units: str | None) -> None:
    """The loss of supervised fine-tuning ("nll", until TRL 1.15 "chunked_nll") reads `lm_head.weight` and never calls
    the head: in forward and in backward, chunk by chunk of the vocabulary."""
    rows = Dataset.from_dict({"input_ids": Tokens().rows.tolist()})
    found, gathers = [], []
    for kind, chunk in ((trl.SFTTrainer, VOCABULARY), (SFTTrainer, VOCABULARY), (SFTTrainer, VOCABULARY // 8)):
        with fresh(), recording(), mock.patch("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", chunk):
            options = {} if kind is trl.SFTTrainer else {"shard": {"units": units}}
            config = trl.SFTConfig(**usual(tmp_path), max_length=None)
            trainer = kind(model=llama(), args=config, train_dataset=rows, processing_class=numbers(), **options)
            found.append(losses_of(trainer))
            if options:
                gathers.append(count(engine_of(trainer.model), "all_gather"))
    stock, *ours = found
    for losses in ours:
        assert losses == pytest.approx(stock, rel=1e-5)
    assert gathers[0] == gathers[1]  # with one chunk, and with eight
