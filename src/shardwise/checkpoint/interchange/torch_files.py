"""Files of torch.save: full `.pt` files, and the streams that a DCP directory consists of.

They are read with `weights_only=True` under fake tensors, which execute nothing, own no memory and know the offset of
their bytes in the file. In the same way torch.save lays out a file with room for bytes, which are written in place.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.local_tensor import bytes_of
from shardwise.checkpoint.interchange.checkpoint_contents import CheckpointContents, LazyTensor
from shardwise.checkpoint.interchange.nested import Key, nested_state
from shardwise.checkpoint.publish import commit
from shardwise.errors import CheckpointError, one_line
from shardwise.files.local_file import read_at, write_at

# Reading --------------------------------------------------------------------------------------------------------------


def read_stream(path: Path, start: int = 0, nbytes: int | None = None) -> Any:
    """Read one torch.save stream, in bytes [start, start + nbytes) of a file, with a `LazyTensor` for each tensor.

    Raises CheckpointError if that is not a torch.save stream, is from before torch 1.6, or holds anything but tensors,
    containers and plain values: nothing of it is executed. UnreadableError if the file exists and cannot be read.
    """
    return tree_map_only(FakeTensor, lambda fake: _lazy(path, start, fake), _read_fakes(path, start, nbytes))


def _read_fakes(path: Path, start: int = 0, nbytes: int | None = None) -> Any:
    try:
        with manifest.reading(path), path.open("rb", buffering=0) as file:
            view = _create_file_view(file, start, os.fstat(file.fileno()).st_size - start if nbytes is None else nbytes)
            if view.read(4) != b"PK\x03\x04":
                raise CheckpointError(
                    f"{path} is not a file of torch.save"
                    + (f" at byte {start}" if start else "")
                    + ", or is from before torch 1.6: load it with torch.load and save it again"
                )
            view.seek(0)
            with FakeTensorMode():
                return torch.load(cast(IO[bytes], view), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, so it was not read: {_refused(error)}"
        ) from None
    except Exception as error:  # torch's unpickler checks little of what a damaged file makes it do
        raise CheckpointError(f"{path} is damaged: {one_line(error, with_type=True)}") from None


def _refused(error: Exception) -> str:
    """Return the line of torch's explanation that names the refused global."""
    lines = [line.strip() for line in str(error).splitlines()]
    telling = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0] if lines else "")
    return telling.split(". Please")[0][:200]


def _lazy(path: Path, start: int, fake: FakeTensor) -> LazyTensor:
    if fake.layout != torch.strided or fake.is_quantized:
        raise CheckpointError(f"{path} holds a sparse or quantized tensor, which cannot be converted")
    first = start + _offset(fake)
    shape, stride, marks = tuple(fake.shape), fake.stride(), (fake.is_conj(), fake.is_neg())
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if fake.numel() else 0
    if extent and first + extent * fake.dtype.itemsize > path.stat().st_size:
        raise CheckpointError(f"{path} is damaged: it ends before the data of a tensor of shape {shape}")

    def load() -> Tensor:
        values = torch.empty(extent, dtype=fake.dtype, device="cpu")
        with manifest.reading_data(path), path.open("rb", buffering=0) as file:
            read_at(file.fileno(), first, bytes_of(values))
        values = values.as_strided(shape, stride)
        for is_marked, resolve in zip(marks, (torch.conj_physical, torch.neg), strict=True):
            values = resolve(values) if is_marked else values  # x.conj() is saved as the bytes of x and a mark
        return values.contiguous()

    return LazyTensor(fake.dtype, shape, load)


def _offset(fake: FakeTensor) -> int:
    """Return the position of a tensor's first element in the stream that it was read from."""
    storage: Any = fake.untyped_storage()
    return int(storage._checkpoint_offset) + int(fake.storage_offset()) * fake.dtype.itemsize


def read_pt(path: Path) -> dict[Key, Any]:
    """Return everything in a `.pt` file by `Key`; tensors stay in it. Raises CheckpointError."""
    document = read_stream(path)
    if not isinstance(document, Mapping):
        what = "tensor" if isinstance(document, LazyTensor) else type(document).__name__
        raise CheckpointError(f"{path} holds a {what}, not a dict of tensors")
    return dict(_leaves((), document))


def _leaves(key: Key, value: Any) -> Iterator[tuple[Key, Any]]:
    """Yield each leaf with its key. Like DCP, this follows dicts, and lists that hold dicts, lists or tensors."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves((*key, str(name)), item)
    elif isinstance(value, list) and any(isinstance(item, (Mapping, list, LazyTensor)) for item in value):
        for number, item in enumerate(value):
            yield from _leaves((*key, number), item)
    else:
        yield key, value


# Writing --------------------------------------------------------------------------------------------------------------


def write_pt(contents: CheckpointContents, target: Path) -> None:
    """Write a `.pt` file, a tensor at a time: complete or absent. Raises CheckpointError.

    `torch.load(weights_only=True)` reads it: a dict of `model`, `optimizer`, `step`. Its zip entries carry no checksums
    (torch.load looks at none).
    """
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already: convert to another path, or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = commit.partial_of(target)
    state = nested_state(contents)
    room: dict[int, Tensor] = {}
    try:
        without_data = torch.serialization.skip_data(materialize_fake_tensors=True)
        with partial.open("wb") as file, FakeTensorMode(), without_data:  # errors of a Python file name the cause
            torch.save(tree_map(lambda value: _room_for(value, room), state), file)
        with partial.open("r+b", buffering=0) as file:
            for fake, value in zip(tree_leaves(_read_fakes(partial)), tree_leaves(state), strict=True):
                if room.pop(id(value), None) is not None:  # what is tied is there once
                    write_at(file.fileno(), _offset(fake), bytes_of(_flat(value)))
        commit.sync(partial)
        os.rename(partial, target)  # noqa: PTH104
        commit.sync(target.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _room_for(value: Any, known: dict[int, Tensor]) -> Any:
    """Return an empty tensor like a lazy or plain one, the same one for the same; any other value as it is."""
    if not isinstance(value, LazyTensor | Tensor):
        return value
    return known.setdefault(id(value), torch.empty(value.shape, dtype=value.dtype, device="cpu"))


def _flat(value: LazyTensor | Tensor) -> Tensor:
    return (value.load() if isinstance(value, LazyTensor) else value).reshape(-1)
