"""Adapters for tasks with a new head: the head is trained and saved with the adapter, and merged into `final/`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertForMaskedLM

from shardwise.train.data.tokenizer import byte_tokenizer
from tests.ranks import RankPools
from tests.train.tasks.rig import RUN, lines, losses, sentences, train

CONFIG = f"""
[model]
path = "base"
task = "sequence-classification"
[lora]
r = 4
targets = ["query", "value"]
[data]
source = "animals.jsonl"
seq_len = 32
eval_fraction = 0.2
{RUN.format(steps=16, more="schedule = 'constant'")}
[checkpoint]
every = 8
[parallel]
units = ["BertLayer"]
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertForMaskedLM(BertConfig(vocab_size=320, **sizes, **none)).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "animals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sentences(60)))
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)


def quietly(folder: str, *overrides: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the head is newly initialised, and says so
        return train(folder, *overrides)


@pytest.mark.slow
def test_a_new_head_is_trained_saved_with_the_adapter_and_merged(tmp_path: Path, ranks: RankPools) -> None:
    ranks(2).run(quietly, str(tmp_path), "train.steps=8", "log.name=parts")
    quietly(str(tmp_path), "log.name=parts")  # goes on alone, adapter and head
    quietly(str(tmp_path), "log.name=whole")
    run = tmp_path / "runs" / "whole"
    assert losses(tmp_path / "runs" / "parts")[8:] == pytest.approx(losses(run)[8:], rel=1e-3)
    assert losses(run)[-1] < losses(run)[0] - 0.03

    step = run / "checkpoints" / "step-000016"
    config = json.loads((step / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["classifier"])
    assert "base_model.model.classifier.weight" in load_file(step / "adapter_model.safetensors")

    merged = AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    assert merged.config.id2label == {0: "cat", 1: "dog", 2: "owl"}
    base = AutoModelForSequenceClassification.from_pretrained("base", num_labels=3)
    adapted = peft.PeftModel.from_pretrained(base, str(step)).eval()
    for name in ("bert.pooler.dense.weight", "bert.pooler.dense.bias"):  # the base has no pooler: it is drawn
        base.get_parameter(name).data = merged.get_parameter(name).data
    ids = torch.tensor([list(b"barks digs"), list(b"purrs mews")])
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_trained_head_is_where_training_starts(tmp_path: Path) -> None:
    quietly(str(tmp_path), "lora.r=0", "lora.targets=none", "checkpoint.every=0", "log.name=tuned")
    tuned = lines(tmp_path / "runs/tuned/evaluations.jsonl")[-1]
    quietly(str(tmp_path), 'model.path="runs/tuned/final"', "train.steps=1", "train.lr=1e-9", "log.name=again")
    assert lines(tmp_path / "runs/again/evaluations.jsonl")[-1]["loss"] == pytest.approx(tuned["loss"], rel=1e-3)
