"""TOML as text: tables, strings, numbers, lists and inline tables."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Inline = Callable[[Mapping[str, Any]], bool]


def toml_text(tree: Mapping[str, Any], is_inline: Inline = lambda table: False) -> str:
    """Return a tree of keys as TOML text; reading that text gives an equal tree.

    Args:
        tree: the values by key; a mapping becomes a table.
        is_inline: whether a mapping is written as an inline table, `{ key = value }`.

    Raises:
        TypeError: a value that TOML cannot hold.
    """
    return "\n".join(_table_lines(tree, (), is_inline)).lstrip() + "\n"


def _table_lines(table: Mapping[str, Any], keys: Sequence[str], is_inline: Inline) -> Iterator[str]:
    """Yield a table's own values before its sub-tables, because in TOML everything after a header belongs to that
    header's table."""
    if keys:
        yield ""
        yield f"[{'.'.join(map(_key, keys))}]"
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping) and not is_inline(value)}
    for key, value in table.items():
        if key not in tables:
            yield f"{_key(key)} = {toml_value(value)}"
    for key, value in tables.items():
        yield from _table_lines(value, (*keys, key), is_inline)


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "_").isidentifier()
    return key if bare else toml_value(key)


def toml_value(value: object) -> str:
    """Return a value as TOML text that reads back as the same value. Raises TypeError for what TOML cannot hold."""
    if isinstance(value, str):  # TOML's escapes are JSON's, except that it wants DEL escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # repr of a float reads back as the same float
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    raise TypeError(f"TOML cannot hold a {type(value).__name__}: {value!r}")
