"""The tasks that a model can be trained for, and the one that its configuration is made for. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from shardwise.errors import ConfigError

TaskName = Literal[
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "sequence-classification",
    "token-classification",
    "image-classification",
    "image-text-to-text",
]
DEFAULT: TaskName = "causal-lm"


class Kind(NamedTuple):
    """What other libraries call a task."""

    auto: str
    """transformers' Auto class of its models."""
    classes: str
    """transformers' table of their classes by model type, in `transformers.models.auto.modeling_auto`."""
    pipeline: str
    """A hub's name of what its models are for."""
    peft: str | None = None
    """PEFT's `TaskType`, if it has one."""


KINDS: Mapping[TaskName, Kind] = {
    "causal-lm": Kind("AutoModelForCausalLM", "CAUSAL_LM", "text-generation", "CAUSAL_LM"),
    "masked-lm": Kind("AutoModelForMaskedLM", "MASKED_LM", "fill-mask"),
    "seq2seq-lm": Kind("AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", "text2text-generation", "SEQ_2_SEQ_LM"),
    "sequence-classification": Kind(
        "AutoModelForSequenceClassification", "SEQUENCE_CLASSIFICATION", "text-classification", "SEQ_CLS"
    ),
    "token-classification": Kind(
        "AutoModelForTokenClassification", "TOKEN_CLASSIFICATION", "token-classification", "TOKEN_CLS"
    ),
    "image-classification": Kind("AutoModelForImageClassification", "IMAGE_CLASSIFICATION", "image-classification"),
    "image-text-to-text": Kind("AutoModelForImageTextToText", "IMAGE_TEXT_TO_TEXT", "image-text-to-text", "CAUSAL_LM"),
}
CLASSIFIES = frozenset({"sequence-classification", "token-classification", "image-classification"})
"""Tasks whose models have a head with as many outputs as there are labels."""


def class_for(task: TaskName, model_type: str) -> str | None:
    """Return the name of transformers' class for a task and a model type; None if it has none."""
    return next(iter(_names(_classes(task).get(model_type))), None)


def task_for(configuration: Mapping[str, Any]) -> TaskName:
    """Return the task that a transformers configuration is made for: that of the class that its `architectures` name.
    If they name none, or one that is for no task, it is a causal language model, or the first task that transformers
    has a model of this type for.

    Args:
        configuration: the contents of `config.json`.
    """
    if not _architecture(configuration):
        return DEFAULT
    found = named_task(configuration)
    if found is not None:
        return found
    tasks: tuple[TaskName, ...] = get_args(TaskName)
    model_type = str(configuration.get("model_type"))
    return next((task for task in tasks if class_for(task, model_type) is not None), DEFAULT)


def named_task(configuration: Mapping[str, Any]) -> TaskName | None:
    """Return the task of the class that a configuration's `architectures` name; None if it is for none, or if they name
    none."""
    named = _architecture(configuration)
    return next((task for ending, task in _ENDINGS.items() if named.endswith(ending)), None) or task_of(named)


def _architecture(configuration: Mapping[str, Any]) -> str:
    return next((name for name in configuration.get("architectures") or () if isinstance(name, str)), "")


def task_of(class_name: str) -> TaskName | None:
    """Return the task that one of transformers' classes is for; None if it is for none of them."""
    tasks: tuple[TaskName, ...] = get_args(TaskName)
    for task in tasks:
        if class_name in {name for names in _classes(task).values() for name in _names(names)}:
            return task
    return None


_ENDINGS: Mapping[str, TaskName] = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForImageClassification": "image-classification",
}
"""The task by the end of a class's name. Most are told by it, without importing transformers."""


def check_task(task: TaskName, model_type: str) -> None:
    """Raise ConfigError if transformers has no model of this type for a task. A type that it does not know at all
    passes: what builds the model reports it."""
    tasks: tuple[TaskName, ...] = get_args(TaskName)
    can = [one for one in tasks if class_for(one, model_type) is not None]
    if can and task not in can:
        raise ConfigError(
            f"model.task={task!r}: transformers has no such model of the type {model_type!r}; set model.task to one "
            f"that it has: {', '.join(can)}"
        )


def _names(found: Any) -> Iterator[str]:
    if found is not None:
        yield from [found] if isinstance(found, str) else found


@cache
def _classes(task: TaskName) -> Mapping[str, Any]:
    """Return transformers' classes for a task, by model type: the name of one, or of several."""
    from transformers.models.auto import modeling_auto

    classes: Mapping[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{KINDS[task].classes}_MAPPING_NAMES")
    return classes
