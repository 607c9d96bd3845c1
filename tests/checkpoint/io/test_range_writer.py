"""Ranges of bytes in files, written past the page cache and through it: the same files, whatever goes wrong."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint.io import range_writer
from shardwise.checkpoint.io.range_writer import RangeWriter
from shardwise.files.direct import PAGE_BYTES

FILE_BYTES = 40 * PAGE_BYTES + 123
BEFORE = b"\xee"
Span = tuple[int, int]


@contextmanager
def small(buffer_pages: int = 2) -> Iterator[pytest.MonkeyPatch]:
    """A few pages are enough to fill buffers and to go past the page cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_writer, "_BUFFER_BYTES", buffer_pages * PAGE_BYTES)
        patch.setattr(range_writer, "_LEAST_BYTES", PAGE_BYTES)
        patch.setattr(range_writer, "_KEPT_BYTES", PAGE_BYTES)
        patch.setattr(range_writer, "_STEP_BYTES", PAGE_BYTES - 13)
        yield patch


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except (OSError, AttributeError) as error:
        pytest.skip(f"nothing goes past the page cache here: {error}")
    return tmp_path


def content(span: Span) -> bytes:
    start, length = span
    return bytes((start * 7 + i * 31 + i // 251) % 256 for i in range(length))


def write(path: Path, spans: list[Span]) -> int:
    """Into a file that is there; the bytes that went past the page cache. Compares the sums."""
    path.write_bytes(BEFORE * FILE_BYTES)
    with RangeWriter() as writer:
        regions = writer.write(path, [(span[0], content(span)) for span in spans])
        writer.sync()
        direct_bytes = writer.direct_bytes
    found = path.read_bytes()
    for region in regions:
        assert xxhash.xxh3_64_hexdigest(found[region.start : region.stop]) == region.sum
    assert sum(region.stop - region.start for region in regions) == sum(length for _, length in spans)
    return direct_bytes


def expected(spans: list[Span]) -> bytes:
    naive = bytearray(BEFORE * FILE_BYTES)
    for start, length in spans:
        naive[start : start + length] = content((start, length))
    return bytes(naive)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@st.composite
def spans_of_a_file(draw: st.DrawFn) -> list[Span]:
    """In order and apart from one another, of a few bytes or of pages, with gaps or without."""
    size = st.one_of(st.integers(0, 40), st.integers(0, 5 * PAGE_BYTES), st.integers(0, 5).map(PAGE_BYTES.__mul__))
    spans, reached = [], 0
    for gap, length in draw(st.lists(st.tuples(st.one_of(st.just(0), size), size), max_size=12)):
        start = reached + gap
        reached = min(start + length, FILE_BYTES)
        if start < reached:
            spans.append((start, reached - start))
    return spans


@settings(max_examples=60, deadline=None)
@given(spans=spans_of_a_file(), buffer_pages=st.integers(1, 3))
def test_any_ranges_either_way(spans: list[Span], buffer_pages: int) -> None:
    with small(buffer_pages) as patch, tempfile.TemporaryDirectory() as name:
        direct, cached = Path(name) / "direct", Path(name) / "cached"
        write(direct, spans)
        refuse_to_open(patch)
        assert write(cached, spans) == 0
        assert direct.read_bytes() == cached.read_bytes() == expected(spans)


def refuse_to_open(patch: pytest.MonkeyPatch) -> None:
    original = os.open

    def refusing(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(path, flags, *arguments, **options)

    patch.setattr(os, "open", refusing)


def test_whole_pages_go_past_the_page_cache_and_no_page_goes_both_ways(disk: Path) -> None:
    spans = [(5, 100), (105, 9 * PAGE_BYTES), (20 * PAGE_BYTES, 2 * PAGE_BYTES), (22 * PAGE_BYTES + 1, 18 * PAGE_BYTES)]
    pages: dict[bool, list[int]] = {True: [], False: []}
    original = os.pwrite

    def noting(fd: int, data: Any, start: int) -> int:
        count = original(fd, data, start)
        pages[is_direct(fd)] += range(start // PAGE_BYTES, (start + count - 1) // PAGE_BYTES + 1)
        return count

    with small() as patch:
        patch.setattr(os, "pwrite", noting)
        assert write(disk / "file", spans) == (8 + 2 + 17) * PAGE_BYTES
    assert sorted(pages[True]) == [*range(1, 9), 20, 21, *range(23, 40)]
    assert not set(pages[True]) & set(pages[False])
    assert (disk / "file").read_bytes() == expected(spans)


def test_two_writers_whose_ranges_meet_inside_pages(disk: Path) -> None:
    """As ranks do, at the same time and again and again."""
    cuts = [0, *(n * 2 * PAGE_BYTES + 37 * n for n in range(1, 16)), FILE_BYTES]
    spans = [(start, stop - start) for start, stop in pairwise(cuts)]
    path = disk / "file"
    with small():
        for _ in range(20):
            path.write_bytes(BEFORE * FILE_BYTES)
            threads = [threading.Thread(target=_write_own, args=(path, spans[rank::2])) for rank in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert path.read_bytes() == expected(spans)


def _write_own(path: Path, spans: list[Span]) -> None:
    with RangeWriter() as writer:
        writer.write(path, [(span[0], content(span)) for span in spans])
        writer.sync()


SPANS = [(3, 50), (53, 7 * PAGE_BYTES), (9 * PAGE_BYTES, 6 * PAGE_BYTES + 1)]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_only_when_written_to(number: int, disk: Path) -> None:
    original, refused = os.pwrite, []

    def refusing(fd: int, data: Any, start: int) -> int:
        if is_direct(fd):
            refused.append(start)
            raise OSError(number, os.strerror(number))
        return original(fd, data, start)

    with small() as patch:
        patch.setattr(os, "pwrite", refusing)
        assert write(disk / "file", SPANS) == 0
    assert refused
    assert (disk / "file").read_bytes() == expected(SPANS)


def test_a_file_system_in_memory() -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("no file system in memory")
    with small(), tempfile.TemporaryDirectory(dir=memory) as name:
        write(Path(name) / "file", SPANS)  # newer kernels take O_DIRECT there, and older ones refuse
        assert (Path(name) / "file").read_bytes() == expected(SPANS)


def test_writes_that_stop_half_way(disk: Path) -> None:
    """What is left is no whole page any more, which the disk refuses past the page cache."""
    original = os.pwrite

    def short(fd: int, data: Any, start: int) -> int:
        view = memoryview(data)
        return original(fd, view[: max(1, view.nbytes - 512)] if is_direct(fd) else view[:1000], start)

    with small() as patch:
        patch.setattr(os, "pwrite", short)
        write(disk / "file", SPANS)
    assert (disk / "file").read_bytes() == expected(SPANS)


@pytest.mark.parametrize("call", range(6))
def test_an_error_in_the_middle_is_raised_and_nothing_stays_open(call: int, disk: Path) -> None:
    original, calls, lock = os.pwrite, iter(range(1000)), threading.Lock()

    def failing(fd: int, data: Any, start: int) -> int:
        with lock:
            number = next(calls)
        if number == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(fd, data, start)

    opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with small() as patch:
        patch.setattr(os, "pwrite", failing)
        with pytest.raises(OSError, match="No space left"):
            write(disk / "file", SPANS)
    assert next(calls) > call
    assert len(os.listdir("/proc/self/fd")) == opened  # noqa: PTH208


def test_a_checkpoint_may_have_more_files_than_a_process_may_open(disk: Path) -> None:
    paths = [disk / f"file-{number}" for number in range(200)]
    for path in paths:
        path.touch()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))  # noqa: PTH208
    synced: list[int] = []
    with small() as patch, RangeWriter() as writer:
        patch.setattr(os, "fsync", lambda fd, fsync=os.fsync: (synced.append(os.fstat(fd).st_ino), fsync(fd)))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 150, hard))
        try:
            for number, path in enumerate(paths):
                writer.write(path, [(3, content((number, 2 * PAGE_BYTES)))])
            writer.sync()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sorted(synced) == sorted(path.stat().st_ino for path in paths), "each once"
    assert all(path.read_bytes()[3:] == content((n, 2 * PAGE_BYTES)) for n, path in enumerate(paths))


def test_no_more_is_taken_than_there_are_buffers_for(disk: Path) -> None:
    """A disk that stands still stops whoever writes."""
    moves, original, taken_before = threading.Event(), os.pwrite, []

    def standing(fd: int, data: Any, start: int) -> int:
        assert moves.wait(20)
        return original(fd, data, start)

    def ranges() -> Iterator[tuple[int, bytes]]:
        for page in range(40):
            if not moves.is_set():
                taken_before.append(page)
            yield page * PAGE_BYTES, content((page * PAGE_BYTES, PAGE_BYTES))

    path = disk / "file"
    path.write_bytes(BEFORE * FILE_BYTES)
    with small(buffer_pages=2) as patch, RangeWriter() as writer:
        patch.setattr(os, "pwrite", standing)
        threading.Timer(0.3, moves.set).start()
        writer.write(path, ranges())
    assert 0 < len(taken_before) <= 2 * range_writer._BUFFERS + 1
    assert path.read_bytes() == expected([(page * PAGE_BYTES, PAGE_BYTES) for page in range(40)])
