from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardwise.train.config import ModelConfig
from shardwise.train.export import write_model
from shardwise.train.models import TextShape, build_model
from shardwise.train.tokenizer import ByteTokenizer

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_transformers_model_comes_back_bit_for_bit(tmp_path: Path, tied: bool, dtype: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    inline = {"model_type": "llama", "tie_word_embeddings": tied, **TINY}
    torch.manual_seed(0)
    model = build_model(ModelConfig(config=inline, init="cpu", dtype=dtype), TextShape(320, 256, 32)).eval()
    write_model(model, model.state_dict(), tmp_path)
    ByteTokenizer().save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {next(model.parameters()).dtype}
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path)("import os")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.generation_config.eos_token_id == 256


def test_any_other_module_becomes_one_file_without_aliases(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False), "norm": nn.LayerNorm(3)})
    model["head"].weight = model["embed"].weight  # type: ignore[assignment]
    write_model(model, model.state_dict(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert sorted(stored) == ["embed.weight", "norm.bias", "norm.weight"]
    assert torch.equal(stored["embed.weight"], model.state_dict()["head.weight"])
