"""Ranges of bytes from files, read past the page cache and through it: the same bytes, whatever goes wrong."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint.io import range_reader
from shardwise.checkpoint.io.range_reader import Buffers, RangeReader
from shardwise.files.direct import PAGE_BYTES, huge_page_buffer
from shardwise.files.local_file import LocalFile
from tests.checkpoint.rig import FILE_BYTES, Reads, content, drop, skip_unless_direct

UNTOUCHED = b"\xee"
Span = tuple[int, int]
"""A start and a length."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that can be read past the page cache, and is not in it."""
    path = tmp_path / "file"
    path.write_bytes(content())
    skip_unless_direct(path)
    drop(path)
    return path


@contextmanager
def small(buffer_pages: int = 3, gap_bytes: int = 100) -> Iterator[pytest.MonkeyPatch]:
    """A few pages are enough to fill buffers and to go past the page cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_reader, "_BUFFER_BYTES", buffer_pages * PAGE_BYTES)
        patch.setattr(range_reader, "_LEAST_BYTES", PAGE_BYTES)
        patch.setattr(range_reader, "_GAP_BYTES", gap_bytes)
        yield patch


def read(path: Path, spans: list[Span], past_cache: bool = True, direct_bytes: int | None = None) -> list[bytes]:
    targets = [bytearray(UNTOUCHED * (length + 2)) for _, length in spans]
    file = LocalFile(path)
    try:
        with RangeReader(file, Buffers()) as reader:
            for (start, length), target in zip(spans, targets, strict=True):
                reader.ask(start, memoryview(target)[1 : 1 + length], past_cache)
            reader.finish()
            assert direct_bytes in {None, reader.direct_bytes}
    finally:
        file.close()
    assert all(target[:1] == target[-1:] == UNTOUCHED for target in targets)
    return [bytes(target[1:-1]) for target in targets]


def expected(spans: list[Span]) -> list[bytes]:
    data = content()
    return [data[start : start + length] for start, length in spans]


size = st.one_of(st.integers(0, 40), st.integers(0, 9 * PAGE_BYTES), st.integers(0, 9).map(PAGE_BYTES.__mul__))
spans_of_a_file = st.lists(
    st.tuples(st.one_of(st.integers(0, FILE_BYTES), st.integers(0, 40).map(PAGE_BYTES.__mul__)), size).map(
        lambda span: (span[0], min(span[1], FILE_BYTES - span[0]))
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(spans=st.one_of(spans_of_a_file, spans_of_a_file.map(sorted)), pages=st.integers(1, 4), gap=st.integers(0, 9000))
def test_any_ranges_either_way(spans: list[Span], pages: int, gap: int) -> None:
    """In any order, on one another or apart, of a few bytes or of pages."""
    with small(pages, gap), tempfile.TemporaryDirectory() as name:
        path = Path(name) / "file"
        path.write_bytes(content())
        drop(path)
        assert read(path, spans) == expected(spans)
        assert read(path, spans, past_cache=False, direct_bytes=0) == expected(spans)


def test_neighbours_are_read_together(path: Path) -> None:
    spans = [(start, 300) for start in range(17, 3 * PAGE_BYTES - 400, 400)]
    with small(gap_bytes=100) as patch:
        reads = Reads(patch)
        assert read(path, spans, direct_bytes=300 * len(spans)) == expected(spans)
    assert reads.direct == [3 * PAGE_BYTES]
    assert reads.cached == []


def test_what_lies_far_apart_is_not(path: Path) -> None:
    spans = [(start, PAGE_BYTES) for start in range(0, 30 * PAGE_BYTES, 10 * PAGE_BYTES)]
    with small(gap_bytes=9 * PAGE_BYTES - 1) as patch:
        reads = Reads(patch)
        assert read(path, spans) == expected(spans)
    assert reads.direct == [PAGE_BYTES] * 3


def test_a_long_range_is_read_in_whole_buffers(path: Path) -> None:
    with small() as patch:
        reads = Reads(patch)
        spans = [(100, FILE_BYTES - 100)]
        assert read(path, spans, direct_bytes=FILE_BYTES - 100) == expected(spans)
    pages = -(-FILE_BYTES // PAGE_BYTES)
    assert len(reads.direct) == -(-pages // 3)
    assert sum(reads.direct) == FILE_BYTES  # no byte twice, and the last page as far as it goes
    assert reads.cached == []


def test_little_goes_through_the_page_cache(path: Path) -> None:
    with small() as patch:
        reads = Reads(patch)
        patch.setattr(range_reader, "_LEAST_BYTES", PAGE_BYTES + 1)
        assert read(path, [(PAGE_BYTES, PAGE_BYTES)]) == expected([(PAGE_BYTES, PAGE_BYTES)])
    assert (reads.direct, reads.cached) == ([], [PAGE_BYTES])


@pytest.mark.parametrize("cached", [0, 1, 2, 3])
def test_what_is_in_the_page_cache_is_taken_from_there(cached: int, path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no more than is asked for
    os.pread(fd, cached * PAGE_BYTES, 0)
    os.close(fd)
    with small() as patch:
        reads = Reads(patch)
        assert read(path, [(0, 3 * PAGE_BYTES)]) == expected([(0, 3 * PAGE_BYTES)])
    through = cached > 1  # more than half of the buffer
    assert (reads.cached, reads.direct) == (([3 * PAGE_BYTES], []) if through else ([], [3 * PAGE_BYTES]))


def test_what_has_not_reached_the_disk_is_read_all_the_same(path: Path) -> None:
    changed = bytearray(content())
    changed[5 * PAGE_BYTES : 5 * PAGE_BYTES + 9] = b"new bytes"
    with path.open("r+b") as file:
        file.seek(5 * PAGE_BYTES)
        file.write(b"new bytes")
    with small(buffer_pages=8):
        assert read(path, [(0, FILE_BYTES)]) == [bytes(changed)]


@pytest.mark.parametrize("past_cache", [True, False])
@pytest.mark.parametrize("cut", [PAGE_BYTES, PAGE_BYTES + 1, 5 * PAGE_BYTES - 1])
def test_a_file_that_ends_too_early(cut: int, past_cache: bool, path: Path) -> None:
    os.truncate(path, cut)
    drop(path)
    with small(), pytest.raises(EOFError) as caught:
        read(path, [(0, 6 * PAGE_BYTES)], past_cache)
    assert caught.value.args == (cut,)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("when", ["open", "preadv", "second preadv"])
def test_a_file_system_that_refuses(number: int, when: str, path: Path) -> None:
    with small() as patch:
        fail(patch, when, number)
        assert read(path, [(5, 11 * PAGE_BYTES)]) == expected([(5, 11 * PAGE_BYTES)])


@pytest.mark.parametrize("when", ["preadv", "second preadv"])
def test_a_disk_that_fails(when: str, path: Path) -> None:
    with small() as patch:
        fail(patch, when, errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            read(path, [(5, 11 * PAGE_BYTES)])


def fail(patch: pytest.MonkeyPatch, when: str, number: int) -> None:
    """Past the page cache only."""
    opens, reads, left = os.open, os.preadv, iter([when == "second preadv"])

    def open_(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if when == "open" and flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return opens(path, flags, *arguments, **options)

    def preadv(fd: int, *arguments: Any) -> int:
        if when != "open" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and not next(left, False):
            raise OSError(number, os.strerror(number))
        return reads(fd, *arguments)

    patch.setattr(os, "open", open_)
    patch.setattr(os, "preadv", preadv)


def test_a_file_that_is_replaced_is_not_mixed_with_the_new_one(path: Path) -> None:
    file = LocalFile(path)
    new = path.with_name("new")
    new.write_bytes(b"\1" * FILE_BYTES)
    drop(new)
    new.replace(path)
    pages = huge_page_buffer(PAGE_BYTES)
    assert file.read_pages(0, pages) == 0
    file.read_at(0, pages)
    assert bytes(pages) == content()[:PAGE_BYTES]
    file.close()


@pytest.mark.parametrize("size", [0, PAGE_BYTES])
def test_a_file_that_shrinks_when_it_is_opened(size: int, path: Path) -> None:
    with small() as patch:
        original = os.fstat

        def shrinking(fd: int) -> os.stat_result:
            status = original(fd)
            os.truncate(path, size)
            return status

        patch.setattr(os, "fstat", shrinking)
        with pytest.raises(EOFError) as caught:
            read(path, [(0, 6 * PAGE_BYTES)])
    assert caught.value.args == (size,)
    assert not open_descriptors(path)


def test_no_descriptor_stays_open(path: Path) -> None:
    with small() as patch:
        read(path, [(0, FILE_BYTES)])
        assert not open_descriptors(path)
        fail(patch, "preadv", errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            read(path, [(0, FILE_BYTES)])
    assert not open_descriptors(path)


def open_descriptors(path: Path) -> list[Path]:
    links = list(Path("/proc/self/fd").iterdir())
    return [link for link in links if link.is_symlink() and link.readlink() == path]


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 2**21, 2**21 + 1, 2**24])
def test_room_is_aligned_and_of_the_size(nbytes: int) -> None:
    memory = huge_page_buffer(nbytes)
    assert memory.nbytes == nbytes
    if nbytes:
        assert np.frombuffer(memory, dtype=np.uint8).ctypes.data % (2**21 if nbytes >= 2**21 else PAGE_BYTES) == 0
        assert not memory[0]
        assert not memory[-1]
        memory[-1] = 1
