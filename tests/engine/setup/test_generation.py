"""transformers' `generate` on ranks that finish at different times, and on ranks that do not generate at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.errors import CollectiveTimeout
from tests import device
from tests.engine.rig import on_ranks, seeded

TOKENS: dict[str, Any] = {"vocab_size": 31, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TOKENS, **sizes)).eval()


def gpt2() -> Any:
    """A model with 12 learned positions."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=12, **TOKENS)
    return transformers.GPT2LMHeadModel(config).eval()


def t5() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**TOKENS, **sizes)).eval()


def prompt(length: int) -> dict[str, Tensor]:
    """This rank's two rows, the second padded on the left."""
    ids = torch.randint(2, 31, (2, length), generator=torch.Generator().manual_seed(dist.get_rank()))
    mask = torch.ones_like(ids)
    ids[1, :2] = mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (llama, {"cache_implementation": "static"}),
        (llama, {"prompt_lookup_num_tokens": 2}),
        (llama, {"use_cache": False}),
        (gpt2, {}),
        (gpt2, {"num_beams": 2}),
        (t5, {"cache_implementation": "static"}),
    ],
)
@on_ranks(2, timeout_s=120)
def test_ranks_of_other_lengths(build: Any, options: dict[str, Any]) -> None:
    """A rank that has reached its greatest length waits without writing past its cache or its learned positions."""
    options = {"max_length": 12, "do_sample": False, **options}
    plain, model = seeded(build), sw.shard(seeded(build))
    inputs = prompt(4 + 6 * dist.get_rank())
    if "prompt_lookup_num_tokens" in options:
        inputs = {name: rows[:1] for name, rows in inputs.items()}
    if build is t5:
        options["max_length"] = 4 + 5 * dist.get_rank()
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **options), plain.generate(**inputs, **options))
    assert model.prepare_inputs_for_generation.__self__ is model


@pytest.mark.parametrize("new", [(1, 6), (3, 7)])
@on_ranks(2, timeout_s=120)
def test_a_cache_that_is_returned(new: tuple[int, int]) -> None:
    """It holds this rank's tokens only, so that a conversation goes on from it."""
    answers: list[Tensor] = []
    caches: list[Any] = []
    for model in (seeded(llama), sw.shard(seeded(llama))):
        ids, cache = prompt(5)["input_ids"][:1], None
        for _ in range(2):
            options: dict[str, Any] = {"past_key_values": cache} if cache is not None else {}
            said = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new[dist.get_rank()],
                do_sample=False,
                return_dict_in_generate=True,
                **options,
            )
            cache = said.past_key_values
            ids = torch.cat([said.sequences, torch.full((1, 2), 7)], 1)
        answers.append(ids)
        caches.append(cache)
    assert torch.equal(*answers)
    assert torch.equal(*(cache.layers[-1].keys for cache in caches))


@pytest.mark.parametrize("rank0_only", [False, True])
@on_ranks(2)
def test_one_rank_generates_from_full_parameters(rank0_only: bool) -> None:
    model = sw.shard(seeded(llama))
    with sw.unsharded(model, rank0_only=rank0_only):
        if dist.get_rank() == 0:
            expected = seeded(llama).generate(**prompt(5), max_new_tokens=4, do_sample=False)
            assert torch.equal(model.generate(**prompt(5), max_new_tokens=4, do_sample=False), expected)


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
@on_ranks(4, timeout_s=120)
def test_some_of_all_ranks(strategy: str) -> None:
    """Ranks wait for those that hold the same model, not for other ranks."""
    mesh = init_device_mesh(device.kind(), (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sw.shard(seeded(llama), strategy, mesh["shard"] if strategy == "full_shard" else mesh)
    if strategy == "hybrid_shard" or dist.get_rank() >= 2:
        options: dict[str, Any] = {"max_new_tokens": 2 + dist.get_rank(), "do_sample": False}
        expected = seeded(llama).generate(**prompt(5), **options)
        assert torch.equal(model.generate(**prompt(5), **options), expected)


@pytest.mark.parametrize("raises", ["one", "all"])
@on_ranks(2)
def test_ranks_that_raise_between_rounds(raises: str) -> None:
    """If one does, the other learns of it at once. If all do and catch it, the next call works."""
    rank = dist.get_rank()
    model = sw.shard(seeded(llama))

    def refuse(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 6 and (rank or raises == "all"):
            raise ArithmeticError("not these scores")
        return scores

    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    told = rank == 0 and raises == "one"
    with pytest.raises(CollectiveTimeout if told else ArithmeticError, match="rank 1 raised" if told else "not these"):
        model.generate(**prompt(5), **options, logits_processor=[refuse])
    if raises == "all":
        assert torch.equal(model.generate(**prompt(5), **options), seeded(llama).generate(**prompt(5), **options))
