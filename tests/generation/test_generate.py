"""`sw.generate`: prompts of other lengths and numbers on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.errors import PeerError, UsageError
from shardwise.generation.generate import Answer
from shardwise.generation.prompts import token_ids
from shardwise.train.data.documents import Document
from shardwise.train.data.encoding import encode_document
from shardwise.train.data.tokenizer import PLAIN_TEMPLATE, HuggingFaceTokenizer
from tests.engine.rig import on_ranks, seeded
from tests.generation.rig import byte_tokenizer

IDS: dict[str, Any] = {"vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 5}


def llama(**more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**IDS, **sizes, **more)).eval()


def gpt2() -> Any:
    """A model with 16 learned positions."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **IDS)
    return transformers.GPT2LMHeadModel(config).eval()


def t5() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**IDS, **sizes)).eval()


def bart() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 16}
    config = transformers.BartConfig(**IDS, **sizes, **heads, decoder_start_token_id=2, forced_eos_token_id=None)
    return transformers.BartForConditionalGeneration(config).eval()


def prompts(number: int, longest: int = 9) -> list[list[int]]:
    random = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest + 1, (number,), generator=random).tolist()
    return [torch.randint(6, 300, (length,), generator=random).tolist() for length in lengths]


BUILDS = [llama, gpt2, t5, bart]


@pytest.mark.parametrize("build", BUILDS)
def test_answers_are_those_of_transformers(build: Callable[[], Any]) -> None:
    """Batch by batch, without padding and without the prompt."""
    model, given = seeded(build), prompts(5)
    answers = sw.generate(model, given, batch_size=2, max_new_tokens=6, do_sample=False)
    assert [answer.prompt for answer in answers] == [0, 1, 2, 3, 4]
    for answer in answers[:4]:
        rows = given[answer.prompt // 2 * 2 :][:2]
        longest = max(map(len, rows))
        padded = torch.zeros(2, longest, dtype=torch.long)
        for row, ids in zip(padded, rows, strict=True):
            place = slice(len(ids)) if build in {t5, bart} else slice(longest - len(ids), None)
            row[place] = torch.tensor(ids)
        expected = model.generate(padded, attention_mask=(padded > 0).long(), max_new_tokens=6, do_sample=False)
        row = expected[answer.prompt % 2, longest if build not in {t5, bart} else 1 :].tolist()
        assert answer.ids == row[: len(answer.ids)]
        assert set(row[len(answer.ids) :]) <= {0}
        assert answer.finish_reason == ("stop" if 5 in answer.ids else "length")


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("options", [{"do_sample": False}, {"temperature": 1.5, "seed": 4}, {"num_beams": 2}])
@on_ranks(2, 3, timeout_s=120)
def test_ranks_with_other_prompts(build: Callable[[], Any], options: dict[str, Any]) -> None:
    """Each rank gets the answers that it would get alone; the last one has no prompt at all."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    own = [] if rank == last else prompts(5 + rank)[rank:]
    options = {"max_new_tokens": 5, "batch_size": 2, **options}
    expected = sw.generate(seeded(build), own, **options)
    before = torch.get_rng_state()
    answers = sw.generate(sw.shard(seeded(build)), own, **options)
    assert answers == expected
    assert len(answers) == len(own)
    if "seed" in options:
        assert torch.equal(torch.get_rng_state(), before)


@on_ranks(2)
def test_a_prompt_that_one_rank_cannot_answer_ends_all() -> None:
    model = sw.shard(seeded(gpt2))
    raises: type[Exception] = UsageError if dist.get_rank() else PeerError
    with pytest.raises(raises, match="prompt 2 has 16 tokens, which leaves no room in the model's 16 positions"):
        sw.generate(model, [[7], [7] * (16 if dist.get_rank() else 3)])
    assert len(sw.generate(model, [[7]], max_new_tokens=2)) == 1


def test_answers_end_where_learned_positions_end() -> None:
    for build, most in ((gpt2, 16 - 9), (bart, 15)):
        model = seeded(build)
        model.generation_config.eos_token_id = None
        (answer,) = sw.generate(model, [[7] * 9], max_new_tokens=500, do_sample=False)
        assert (len(answer.ids), answer.finish_reason) == (most, "length")


def test_several_answers_to_a_prompt() -> None:
    options = {"num_return_sequences": 3, "temperature": 2.0, "max_new_tokens": 4, "batch_size": 2, "seed": 0}
    model = seeded(llama)
    answers = sw.generate(model, prompts(3), **options)
    assert [answer.prompt for answer in answers] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert answers == sw.generate(model, prompts(3), **options)
    assert answers != sw.generate(model, prompts(3), **{**options, "seed": 1})


def test_texts_and_conversations() -> None:
    model, tokenizer = seeded(llama), byte_tokenizer()
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    said = [{"role": "user", "content": "hé"}]
    texts = sw.generate(model, ["<user>hé", said], tokenizer, **options)
    ids = sw.generate(model, [list("<user>hé".encode())] * 2, **options)
    assert texts[0].ids == texts[1].ids == ids[0].ids
    assert texts[0].text == tokenizer.decode(ids[0].ids, skip_special_tokens=True)
    assert ids[0] == replace(texts[0], text=None)


def test_the_plain_template_is_that_of_training() -> None:
    """A prompt is what comes before the reply in a training example."""
    tokenizer = byte_tokenizer()
    messages = [
        {"role": role, "content": f"{role}'s\n"} for role in ("system", "user", "assistant", "user", "assistant")
    ]
    trained = encode_document(Document.of_messages("one", tuple(messages)), HuggingFaceTokenizer(tokenizer, "one"))
    tokenizer.chat_template = PLAIN_TEMPLATE
    for replies in (2, 4):
        prompt = token_ids(messages[:replies], tokenizer, "prompt 1")
        assert trained.ids[: len(prompt)].tolist() == prompt
        assert trained.is_target[len(prompt)]
        assert not trained.is_target[len(prompt) - 1]


def test_stop_strings() -> None:
    model, tokenizer = seeded(llama), byte_tokenizer()
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    (whole,) = sw.generate(model, ["abc"], tokenizer, **options)
    place = next(place for place, token in enumerate(whole.ids) if chr(token).isascii() and chr(token).isprintable())
    stop = chr(whole.ids[place])
    cut, other = sw.generate(model, ["abc", "abd"], tokenizer, **options, stop_strings=[stop])
    assert cut.ids == whole.ids[: place + 1]
    assert (cut.finish_reason, stop in (cut.text or "")) == ("stop", True)
    assert len(other.ids) <= 40


def test_the_mode_of_the_model_is_kept() -> None:
    model = seeded(llama).train()
    sw.generate(model, [[7]], max_new_tokens=2)
    assert model.training


def test_what_cannot_be_generated() -> None:
    transformers = pytest.importorskip("transformers")
    model, tokenizer = seeded(llama), byte_tokenizer()
    for given, words in (
        ([[]], "prompt 1 is empty"),
        (["a", ""], "prompt 2 is empty"),
        ([[{"role": "user", "content": "a"}]], "prompt 1 is a conversation, and the tokenizer has no chat template"),
        ([[{"role": "user"}]], "prompt 1: every message needs a role and a content"),
        ([[320]], "prompt 1 has the token 320, which is not in the model's vocabulary of 320"),
    ):
        with pytest.raises(UsageError, match=words):
            sw.generate(model, given, tokenizer)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match="rejects this conversation: roles must alternate"):
        sw.generate(model, [[{"role": "user", "content": "a"}]], tokenizer)
    with pytest.raises(UsageError, match="prompt 1 is not a list of token ids: pass the tokenizer"):
        sw.generate(model, ["a"])
    with pytest.raises(UsageError, match="batch_size=0: must be 1 or more"):
        sw.generate(model, [[7]], batch_size=0)
    for other in (transformers.LlamaModel(model.config), torch.nn.Linear(2, 2)):
        with pytest.raises(UsageError, match=f"{type(other).__name__} does not generate"):
            sw.generate(other, [[7]])


def test_a_model_without_masks_gets_each_prompt_alone() -> None:
    class Unmasked(type(llama())):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, past_key_values: Any = None, use_cache: Any = None, **more) -> Any:
            assert len(input_ids) == 1
            return super().forward(input_ids=input_ids, past_key_values=past_key_values, use_cache=use_cache, **more)

    model = Unmasked(llama().config).eval()
    together = sw.generate(model, prompts(3), max_new_tokens=4, do_sample=False)
    alone: list[Answer] = []
    for index, prompt in enumerate(prompts(3)):
        alone += [replace(a, prompt=index) for a in sw.generate(model, [prompt], max_new_tokens=4, do_sample=False)]
    assert together == alone
