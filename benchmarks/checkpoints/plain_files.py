"""The floor under every checkpoint: its bytes in one file, written by one process in order, then fsynced.

python -m benchmarks.checkpoints.plain_files CHECKPOINT FILE REPEATS     # prints {"write_s": [...], "read_s": [...]}
"""

import json
import os
import sys
import time
from pathlib import Path

from benchmarks.checkpoints import page_cache

CHUNK_BYTES = 16 * 2**20


def write(path: Path, data: bytearray) -> float:
    os.sync()
    start_s = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    view = memoryview(data)
    for start in range(0, len(view), CHUNK_BYTES):
        part = view[start : start + CHUNK_BYTES]
        while part:
            part = part[os.write(fd, part) :]
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - start_s


def read(path: Path, into: bytearray) -> float:
    start_s = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        view = memoryview(into)
        while view and (count := file.readinto(view[:CHUNK_BYTES])):
            view = view[count:]
    return time.perf_counter() - start_s


def main(checkpoint: str, name: str, repeats: str) -> None:
    files = sorted(file for file in Path(checkpoint).rglob("*") if file.is_file())
    data = bytearray(b"".join(file.read_bytes() for file in files))
    path = Path(name)
    times: dict[str, list[float]] = {"write_s": [], "read_s": []}
    for _ in range(int(repeats)):
        times["write_s"].append(write(path, data))
        page_cache.drop(path.parent)
        times["read_s"].append(read(path, data))
        path.unlink()
    print(json.dumps({**times, "bytes": len(data)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
