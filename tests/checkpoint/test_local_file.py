"""Reading byte ranges of a file past the page cache and through it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint import local_file
from shardwise.checkpoint.local_file import LocalFile
from shardwise.checkpoint.pages import PAGE_BYTES

CONTENT = os.urandom(20 * PAGE_BYTES + 321)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of which nothing is in the page cache."""
    monkeypatch.setattr(local_file, "_LEAST_BYTES", 1)
    monkeypatch.setattr(local_file, "_BUFFER_BYTES", 4 * PAGE_BYTES)
    path = tmp_path / "file"
    for name in ("file", "probe"):
        (tmp_path / name).write_bytes(CONTENT)
        drop(tmp_path / name)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        with (tmp_path / "probe").open("rb") as file:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:  # as it should be: not cached
        return path
    except (OSError, AttributeError) as error:
        pytest.skip(f"nothing goes past the page cache here: {error}")
    pytest.skip("this file system is nothing but its page cache")


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: Path, start: int, length: int) -> bytes:
    into = bytearray(length)
    source = LocalFile(path)
    try:
        source.read_once(start, memoryview(into))
    finally:
        source.close()
    return bytes(into)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every read of more than a byte: whether it went past the page cache."""
    found: list[bool] = []
    original = os.preadv

    def noting(fd: int, buffers: Any, *rest: int) -> int:
        if sum(len(buffer) for buffer in buffers) > 1:
            found.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return original(fd, buffers, *rest)

    monkeypatch.setattr(os, "preadv", noting)
    return found


def test_any_range(path: Path) -> None:
    position = st.one_of(st.integers(0, len(CONTENT)), st.integers(0, 20).map(PAGE_BYTES.__mul__))

    @settings(max_examples=80, deadline=None)
    @given(position, position)
    def compare(a: int, b: int) -> None:
        start, stop = sorted((a, b))
        drop(path)
        assert read(path, start, stop - start) == CONTENT[start:stop]

    compare()


def test_what_is_not_in_the_page_cache_is_read_past_it(path: Path, ways: list[bool]) -> None:
    assert read(path, 5, 9 * PAGE_BYTES) == CONTENT[5 : 5 + 9 * PAGE_BYTES]
    assert ways
    assert all(ways)


def test_reading_past_it_again_and_again(path: Path, ways: list[bool]) -> None:
    """To ask whether a page is cached is to have it read: that must not be taken for an answer the next time."""
    for _ in range(3):
        assert read(path, 3 * PAGE_BYTES + 5, 9 * PAGE_BYTES) == CONTENT[3 * PAGE_BYTES + 5 :][: 9 * PAGE_BYTES]
    assert len(ways) >= 3
    assert all(ways)


def test_what_is_there_is_taken_from_there(path: Path, ways: list[bool]) -> None:
    path.read_bytes()
    assert read(path, 5, 9 * PAGE_BYTES) == CONTENT[5 : 5 + 9 * PAGE_BYTES]
    assert ways == [False]


def test_what_was_written_and_is_not_on_disk_yet_is_seen(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(3 * PAGE_BYTES + 7)
        file.write(b"new")
    assert read(path, PAGE_BYTES, 5 * PAGE_BYTES)[2 * PAGE_BYTES + 7 :][:3] == b"new"


def test_the_end_of_the_file(path: Path) -> None:
    for start in (18 * PAGE_BYTES + 3, 20 * PAGE_BYTES + 300):
        drop(path)
        assert read(path, start, len(CONTENT) - start) == CONTENT[start:]
        drop(path)
        with pytest.raises(EOFError) as caught:
            read(path, start, len(CONTENT) - start + 1)
        assert caught.value.args == (len(CONTENT),)


@pytest.mark.parametrize("where", ["open", "preadv"])
def test_a_file_system_that_refuses(where: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = getattr(os, where)
    refused = []

    def refusing(target: Any, *rest: Any, **options: Any) -> Any:
        flags = rest[0] if where == "open" else fcntl.fcntl(target, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            refused.append(target)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(target, *rest, **options)

    monkeypatch.setattr(os, where, refusing)
    assert read(path, 5, 9 * PAGE_BYTES) == CONTENT[5 : 5 + 9 * PAGE_BYTES]
    assert refused


def test_an_error_of_the_disk_is_raised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.preadv

    def failing(fd: int, *rest: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, *rest)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match="Input/output error"):
        read(path, 5, 9 * PAGE_BYTES)


def test_several_threads_at_a_time(path: Path) -> None:
    source, found = LocalFile(path), {}

    def read_own(number: int) -> None:
        into = bytearray(7 * PAGE_BYTES)
        for _ in range(50):
            source.read_once(number * PAGE_BYTES + 11, memoryview(into))
        found[number] = bytes(into)

    threads = [threading.Thread(target=read_own, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    source.close()
    assert found == {n: CONTENT[n * PAGE_BYTES + 11 :][: 7 * PAGE_BYTES] for n in range(4)}
