"""`consolidate`: turns the files that ranks wrote to storage without ranged writes into an ordinary checkpoint."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.manifest import FileRecord, Manifest, Part
from shardwise.checkpoint.io.checksums import RegionSums
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.checkpoint.publish import commit
from shardwise.files.local_file import write_at
from shardwise.layout.ranges import intersection


def consolidate(contents: Contents, target: Path) -> None:
    """Write a checkpoint of joined files again as ordinary safetensors files. No communication: one process does it.

    `target` appears complete or not at all, and its files are those that a save to a path would have written, byte for
    byte. Every file is read once, 8 MiB at a time, and its checksums are compared.

    Raises CheckpointError if the checkpoint is damaged or `target` is taken, OSError if `target` cannot be written.
    """
    joined, records = contents.manifest.joined, dict[str, FileRecord]()
    parts: dict[str, list[tuple[str, Part]]] = {}
    for name, file in joined.items():
        for part in file.parts:
            parts.setdefault(part.file, []).append((name, part))
    sums = {name: RegionSums() for name in joined}
    with commit.building(target) as partial, ExitStack() as stack:
        new = {name: stack.enter_context((partial / name).open("xb")) for name in joined}
        for source, record in contents.manifest.files.items():
            manifest.check_size(contents.directory, source, record)
            if source not in parts:
                LocalDirectory(partial).write(source, contents.read(source))
                records[source] = record
                continue
            path, in_order = f"{contents}/{source}", sorted(parts[source], key=lambda item: item[1].offset)
            with manifest.reading(path):  # only errors of the source; the target's are the caller's
                opening = contents.directory.open(source)
            with opening as opened:
                for start, chunk in manifest.checked_chunks(path, opened, record):
                    for name, part in in_order:
                        of_part = (part.offset, part.offset + part.stop - part.start)
                        inside = intersection((start, start + chunk.nbytes), of_part)
                        if inside.length:
                            data, at = chunk[inside.start - start : inside.stop - start], inside.start - part.offset
                            sums[name].add(part.start + at, data)
                            write_at(new[name].fileno(), part.start + at, data)
        for name, out in new.items():
            os.fsync(out.fileno())
            records[name] = FileRecord(joined[name].nbytes, tuple(sums[name].regions()))
        manifest.write(LocalDirectory(partial), Manifest(records))
