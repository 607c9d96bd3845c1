"""What slices of sequences are, what attends across them, what cannot be divided, and what is sent and saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.errors import ConfigError, UsageError
from tests.engine.context.rig import LENGTH, SIZES, batch_of, build
from tests.engine.rig import on_ranks


@on_ranks(2)
def test_a_module_of_ones_own() -> None:
    """Grouped queries, fewer heads of keys than ranks, a mask over whole sequences."""
    mesh = sw.mesh(cp=2)["cp"]
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, LENGTH, 5, requires_grad=True) for heads in (4, 1, 1))
    mask = torch.rand(LENGTH, LENGTH) > 0.3
    own = slice(LENGTH // 2 * dist.get_rank(), LENGTH // 2 * (dist.get_rank() + 1))
    for options in ({"is_causal": True}, {"attn_mask": mask}):
        expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
        found = sw.context_attention(*(t[:, :, own] for t in (query, key, value)), mesh, **options)
        torch.testing.assert_close(found, expected[:, :, own])
        ours = torch.autograd.grad(found.pow(2).sum(), [query, key, value])
        for grad in ours:
            dist.all_reduce(grad)
        torch.testing.assert_close(ours, torch.autograd.grad(expected.pow(2).sum(), [query, key, value]))
    with pytest.raises(ConfigError, match="cp=2 does not divide 3 heads of attention, 3 of keys"):
        sw.context_attention(*(torch.randn(1, 3, 4, 5) for _ in range(3)), mesh)


@on_ranks(2)
def test_whole_sequences_are_generated() -> None:
    plain, model = build("llama").eval(), build("llama").eval()
    sw.shard(model, mesh=sw.mesh(cp=2))
    prompt = torch.randint(64, (1, 5 + dist.get_rank()), generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
    [answer] = sw.generate(model, [prompt[0]], **options)
    assert answer.ids == plain.generate(prompt, **options, pad_token_id=0)[0, prompt.shape[1] :].tolist()


@on_ranks(2)
def test_copies_models_of_one_configuration_and_a_second_call() -> None:
    mesh = sw.mesh(cp=2)
    plain, model = build("llama"), build("llama")
    with pytest.raises(ConfigError, match="align"):
        sw.shard(model, mesh=mesh, align=-3)
    sw.shard(model.model, mesh=mesh)
    sw.shard(model, mesh=mesh)
    copied = copy.deepcopy(model)
    torch.manual_seed(0)
    undivided = transformers.AutoModelForCausalLM.from_config(model.config)
    batch = batch_of(0, "documents")
    model(**sw.sequence_slice(batch, mesh))  # leaves nothing behind for the others
    whole = {"input_ids": batch["input_ids"], "position_ids": torch.arange(LENGTH)[None]}  # one row for all
    own = slice(LENGTH // 2 * dist.get_rank(), LENGTH // 2 * (dist.get_rank() + 1))
    expected = plain(**whole).logits
    torch.testing.assert_close(copied(**sw.sequence_slice(whole, mesh)).logits, expected[:, own])
    torch.testing.assert_close(undivided(**whole).logits, expected)


@on_ranks(2)
def test_layers_are_computed_again_as_they_were() -> None:
    """Another forward, of whole sequences, comes before the backward."""
    mesh = sw.mesh(cp=2)
    plain, model = build("llama"), build("llama").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sw.shard(model, mesh=mesh)
    batch = batch_of(0, "documents")
    loss = model(**sw.sequence_slice(batch, mesh)).loss
    with torch.no_grad():
        model.eval()(input_ids=batch["input_ids"], use_cache=True)
    model.train()
    loss.backward()
    plain(**batch, use_cache=False).loss.backward()
    for expected, sharded in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), expected.grad, atol=1e-6, rtol=1e-4)


@on_ranks(2)
def test_encoders_and_arguments_by_place() -> None:
    """transformers tells documents of an encoder's row not apart by their positions."""
    mesh = sw.mesh(cp=2)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.BertConfig(**sizes, num_attention_heads=4, hidden_dropout_prob=0.0)
    plain = transformers.BertForMaskedLM(config).eval()
    model = sw.shard(copy.deepcopy(plain), mesh=mesh)
    batch = batch_of(0, "documents") | {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}
    del batch["labels"]
    own = slice(LENGTH // 2 * dist.get_rank(), LENGTH // 2 * (dist.get_rank() + 1))
    sliced = sw.sequence_slice(batch, mesh)
    for names in (["position_ids"], ["attention_mask"], ["attention_mask", "position_ids"]):
        expected = plain(**{name: batch[name] for name in ["input_ids", *names]}).logits[:, own]
        found = model(sliced["input_ids"], **{name: sliced[name] for name in names}).logits
        torch.testing.assert_close(found, expected)
    found = model(sliced["input_ids"], sliced["attention_mask"]).logits
    torch.testing.assert_close(found, plain(batch["input_ids"]).logits[:, own])


@on_ranks(2)
def test_what_cannot_be_divided() -> None:
    mesh = sw.mesh(cp=2)
    with pytest.raises(ConfigError, match="sequences of 7 tokens cannot be divided by cp=2: pad them"):
        sw.sequence_slice({"input_ids": torch.zeros(1, 7)}, mesh)
    with pytest.raises(ConfigError, match="no input_ids or inputs_embeds"):
        sw.sequence_slice({"x": torch.zeros(1, 8)}, mesh)
    with pytest.raises(ConfigError, match="needs a mesh with an axis 'cp'"):
        sw.sequence_slice({"input_ids": torch.zeros(1, 8)}, mesh["tp"])
    odd = transformers.LlamaConfig(**SIZES | {"num_attention_heads": 1, "num_key_value_heads": 1})
    mamba = transformers.MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1)
    t5 = transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    small: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert, roberta = transformers.BertConfig(**small), transformers.RobertaConfig(**small)
    opt = transformers.OPTConfig(**small, ffn_dim=8, word_embed_proj_dim=8)
    auto = transformers.AutoModelForCausalLM
    for model, why in (
        (auto.from_config(odd), "does not divide the model's 1 heads"),
        (auto.from_config(mamba), "layers of linear_attention, which would need the tokens of other ranks"),
        (transformers.T5ForConditionalGeneration(t5), "more than one sequence in a batch"),
        (transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES)), "picks tokens of the whole"),
        (transformers.BertModel(bert), "picks tokens of the whole sequence"),
        (transformers.RobertaForMaskedLM(roberta), "numbers positions itself, and would do so by slice"),
        (transformers.OPTForCausalLM(opt), "numbers positions itself, and would do so by slice"),
        (
            auto.from_config(transformers.LlamaConfig(**SIZES), attn_implementation="eager"),
            "attn_implementation='sdpa'",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            sw.shard(model, mesh=mesh)
    llama = sw.shard(build("llama"), mesh=mesh)
    with pytest.raises(UsageError, match=r"attention_mask is \(1, 1, 4, 4\): with a 'cp' axis pass"):
        llama(input_ids=torch.zeros(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 1, 4, 4))


class Counting(TorchDispatchMode):
    """Counts what all_to_all is given, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_to_all_single" in str(func):
            self.bytes += args[0].nbytes
        return func(*args, **kwargs or {})


@on_ranks(2)
def test_bytes_over_the_axis() -> None:
    """Each layer trades queries, keys and values for heads, and what they attend to back; backward as much."""
    mesh = sw.mesh(cp=2)
    model = sw.shard(build("llama"), mesh=mesh)
    rows, layers, heads, kv_heads, size = 2, 2, 4, 2, 8
    with Counting() as counting:
        model(**sw.sequence_slice(batch_of(0, "whole"), mesh)).loss.backward()
    elements = rows * LENGTH // 2 * size * (2 * heads + 2 * kv_heads)
    assert counting.bytes == 2 * layers * elements * 4  # of which (cp - 1) / cp leave the rank


@on_ranks(2)
def test_a_checkpoint(tmp_path: Any) -> None:
    """A checkpoint of ranks that share sequences is that of one process: it is read with the axis and without."""
    mesh = sw.mesh(cp=2)
    model = sw.shard(build("llama"), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(**sw.sequence_slice(batch_of(0, "whole"), mesh)).loss.backward()
    optimizer.step()
    sw.checkpoint.save(tmp_path / "step", model, optimizer)
    other = sw.shard(build("llama"))
    sw.checkpoint.load(tmp_path / "step", other, torch.optim.AdamW(other.parameters(), lr=0.01))
    expected, found = (sw.full_state_dict(m, rank0_only=False) for m in (model, other))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
