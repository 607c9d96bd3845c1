from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from shardwise.errors import ConfigError
from shardwise.train.build.models import TextShape
from shardwise.train.data.batches import EvaluationBatches, Share
from shardwise.train.data.encoding import EncodedDocument
from shardwise.train.data.packing import pack
from shardwise.train.document_mask import check_keeps_apart
from shardwise.train.loss import DeviceBatch, LossFunction

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def build(model_type: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**{**SIZES, "initializer_range": 0.2, **sizes})
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_config(config).eval()


def check(model: Any, in_16_bits: bool = False) -> None:
    ranks: Any = SimpleNamespace(device=CPU, count=int)
    check_keeps_apart(model, LossFunction(model), ranks, 2, TextShape(64, 0, 32), in_16_bits)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_keep_documents_apart(model_type: str, dtype: torch.dtype) -> None:
    check(build(model_type).to(dtype), dtype == torch.bfloat16)


def test_models_that_do_not_are_refused() -> None:
    """OPT makes a mask of its own, RecurrentGemma has a recurrence, and Bloom takes no positions."""
    with pytest.raises(ConfigError, match="OPTForCausalLM carries something from one document"):
        check(build("opt", ffn_dim=48, word_embed_proj_dim=32))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ConfigError, match="RecurrentGemmaForCausalLM carries something"):
            check(build("recurrent_gemma", num_hidden_layers=3).to(dtype), dtype == torch.bfloat16)
    with pytest.raises(ConfigError, match=r"BloomForCausalLM.forward takes no position_ids"):
        check(build("bloom"))


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_packed_documents_logits_are_those_of_the_document_alone(model_type: str) -> None:
    model = build(model_type)
    loss_function = LossFunction(model)
    generator = np.random.default_rng(0)
    lengths = [5, 9, 1, 12, 3, 16, 20]  # the last loses its end
    documents = [generator.integers(1, 64, length).astype(np.int32) for length in lengths]
    encoded = [EncodedDocument(ids, np.arange(len(ids)) > 0, whole=True) for ids in documents]
    rows = pack(encoded, 16, 0, keeps_apart=True)
    (batch,) = (DeviceBatch.of(one, CPU) for one in EvaluationBatches(rows, Share(0, 1, len(rows))))
    mixed = batch._replace(inputs={"input_ids": batch.inputs["input_ids"]})
    with torch.no_grad():
        _, packed = loss_function.outputs(model, batch)
        assert not torch.allclose(packed, loss_function.outputs(model, mixed)[1])
        row, place = 0, 0
        for ids in documents:
            ids = ids[:16]  # noqa: PLW2901
            if place + len(ids) > 16:
                row, place = row + 1, 0
            if len(ids) == 1:
                place += 1
                continue  # has no target, but fills its place
            alone = model(input_ids=torch.from_numpy(ids)[None].long()).logits[0]
            torch.testing.assert_close(packed[row, place : place + len(ids)], alone)
            place += len(ids)
