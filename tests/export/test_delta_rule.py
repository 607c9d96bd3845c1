"""The gated delta rule as it is exported, beside transformers' own, token by token and piece by piece."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from shardwise.export import delta_rule


def inputs(length, key_heads=2):
    torch.manual_seed(length)
    return {
        "query": torch.randn(2, length, key_heads, 8),
        "key": torch.randn(2, length, key_heads, 8),
        "value": torch.randn(2, length, 4, 6),
        "g": -torch.rand(2, length, 4),
        "beta": torch.rand(2, length, 4),
    }


@pytest.mark.parametrize("length", [1, 3, 64, 65, 200])
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("state", [None, torch.randn(2, 4, 8, 6)])
def test_the_same_as_token_by_token(length, key_heads, state):
    given = {**inputs(length, key_heads), "initial_state": state, "output_final_state": True}
    expected = theirs.torch_recurrent_gated_delta_rule(**given, use_qk_l2norm_in_kernel=True)
    found = delta_rule.gated_delta_rule(**given, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_repeated_keys_keep_their_digits():
    """Powers of their products grow like binomials; 1e-5 is 80 roundings of values near 1."""
    given = inputs(130)
    given["key"][:] = given["key"][:, :1]
    given["beta"].fill_(1)
    given["g"].mul_(1e-3)
    expected = theirs.torch_recurrent_gated_delta_rule(
        **given, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    found = delta_rule.gated_delta_rule(**given, output_final_state=True, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_loop_is_replaced_while_a_model_is_traced():
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_experts": 0}
    config = transformers.Qwen3NextConfig(**sizes, intermediate_size=32, layer_types=["linear_attention"])
    model = transformers.Qwen3NextForCausalLM(config)
    own = theirs.torch_chunk_gated_delta_rule
    with delta_rule.of_any_length(model):
        assert theirs.torch_chunk_gated_delta_rule is delta_rule.gated_delta_rule
    assert theirs.torch_chunk_gated_delta_rule is own
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=32))
    assert not delta_rule.modules(llama)
