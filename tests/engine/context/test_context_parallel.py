"""Models whose ranks have slices of sequences train as one process does on whole ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.errors import ConfigError, UsageError
from tests.engine.rig import on_ranks
from tests.engine.tensor.rig import forget_meshes

LENGTH = 24
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES | {"num_key_value_heads": 2}),
    "one-kv-head": ("LlamaConfig", SIZES | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", SIZES | {"num_key_value_heads": 4, "head_dim": 8}),
    "sliding": (
        "Qwen3Config",
        SIZES
        | {"num_key_value_heads": 2, "head_dim": 8, "use_sliding_window": True, "sliding_window": 5}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mixtral": ("MixtralConfig", SIZES | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | {f"{place}_pdrop": 0.0 for place in ("attn", "embd", "resid")},
    ),
}


def _build(name: str) -> Any:
    kind, settings = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**copy.deepcopy(settings))
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def _batch(seed: int, kind: str) -> dict[str, Tensor]:
    """Two rows: "whole", of several "documents", or "padded" at the left or at the right."""
    ids = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "documents":
        rows = [[9, 7, 8], [LENGTH]] if seed % 2 else [[13, 11], [1, 20, 3]]
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    if kind in {"left", "right"}:
        batch["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
        where = slice(0, 5) if kind == "left" else slice(LENGTH - 5, LENGTH)
        batch["attention_mask"][0, where] = 0
        batch["labels"][batch["attention_mask"] == 0] = -100
        if kind == "left":
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return batch


def _train(name: str, kind: str, cp: int, options: dict[str, Any]) -> None:
    forget_meshes()
    plain, model = _build(name), _build(name)
    if options.pop("recompute", False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    mesh = sw.mesh(cp=cp, **options.pop("axes", {}))
    sw.shard(model, mesh=mesh, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    data_ranks = dist.get_world_size() // mesh["cp"].size() // mesh["tp"].size()
    data = mesh["dp_replicate"].get_local_rank() * mesh["dp_shard"].size() + mesh["dp_shard"].get_local_rank()
    for step in range(2):
        batches = [_batch(10 * step + rank, kind) for rank in range(data_ranks)]
        expected = torch.stack([plain(**batch, use_cache=False).loss for batch in batches]).mean()
        loss = model(**sw.sequence_slice(batches[data], mesh)).loss
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / dist.get_world_size(), expected.detach(), atol=2e-6, rtol=1e-6)
        expected.backward()
        loss.backward()
        for (key, own), (_, sharded) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            found = sharded.grad.full_tensor()
            scale = own.grad.abs().max().item()
            torch.testing.assert_close(
                found, own.grad, atol=1e-5 * scale + 1e-9, rtol=0, msg=lambda m, k=key: f"{k}: {m}"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["whole", "documents", "left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_trains_as_in_one_process(ranks: Any, name: str, kind: str) -> None:
    ranks(2).run(_train, name, kind, 2, {})


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "more ranks than heads of keys": ("one-kv-head", 4, {}),
    "data ranks": ("llama", 2, {}),
    "replicas": ("llama", 2, {"strategy": "hybrid_shard", "axes": {"dp_replicate": 2, "dp_shard": 1}}),
    "tensor ranks": ("llama", 2, {"axes": {"tp": 2}, "tp_plan": "auto"}),
    "recomputed": ("llama", 2, {"recompute": True}),
    "not sharded": ("qwen3", 2, {"strategy": "no_shard"}),
    "experts": ("mixtral", 2, {"axes": {"ep": 2}}),
    "gathered once": ("gpt2", 2, {"strategy": "shard_grad_op"}),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_beside_other_axes(ranks: Any, case: str) -> None:
    name, cp, options = CASES[case]
    ranks(4).run(_train, name, "whole" if "tensor" in case else "documents", cp, options)


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
    plain, model = _build("llama").eval(), _build("llama").eval()
    sw.shard(model, mesh=sw.mesh(cp=2))
    prompt = torch.randint(64, (1, 5 + dist.get_rank()), generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
    [answer] = sw.generate(model, [prompt[0]], **options)
    assert answer.ids == plain.generate(prompt, **options, pad_token_id=0)[0, prompt.shape[1] :].tolist()


@on_ranks(2)
def test_copies_models_of_one_configuration_and_a_second_call() -> None:
    mesh = sw.mesh(cp=2)
    plain, model = _build("llama"), _build("llama")
    with pytest.raises(ConfigError, match="align"):
        sw.shard(model, mesh=mesh, align=-3)
    sw.shard(model.model, mesh=mesh)
    sw.shard(model, mesh=mesh)
    copied = copy.deepcopy(model)
    torch.manual_seed(0)
    undivided = transformers.AutoModelForCausalLM.from_config(model.config)
    batch = _batch(0, "documents")
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
    plain, model = _build("llama"), _build("llama").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sw.shard(model, mesh=mesh)
    batch = _batch(0, "documents")
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
    batch = _batch(0, "documents") | {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}
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
    llama = sw.shard(_build("llama"), mesh=mesh)
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
    model = sw.shard(_build("llama"), mesh=mesh)
    rows, layers, heads, kv_heads, size = 2, 2, 4, 2, 8
    with Counting() as counting:
        model(**sw.sequence_slice(_batch(0, "whole"), mesh)).loss.backward()
    elements = rows * LENGTH // 2 * size * (2 * heads + 2 * kv_heads)
    assert counting.bytes == 2 * layers * elements * 4  # of which (cp - 1) / cp leave the rank


@on_ranks(2)
def test_a_checkpoint(tmp_path: Any) -> None:
    """A checkpoint of ranks that share sequences is that of one process: it is read with the axis and without."""
    mesh = sw.mesh(cp=2)
    model = sw.shard(_build("llama"), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(**sw.sequence_slice(_batch(0, "whole"), mesh)).loss.backward()
    optimizer.step()
    sw.checkpoint.save(tmp_path / "step", model, optimizer)
    other = sw.shard(_build("llama"))
    sw.checkpoint.load(tmp_path / "step", other, torch.optim.AdamW(other.parameters(), lr=0.01))
    expected, found = (sw.full_state_dict(m, rank0_only=False) for m in (model, other))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
