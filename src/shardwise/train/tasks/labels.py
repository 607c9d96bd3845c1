"""Names of labels: of the data's, in the order that the model has for them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError
from shardwise.hub import local
from shardwise.train.config.schema import ModelConfig
from shardwise.train.config.tasks import class_for

_SHOWN = 5
_UNNAMED = "LABEL_"
"""Begins the names that transformers gives to labels without names."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a task."""

    names: tuple[str, ...]
    """In the order of the head's outputs."""
    ids: Mapping[Any, int]
    """By value in the rows: the output that stands for it."""

    def of(self, value: Any, key: str, column: str) -> int:
        """Return the output that stands for a value. Raises ConfigError, which begins with `key`, for no label."""
        try:
            return self.ids[value]
        except (KeyError, TypeError):
            raise ConfigError(f"{key}: {column} must be a label, not {value!r}") from None


def labels_of(model: ModelConfig, feature: Any, values: Iterable[Any], column: str) -> Labels:
    """Return the labels of a column.

    Names are those of the column's `ClassLabel`, texts as they are, and for numbers the model's own names. Where the
    model knows all of the names, or has as many outputs as the numbers need, its own order and number are kept, so that
    a trained head goes on; else names are ordered as in `ClassLabel`, or by the alphabet.

    Args:
        model: the section `[model]`.
        feature: the type that `datasets` has for one label.
        values: all values of the column that occur.
        column: for errors.

    Raises:
        ConfigError: the values are no labels; there are fewer than two; or the model's own head has another number of
            outputs.
    """
    named: list[str] | None = getattr(feature, "names", None)
    found = set(values) - {-1} if named else set(values)
    own, is_trained = _own(model)
    if named is not None:
        by_value: dict[Any, str] = dict(enumerate(named))
    elif found and all(isinstance(value, str) for value in found):
        by_value = {value: value for value in sorted(found)}
    elif found and all(isinstance(value, int) and value >= 0 for value in found):
        count = max(2, max(found) + 1)
        names = own if own is not None and len(own) >= count else [f"{_UNNAMED}{number}" for number in range(count)]
        by_value = dict(enumerate(names))
    else:
        strange = next((value for value in found if not isinstance(value, int) or value < 0), found)
        raise ConfigError(
            f"data: {column} must hold labels, texts or whole numbers from 0 on, not such as {strange!r}: regression "
            "and several labels for one row are not supported"
        )
    ordered = list(by_value.values())
    if own is not None and set(ordered) <= set(own):
        ordered = list(own)
    if len(ordered) < 2:
        raise ConfigError(f"data: {column} has one label only ({ordered[0]!r}), so there is nothing to learn")
    if is_trained and own is not None and len(own) != len(ordered):
        raise ConfigError(
            f"the model's trained head has {len(own)} labels ({', '.join(own[:_SHOWN])}), and {column} has "
            f"{len(ordered)} ({', '.join(ordered[:_SHOWN])}): start from the model that it was fine-tuned from"
        )
    return Labels(tuple(ordered), {value: ordered.index(name) for value, name in by_value.items()})


def labels_in_words(names: tuple[str, ...]) -> str:
    """Return what a user is told of labels, as the end of a sentence; empty without any."""
    if not names:
        return ""
    more = ", ..." if len(names) > _SHOWN else ""
    return f", with {len(names)} labels: {', '.join(names[:_SHOWN])}{more}"


def _own(model: ModelConfig) -> tuple[list[str] | None, bool]:
    """Return the names of a model's labels, None if it has none yet; and whether weights for them are loaded."""
    configuration: Mapping[str, Any] = model.config or {}
    if model.path is not None:
        path = local(model.path)
        configuration = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    named = configuration.get("id2label")
    names = None if not named else [named[key] for key in sorted(named, key=int)]
    built = None if model.task is None else class_for(model.task, str(configuration.get("model_type")))
    has_head = model.pretrained is not None and built in (configuration.get("architectures") or ())
    if has_head and names is None:
        names = [f"{_UNNAMED}0", f"{_UNNAMED}1"]  # transformers writes no names of two labels
    return names, has_head
