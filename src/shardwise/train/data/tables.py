"""A source as one table of `datasets`, for tasks whose rows have more fields than text. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.errors import ConfigError, one_line
from shardwise.hub import hub_name
from shardwise.train.config.files import reading
from shardwise.train.config.schema import DataConfig, SourceConfig
from shardwise.train.data.corpus import BUILTIN_PREFIX
from shardwise.train.data.holdout import is_held_out
from shardwise.train.data.hub_rows import key_of, prepare
from shardwise.train.data.micro_batch import Part
from shardwise.train.data.sources import find_files, folder_of_pictures, format_of, is_saved, saved_table, table_of

SOURCES, TARGETS = ("text", "source", "document", "prompt"), ("target", "summary", "completion")
"""Columns of a sequence-to-sequence model: what it reads, and what it is to write for it."""
_PICTURES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})


class TableSplit(NamedTuple):
    """Rows of a table, by their places in it; none is in both."""

    train: list[int]
    held_out: list[int]
    parts: tuple[Part, ...]
    """The sources of those to train on, as `Rows.parts`."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The rows of one source, or of several, one after another."""

    rows: Any
    """A `datasets.Dataset`: memory-mapped, with its columns' types in `features`."""
    keys: list[str]
    """By row, a stable name. Its hash decides whether the row is held out, and errors begin with it."""
    names: Sequence[str]
    """By source, its name."""
    parts: Sequence[Part]
    """By source, its rows."""

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, *names: str) -> str | None:
        """Return the first of these columns that the table has; None if it has none of them."""
        return next((name for name in names if name in self.rows.column_names), None)

    def column(self, *names: str) -> str:
        """Return the first of these columns that the table has. Raises ConfigError if it has none."""
        found = self.find(*names)
        if found is None:
            raise ConfigError(
                f"data.source={', '.join(self.names)!r}: rows need {' or '.join(names)}; these have "
                f"{', '.join(self.rows.column_names)}"
            )
        return found

    def texts(self, column: str) -> list[str]:
        """Return a column of texts. Raises ConfigError, which names the first row that has something else there."""
        values: list[Any] = self.rows[column][:]
        for key, value in zip(self.keys, values, strict=True):
            if not isinstance(value, str):
                raise ConfigError(f"{key}: {column} must be text, not {str(value)[:80]!r}")
        return values

    def split(self, fraction: float) -> TableSplit:
        """Return the rows to train on and those that are held out: as `hold_out` does for documents, of each source by
        itself.

        Raises ConfigError if no row of a source is left to train on, as with a single one.
        """
        train, held_out, parts = list[int](), list[int](), list[Part]()
        end = 0
        for source, part in zip(self.names, self.parts, strict=True):
            keys = self.keys[end : end + part.rows]
            if not keys:
                raise ConfigError(f"data.source={source!r} has no row to train on")
            if fraction and len(keys) == 1:
                raise ConfigError(
                    f"data.eval_fraction={fraction}: the source has only one example ({keys[0]}), which cannot be held "
                    "out; set eval_fraction=0"
                )
            held = is_held_out(keys, fraction)
            train += [row for row, out in enumerate(held, end) if not out]
            held_out += [row for row, out in enumerate(held, end) if out]
            parts.append(Part(held.count(False), part.weight))
            end += part.rows
        return TableSplit(train, held_out, tuple(parts) if len(parts) > 1 else ())


def read_table(config: DataConfig, fields: str) -> Table:
    """Return the rows of one or several sources. Files of several formats may lie side by side, if they have the same
    columns.

    Args:
        config: the section `[data]`.
        fields: what a row needs, for errors about sources that have no rows.

    Raises:
        ConfigError: a source has no rows, or files of it cannot be read or have other columns than others.
        HubError: a source is a data set of a hub that cannot be fetched.
    """
    tables, keys, parts = list[Any](), list[str](), list[Part]()
    for source in config.each_source:
        before = len(keys)
        for name, table in _tables(source, fields):
            tables.append(table)
            keys += [f"{name}:{number}" for number in range(1, len(table) + 1)]
        if len(keys) == before:
            raise ConfigError(f"data.source={source.source!r} has no rows")
        parts.append(Part(len(keys) - before, source.weight))
    return Table(_joined(tables, config.named), keys, [one.source for one in config.each_source], parts)


def _tables(config: SourceConfig, fields: str) -> list[tuple[str, Any]]:
    """Return the tables of a source, each with the name that its rows' keys begin with."""
    source = config.source
    name = hub_name(source)
    if name is not None:
        return [(key_of(name, config.subset, config.split), prepare(name, config.subset, config.split))]
    if source.startswith(BUILTIN_PREFIX):
        raise ConfigError(f"data.source={source!r} is plain text, but this task needs rows with {fields}")
    if is_saved(source):
        return [(source, saved_table(source, config.split))]
    found = []
    with reading("data.source", source):
        files = find_files(source)
        if is_folder_of_pictures(source):
            return [(source, folder_of_pictures(source))]
        for file in files:
            file_format = config.format or format_of(file)
            if file_format == "text":
                raise ConfigError(f"data.source: {file} is plain text, but this task needs rows with {fields}")
            found.append((file.as_posix(), table_of(file, file_format)))
    return found


def is_folder_of_pictures(source: str) -> bool:
    """Return whether a source is a directory with pictures below it."""
    return Path(source).is_dir() and any(file.suffix.lower() in _PICTURES for file in find_files(source))


def _joined(tables: Sequence[Any], source: str) -> Any:
    import datasets

    there = [table for table in tables if len(table)]
    try:
        return there[0] if len(there) == 1 else datasets.concatenate_datasets(there)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"data.source={source!r}: not all have the same columns: {one_line(error)[:200]}") from None
