"""Modules with more than plain parameters: parametrizations, generation, compilation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import shardwise as sw
from tests.engine.rig import Block, Net, Twins, batch, on_ranks, seeded, squares


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


class Parametrized(Block):
    """A block whose layers have one of torch's parametrizations."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.square = nn.Linear(6, 6)
        if kind == "parametrize":
            parametrize.register_parametrization(self.square, "weight", Symmetric())
        elif kind == "weight_norm":
            parametrizations.weight_norm(self.square)
        elif kind == "old_weight_norm":
            torch.nn.utils.weight_norm(self.square)
        elif kind == "spectral_norm":
            parametrizations.spectral_norm(self.square)
        else:
            torch.nn.utils.spectral_norm(self.square)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.square(x))


KINDS = ["parametrize", "weight_norm", "old_weight_norm", "spectral_norm", "old_spectral_norm"]


@pytest.mark.parametrize("where", ["inside", "unit"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_parametrizations(kind: str, where: str) -> None:
    """Inside a unit, and on a module that is a unit itself. In eval: spectral norm's buffers follow the batches run."""

    def build() -> nn.Module:
        model = Net(block=lambda: Parametrized(kind))
        for module in model.modules():
            if "spectral" in kind and not isinstance(module, (Net, Block)):
                module.eval()
        return model

    units = (lambda fqn, module: fqn.endswith("square")) if where == "unit" else None
    Twins(build, units=units).train(3)


@on_ranks(2)
def test_spectral_norm_in_training_mode() -> None:
    """Power iteration updates buffers, alike on every rank."""
    twins = Twins(lambda: Net(block=lambda: Parametrized("spectral_norm")))
    for _ in range(3):
        own = squares(twins.sharded, batch(0, 0))
        own.backward()
        loss = squares(twins.plain, batch(0, 0))
        loss.backward()
        assert torch.equal(own, loss)
        twins.same_gradients()
        twins.step()
    for (_, a), (_, b) in zip(twins.plain.named_buffers(), twins.sharded.named_buffers(), strict=True):
        assert torch.equal(a, b)


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=31, max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("first", ["generate", "train"])
@on_ranks(2)
def test_generate_loops(first: str) -> None:
    """Hugging Face's generate() on a sharded model, as its first forward or between steps."""
    plain: Any = seeded(llama)
    model: Any = sw.shard(seeded(llama))
    assert len(sw.describe(model).splitlines()) >= 5
    ids = torch.randint(0, 31, (2, 5), generator=torch.Generator().manual_seed(1))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for turn in range(3):
        if turn or first == "generate":
            with torch.inference_mode(turn == 1):
                said = [m.eval().generate(ids, max_new_tokens=4, do_sample=False) for m in (plain, model)]
            assert torch.equal(*said)
        losses = [m.train()(input_ids=ids, labels=ids).loss for m in (plain, model)]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2, timeout_s=120)
def test_generate_where_ranks_differ(strategy: str) -> None:
    """Prompts of other lengths, answers that end early, the KV cache: what the unsharded model says, and no hang."""
    rank = dist.get_rank()
    model: Any = sw.shard(seeded(llama), strategy).eval()
    plain: Any = seeded(llama).eval()
    for turn, (length, new) in enumerate([(3 + 4 * rank, 6), (5, 2 + 5 * rank), (4 + rank, 8)]):
        ids = torch.randint(0, 31, (2, length), generator=torch.Generator().manual_seed(10 * turn + rank))
        options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
        answer = plain.generate(ids, **options)
        if turn == 2 and rank:  # ends at the first new token of one of its rows, long before the other rank
            options["eos_token_id"] = answer[:, length + 1].unique().tolist()
            answer = plain.generate(ids, **options)
        assert torch.equal(model.generate(ids, **options), answer)
    ids = torch.randint(0, 31, (2, 5), generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def encoder_decoder() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=31, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None, **sizes)
    )


def of_images() -> Any:
    transformers = pytest.importorskip("transformers")
    eyes = transformers.CLIPVisionConfig(image_size=16, patch_size=8, projection_dim=16, **SMALL)
    words = transformers.LlamaConfig(vocab_size=31, pad_token_id=0, eos_token_id=None, **SMALL)
    config = transformers.LlavaConfig(
        vision_config=eyes, text_config=words, image_token_index=30, vision_feature_select_strategy="default"
    )
    return transformers.LlavaForConditionalGeneration(config)


class Around(nn.Module):
    """A model that contains a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = encoder_decoder()

    def generate(self, **inputs: Any) -> Any:
        return self.inner.generate(**inputs)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("build", [encoder_decoder, of_images, Around])
@on_ranks(2, timeout_s=120)
def test_generate_that_computes_outside_forward(build: Any, strategy: str) -> None:
    """An encoder called alone, images embedded: before any forward and after a backward, each rank with its own."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    plain: Any = seeded(build).eval()
    model: Any = sw.shard(seeded(build), strategy).eval()
    inputs = {"input_ids": torch.randint(1, 30, (2, 4 + rank), generator=generator)}
    if build is of_images:
        inputs["input_ids"][:, :4] = 30
        inputs["pixel_values"] = torch.randn(2, 3, 16, 16, generator=generator)
    for turn, copied in enumerate([model, model, copy.deepcopy(model)]):
        options: dict[str, Any] = {"max_new_tokens": 3 + 2 * rank, "do_sample": False, "num_beams": 1 + turn % 2}
        assert torch.equal(copied.generate(**inputs, **options), plain.generate(**inputs, **options))
        whole, own = (getattr(m, "inner", m) for m in (plain, copied))
        if build is not Around:
            losses = [m(**inputs, labels=inputs["input_ids"]).loss for m in (whole, own)]
            assert torch.equal(*losses)
            losses[1].backward()


# torch.compile --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["blocks", pytest.param("whole", marks=pytest.mark.slow)])
@on_ranks(2, timeout_s=120)
def test_compiled_transformers(how: str) -> None:
    """With the marks by which transformers knows a sharded model, which torch.compile reads too."""
    torch._dynamo.reset()
    model: Any = sw.shard(seeded(llama))
    plain: Any = seeded(llama)
    counters = torch._dynamo.utils.counters
    counters.clear()
    if how == "blocks":
        for block in model.model.layers:
            block.compile(backend="aot_eager")
    compiled = torch.compile(model, backend="aot_eager") if how == "whole" else model
    ids = torch.randint(0, 31, (2, 5), generator=torch.Generator().manual_seed(1))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    graphs = []
    for _ in range(4):
        losses = [m(input_ids=ids, labels=ids).loss for m in (plain, compiled)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1] == graphs[-1], "recompiled from step to step"


@pytest.mark.parametrize("how", ["module.compile", "blocks in place", "blocks before shard", "whole"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2, timeout_s=120)
def test_compiled(how: str, strategy: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    options: dict[str, Any] = {"backend": "aot_eager"}

    def build() -> nn.Module:
        model = Net(depth=3)
        if how == "blocks before shard":
            for block in model.blocks:
                block.compile(**options)
        return model

    twins = Twins(build, strategy=strategy)
    if how == "module.compile":
        for block in twins.sharded.blocks:  # type: ignore[union-attr]
            block.compile(**options)
    if how == "blocks in place":
        for index, block in enumerate(twins.sharded.blocks):  # type: ignore[arg-type]
            twins.sharded.blocks[index] = torch.compile(block, **options)  # type: ignore[index, operator]
    if how == "whole":
        whole, raw = torch.compile(twins.sharded, **options), twins.sharded
        twins.loss = lambda model, x: squares(whole if model is raw else model, x)  # type: ignore[arg-type]
    for _ in range(3):
        twins.backward()
        pairs = zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad.full_tensor()) for p, q in pairs)  # type: ignore[arg-type, union-attr]
        twins.step()
    assert twins.engine.unsharder.retired_slots == 0
    compiled = torch._dynamo.utils.get_compilation_metrics()
    assert compiled
    ours = {metrics.co_name for metrics in compiled if "/src/shardwise/" in str(metrics.co_filename)}
    assert ours <= {"_pre_forward"}, "of the root, the first of all"


@on_ranks(2, timeout_s=120)
def test_equal_blocks_compile_once_and_steps_recompile_nothing() -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    twins = Twins(lambda: Net(depth=4), units={Block})
    for block in twins.sharded.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    graphs = []
    for _ in range(4):
        twins.train(1)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1] * 4, "of four blocks and four steps"


@pytest.mark.slow
@on_ranks(2, timeout_s=240)
def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    twins = Twins(lambda: Net(depth=2))
    for block in twins.sharded.blocks:  # type: ignore[union-attr]
        block.compile()
    for _ in range(2):
        plain, own = squares(twins.plain, batch(0, 0)), squares(twins.sharded, batch(0, 0))
        plain.backward()
        own.backward()
        torch.testing.assert_close(own, plain)
        for p, q in zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)  # type: ignore[union-attr]
        twins.step()
