"""Prompts: text, conversations or token ids, and the tokenizer that turns the first two into the third."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from shardwise.errors import UsageError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[Message] | Sequence[int] | Tensor
"""A text, a conversation of {role, content}, or token ids (1-D)."""


def token_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, where: str) -> list[int]:
    """Return the token ids of a prompt: of a text with the special tokens that the tokenizer adds, of a conversation as
    the tokenizer's chat template renders it, with the beginning of the answer.

    Args:
        tokenizer: may be None for token ids.
        where: the beginning of messages, such as "prompt 3".

    Raises:
        UsageError: the prompt is empty, there is no tokenizer or no chat template for it, or the template refuses it.
    """
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist() if prompt.ndim == 1 else []
    if not len(prompt):
        raise UsageError(f"{where} is empty: give it at least one token")
    ids = [one for one in prompt if isinstance(one, int)]
    if len(ids) == len(prompt):
        return ids
    if tokenizer is None:
        raise UsageError(f"{where} is not a list of token ids: pass the tokenizer that makes them of it")
    ids = _of_text(prompt, tokenizer) if isinstance(prompt, str) else _of_messages([*prompt], tokenizer, where)
    if not ids:
        raise UsageError(f"{where} is empty: the tokenizer makes no token of it")
    return ids


def _of_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def _of_messages(messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    from jinja2 import TemplateError

    for message in messages:
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message):
            raise UsageError(f"{where}: every message needs a role and a content")
    if not tokenizer.chat_template:
        raise UsageError(
            f"{where} is a conversation, and the tokenizer has no chat template: give one with --chat-template FILE "
            '(in Python, tokenizer.chat_template), or --chat-template plain for the "### role" headings with which '
            "`shardwise train` trains such models"
        )
    try:
        rendered: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{where}: the chat template rejects this conversation: {one_line(error)}") from None
    ids: list[int] = list(rendered["input_ids"])
    return ids
