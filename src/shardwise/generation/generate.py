"""`generate`: answers of a sharded or plain transformers model to any number of prompts on each rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from shardwise import device_tools
from shardwise.comm.together import OverGroups
from shardwise.engine.lookup import engine_of
from shardwise.errors import UsageError, one_line
from shardwise.generation.options import checked_options, merged
from shardwise.generation.prompts import Prompt, token_ids
from shardwise.modules.adapters import base_of
from shardwise.plan.models.transformers_models import is_rotary, positions_of, text_part
from shardwise.together import Together

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_SIZE = 8
_SEEDS = 2**62
_APART = 1_000_003
"""Distance of the random streams of two seeds, in batches."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model generated for one prompt."""

    prompt: int
    """Index of the prompt among this rank's."""
    ids: list[int]
    """The new token ids, the one that ends the answer included."""
    text: str | None
    """The answer without special tokens; None without a tokenizer."""
    finish_reason: Literal["stop", "length"]
    """"length" if the answer reached the greatest length without an end."""


def generate(
    model: nn.Module,
    inputs: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    batch_size: int = BATCH_SIZE,
    seed: int | None = None,
    **options: Any,
) -> list[Answer]:
    """Generate answers to this rank's prompts. Every rank of a sharded model must call this.

    Ranks may have different prompts, of different numbers and lengths, or none. Prompts are answered in batches of
    `batch_size`, in order, padded to the longest of the batch. An answer depends on its batch, not on what other ranks
    do: a rank that got the same prompts alone would generate the same tokens, to the bit where kernels are the same.

    Args:
        model: a transformers or PEFT model that can generate, causal or with an encoder and a decoder; sharded or not.
        inputs: texts, conversations (lists of {"role", "content"}) or token ids (lists, or 1-D integer tensors).
        tokenizer: a transformers tokenizer, for texts, conversations and `Answer.text`.
        batch_size: prompts that are computed together.
        seed: seed of the sampling. A batch's random numbers depend on it and on the batch's index on this rank. None
            draws from torch's global state.
        options: those of transformers' `GenerationConfig`, by name; the model's own `generation_config` holds for the
            others. See `checked_options` for defaults.

    Returns:
        Answers in the order of the prompts; with `num_return_sequences=n`, n for each prompt.

    Raises:
        UsageError: the model cannot generate, an option does not exist or its value is refused, or a prompt is empty,
            needs a tokenizer or a chat template that is not there, or is longer than the model's positions. Where it is
            raised before anything is computed, all other ranks raise a PeerError.
    """
    engine = engine_of(model)
    is_shared = engine is not None and not engine.is_suspended
    peers = OverGroups(engine.joint_groups if is_shared and engine is not None else [])
    with peers.together():
        generator = Generator(model, tokenizer, options, seed)
        batches = generator.batches(inputs, batch_size)
    rounds = max(peers.all_gather_object(len(batches)))
    answers: list[Answer] = []
    with generator.evaluating():
        for number in range(rounds):
            if number < len(batches):
                answers += generator.answer(batches[number], number)
            else:
                generator.stand_in()
    return answers


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that are computed together."""

    first: int
    """Index of the first prompt."""
    prompts: list[list[int]]


class Generator:
    """A model with options of generation, which answers batch by batch."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None,
        options: dict[str, Any],
        seed: int | None = None,
    ) -> None:
        """Raises UsageError if the model cannot generate or an option cannot be used."""
        check_generates(model)
        self.model: Any = model
        self.tokenizer = tokenizer
        own: Any = model.generation_config
        config: Any = model.config
        self.options = checked_options(options, own)
        self._seed = seed
        values = merged(self.options, own)
        ends = values.get("eos_token_id")
        if ends is None and tokenizer is not None:
            ends = tokenizer.eos_token_id
        self._ends: list[int] = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        pad = getattr(tokenizer, "pad_token_id", None)
        own_pad = values.get("pad_token_id")
        self._pad: int = next((one for one in (own_pad, pad, *self._ends) if one is not None), 0)
        self._stop_strings = values.get("stop_strings")
        self.beams: int = values.get("num_beams") or 1
        self.answers_per_prompt: int = values.get("num_return_sequences") or 1
        engine = engine_of(model)
        self._device = next(model.parameters()).device if engine is None else engine.mesh.device
        self._has_decoder = bool(config.is_encoder_decoder)
        text = text_part(config)
        self._vocabulary: int | None = getattr(text, "vocab_size", None)
        self._positions = positions_of(text)
        self._positions_go_on = is_rotary(text)
        self._masks = "attention_mask" in inspect.signature(type(base_of(model)).forward).parameters

    def batches(self, inputs: Sequence[Prompt], batch_size: int, first: int = 0) -> list[Batch]:
        """Return prompts in batches. A model that knows no mask for padding gets each prompt alone.

        first: number of prompts before these.

        Raises UsageError for the first prompt that cannot be answered.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size}: must be 1 or more")
        prompts = [self.encode(prompt, f"prompt {first + index + 1}") for index, prompt in enumerate(inputs)]
        size = batch_size if self._masks else 1
        return [Batch(first + start, prompts[start : start + size]) for start in range(0, len(prompts), size)]

    def encode(self, prompt: Prompt, where: str) -> list[int]:
        """Return the token ids of a prompt. Raises UsageError if it cannot be answered; `where` begins the message."""
        ids = token_ids(prompt, self.tokenizer, where)
        strange = [one for one in ids if one < 0 or (self._vocabulary is not None and one >= self._vocabulary)]
        if strange:
            raise UsageError(
                f"{where} has the token {strange[0]}, which is not in the model's vocabulary of {self._vocabulary}: "
                "the tokenizer is another model's"
            )
        if self._positions is not None and len(ids) + (not self._has_decoder) > self._positions:
            raise UsageError(
                f"{where} has {len(ids):,} tokens, which leaves no room in the model's {self._positions:,} positions: "
                "shorten it"
            )
        return ids

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside the block, the model is in evaluation mode."""
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    def in_turns(
        self, batches: Sequence[Batch], ranks: Together, per_batch: int = 1, first: int = 0, streamer: Any = None
    ) -> Iterator[list[Answer]]:
        """Answer batches, of which each rank takes its turn: yield the answers of every round of all ranks, in the
        order of the prompts. They do not depend on the number of ranks. Every rank must iterate, with the same batches.

        Args:
            ranks: all ranks of the run.
            per_batch: number of consecutive ranks that answer the same batch, such as those of a tensor-parallel group.
            first: the index of the first batch to answer.
            streamer: as for `answer`.
        """
        for start in range(first, len(batches), ranks.world_size // per_batch):
            own, answers = start + ranks.rank // per_batch, list[Answer]()
            if own < len(batches):
                answers = self.answer(batches[own], own, streamer)
            else:
                self.stand_in()
            yield [answer for of_rank in ranks.all_gather_object(answers)[::per_batch] for answer in of_rank]

    def answer(self, batch: Batch, number: int, streamer: Any = None) -> list[Answer]:
        """Return the answers to a batch. Every rank of the model must call this or `stand_in`.

        Args:
            number: the index of the batch, on which the random numbers of sampling depend.
            streamer: one of transformers' streamers; not with beams.
        """
        longest = max(len(ids) for ids in batch.prompts)
        ids = torch.full((len(batch.prompts), longest), self._pad)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(batch.prompts):
            place = slice(len(prompt)) if self._has_decoder else slice(longest - len(prompt), None)
            ids[row, place] = torch.tensor(prompt)
            mask[row, place] = 1
        options = {**self.options, **self._limited(longest)}
        if self.beams == 1:
            options["streamer"] = streamer
        sequences = self._call(ids, mask, options, number)
        skip = longest if not self._has_decoder else 1
        most = options.get("max_new_tokens")
        each = self.answers_per_prompt
        rows = [row.tolist() for row in sequences[:, skip:].cpu()]
        return [self._answer(batch.first + index // each, row, most) for index, row in enumerate(rows)]

    def stand_in(self) -> None:
        """Take part in the batch of another rank without one of this rank's own. Every rank of the model must call this
        or `answer`."""
        ids = torch.full((1, 1), self._pad)
        shortest = {"max_new_tokens": 1, "min_new_tokens": 0, "min_length": 0}
        self._call(ids, torch.ones_like(ids), {**self.options, **shortest}, 0)

    def _call(self, ids: Tensor, mask: Tensor, options: dict[str, Any], number: int) -> Tensor:
        masks = {"attention_mask": mask.to(self._device)} if self._masks else {}
        ends = {"eos_token_id": self._ends} if self._ends else {}
        strings = {"tokenizer": self.tokenizer} if self._stop_strings else {}
        seed = None if self._seed is None else (self._seed * _APART + number) % _SEEDS
        try:
            with nullcontext() if seed is None else device_tools.seeded(self._device, seed):
                sequences: Tensor = self.model.generate(
                    input_ids=ids.to(self._device), pad_token_id=self._pad, **ends, **strings, **masks, **options
                )
        except ValueError as error:  # transformers checks some options only here
            raise UsageError(f"transformers cannot generate with these options: {one_line(error)}") from error
        return sequences

    def _limited(self, longest: int) -> dict[str, int]:
        """Return the greatest number of new tokens if learned positions leave fewer than the options ask for."""
        wanted = self.options.get("max_new_tokens") or self.model.generation_config.max_new_tokens
        if wanted is None or self._positions is None or self._positions_go_on:
            return {} if wanted is None else {"max_new_tokens": wanted}
        return {"max_new_tokens": min(wanted, self._positions - (1 if self._has_decoder else longest))}

    def _answer(self, prompt: int, row: list[int], most: int | None) -> Answer:
        """Return an answer without the padding after its end."""
        end = next((place for place, token in enumerate(row) if token in self._ends), None)
        if end is not None:
            row = row[: end + 1]
        elif self._stop_strings:
            while row and row[-1] == self._pad:
                row.pop()
        reason: Literal["stop", "length"] = "stop" if end is not None or len(row) < (most or 0) else "length"
        text: Any = None if self.tokenizer is None else self.tokenizer.decode(row, skip_special_tokens=True)
        return Answer(prompt, row, text, reason)


def check_generates(model: nn.Module) -> None:
    """Raise UsageError unless a model generates text from text."""
    base: Any = base_of(model)
    name = type(base).__name__
    if not callable(getattr(model, "generate", None)) or not getattr(base, "can_generate", lambda: False)():
        raise UsageError(
            f"{name} does not generate: it has no language model's head. Generation needs a transformers model such as "
            "LlamaForCausalLM or T5ForConditionalGeneration"
        )
    if base.main_input_name != "input_ids":
        raise UsageError(f"{name} generates from {base.main_input_name}, not from text: call its own generate")
