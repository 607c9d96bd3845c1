"""Pictures with a conversation about them: the assistant's replies are learnt."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from shardwise.errors import ConfigError, one_line
from shardwise.hub import local, shown
from shardwise.train.build.models import TextShape
from shardwise.train.config.schema import Config, ModelConfig
from shardwise.train.data.micro_batch import IGNORED, Draw, MicroBatch
from shardwise.train.data.tables import Table, read_table
from shardwise.train.tasks.examples import counted
from shardwise.train.tasks.objectives import NextToken
from shardwise.train.tasks.pictures import PictureRows, Pictures, check_pillow
from shardwise.train.tasks.processors import Pretrained
from shardwise.train.tasks.task import Task, shares

_FIELDS = "a picture (image or images) and messages, or prompt and completion"


def image_text_to_text(config: Config) -> Task:
    """Read rows of pictures with a conversation about them. Not collective. Raises as `load_task`."""
    check_pillow("image-text-to-text")
    table = read_table(config.data, _FIELDS)
    processor = _processor(config.model)
    tokenizer = processor.tokenizer
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    pictures = Pictures.of(table, table.column("images", "image"))
    if not any(map(pictures.count, range(len(table)))):
        raise ConfigError(f"{pictures.keys[0]} and all other rows: no picture; train texts with model.task='causal-lm'")
    texts = [_rendered(processor, _messages(table, row), pictures, row) for row in range(len(table))]
    split = table.split(config.data.eval_fraction)
    train, held_out = (
        Conversations(pictures, rows, [texts[row] for row in rows], processor, parts)
        for rows, parts in ((split.train, split.parts), (split.held_out, ()))
    )
    said = f"{len(train):,} conversations about pictures to train on, {len(held_out):,} held out"
    end_id = tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return Task(
        objective=NextToken(),
        train=train,
        held_out=held_out,
        shape=TextShape(len(tokenizer), end_id, config.data.seq_len, tokenizer.pad_token_id),
        processor=Pretrained(processor),
        reads=f"texts and pictures through {type(processor).__name__}, {len(tokenizer):,} ids",
        says=(f"{shown(config.data.named)}: {said}", *shares(config.data, train)),
        words=f"{said} (digests {train.digest} and {held_out.digest}), of {len(tokenizer)} token ids",
    )


class Rendered(NamedTuple):
    """A conversation in the processor's chat template."""

    text: str
    replies: tuple[tuple[int, int], ...]
    """By reply: its first token and the one past its last, as numbers of tokens before the end of the text. Pictures
    become any number of tokens, but only before the first reply."""


class Conversations(PictureRows):
    """Rows with a `Rendered` conversation, most of them about pictures. Nothing is cut: pictures and texts would no
    longer belong together."""

    @cached_property
    def _first_with_picture(self) -> int | None:
        return next((row for row in range(len(self)) if self.pictures.count(self.rows[row])), None)

    def micro_batch(self, draws: list[Draw]) -> MicroBatch:
        """Return the rows that were drawn, with their pictures decoded, padded to the longest of them.

        If none of them has a picture, one more row that has is put behind, of which nothing is learnt: the layers that
        see then run on every rank, whose gradients are all of the same parameters.
        """
        there, drawn = counted(draws, len(self))
        extra = self._first_with_picture
        if extra is not None and not any(self.pictures.count(self.rows[row]) for row in drawn):
            there, drawn = np.append(there, False), [*drawn, extra]
        texts: list[Rendered] = [self.answers[row] for row in drawn]
        batch = self.processor(
            text=[text.text for text in texts],
            images=None if extra is None else [self.pictures.open(self.rows[row]) for row in drawn],
            padding=True,
            add_special_tokens=False,  # the template has put them
            return_tensors="pt",
        )
        inputs = {name: value.numpy() for name, value in batch.items()}
        labels = np.full(inputs["input_ids"].shape, IGNORED, dtype=np.int64)
        for row, (text, is_there) in enumerate(zip(texts, there, strict=True)):
            length = int(inputs["attention_mask"][row].sum())
            for first, last in text.replies if is_there else ():
                span = slice(length - first, length - last)
                labels[row, span] = inputs["input_ids"][row, span]
        return MicroBatch.of_next_tokens(inputs, labels)


def _processor(model: ModelConfig) -> Any:
    """Return the processor beside the model's configuration or weights. Raises ConfigError without one, or without a
    chat template."""
    from transformers import AutoProcessor

    auto: Any = AutoProcessor  # untyped
    name = next((name for name in (model.directory, model.pretrained) if name is not None), None)
    if name is None:
        raise ConfigError("model.task='image-text-to-text' needs a model.path with a processor for its pictures")
    try:
        found = auto.from_pretrained(local(name), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{name}: its processor cannot be loaded: {one_line(error)[:160]}") from None
    if not hasattr(found, "image_processor") or not getattr(found, "chat_template", None):
        raise ConfigError(f"{name} has no processor of pictures with a chat template (processor_config.json)")
    return found


def _messages(table: Table, row: int) -> list[dict[str, Any]]:
    """Return a row's conversation as messages whose content is a list of parts, one of them for each picture."""
    fields, key = table.rows[row], table.keys[row]
    messages = fields.get("messages")
    if messages is None:
        asked = next((fields[name] for name in ("prompt", "question") if fields.get(name) is not None), None)
        answer = next((fields[name] for name in ("completion", "answer") if fields.get(name) is not None), None)
        if not isinstance(asked, str) or not isinstance(answer, str):
            raise ConfigError(f"{key}: a row needs {_FIELDS}")
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return [{"role": message["role"], "content": _parts(message, key)} for message in messages]


def _parts(message: Any, key: str) -> list[dict[str, Any]]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or any(part.get("type") not in {"text", "image"} for part in content):
        raise ConfigError(f"{key}: a message's content must be text, or a list of parts of the types text and image")
    image = {"type": "image"}
    return [image if part["type"] == "image" else {"type": "text", "text": part["text"]} for part in content]


def _rendered(processor: Any, messages: list[dict[str, Any]], pictures: Pictures, row: int) -> Rendered:
    """Render a conversation, and find its replies. Raises ConfigError, which begins with the row's name, if it has a
    picture behind its first reply, or no reply, or if the template rewrites earlier turns."""
    key = pictures.keys[row]
    replies = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies:
        raise ConfigError(f"{key}: the conversation has no assistant message, so there is nothing to learn; remove it")
    count = pictures.count(row)
    placed = [at for at, message in enumerate(messages) for part in message["content"] if part["type"] == "image"]
    if not placed and count:
        asking = next((message for message in messages if message["role"] == "user"), messages[0])
        asking["content"] = [*({"type": "image"} for _ in range(count)), *asking["content"]]
    elif len(placed) != count or (placed and placed[-1] > replies[0]):
        raise ConfigError(f"{key}: has {count} pictures and {len(placed)} places for them; all must be before a reply")

    def render(upto: int, prompts: bool) -> str:
        return str(processor.apply_chat_template(messages[:upto], tokenize=False, add_generation_prompt=prompts))

    def tokens(text: str) -> list[int]:
        ids: list[int] = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    whole = render(len(messages), prompts=False)
    ids = tokens(whole)
    spans: list[tuple[int, int]] = []
    for at in replies:
        prompt, answered = render(at, prompts=True), render(at + 1, prompts=False)
        first, last = tokens(whole[len(prompt) :]), tokens(whole[len(answered) :])
        is_prefix = whole.startswith(answered) and answered.startswith(prompt)
        if not is_prefix or ids[len(ids) - len(first) :] != first or ids[len(ids) - len(last) :] != last:
            raise ConfigError(
                f"{key}: the chat template rewrites earlier turns, so replies cannot be told from prompts"
            )
        spans.append((len(first), len(last)))
    return Rendered(whole, tuple(spans))
