from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.train.build.models import TextShape, build_model
from shardwise.train.config.schema import ModelConfig
from shardwise.train.data.tokenizer import ByteTokenizer
from shardwise.train.output import export as export_module
from shardwise.train.output.export import write_model
from shardwise.train.process.ranks import started
from shardwise.train.run.directory import RunDirectory
from shardwise.train.run.run_lock import claimed
from tests.ranks import RankPools

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


def exported(folder: str, gathered: bool, shared: bool, dtype: str) -> tuple[list[str], int]:
    """Export a sharded model. Returns the names of its files, and the number of calls that gather the whole model."""
    inline = {"model_type": "llama", "tie_word_embeddings": True, **TINY}
    with started() as ranks, pytest.MonkeyPatch.context() as patch:
        run = Path(folder) if shared else Path(folder) / str(ranks.rank)
        torch.manual_seed(0)
        model = sw.shard(build_model(ModelConfig(config=inline, dtype=dtype), TextShape(320, 256, 32)), "full_shard")  # type: ignore[arg-type]
        asked: list[object] = []

        def gather(*arguments: Any, **keywords: Any) -> Any:
            asked.append(arguments)
            return original(*arguments, **keywords)

        original = sw.full_state_dict
        patch.setattr(sw, "full_state_dict", gather)
        if gathered:
            patch.setattr(export_module, "pieces_to_write", refuse)
        with claimed(run, print) if ranks.is_first else nullcontext():
            ranks.all_gather_object(None)  # the claim is there before any rank looks
            export_module.export(model, ByteTokenizer(), RunDirectory(run), ranks, 3)
        return sorted(path.name for path in (run / "final").iterdir()) if (run / "final").exists() else [], len(asked)


def refuse(_: object) -> None:
    raise UsageError("its tensors are computed")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ranks_write_what_they_hold_and_gather_nothing(ranks: RankPools, tmp_path: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name, gathered in (("in-place", False), ("gathered", True)):
        (files, asked), _ = ranks(2).run(exported, str(tmp_path / name), gathered, True, dtype)
        assert asked == gathered
        assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(files)
        assert ("manifest.json" in files) != gathered
    sw.checkpoint.verify(tmp_path / "in-place" / "final")
    assert sw.checkpoint.latest(tmp_path / "in-place") is None, "there is nothing to go on from"
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "final") for name in ("in-place", "gathered"))
    assert one.dtype == other.dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)
    assert one.config.to_dict() | {"_name_or_path": ""} == other.config.to_dict() | {"_name_or_path": ""}
    assert one.generation_config == other.generation_config
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    tokenizers = (AutoTokenizer.from_pretrained(tmp_path / name / "final") for name in ("in-place", "gathered"))
    assert [tokenizer("import os")["input_ids"] for tokenizer in tokenizers] == [list(b"import os")] * 2


def test_ranks_without_a_common_directory_give_the_model_to_the_first(ranks: RankPools, tmp_path: Path) -> None:
    (files, asked), (other_files, _) = ranks(2).run(exported, str(tmp_path), False, False, "fp32")
    assert asked == 1
    assert "model.safetensors" in files
    assert other_files == []


def test_any_other_module_becomes_one_file_without_aliases(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False), "norm": nn.LayerNorm(3)})
    model["head"].weight = model["embed"].weight  # type: ignore[assignment]
    write_model(model, model.state_dict(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert sorted(stored) == ["embed.weight", "norm.bias", "norm.weight"]
    assert torch.equal(stored["embed.weight"], model.state_dict()["head.weight"])
