"""Checkpoints that do not fit say what does not, and change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError
from tests.checkpoint.states import everything, same, step
from tests.engine.rig import Net, adamw, on_ranks


class Wider(Net):
    """One parameter has another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(6, 5)


def saved(path: Path) -> None:
    torch.manual_seed(3)
    model = sw.shard(Net(depth=4))
    optimizer = adamw(model.parameters())
    step(model, optimizer, 0)
    sw.checkpoint.save(path, model, optimizer)


@on_ranks(2)
def test_what_is_missing_or_unexpected_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    for depth, message in ((5, r"missing from the checkpoint: blocks\.4"), (3, r"unexpected in it: blocks\.3")):
        model = sw.shard(Net(depth=depth))
        optimizer = adamw(model.parameters())
        before = everything(model, optimizer)
        with pytest.raises(CheckpointError, match=message):
            sw.checkpoint.load(tmp_path / "c", model)
        with pytest.raises(CheckpointError, match=message):
            sw.checkpoint.load(tmp_path / "c", model, optimizer)
        same(everything(model, optimizer), before)
        loaded = sw.checkpoint.load(tmp_path / "c", model, optimizer, strict=False)
        names = {name for name, _ in Net(depth=5).named_parameters() if name.startswith(f"blocks.{min(depth, 4)}.")}
        if depth == 5:
            assert set(loaded.missing) == names | {f"optimizer state of {name}" for name in names}
            assert loaded.unexpected == ()
        else:
            assert loaded.missing == ()
            assert {"blocks.3.up.weight", "optimizer state of blocks.3.up.weight"} <= set(loaded.unexpected)
        after = everything(model, optimizer)
        assert not torch.equal(after["enter.weight"], before["enter.weight"])
        assert "enter.weight.exp_avg" in after


@on_ranks(2)
def test_another_shape_is_named_with_both(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    model = sw.shard(Wider())
    with pytest.raises(CheckpointError, match=r"leave\.weight \(here \(5, 6\), stored \(3, 6\)\)"):
        sw.checkpoint.load(tmp_path / "c", model)
    before = everything(model, adamw(model.parameters()))
    loaded = sw.checkpoint.load(tmp_path / "c", model, adamw(model.parameters()), strict=False)
    assert [text.split(" ")[0] for text in loaded.wrong_shape][:2] == ["leave.weight", "leave.bias"]
    after = everything(model, adamw(model.parameters()))
    assert torch.equal(after["leave.weight"], before["leave.weight"])
    assert not torch.equal(after["enter.weight"], before["enter.weight"])


@on_ranks(1)
def test_without_an_optimizer(tmp_path: Path) -> None:
    model = sw.shard(Net())
    sw.checkpoint.save(tmp_path / "c", model)
    sw.checkpoint.load(tmp_path / "c", model)
    with pytest.raises(CheckpointError, match="without an optimizer"):
        sw.checkpoint.load(tmp_path / "c", model, adamw(model.parameters()))
    loaded = sw.checkpoint.load(tmp_path / "c", model, adamw(model.parameters()), strict=False)
    assert loaded.missing == tuple(f"optimizer state of {name}" for name, _ in Net().named_parameters())


@on_ranks(2)
def test_state_of_another_kind_of_optimizer(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    model = sw.shard(Net(depth=4))
    other = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    before = everything(model, other)
    with pytest.raises(CheckpointError, match="was saved with AdamW, and this is SGD"):
        sw.checkpoint.load(tmp_path / "c", model, other)
    same(everything(model, other), before)
    assert set(other.param_groups[0]) == set(torch.optim.SGD([torch.zeros(1)]).param_groups[0])


@on_ranks(2)
def test_no_checkpoint_and_a_truncated_one(tmp_path: Path) -> None:
    model = sw.shard(Net())
    with pytest.raises(CheckpointError, match="does not exist"):
        sw.checkpoint.load(tmp_path / "c", model)
    sw.checkpoint.save(tmp_path / "c", model)
    file = tmp_path / "c" / "model.safetensors"
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        file.write_bytes(file.read_bytes()[:-1])
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        sw.checkpoint.load(tmp_path / "c", model)
