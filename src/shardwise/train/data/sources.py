"""`data.source` and `data.format`: from a built-in corpus, a file, a folder, a glob or a hub to documents."""

from __future__ import annotations

import codecs
import glob
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, one_line
from shardwise.hub import hub_name
from shardwise.suggest import nearest_path
from shardwise.train.config.files import reading
from shardwise.train.config.schema import UNSET, SourceConfig
from shardwise.train.data.blocks import KeyedRow, Stretch, TableRows, TextFile
from shardwise.train.data.corpus import BUILTIN_PREFIX, builtin
from shardwise.train.data.documents import Document
from shardwise.train.data.hub_rows import key_of, prepare
from shardwise.train.data.rows import document_of_row

_SUFFIX_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
_SUFFIX_FORMATS |= {".csv": "csv", ".tsv": "tsv", ".arrow": "arrow"}
_COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst"})
"""Suffixes after a table's own; `datasets` decompresses such files."""
_TABLE, _TABLES = "state.json", "dataset_dict.json"
"""Files by which a folder that `save_to_disk` of `datasets` wrote is recognised: a table, and tables by split."""
_START_BYTES = 4096
_BUILDERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "jsonl": ("json", {}),
    "parquet": ("parquet", {}),
    "csv": ("csv", {}),
    "tsv": ("csv", {"delimiter": "\t"}),
    "arrow": ("arrow", {}),
}
"""By format: the builder of the `datasets` library, and its options."""


def read_documents(
    source: str, file_format: str | None = None, subset: str | None = None, split: str | None = None
) -> list[Document]:
    """Return every document of a source, in an order that depends only on the files' names.

    Args:
        source: `builtin:NAME`, a file, a folder (every file below it, or what `save_to_disk` of `datasets` wrote), a
            glob (`**` descends), or the name of a data set on a hub.
        file_format: "text", "jsonl", "parquet", "arrow", "csv" or "tsv"; None = by suffix, where an unknown suffix
            means text.
        subset: of a hub's data set; None = its only one, or its default.
        split: of a hub's data set, or of a folder with several; None = "train".

    Raises:
        ConfigError: the source has no files or no text, or a file cannot be read or is not in its format.
        HubError: a data set of a hub cannot be fetched.
    """
    found = (document_of_row(key, row) for key, row in each_row(source, file_format, subset, split))
    documents = [document for document in found if document is not None]
    if not documents:
        rows = hub_name(source) is not None or source.startswith(BUILTIN_PREFIX) or is_saved(source)
        raise ConfigError(
            f"data.source={source!r} has no text in its {'rows' if rows else counted(len(find_files(source)))}"
        )
    return documents


def each_row(
    source: str, file_format: str | None = None, subset: str | None = None, split: str | None = None
) -> Iterator[KeyedRow]:
    """Yield every row of a source and its name, which `document_of_row` takes; a file of text is one row with `text`.

    The arguments, the order and the errors are those of `read_documents`, which also raises if there are no rows.
    """
    for stretch in stretches(source, file_format, subset, split):
        with reading("data.source", source):
            yield from stretch.rows(0, stretch.size)


def stretches(
    source: str, file_format: str | None = None, subset: str | None = None, split: str | None = None
) -> Iterator[Stretch]:
    """Yield the files and tables of a source. The arguments, the order and the errors are those of `each_row`."""
    name = hub_name(source)
    if name is not None:
        yield TableRows(key_of(name, subset, split), prepare(name, subset, split))
    elif source.startswith(BUILTIN_PREFIX):
        yield from builtin(source)()
    elif is_saved(source):
        yield TableRows(source, saved_table(source, split))
    else:
        files = find_files(source)
        with reading("data.source", source):
            for file in files:
                kind = file_format or format_of(file)
                if kind == "text":
                    yield TextFile(file.as_posix(), file)
                elif file.stat().st_size:  # `datasets` raises an unhelpful error for an empty file
                    yield TableRows(file.as_posix(), table_of(file, kind))


def check_there(source: str) -> None:
    """Raise ConfigError if a path, folder or glob names no files. Names of a hub are not looked up."""
    if hub_name(source) is None and not source.startswith(BUILTIN_PREFIX):
        find_files(source)


def check_keys(config: SourceConfig) -> None:
    """Raise ConfigError for a key that has no effect on the kind of source that is given."""
    named, saved = hub_name(config.source) is not None, is_saved(config.source)
    for key in ("format",) if named else ("format", "subset") if saved else ("subset", "split"):
        if getattr(config, key) is not None:
            what = "a data set of a hub" if named else "a saved data set" if saved else "no data set of a hub"
            raise ConfigError(
                f"data.{key}={getattr(config, key)!r} has no effect, because data.source={config.source!r} is {what}: "
                f"leave {key} out"
            )


def format_of(file: Path) -> str:
    """Return the format that a file's suffix implies, or the one before that of a compression."""
    suffix = file.with_suffix("").suffix if file.suffix.lower() in _COMPRESSED else file.suffix
    return _SUFFIX_FORMATS.get(suffix.lower(), "text")


def is_saved(source: str) -> bool:
    """Return whether a source is a folder that `save_to_disk` of `datasets` wrote. Raises ConfigError if it cannot be
    read."""
    with reading("data.source", source):
        path = Path(source)
        return path.is_dir() and any((path / name).is_file() for name in (_TABLE, _TABLES))


def counted(files: int) -> str:
    """Return a number of files in words: "1 file", "2 files"."""
    return "1 file" if files == 1 else f"{files} files"


def find_files(source: str) -> list[Path]:
    """Return the files that a path, folder or glob names, sorted. Hidden files in a folder are left out.

    Raises:
        ConfigError: there are none (the message names the most similar existing path), or a directory cannot be read.
    """
    path = Path(source)
    if source == UNSET and not path.exists():
        raise ConfigError("data.source is not set: set it to what to train on, such as data.source=texts/*.jsonl")
    with reading("data.source", source):
        if path.is_file():
            return [path]
        if path.is_dir():
            files = [file for file in _below(path) if file.is_file() and not file.name.startswith(".")]
        else:
            names = glob.glob(source, recursive=True)  # noqa: PTH207, Path.glob takes no absolute pattern
            files = [Path(name) for name in names if Path(name).is_file()]
    if not files:
        raise ConfigError(f"data.source={source!r}: no such files{nearest_path(path)}")
    return sorted(files)


def _below(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder. A directory that cannot be listed raises, whereas a glob would skip it."""

    def refuse(error: OSError) -> None:
        raise error

    for directory, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(directory, name) for name in names)


def saved_table(source: str, split: str | None) -> Any:
    """Return the rows of a folder that `save_to_disk` wrote, memory-mapped. Raises ConfigError if they cannot be read,
    or there is no such split."""
    import datasets

    try:
        found = datasets.load_from_disk(source)
    except (OSError, ValueError, KeyError, IndexError) as error:  # the last one for a table without rows
        raise ConfigError(f"data.source={source!r}: `datasets` cannot read it: {one_line(error)}") from None
    if not isinstance(found, datasets.DatasetDict):
        if split not in {None, "train"}:
            raise ConfigError(f"data.split={split!r} has no effect: data.source={source!r} has no splits; leave it out")
        return found
    name = split or "train"
    if name not in found:
        raise ConfigError(f"data.source={source!r} has no split {name!r}: set data.split to one of {', '.join(found)}")
    return found[name]


def table_of(file: Path, file_format: str) -> Any:
    """Return the rows of a file, read by `datasets`, which keeps them in memory-mapped files instead of RAM; no rows
    for an empty file. Raises ConfigError if the file is not in its format."""
    if not file.stat().st_size:  # `datasets` raises an unhelpful error for an empty file
        return ()
    builder, options = _BUILDERS[file_format]
    with file.open("rb") as start:
        if file_format == "jsonl" and start.read(_START_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:4] == b"null":
            raise ConfigError(f"data.source: {file} cannot be read as jsonl: its first row is null")  # kills pyarrow 26
    return _loaded(f"data.source: {file} cannot be read as {file_format}", builder, data_files=str(file), **options)


def folder_of_pictures(source: str) -> Any:
    """Return the pictures below a folder as a table, read by `datasets`: with the names of their folders as labels, or
    with the fields that a `metadata.csv` or `metadata.jsonl` has for them. Raises ConfigError if it cannot be read."""
    return _loaded(f"data.source={source!r} cannot be read as a folder of pictures", "imagefolder", data_dir=source)


def _loaded(where: str, builder: str, **options: Any) -> Any:
    """Return what `datasets` reads. Raises ConfigError, which begins with `where`, if it cannot."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it also logs every error that it raises
    try:
        return datasets.load_dataset(builder, split="train", **options)
    except (DatasetGenerationError, ValueError, OSError) as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(f"{where}: {cause[:200]}") from None
