"""Downloads of large files of a hub into huggingface_hub's cache, which a killed process leaves for the next to go on
with.

huggingface_hub (1.31 to 2.4 at least) writes every download under a random name and begins anew, so that two processes
never append to one file where locks do nothing. Here a file's partial download has one name. Whoever goes on with it
writes at the offset at which it ended, so that two writers write the same bytes to the same places, and the checksum
of what was continued is compared. `snapshot_download` then finds the bytes in the cache, and only links to them.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_AT_ONCE = 8
"""Number of files that are downloaded at the same time."""


@dataclass(frozen=True, slots=True)
class LargeFile:
    """A file of a hub that is stored outside of git, and its place in the cache."""

    url: str
    sha256: str
    """Checksum of its bytes, 64 hexadecimal digits."""
    nbytes: int
    repository: Path
    """The cache's directory of its repository."""

    @property
    def blob(self) -> Path:
        """Where the cache has the bytes of the whole file."""
        return self.repository / "blobs" / self.sha256

    @property
    def partial(self) -> Path:
        """Where the bytes are until they are whole."""
        return self.blob.with_suffix(".partial")

    @property
    def had_bytes(self) -> int:
        """The bytes that were downloaded before, in this or in an earlier process."""
        for path in (self.blob, self.partial):
            with suppress(OSError):
                return min(path.stat().st_size, self.nbytes)
        return 0


def download(files: Sequence[LargeFile]) -> None:
    """Download files into the cache, with one progress bar for all.

    Raises what huggingface_hub raises. The files that are not whole then are gone on with by the next call.
    """
    with _bar(files) as bar, ThreadPoolExecutor(_AT_ONCE) as pool:
        stop = threading.Event()
        part = _part_of(bar, stop)
        tasks = [pool.submit(_download, file, part) for file in files]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _download(file: LargeFile, bar: type[Any]) -> None:
    locks = file.repository.parent / ".locks" / file.repository.name  # the lock that huggingface_hub takes
    for path in (locks, file.blob.parent):
        path.mkdir(parents=True, exist_ok=True)
    with _utils().WeakFileLock(locks / f"{file.sha256}.lock"):
        while not file.blob.exists():
            begun = file.had_bytes
            file.partial.touch()
            with file.partial.open("r+b") as out:
                out.seek(begun)
                _fetch(file, out, begun, bar)
            if begun and not _is_right(file):
                file.partial.unlink()  # such as after a power failure
                continue
            with suppress(FileNotFoundError):  # another process was as far
                file.partial.rename(file.blob)


def _fetch(file: LargeFile, out: BinaryIO, begun: int, bar: type[Any]) -> None:
    """Write a file's bytes from `begun` on to where `out` is."""
    from huggingface_hub.file_download import http_get

    headers = _utils().build_hf_headers()
    http_get(file.url, out, resume_size=begun, headers=headers, expected_size=file.nbytes, tqdm_class=bar)


def _is_right(file: LargeFile) -> bool:
    with file.partial.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256


def _bar(files: Sequence[LargeFile]) -> Any:
    """Return the progress bar, which begins with the bytes that were downloaded before."""
    had = sum(file.had_bytes for file in files)
    return _utils().tqdm(
        desc="weights", total=sum(file.nbytes for file in files), initial=had, unit="B", unit_scale=True
    )


def _part_of(bar: Any, stop: threading.Event) -> type[Any]:
    """Return the class of a file's progress bar: it shows nothing itself, advances the bar of all files, and ends the
    file's download once `stop` is set."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        super(part, self).__init__(*args, **{**kwargs, "disable": True})

    def update(self: Any, n: int = 1) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        bar.update(n)

    part: type[Any] = type("Part", (_utils().tqdm,), {"__init__": init, "update": update})
    return part


def _utils() -> Any:
    """Return huggingface_hub's utilities, which it exports, but not to type checkers."""
    from huggingface_hub import utils

    return utils
