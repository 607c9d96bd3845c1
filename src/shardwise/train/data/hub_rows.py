"""`data.source` as a data set on a hub: its rows, in the library `datasets`' own cache.

After the first time a note in that cache says which of its files have the rows of a data set at a commit. Whoever reads
them again, another rank or a later run, asks no hub.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise import hub
from shardwise.errors import ConfigError, HubError, one_line

_ARROW_BYTES = 2
"""A data set needs this many times the bytes of its files: they are kept, and copied into a memory-mapped file."""


def key_of(name: hub.HubName, subset: str | None, split: str | None) -> str:
    """Return what the names of a data set's rows begin with. It has no revision, so that rows that are held out stay so
    in another one."""
    return "/".join(part for part in (name.repository, subset, split or "train") if part)


def prepare(name: hub.HubName, subset: str | None, split: str | None, say: Callable[[str], None] | None = None) -> Any:
    """Return a data set of a hub as a `datasets.Dataset`, after downloading and converting it if it is not in the
    cache.

    Args:
        name: pinned to a commit.
        subset: its configuration; None = its only one, or its default.
        split: None = "train".
        say: takes the line that says that it is fetched; None = say nothing, and show no progress bars.

    Raises:
        HubError: it cannot be fetched, or the disk has no room for it.
        ConfigError: it has no such subset or split, or is a script.
    """
    import datasets
    from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError, DatasetNotFoundError

    (datasets.disable_progress_bars if say is None else datasets.enable_progress_bars)()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it also logs every error that it raises
    where = f"data.source={hub.shown(str(name))!r}"
    note = _note(name, subset, split)
    known = _noted(note)
    if known is not None:
        return known
    if say is not None:
        say(f"{hub.shown(str(name))}: fetching the data set")
    files = hub.listing(name, where, "dataset").files
    arguments: dict[str, Any] = {"name": subset, "revision": name.revision}
    try:
        with hub.reaching(name, where, "dataset"):
            try:
                builder = datasets.load_dataset_builder(name.repository, **arguments)
                hub.check_room(_ARROW_BYTES * _file_bytes(builder, name, files), name, where, Path(builder.cache_dir))
                builder.download_and_prepare()
                rows = builder.as_dataset(split=split or "train")
            except DatasetNotFoundError as error:  # its list of files was shown, its files are not
                raise HubError(f"{where}: {hub.gated(name, 'dataset')}") from error
            except (ValueError, RuntimeError, DatasetGenerationError, DataFilesNotFoundError) as error:
                raise _Unusable(one_line(error.__cause__ or error)) from error
    except HubError as error:
        if isinstance(error.__cause__, _Unusable):
            keys = "".join(f", data.{key}={value!r}" for key, value in (("subset", subset), ("split", split)) if value)
            raise ConfigError(f"{where}{keys}: `datasets` cannot read it: {error.__cause__}") from None
        raise
    _write(note, rows)
    return rows


class _Unusable(Exception):
    """What `datasets` says of a data set that was reached."""


def _file_bytes(builder: Any, name: hub.HubName, files: Mapping[str, int]) -> int:
    """Return the bytes of the files that a builder downloads: of all splits."""
    urls = (url for urls in (builder.config.data_files or {}).values() for url in urls)
    paths = {str(url).partition(f"@{name.revision}/")[2] for url in urls}
    return sum(files.get(path, 0) for path in paths)


def _note(name: hub.HubName, subset: str | None, split: str | None) -> Path:
    import datasets

    asked = json.dumps([name.repository, name.revision, subset, split])
    return Path(datasets.config.HF_DATASETS_CACHE) / "shardwise" / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"


def _noted(note: Path) -> Any:
    """Return the data set whose files a note names; None without a note, or if its files are gone."""
    import datasets

    try:
        found: Mapping[str, Any] = json.loads(note.read_bytes())
        rows = datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in found["files"]])
    except (OSError, ValueError, KeyError):
        return None
    return rows if len(rows) == found["rows"] else None


def _write(note: Path, rows: Any) -> None:
    """Write a note, unless the rows are a part of their files (a split such as "train[:1%]")."""
    import datasets

    files = [file["filename"] for file in rows.cache_files]
    if not files or sum(len(datasets.Dataset.from_file(file)) for file in files) != len(rows):
        return
    note.parent.mkdir(parents=True, exist_ok=True)
    partial = note.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({"rows": len(rows), "files": files}))
    partial.replace(note)
