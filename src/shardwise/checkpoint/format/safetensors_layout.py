"""A safetensors file as byte arithmetic: the header, and where in the file each element of each tensor is stored.

    | 8 bytes: n | n bytes: JSON, padded with spaces | tensor | tensor | ... |

Tensors follow one another without gaps, the widest dtypes first, so that each begins at a multiple of its item size.
Source: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.fsdp.layout import round_up
from shardwise.layout.ranges import Range

_DTYPES = {
    "BOOL": (1, "bool"),
    "U8": (1, "uint8"),
    "I8": (1, "int8"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
    "U16": (2, "uint16"),
    "I16": (2, "int16"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "U32": (4, "uint32"),
    "I32": (4, "int32"),
    "F32": (4, "float32"),
    "U64": (8, "uint64"),
    "I64": (8, "int64"),
    "F64": (8, "float64"),
    "C64": (8, "complex64"),
}
ITEM_BYTES = {name: item_bytes for name, (item_bytes, _) in _DTYPES.items()}
"""Bytes of an element, by the format's name for its dtype."""
TORCH_NAMES = {name: torch_name for name, (_, torch_name) in _DTYPES.items()}
"""torch's name of each dtype, as in `torch.bfloat16`; where numpy has the dtype, also numpy's."""
LENGTH_BYTES = 8
"""Bytes of the header's length, a little-endian number before the header."""
RESERVED = "__metadata__"
"""The header's only entry that does not describe a tensor."""
_HEADER_ALIGN = 8
_MOST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor as a file holds it."""

    name: str
    dtype: str
    """A key of ITEM_BYTES."""
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.item_bytes


@dataclass(frozen=True)
class TensorFile:
    """The layout of a file: its tensors and where they begin. Offsets count from the beginning of the file."""

    header: bytes
    """Everything before the first tensor."""
    tensors: Mapping[str, StoredTensor]
    starts: Mapping[str, int]
    """First byte of each tensor."""
    nbytes: int

    def byte_range(self, name: str, start: int, stop: int) -> Range:
        """Return the bytes of elements [start, stop) of the flattened (row-major) tensor `name`."""
        tensor = self.tensors[name]
        if not 0 <= start <= stop <= tensor.numel:
            raise ValueError(f"elements [{start}, {stop}) are outside {name!r}, which has {tensor.numel}")
        first = self.starts[name]
        return Range(first + start * tensor.item_bytes, first + stop * tensor.item_bytes)


def lay_out(tensors: Iterable[StoredTensor], metadata: Mapping[str, str] | None = None) -> TensorFile:
    """Lay out the file that holds `tensors`: the widest dtypes first, otherwise in the order given."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.item_bytes)
    described: dict[str, Any] = {RESERVED: dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    end = 0
    for tensor in ordered:
        if tensor.name in offsets or tensor.name == RESERVED:
            raise ValueError(f"a file cannot hold two tensors named {tensor.name!r}")
        offsets[tensor.name] = end
        stop = end + tensor.nbytes
        described[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, stop]}
        end = stop
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(round_up(len(text), _HEADER_ALIGN))
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    starts = {name: len(header) + offset for name, offset in offsets.items()}
    return TensorFile(header, {tensor.name: tensor for tensor in ordered}, starts, len(header) + end)


def split(tensors: Sequence[StoredTensor], max_file_bytes: int) -> list[list[StoredTensor]]:
    """Cut a sequence into files of at most `max_file_bytes` of tensors each; a larger tensor gets a file of its own.

    Returns at least one file, perhaps an empty one.
    """
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes must be at least 1, not {max_file_bytes}")
    files: list[list[StoredTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if files[-1] and filled + tensor.nbytes > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.nbytes
    return files


def header_bytes(prefix: bytes, file_bytes: int) -> int:
    """Return the bytes before the first tensor, from a file's first 8 bytes and its size. Raises ValueError if they
    cannot be right."""
    length = int.from_bytes(prefix, "little") if len(prefix) == LENGTH_BYTES else -1
    if not 2 <= length <= min(_MOST_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise ValueError(f"no safetensors header fits in its {file_bytes} bytes")
    return LENGTH_BYTES + length


def parse(header: bytes, file_bytes: int) -> TensorFile:
    """Read a header back: the bytes before the first tensor.

    Raises ValueError, saying what is wrong, unless every tensor has its bytes and these follow one another to the end
    of the file.
    """
    try:
        described = json.loads(header[LENGTH_BYTES:])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not JSON: {error}") from None
    if not isinstance(described, dict):
        raise ValueError("its header is not a JSON object")
    described.pop(RESERVED, None)
    tensors: dict[str, StoredTensor] = {}
    starts: dict[str, int] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in described.items():
        tensor, (start, stop) = _entry(name, entry)
        if stop - start != tensor.nbytes:
            raise ValueError(f"tensor {name!r} of {tensor.nbytes} bytes has {stop - start} bytes in the file")
        tensors[name], starts[name] = tensor, len(header) + start
        ranges.append((start, stop, name))
    reached = 0
    for start, stop, name in sorted(ranges):
        if start != reached:
            raise ValueError(f"tensor {name!r} begins at byte {start} of the data, not at {reached}")
        reached = stop
    if len(header) + reached != file_bytes:
        raise ValueError(f"its tensors end at byte {len(header) + reached}, but the file has {file_bytes} bytes")
    return TensorFile(header, tensors, starts, file_bytes)


def _entry(name: str, entry: Any) -> tuple[StoredTensor, tuple[int, int]]:
    try:
        start, stop = (int(offset) for offset in entry["data_offsets"])
        tensor = StoredTensor(name, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"its header does not say where {name!r} is") from None
    if tensor.dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {tensor.dtype!r}")
    if start < 0 or min(tensor.shape, default=0) < 0:
        raise ValueError(f"tensor {name!r} has a negative size or offset")
    return tensor, (start, stop)
