"""Files against one that is written byte by byte, and against the safetensors library."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.format.safetensors_layout import (
    LENGTH_BYTES,
    StoredTensor,
    header_bytes,
    lay_out,
    parse,
    split,
)

NUMPY = {"F64": np.float64, "I64": np.int64, "F32": np.float32, "F16": np.float16, "I8": np.int8, "BOOL": np.bool_}

tensors_of_a_file = st.lists(
    st.tuples(st.sampled_from(sorted(NUMPY)), st.lists(st.integers(0, 4), max_size=3).map(tuple)), max_size=6
).map(lambda specs: [StoredTensor(f"p{i}.wéight", dtype, shape) for i, (dtype, shape) in enumerate(specs)])


def values(tensor: StoredTensor) -> np.ndarray:
    numbers = np.arange(tensor.numel) + len(tensor.name) + tensor.numel
    return numbers.astype(NUMPY[tensor.dtype]).reshape(tensor.shape)


@given(tensors_of_a_file)
def test_elements_written_at_their_offsets_are_what_safetensors_reads(tensors: list[StoredTensor]) -> None:
    file = lay_out(tensors, {"format": "pt"})
    data = bytearray(file.nbytes)
    data[: len(file.header)] = file.header
    written = list(range(len(file.header)))
    for tensor in tensors:
        flat = values(tensor).reshape(-1)
        for element in reversed(range(tensor.numel)):
            start, stop = file.byte_range(tensor.name, element, element + 1)
            data[start:stop] = flat[element : element + 1].tobytes()
            written += range(start, stop)
            assert start % tensor.item_bytes == 0
    assert sorted(written) == list(range(file.nbytes))  # every byte once
    read = safetensors.numpy.load(bytes(data))
    assert sorted(read) == sorted(tensor.name for tensor in tensors)
    for tensor in tensors:
        assert read[tensor.name].dtype == NUMPY[tensor.dtype]
        assert np.array_equal(read[tensor.name], values(tensor))


@given(tensors_of_a_file)
def test_a_header_reads_back(tensors: list[StoredTensor]) -> None:
    file = lay_out(tensors, {"format": "pt"})
    assert header_bytes(file.header[:LENGTH_BYTES], file.nbytes) == len(file.header)
    assert parse(file.header, file.nbytes) == file


@given(tensors_of_a_file)
def test_a_file_of_the_library_reads_back(tensors: list[StoredTensor]) -> None:
    data = safetensors.numpy.save({tensor.name: values(tensor) for tensor in tensors})
    file = parse(data[: header_bytes(data[:LENGTH_BYTES], len(data))], len(data))
    for tensor in tensors:
        start, stop = file.byte_range(tensor.name, 0, tensor.numel)
        assert data[start:stop] == values(tensor).tobytes()


def test_a_header_is_what_the_library_writes() -> None:
    tensors = [StoredTensor("b", "F32", (3,)), StoredTensor("a", "I8", (1,)), StoredTensor("c", "F64", (0, 4))]
    expected = safetensors.numpy.save({tensor.name: values(tensor) for tensor in tensors}, {"format": "pt"})
    assert expected.startswith(lay_out(tensors, {"format": "pt"}).header)


@given(tensors_of_a_file, st.integers(1, 200))
def test_files_are_as_full_as_the_limit_allows(tensors: list[StoredTensor], limit: int) -> None:
    files = split(tensors, limit)
    assert list(itertools.chain(*files)) == tensors
    sizes = [sum(tensor.nbytes for tensor in file) for file in files]
    assert all(size <= limit or len(file) == 1 for size, file in zip(sizes, files, strict=True))
    for file, (size, later) in zip(files, zip(sizes[:-1], files[1:], strict=True), strict=False):
        assert file
        assert size + later[0].nbytes > limit


def test_elements_that_are_not_there_have_no_bytes() -> None:
    with pytest.raises(ValueError, match=r"\[2, 5\).*which has 4"):
        lay_out([StoredTensor("a", "F32", (2, 2))]).byte_range("a", 2, 5)
    with pytest.raises(ValueError, match="two tensors named 'a'"):
        lay_out([StoredTensor("a", "F32", (2,)), StoredTensor("a", "F32", (2,))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "F128"}, "unknown dtype 'F128'"),
        ({"shape": [3]}, "of 12 bytes has 8"),
        ({"shape": [-2, -1]}, "negative"),
        ({"data_offsets": [4, 12]}, "begins at byte 4"),
        ({"data_offsets": None}, "where 'a' is"),
        ({"data_offsets": [0, float("inf")]}, "where 'a' is"),
        ({"shape": [float("inf")]}, "where 'a' is"),
    ],
)
def test_a_header_that_cannot_be_right_is_refused(change: dict[str, object], message: str) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **change}
    header = bytes(LENGTH_BYTES) + json.dumps({"a": entry}).encode()
    with pytest.raises(ValueError, match=message):
        parse(header, len(header) + 8)


@pytest.mark.parametrize("text", ["{", '"', '{"a": ' + "[" * 200_000, "[" + "1" * 5000 + "]"])
def test_a_header_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="its header is not JSON: "):
        parse(bytes(LENGTH_BYTES) + text.encode(), LENGTH_BYTES + len(text))


def test_a_truncated_file_is_refused() -> None:
    file = lay_out([StoredTensor("a", "F32", (2,))])
    with pytest.raises(ValueError, match=f"end at byte {file.nbytes}"):
        parse(file.header, file.nbytes - 1)
    with pytest.raises(ValueError, match="header"):
        header_bytes(file.header[:LENGTH_BYTES], LENGTH_BYTES + 1)
    with pytest.raises(ValueError, match="header"):
        header_bytes(file.header[:3], 3)
