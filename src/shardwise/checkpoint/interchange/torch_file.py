"""Reads files of torch.save without their tensors' bytes: it finds where these are, so that any range can be read
later.

A full `.pt` file is one such stream; a DCP directory has one for each chunk of each tensor. They are read with
`weights_only=True` under fake tensors, which execute nothing, own no memory and know the offset of their bytes.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.local_tensor import NAMES, bytes_of
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.errors import CheckpointError
from shardwise.files.local_file import read_at


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor in a file of torch.save, and where its bytes are."""

    path: Path
    start: int
    """First byte of its storage in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements of the storage before the tensor's first."""
    is_conj: bool = False
    """Whether the stored numbers are still to be conjugated."""
    is_neg: bool = False
    """Whether the stored numbers are still to be negated."""

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements follow one another in the file, row-major."""
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()

    def stored(self, name: str) -> StoredTensor:
        """Return it as safetensors describes it. Raises CheckpointError if safetensors has no such dtype."""
        return StoredTensor(name, dtype_name(self.dtype, name), self.shape)

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened tensor, 1-D. Raises CheckpointError if the file ends too
        early.

        A tensor that was saved with gaps or in another order (a transposed view) is read as a whole each time.
        """
        first = self.start + self.offset * self.dtype.itemsize
        if self.is_contiguous:
            values = read_elements(self.path, first + start * self.dtype.itemsize, self.dtype, stop - start)
            return self._resolved(values)
        extent = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)) + 1
        extent = 0 if 0 in self.shape else extent
        storage = read_elements(self.path, first, self.dtype, extent)
        return self._resolved(torch.as_strided(storage, self.shape, self.stride).reshape(-1)[start:stop].contiguous())

    def _resolved(self, values: Tensor) -> Tensor:
        """Apply the marks: views such as `x.conj()` are saved as the bytes of `x` and a mark."""
        values = values.conj_physical() if self.is_conj else values
        return values.neg() if self.is_neg else values


def read_stream(path: Path, start: int = 0, nbytes: int | None = None) -> Any:
    """Read one torch.save stream, in bytes [start, start + nbytes) of a file, with a `SavedTensor` for each tensor.

    Raises CheckpointError if that is not a torch.save stream, is from before torch 1.6, or holds anything but tensors,
    containers and plain values: nothing of it is executed. UnreadableError if the file exists and cannot be read.
    """
    with _opened(path) as fd:
        view = _FileView(fd, start, os.fstat(fd).st_size - start if nbytes is None else nbytes)
        try:
            if view.read(4) != b"PK\x03\x04":
                raise CheckpointError(
                    f"{path} is not a file of torch.save"
                    + (f" at byte {start}" if start else "")
                    + ", or is from before torch 1.6: load it with torch.load and save it again"
                )
            view.seek(0)
            with FakeTensorMode():
                loaded = torch.load(cast(IO[bytes], view), map_location="cpu", weights_only=True)
                return _without_fakes(path, start, loaded)
        except pickle.UnpicklingError as error:
            why = _why(error)
            raise CheckpointError(
                f"{path} holds more than tensors and plain values, so it was not read: {why}"
            ) from None
        except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            if view.failure is not None:  # torch reports a file without `read`
                raise view.failure from None
            raise CheckpointError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from None


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        with manifest.reading(path), path.open("rb", buffering=0) as file:
            yield file.fileno()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is missing") from None


def dtype_name(dtype: torch.dtype, name: str) -> str:
    """Return safetensors' name of a dtype. Raises CheckpointError, naming the tensor, if there is none."""
    if dtype not in NAMES:
        raise CheckpointError(f"{name!r} has dtype {dtype}, which safetensors files cannot hold")
    return NAMES[dtype]


def read_elements(path: Path, start: int, dtype: torch.dtype, numel: int) -> Tensor:
    """Return `numel` consecutive elements from byte `start` of a file on, 1-D. Raises CheckpointError."""
    values = torch.empty(numel, dtype=dtype, device="cpu")
    with _opened(path) as fd:
        try:
            read_at(fd, start, bytes_of(values))
        except EOFError as error:
            raise CheckpointError(f"{path} ends at byte {error}, before the end of its tensor data") from None
    return values


def _why(error: Exception) -> str:
    """Return the line of torch's explanation that names the refused global."""
    lines = [line.strip() for line in str(error).splitlines()]
    telling = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0] if lines else "")
    return telling.split(". Please")[0][:200]


def _without_fakes(path: Path, start: int, value: Any) -> Any:
    if isinstance(value, FakeTensor):
        if value.layout != torch.strided or value.is_quantized:
            raise CheckpointError(f"{path} holds a sparse or quantized tensor, which cannot be converted")
        storage: Any = value.untyped_storage()
        at = start + storage._checkpoint_offset
        shape, stride, offset = tuple(value.shape), tuple(value.stride()), int(value.storage_offset())
        return SavedTensor(path, at, value.dtype, shape, stride, offset, value.is_conj(), value.is_neg())
    if isinstance(value, dict):
        return {key: _without_fakes(path, start, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_without_fakes(path, start, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


class _FileView(io.RawIOBase):
    """Part of a file, as a file object."""

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        self._fd, self._start, self._nbytes, self._at = fd, start, max(0, nbytes), 0
        self.failure: OSError | None = None
        """The operating system's error, if there was one; otherwise None."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._nbytes)[whence]
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        wanted = min(view.nbytes, max(0, self._nbytes - self._at))
        try:
            count = os.preadv(self._fd, [view[:wanted]], self._start + self._at) if wanted else 0
        except OSError as error:
            self.failure = error
            raise
        self._at += count
        return count
