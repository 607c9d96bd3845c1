"""Memory that the ranks of one host share.

A segment is one memfd. It has no name, so its memory is freed when the last process that maps it ends in any way, and
the size of /dev/shm does not matter. Rank 0 creates it and the others open it through /proc/<pid>/fd.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.errors import CollectiveTimeout

if TYPE_CHECKING:
    import torch.distributed as dist

LINE_BYTES = 64
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MREMAP_MAYMOVE_FIXED = 1 | 2

# Python's own mmap cannot map to a given address, and keeps a file descriptor for each mapping.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Segment:
    """Shared memory: a head of cache lines, then parts of equal size. Created by all ranks of a group together."""

    def __init__(self, group: dist.ProcessGroup, lines: int, parts: int, part_bytes: int) -> None:
        """Every rank must call this with the same arguments.

        Args:
            lines: cache lines in the head.
            parts: number of parts; each is rounded up to whole pages.
            part_bytes: size of one part.

        Raises:
            OSError: on every rank, if any rank could not create, reach or map the memory.
        """
        self._head_bytes = _whole_pages(lines * LINE_BYTES + 8)  # its last 8 bytes are the token
        self.part_bytes = _whole_pages(part_bytes)
        total_bytes = self._head_bytes + parts * self.part_bytes
        self._fd, token, problem = -1, secrets.randbits(62), 0
        try:
            if group.rank() == 0:
                self._fd = os.memfd_create("shardwise", os.MFD_CLOEXEC)
                os.ftruncate(self._fd, total_bytes)
                os.pwrite(self._fd, token.to_bytes(8, "little"), self._head_bytes - 8)
        except OSError as error:
            problem = error.errno or errno.EIO
        pid, creator_fd, token, creator_problem = exchange(group, [os.getpid(), self._fd, token, problem])[0]
        problem = creator_problem or self._join(group, f"/proc/{pid}/fd/{creator_fd}", token, total_bytes)
        if self._fd >= 0:
            weakref.finalize(self, os.close, self._fd).atexit = False
        for rank, (code,) in enumerate(exchange(group, [problem])):
            if code:
                raise OSError(code, f"rank {rank} cannot share {total_bytes} bytes of memory: {os.strerror(code)}")

    def _join(self, group: dist.ProcessGroup, path: str, token: int, total_bytes: int) -> int:
        """Open the file and map its head. Returns an errno, or 0, because all ranks must hear of a failure."""
        try:
            if self._fd < 0:
                self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if os.pread(self._fd, 8, self._head_bytes - 8) != token.to_bytes(8, "little"):
                return errno.ESTALE  # a process with this id, but on another host or in another container
            # If memory runs out, this raises here, instead of SIGBUS later. Each rank allocates its share of the pages,
            # so that they are near the cores that will write them.
            start, stop = (total_bytes * rank // group.size() for rank in (group.rank(), group.rank() + 1))
            os.posix_fallocate(self._fd, start, stop - start)
            head = _map(self._fd, 0, self._head_bytes, populate=True)
        except OSError as error:
            return error.errno or errno.EIO
        self.head = head.numpy().data.cast("q")
        return 0

    def map(self, first_part: int, parts: int, populate: bool) -> Tensor:
        """Return a new mapping of consecutive parts, as uint8, in a storage of its own."""
        offset = self._head_bytes + first_part * self.part_bytes
        return _map(self._fd, offset, parts * self.part_bytes, populate)


def make_private(shared: Tensor) -> None:
    """Atomically replace the memory of a mapped storage by private memory with equal contents at the same addresses."""
    storage = shared.untyped_storage()
    nbytes = storage.nbytes()
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    copy = _checked("mmap", _libc.mmap(None, nbytes, _READ_WRITE, anonymous, -1, 0))
    ctypes.memmove(copy, storage.data_ptr(), nbytes)
    _checked("mremap", _libc.mremap(copy, nbytes, nbytes, _MREMAP_MAYMOVE_FIXED, storage.data_ptr()))


def exchange(group: dist.ProcessGroup, values: list[int]) -> list[list[int]]:
    """Return every rank's integers, by rank. Every rank must call this, with the same number of values."""
    mine = torch.tensor(values, dtype=torch.int64, device="cpu")
    everybody = [torch.empty_like(mine) for _ in range(group.size())]
    try:
        group.allgather([everybody], [mine]).wait()
    except RuntimeError as error:
        raise CollectiveTimeout(f"rank {group.rank()} could not reach its peers to share memory: {error}") from error
    return [theirs.tolist() for theirs in everybody]


def _map(fd: int, offset: int, nbytes: int, populate: bool) -> Tensor:
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    address = _checked("mmap", _libc.mmap(None, nbytes, _READ_WRITE, flags, fd, offset))
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    # The storage holds `memory`, so the mapping lives as long as any view of it. At exit the kernel unmaps it.
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)


def _checked(call: str, address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return address


def _whole_pages(nbytes: int) -> int:
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
