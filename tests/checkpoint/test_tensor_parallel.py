"""Checkpoints of tensor-parallel models: the bytes of an ordinary one, written and read at any mesh."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise.checkpoint.format import manifest, row_exchange
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.checkpoint.ranks.file_barrier import FileBarrier
from shardwise.errors import CheckpointError, PeerError
from tests.engine.tensor.rig import CONFIGS, Case, column_and_row, forget_meshes, loss_of, sequence, vocabulary


class InContext(Case):
    """A case on the axes (dp_shard, cp, tp) of `sw.mesh`. Over `cp` are data ranks, each with its slice of a batch:
    this model has no attention that would trade tokens, and so no slice needs another."""

    def mesh(self) -> DeviceMesh:
        forget_meshes()
        return sw.mesh(dp_shard=self.shape[0], cp=self.shape[1], tp=self.shape[2])

    def data(self, mesh: DeviceMesh) -> DeviceMesh:
        return mesh


MESHES = {
    "1x1": Case(vocabulary, shape=(1, 1)),
    "2x2": Case(vocabulary, shape=(2, 2)),
    "4x1": Case(vocabulary, shape=(4, 1)),
    "1x4": Case(vocabulary, shape=(1, 4)),
    "3x1": Case(column_and_row, shape=(3, 1)),
    "1x3": Case(column_and_row, shape=(1, 3)),
    "2x2 by sequence, ZeRO-2": Case(sequence, shape=(2, 2), strategy="shard_grad_op"),
    "2x2 replicated": Case(column_and_row, shape=(2, 2), strategy="no_shard"),
    "2x2x2": Case(vocabulary, shape=(2, 2, 2), strategy="hybrid_shard"),
}
IN_CONTEXT = {
    "cp=2": InContext(vocabulary, shape=(1, 2, 1)),
    "2 x cp=2": InContext(vocabulary, shape=(2, 2, 1)),
    "cp=2 x tp=2": InContext(vocabulary, shape=(1, 2, 2)),
}


def _numbers(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Give weights and moments numbers of their own, equal at every mesh."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        assert isinstance(parameter, sw.ShardedParameter)
        for tensor in (parameter.detach(), *_moments(optimizer, parameter).values()):
            tensor.copy_(torch.randn(parameter.shape, generator=generator))


def _moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    return {name: value for name, value in optimizer.state[parameter].items() if isinstance(value, sw.ShardedParameter)}


def _trained(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = case.mesh()
    _, model = case.build(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, case.batches(mesh, 0)[1][0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _save(case: Case, path: Path, asynchronous: bool = False) -> None:
    model, optimizer = _trained(case)
    _numbers(model, optimizer, 5)
    sw.checkpoint.save(path, model, optimizer, step=3, asynchronous=asynchronous, max_file_bytes=4096)
    sw.checkpoint.wait(model)


def _load(case: Case, path: Path) -> None:
    model, optimizer = _trained(case)
    assert sw.checkpoint.load(path, model, optimizer).step == 3
    found = _whole(model, optimizer)
    _numbers(model, optimizer, 5)
    _same(found, _whole(model, optimizer))


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], Tensor]:
    """Return whole parameters, by their names and "", and whole moments."""
    return {
        (name, key): value.full_tensor()  # type: ignore[operator]
        for name, parameter in model.named_parameters()
        for key, value in {"": parameter, **_moments(optimizer, parameter)}.items()
    }


def _same(found: dict[tuple[str, str], Tensor], expected: dict[tuple[str, str], Tensor]) -> None:
    assert found.keys() == expected.keys()
    for each, value in expected.items():
        assert torch.equal(found[each], value), each


def _bytes(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix == ".safetensors"}


@pytest.mark.slow
def test_every_mesh_writes_the_same_bytes_and_reads_those_of_every_other(ranks: Any, tmp_path: Path) -> None:
    for number, (name, case) in enumerate(MESHES.items()):
        ranks(case.world_size).run(_save, case, tmp_path / str(number))
        assert _bytes(tmp_path / str(number)) == _bytes(tmp_path / "0"), name
        sw.checkpoint.verify(tmp_path / str(number))
    for number, reader in itertools.product((0, 1, 3, 8), MESHES.values()):
        ranks(reader.world_size).run(_load, reader, tmp_path / str(number))


@pytest.mark.slow
def test_meshes_with_a_context_axis_write_the_same_bytes_and_read_those_of_others(ranks: Any, tmp_path: Path) -> None:
    for name, case in {"alone": MESHES["1x1"], "2x2": MESHES["2x2"], **IN_CONTEXT}.items():
        ranks(case.world_size).run(_save, case, tmp_path / name)
        assert _bytes(tmp_path / name) == _bytes(tmp_path / "alone"), name
    for reader in IN_CONTEXT.values():
        ranks(reader.world_size).run(_load, reader, tmp_path / "2x2")
    for name in IN_CONTEXT:
        ranks(4).run(_load, MESHES["1x4"], tmp_path / name)
    ranks(4).run(_load, IN_CONTEXT["cp=2 x tp=2"], tmp_path / "2 x cp=2")


def test_two_meshes_of_four_ranks_and_one_process(ranks: Any, tmp_path: Path) -> None:
    ranks(1).run(_save, MESHES["1x1"], tmp_path / "alone")
    ranks(4).run(_save, MESHES["2x2"], tmp_path / "now")
    ranks(4).run(_save, MESHES["1x4"], tmp_path / "later", True)
    assert _bytes(tmp_path / "now") == _bytes(tmp_path / "later") == _bytes(tmp_path / "alone")
    ranks(4).run(_load, MESHES["1x4"], tmp_path / "now")
    ranks(4).run(_load, MESHES["2x2"], tmp_path / "alone")


def _load_pretrained(case: Case, path: Path) -> None:
    plain, model = case.build()
    nn.init.zeros_(model.embed.weight)
    sw.checkpoint.load_pretrained(path, model)
    full = sw.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(full[name], value) for name, value in plain.state_dict().items())
    streamed = dict(sw.stream_weights(model))
    assert all(torch.equal(streamed[name], value) for name, value in plain.state_dict().items())


def test_pretrained_weights_are_read_and_streamed(ranks: Any, tmp_path: Path) -> None:
    case = MESHES["2x2"]
    torch.manual_seed(0)
    ranks(1).run(_save_plain, Case(vocabulary, shape=(1, 1)), tmp_path / "plain")
    assert load_file(tmp_path / "plain" / "model.safetensors")["embed.weight"].shape == (31, 12)
    ranks(case.world_size).run(_load_pretrained, case, tmp_path / "plain")


def _save_plain(case: Case, path: Path) -> None:
    sw.checkpoint.save(path, case.build()[1])


def _save_and_load_elsewhere(case: Case, path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"blocks.0.up.weight \(here \(24, 12\), stored \(22, 12\)\)"):
        sw.checkpoint.load(path, case.build()[1])


def test_another_shape_is_refused_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    ranks(1).run(_save_plain, Case(vocabulary, shape=(1, 1)), tmp_path / "plain")
    ranks(4).run(_save_and_load_elsewhere, Case(vocabulary, model={"hidden": 24}), tmp_path / "plain")


# Tensors that are cut across their rows: ranks exchange them before they write ----------------------------------------


def _save_in_rounds(case: Case, path: Path, asynchronous: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_exchange, "_ROUND_BYTES", 100)
        _save(case, path, asynchronous)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exchange_of_many_rounds(ranks: Any, tmp_path: Path, asynchronous: bool) -> None:
    cases = [MESHES["1x1"], MESHES["2x2"], MESHES["1x3"]]
    for number, case in enumerate(cases):
        ranks(case.world_size).run(_save_in_rounds, case, tmp_path / str(number), asynchronous)
        assert _bytes(tmp_path / str(number)) == _bytes(tmp_path / "0")
        sw.checkpoint.verify(tmp_path / str(number))


def test_rows_are_written_in_long_ranges(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(_save_plain, Case(vocabulary, model={"hidden": 64}), tmp_path / "saved")
    (written,) = (
        file for name, file in manifest.read(LocalDirectory(tmp_path / "saved")).files.items() if "safetensors" in name
    )
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    assert tensors["blocks.0.down.weight"].shape == (12, 64)  # 24 ranges of 2 ranks, if each wrote its columns
    assert len(written.regions) <= 3 * len(tensors)


def _fail_on_one_rank(path: Path, asynchronous: bool) -> None:
    model, optimizer = _trained(MESHES["2x2"])
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            target, name = (FileBarrier, "announce_process") if asynchronous else (os, "pwrite")
            patch.setattr(target, name, _no_space)
        with pytest.raises(CheckpointError, match="No space left"):
            sw.checkpoint.save(path, model, optimizer, asynchronous=asynchronous, max_file_bytes=1024)
    dist.barrier()  # rank 0 may still be clearing up
    assert not list(path.parent.iterdir())
    sw.checkpoint.save(path, model, optimizer, asynchronous=asynchronous)
    sw.checkpoint.wait(model)
    sw.checkpoint.load(path, model, optimizer)


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nobody_waits_for_a_rank_that_failed_before_it_exchanged(
    ranks: Any, tmp_path: Path, asynchronous: bool
) -> None:
    ranks(4).run(_fail_on_one_rank, tmp_path / "saved", asynchronous)


FAILING = {
    "arranging": "_covered",
    "allocating": "_Room",
    "sending": "_values",
    "receiving": "copy_runs",
}


def _fail_inside(path: Path, place: str, asynchronous: bool) -> None:
    """One of the two ranks that exchange rows runs out of memory within the exchange, not at once."""
    model, optimizer = _trained(MESHES["2x2"])
    calls = 0
    original = getattr(row_exchange, FAILING[place])

    def fails(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > (place in {"sending", "receiving"}) * 5:
            raise torch.OutOfMemoryError("planted")
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_exchange, "_ROUND_BYTES", 200)
        if dist.get_rank() == 3:
            patch.setattr(row_exchange, FAILING[place], fails)
        expected = torch.OutOfMemoryError if dist.get_rank() == 3 else PeerError
        with pytest.raises(expected, match="planted"):
            sw.checkpoint.save(path, model, optimizer, asynchronous=asynchronous)
    dist.barrier()
    assert not list(path.parent.iterdir())
    sw.checkpoint.save(path, model, optimizer, asynchronous=asynchronous)
    sw.checkpoint.wait(model)
    sw.checkpoint.load(path, model, optimizer)


@pytest.mark.parametrize("place", FAILING)
def test_a_rank_that_fails_within_an_exchange_is_named_by_all(ranks: Any, tmp_path: Path, place: str) -> None:
    ranks(4).run(_fail_inside, tmp_path / "saved", place, place == "receiving")


# Packed weights and experts -------------------------------------------------------------------------------------------

PACKED = ("mixtral", "phi3")
"""Mixtral stacks and packs its experts' matrices, and stores each alone. Phi-3 packs those of attention and of its MLP,
and stores them so."""
READERS = {"tp=4": (4, 4), "tp=2": (4, 2), "tp=1": (3, 1), "alone": (1, 1)}
"""How many ranks read, and over how many of them weights are cut."""


def _packed(name: str, tp: int, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    """Return a sharded model with heads for four tensor ranks, and its optimizer."""
    forget_meshes()
    kind, sizes = CONFIGS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**sizes | {"num_key_value_heads": 4})
    model = transformers.AutoModelForCausalLM.from_config(config)
    if tp == 1:
        sw.shard(model)
    else:
        sw.shard(model, mesh=sw.mesh(tp=tp), tp_plan="auto")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _save_packed(name: str, tp: int, path: Path) -> None:
    """Save it after a step, and its weights alone as transformers does."""
    model, optimizer = _packed(name, tp)
    ids = torch.arange(16).view(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    _numbers(model, optimizer, 5)
    sw.checkpoint.save(path, model, optimizer, step=3)
    full = sw.full_state_dict(model)
    if dist.get_rank() == 0:
        plain = transformers.AutoModelForCausalLM.from_config(model.config)
        plain.load_state_dict(full)
        plain.save_pretrained(path.with_suffix(".pretrained"))


def _load_packed(name: str, tp: int, path: Path) -> None:
    model, optimizer = _packed(name, tp, seed=1)
    assert sw.checkpoint.load(path, model, optimizer).step == 3
    pretrained, untrained = _packed(name, tp, seed=2)
    sw.checkpoint.load_pretrained(path.with_suffix(".pretrained"), pretrained)
    found, weights = _whole(model, optimizer), _whole(pretrained, untrained)
    assert len(found) == 3 * len(weights)
    _numbers(model, optimizer, 5)
    expected = _whole(model, optimizer)
    _same(found, expected)
    _same(weights, {each: value for each, value in expected.items() if not each[1]})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("reader", ["tp=4", *(pytest.param(r, marks=pytest.mark.slow) for r in READERS if r != "tp=4")])
@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_and_experts(ranks: Any, tmp_path: Path, name: str, reader: str) -> None:
    """Saved over two tensor ranks, loaded over others, and from a directory of transformers."""
    ranks(4).run(_save_packed, name, 2, tmp_path / "tp")
    world_size, tp = READERS[reader]
    ranks(world_size).run(_load_packed, name, tp, tmp_path / "tp")


def _cut_across_rows(path: Path) -> None:
    model, _ = _packed("mixtral", 2)
    expert = dict(model.named_parameters())["model.layers.0.mlp.experts.down_proj"]
    assert isinstance(expert, sw.ShardedParameter)
    assert expert.placement.part is not None
    assert expert.placement.part[2] != ((0, 48),)
    _save_packed("mixtral", 2, path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_experts_cut_across_their_rows(ranks: Any, tmp_path: Path) -> None:
    """They are stored by expert, as one process stores them."""
    ranks(1).run(_save_packed, "mixtral", 1, tmp_path / "alone")
    ranks(4).run(_cut_across_rows, tmp_path / "tp")
    assert _bytes(tmp_path / "tp") == _bytes(tmp_path / "alone")
    sw.checkpoint.verify(tmp_path / "tp")
