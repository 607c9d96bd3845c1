"""Checkpoints of every kind, as `shardwise generate` finds and reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import UserError
from shardwise.generation.loading import build_model, load_model, load_tokenizer
from shardwise.generation.source import find_source
from shardwise.train.process.ranks import Ranks
from tests.generation.rig import byte_tokenizer, save_llama

ALONE = Ranks(0, 1, torch.device("cpu"))


def generated(model: Any) -> list[list[int]]:
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    return [answer.ids for answer in sw.generate(model, [[7, 8], [9]], **options)]


def loaded(checkpoint: Path | str, **arguments: Any) -> Any:
    return load_model(find_source(str(checkpoint), **arguments), None, ALONE)


def test_a_hugging_face_directory(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_llama(tmp_path)
    model = loaded(tmp_path)
    assert not model.training
    assert generated(model) == generated(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert load_tokenizer(find_source(str(tmp_path))).vocab_size > 256


def test_a_run_and_its_steps(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").glob("tokenizer*")}
    expected = generated(model)
    sharded = sw.shard(model, "no_shard")
    step = tmp_path / "run" / "checkpoints" / "step-000003"
    step.parent.mkdir(parents=True)
    sw.checkpoint.save(step, sharded, torch.optim.AdamW(sharded.parameters()), step=3, files=files)
    assert generated(loaded(step)) == generated(loaded(tmp_path / "run")) == expected


def test_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = save_llama(tmp_path / "base")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, adapter)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    assert generated(loaded(tmp_path / "adapter")) == generated(model)
    shutil.move(tmp_path / "base", tmp_path / "elsewhere")
    assert generated(loaded(tmp_path / "adapter", base=str(tmp_path / "elsewhere"))) == generated(model)


def test_the_dtype_is_the_stored_one(tmp_path: Path) -> None:
    save_llama(tmp_path, dtype=torch.bfloat16)
    source = find_source(str(tmp_path))
    assert next(build_model(source, None).parameters()).dtype == torch.bfloat16
    assert next(load_model(source, torch.float32, ALONE).parameters()).dtype == torch.float32


def test_what_is_not_a_model(tmp_path: Path) -> None:
    save_llama(tmp_path / "model")
    for path in (tmp_path / "model").glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError, match=r"has no tokenizer .*: give the one that belongs to it"):
        find_source(str(tmp_path / "model"))
    with pytest.raises(UserError, match=r"--tokenizer .*: no tokenizer there"):
        find_source(str(tmp_path / "model"), tokenizer=str(tmp_path))
    byte_tokenizer().save_pretrained(tmp_path / "tokens")
    source = find_source(str(tmp_path / "model"), tokenizer=str(tmp_path / "tokens"))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for change, words in (
        ({"architectures": ["LlamaModel"]}, "LlamaModel does not generate: it has no language model's head"),
        ({"model_type": "lama"}, "transformers cannot build this model"),
        ({"num_attention_heads": 0}, "transformers cannot build this model"),
    ):
        (tmp_path / "model" / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match=words):
            build_model(source, None)
