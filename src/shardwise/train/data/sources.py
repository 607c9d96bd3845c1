"""`data.source` and `data.format`: from a path, a folder or a glob to documents."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.suggest import nearest_path
from shardwise.train.config.files import reading
from shardwise.train.config.schema import UNSET
from shardwise.train.data.corpus import BUILTIN_PREFIX, builtin_documents
from shardwise.train.data.documents import TEXT_ERRORS, Document, document_of_row

_SUFFIX_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
_SUFFIX_FORMATS |= {".csv": "csv", ".tsv": "tsv"}
_BUILDERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "jsonl": ("json", {}),
    "parquet": ("parquet", {}),
    "csv": ("csv", {}),
    "tsv": ("csv", {"delimiter": "\t"}),
}
"""Of `datasets`, with its options, by format."""


def read_documents(source: str, file_format: str | None = None) -> list[Document]:
    """Every document of a source, in an order that depends on names alone.

    Args:
        source: `builtin:NAME`, a file, a folder (every file below it) or a glob (`**` descends).
        file_format: "text", "jsonl", "parquet", "csv" or "tsv"; None goes by suffix, where any other suffix is text.

    Raises:
        ConfigError: nothing is there, or a file cannot be read or does not hold what its format says.
    """
    if source.startswith(BUILTIN_PREFIX):
        return builtin_documents(source.removeprefix(BUILTIN_PREFIX))
    files = find_files(source)
    documents: list[Document] = []
    with reading("data.source", source):
        for file in files:
            documents.extend(_read_file(file, file_format or format_of(file)))
    if not documents:
        raise ConfigError(f"data.source={source!r} holds no text in {counted(len(files))}")
    return documents


def format_of(file: Path) -> str:
    """The format that a file's suffix says."""
    return _SUFFIX_FORMATS.get(file.suffix.lower(), "text")


def counted(files: int) -> str:
    """A number of files in words."""
    return "1 file" if files == 1 else f"{files} files"


def find_files(source: str) -> list[Path]:
    """The files that a path, folder or glob names, sorted.

    Raises:
        ConfigError: there are none, and the message names the nearest existing name; or some cannot be looked at.
    """
    path = Path(source)
    if source == UNSET and not path.exists():
        raise ConfigError("data.source is not set: name what to train on, such as data.source=texts/*.jsonl")
    with reading("data.source", source):
        if path.is_file():
            return [path]
        if path.is_dir():
            files = [file for file in _below(path) if file.is_file() and not file.name.startswith(".")]
        else:
            names = glob.glob(source, recursive=True)  # noqa: PTH207, Path.glob takes no absolute pattern
            files = [Path(name) for name in names if Path(name).is_file()]
    if not files:
        raise ConfigError(f"data.source={source!r}: no files there{nearest_path(path)}")
    return sorted(files)


def _below(folder: Path) -> Iterator[Path]:
    """Everything in a folder and its folders. What cannot be listed raises, where globs would leave it out."""

    def refuse(error: OSError) -> None:
        raise error

    for directory, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(directory, name) for name in names)


def _read_file(file: Path, file_format: str) -> Iterator[Document]:
    if file_format == "text":
        text = file.read_bytes().decode(errors=TEXT_ERRORS)
        if text:
            yield Document.of_text(file.as_posix(), text)
        return
    for index, row in enumerate(_read_rows(file, file_format)):
        document = document_of_row(f"{file.as_posix()}:{index + 1}", row)
        if document is not None:
            yield document


def _read_rows(file: Path, file_format: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a table, through `datasets`, which keeps them in memory-mapped files and not in RAM."""
    if not file.stat().st_size:  # datasets fails at it in a way of its own
        return
    import datasets
    from datasets.exceptions import DatasetGenerationError

    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs what it raises
    builder, options = _BUILDERS[file_format]
    try:
        table = datasets.load_dataset(builder, data_files=str(file), split="train", **options)
    except (DatasetGenerationError, ValueError, OSError) as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(f"data.source: {file} cannot be read as {file_format}: {cause[:200]}") from None
    yield from table
