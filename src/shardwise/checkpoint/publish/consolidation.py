"""`consolidate`: turns the files that ranks wrote to storage without ranged writes into an ordinary checkpoint."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.manifest import FileRecord, Manifest, Part
from shardwise.checkpoint.io.checksums import RegionSums
from shardwise.checkpoint.io.storage import LocalDirectory, Location, is_url
from shardwise.checkpoint.publish import commit
from shardwise.checkpoint.ranks import save_thread
from shardwise.errors import CheckpointError, UsageError
from shardwise.files.local_file import write_at
from shardwise.layout.ranges import intersection


def consolidate(source: Location, target: str | os.PathLike[str]) -> None:
    """Write the checkpoint `source` again as ordinary safetensors files. No communication: one process does it.

    Args:
        source: the path or URL of a checkpoint that was saved to a URL.
        target: the new checkpoint's path; complete or absent, as with `save`. Its files are those that a save to a path
            would have written, byte for byte.

    Every file is read once, 8 MiB at a time, and its checksums are compared.

    Raises:
        CheckpointError: there is no checkpoint, it consists of ordinary files already, it is damaged (nothing is left
            at `target`), or `target` is taken or cannot be written. UsageError: `target` is a URL.
    """
    save_thread.wait()
    if is_url(target):
        raise UsageError(f"{os.fspath(target)}: must be a path, because joining writes files in any order")
    contents, path = Contents.of(source), Path(os.path.abspath(target))  # noqa: PTH100 - as `save` has it
    if not contents.manifest.joined:
        raise CheckpointError(f"{contents} already consists of ordinary safetensors files: there is nothing to join")
    try:
        with commit.building(path) as partial, ExitStack() as stack:
            records = _Consolidation(contents, partial, stack).run()
            manifest.write(LocalDirectory(partial), Manifest(records))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error


class _Consolidation:
    """Reads the existing files one after another, and writes each byte where it belongs."""

    def __init__(self, contents: Contents, partial: Path, stack: ExitStack) -> None:
        """
        Args:
            stack: closes the new files.
        """
        self._contents = contents
        self._partial = partial
        self._joined = contents.manifest.joined
        self._sums = {name: RegionSums() for name in self._joined}
        self._fds = {name: stack.enter_context((partial / name).open("xb")).fileno() for name in self._joined}

    def run(self) -> dict[str, FileRecord]:
        """Write the new files. Returns their records."""
        parts: dict[str, list[tuple[str, Part]]] = {}
        for name, joined in self._joined.items():
            for part in joined.parts:
                parts.setdefault(part.file, []).append((name, part))
        records: dict[str, FileRecord] = {}
        for file, record in self._contents.manifest.files.items():
            manifest.check_size(self._contents.directory, file, record)
            if file in parts:
                self._distribute(file, record, sorted(parts[file], key=lambda item: item[1].offset))
            else:
                LocalDirectory(self._partial).write(file, self._contents.read(file))
                records[file] = record
        for name, fd in self._fds.items():
            os.fsync(fd)
            records[name] = FileRecord(self._joined[name].nbytes, tuple(self._sums[name].regions()))
        return records

    def _distribute(self, file: str, record: FileRecord, parts: Sequence[tuple[str, Part]]) -> None:
        path = f"{self._contents}/{file}"
        with ExitStack() as stack:
            with manifest.reading(path):  # only errors of the source; the target's are the caller's
                source = stack.enter_context(self._contents.directory.open(file))
            for start, chunk in manifest.checked_chunks(path, source, record):
                self._put(start, chunk, parts)

    def _put(self, offset: int, chunk: memoryview, parts: Sequence[tuple[str, Part]]) -> None:
        """Write `chunk`, which begins at byte `offset` of one file, to the files that it belongs to.

        parts: the parts in that file, sorted by offset.
        """
        first = bisect_right(parts, offset, key=lambda item: item[1].offset) - 1
        for name, part in parts[max(0, first) :]:
            if part.offset >= offset + chunk.nbytes:
                break
            inside = intersection((offset, offset + chunk.nbytes), (part.offset, part.offset + part.stop - part.start))
            data = chunk[inside.start - offset : inside.stop - offset]
            start = part.start + inside.start - part.offset
            self._sums[name].add(start, data)
            write_at(self._fds[name], start, data)
