"""`.metadata` is a pickle that somebody else wrote: what belongs there is read, anything else is refused unexecuted."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as torch_metadata

from shardwise.checkpoint.interchange import dcp_metadata
from shardwise.errors import CheckpointError
from shardwise.sharded.extensions.dcp_chunks import Box

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tensors = {str(dtype): torch.zeros(2, 3).to(dtype) for dtype in DTYPES}
    state = {"model": {**tensors, "one": torch.tensor(1.0), "none": torch.zeros(0, 3)}, "list": [{"a": 1}], "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    return tmp_path / "c"


def test_what_torch_writes_is_read(directory: Path) -> None:
    found = dcp_metadata.read(directory)
    for dtype in DTYPES:
        tensor = found.tensors["model", str(dtype)]
        assert (f"torch.{tensor.dtype}", tensor.shape) == (str(dtype), (2, 3))
        assert [box for box, _ in tensor.chunks] == [Box((0, 0), (2, 3))]
    assert found.tensors["model", "one"].shape == ()
    assert set(found.objects) == {("list", 0, "a"), ("step",)}
    assert found.objects[("step",)].file == "__0_0.distcp"


class Runs:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.mkdir, "posix.mkdir"),
        (eval, "builtins.eval"),
        (getattr, "builtins.getattr"),
        (torch.load, "torch.serialization.load"),
        (
            torch_metadata.TensorProperties.create_from_tensor,
            "torch.distributed.checkpoint.metadata.TensorProperties.create_from_tensor",
        ),
    ],
)
def test_any_other_name_is_refused_and_nothing_runs(
    function: Callable[..., Any], name: str, directory: Path, tmp_path: Path
) -> None:
    metadata = torch_metadata.Metadata({}, planner_data=Runs(function, str(tmp_path / "ran")))
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"names {name.replace('.', '[.]')}, which does not belong"):
        dcp_metadata.read(directory)
    assert not (tmp_path / "ran").exists()


def test_reading_changes_no_class_of_torch(directory: Path) -> None:
    """A pickle may set attributes of whatever it names, classes too."""
    evil = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n(N}\x8c\x04evilK\x01stb."
    (directory / ".metadata").write_bytes(evil)
    with pytest.raises(CheckpointError, match="is damaged"):
        dcp_metadata.read(directory)
    assert not hasattr(torch_metadata.Metadata, "evil")
    assert not hasattr(dcp_metadata._Record, "evil")


@pytest.mark.parametrize("file", ["../outside", "/etc/passwd", "a/b", "..", ""])
def test_paths_stay_in_the_directory(file: str, directory: Path) -> None:
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = file
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is not the name of a file in the checkpoint"):
        dcp_metadata.read(directory)


def test_chunks_must_make_up_the_tensor(directory: Path) -> None:
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    chunk = metadata.state_dict_metadata["model.torch.float32"].chunks[0]
    for offsets, sizes, message in (((0, 0), (1, 3), "do not hold the 6"), ((1, 0), (2, 3), "does not lie in")):
        chunk.offsets, chunk.sizes = torch.Size(offsets), torch.Size(sizes)
        index = next(i for i in metadata.storage_data if i.fqn == "model.torch.float32")
        metadata.storage_data[torch_metadata.MetadataIndex(index.fqn, offsets)] = metadata.storage_data[index]
        (directory / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=message):
            dcp_metadata.read(directory)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damage_is_an_error_or_another_reading(whole: bytes, room: Path, data: st.DataObject) -> None:
    """Nothing but CheckpointError comes out, whatever the bytes are."""
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (room / ".metadata").write_bytes(damaged[: data.draw(st.integers(1, len(whole)))])
    try:
        dcp_metadata.read(room)
    except CheckpointError as error:
        assert str(room) in str(error)  # noqa: PT017


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole")
    dcp.save({"a": torch.zeros(2, 3), "b": {"c": 1}}, checkpoint_id=path, no_dist=True)
    return (path / ".metadata").read_bytes()
