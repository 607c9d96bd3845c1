"""What `from_pretrained` reads is what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import verify
from tests.ranks import RankPools

transformers = pytest.importorskip("transformers")

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 33,
        "tie_word_embeddings": False,
    },
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 33, "n_positions": 16},
}
IDS = torch.tensor([[1, 5, 9, 2], [3, 3, 8, 30]])


def build(name: str) -> nn.Module:
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(name, **CONFIGS[name])
    return transformers.AutoModelForCausalLM.from_config(config)


def train_and_save(name: str, path: Path, max_file_bytes: int) -> torch.Tensor:
    model = sw.shard(build(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sw.checkpoint.save(path, model, optimizer, step=2, max_file_bytes=max_file_bytes)
    fresh = sw.shard(build(name))
    sw.checkpoint.load(path, fresh, torch.optim.AdamW(fresh.parameters()))
    with torch.no_grad():
        logits = model.eval()(input_ids=IDS).logits
        assert torch.equal(fresh.eval()(input_ids=IDS).logits, logits)
    return logits


@pytest.mark.parametrize("max_file_bytes", [10**9, 10**4], ids=["one file", "several"])
@pytest.mark.parametrize("name", CONFIGS)
def test_from_pretrained_has_the_same_logits(name: str, max_file_bytes: int, ranks: RankPools, tmp_path: Path) -> None:
    logits, other = ranks(2).run(train_and_save, name, tmp_path / "c", max_file_bytes)
    assert torch.equal(logits, other)
    verify(tmp_path / "c")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c", output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=IDS).logits, logits)
    model.save_pretrained(tmp_path / "theirs")
    if max_file_bytes == 10**9:
        ours, theirs = (_names(tmp_path / where / "model.safetensors") for where in ("c", "theirs"))
        assert ours == theirs
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "c" / file).read_text() == (tmp_path / "theirs" / file).read_text()


def _names(path: Path) -> set[str]:
    with path.open("rb") as file:
        return set(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
