"""What the model calls its tensors goes along: FSDP2 finds its own names in what files call and cut otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.checkpoint import convert, verify
from shardwise.checkpoint.format import manifest, names_json
from shardwise.checkpoint.interchange.checkpoint_contents import LazyTensor
from shardwise.checkpoint.interchange.rearranged import as_in_memory, as_stored
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.checkpoint.names.index_map import IndexMap, Place, Strided
from shardwise.errors import CheckpointError
from tests.checkpoint.interchange.sources import whole
from tests.checkpoint.states import State, everything
from tests.engine.rig import adamw
from tests.ranks import RankPools

transformers = pytest.importorskip("transformers")

from tests.checkpoint.architectures import ARCHITECTURES  # noqa: E402

TRAINED = ("mixtral, stacked experts", "gpt2, tied", "vit, renamed")
STEPS = 2


def train(name: str, model: nn.Module, optimizer: Any) -> list[float]:
    """Losses of some steps, of another size on every rank."""
    losses = []
    for _ in range(STEPS):
        loss = ARCHITECTURES[name].outputs(model).square().mean() * (1 + dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_save_train(name: str, path: Path) -> tuple[State, list[float]]:
    """What was saved, and the losses that came after."""
    model = sw.shard(ARCHITECTURES[name].build())
    optimizer = adamw(model.parameters())
    train(name, model, optimizer)
    sw.checkpoint.save(path, model, optimizer, step=STEPS)
    saved = everything(model, optimizer)
    return saved, train(name, model, optimizer)


def go_on_with_fsdp2(name: str, path: Path) -> tuple[State, list[float]]:
    """What FSDP2 finds under its own names, and the losses of training on."""
    model = ARCHITECTURES[name].build(seed=99)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = adamw(model.parameters())
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return whole(model, optimizer), train(name, model, optimizer)


@pytest.mark.parametrize("name", TRAINED)
def test_fsdp2_trains_on_under_its_own_names(name: str, ranks: RankPools, tmp_path: Path) -> None:
    (saved, losses), (_, of_the_other) = ranks(2).run(train_save_train, name, tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "dcp", "dcp")
    found = ranks(2).run(go_on_with_fsdp2, name, tmp_path / "dcp")
    for state, _ in found:
        assert state.keys() == saved.keys()
        for key, value in saved.items():
            assert torch.equal(state[key], value), key
    assert [after for _, after in found] == [losses, of_the_other]
    assert len(set(losses)) == STEPS


def save(name: str, path: Path) -> None:
    model = sw.shard(ARCHITECTURES[name].build())
    optimizer = adamw(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    sw.checkpoint.save(path, model, optimizer)


@pytest.mark.parametrize("way", ["dcp", "pt"])
@pytest.mark.parametrize(
    "name",
    [
        *TRAINED,
        "inkling, rows of experts interleaved",
        "gradium, rows permuted",
        "ernie vl, transposed and joined experts",
    ],
)
def test_there_and_back_gives_the_very_same_files(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of a few elements, so that every loop goes round; and torch.load gives the model's own state_dict."""
    monkeypatch.setattr("shardwise.checkpoint.interchange.rearranged._GATHERED_NUMEL", 300)
    monkeypatch.setattr("shardwise.checkpoint.interchange.dcp_files._CHUNK_BYTES", 3000)
    save(name, tmp_path / "own")
    between = tmp_path / ("between.pt" if way == "pt" else "between")
    convert(tmp_path / "own", between, way)
    assert convert(between, tmp_path / "back").left_out == ()
    verify(tmp_path / "back")
    for file in ("model.safetensors", "optimizer.safetensors", "names.json"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "own" / file).read_bytes()
    if way == "pt":
        model = ARCHITECTURES[name].kind.from_pretrained(tmp_path / "own")
        loaded = torch.load(between, weights_only=True)["model"]
        assert loaded.keys() == model.state_dict().keys()
        for key, value in model.state_dict().items():
            assert torch.equal(loaded[key], value), key


def test_what_is_tied_is_written_once(tmp_path: Path) -> None:
    save("gpt2, tied", tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "full.pt", model_only=True)
    loaded = torch.load(tmp_path / "full.pt", weights_only=True)["model"]
    assert loaded["lm_head.weight"].data_ptr() == loaded["transformer.wte.weight"].data_ptr()
    convert(tmp_path / "own", tmp_path / "dcp", "dcp", model_only=True)
    tensors = (tmp_path / "own" / "model.safetensors").stat().st_size
    for file in (tmp_path / "full.pt", tmp_path / "dcp" / "__0_0.distcp"):
        assert b"lm_head" not in (tmp_path / "own" / "model.safetensors").read_bytes()
        count = len(loaded) if file.suffix == ".distcp" else 1
        assert file.stat().st_size < tensors + count * 2000 + 20000


def test_a_checkpoint_without_the_names_converts_as_it_is(tmp_path: Path) -> None:
    """Of a version that did not write them."""
    save("vit, renamed", tmp_path / "own")
    directory = LocalDirectory(tmp_path / "own")
    records = {name: file for name, file in manifest.read(directory).files.items() if name != names_json.NAME}
    manifest.write(directory, manifest.Manifest(records))
    directory.remove(names_json.NAME)
    convert(tmp_path / "own", tmp_path / "full.pt", model_only=True)
    document = torch.load(tmp_path / "full.pt", weights_only=True)
    assert document.keys() == {"model", "step"}
    assert document["model"].keys() == load_file(tmp_path / "own" / "model.safetensors").keys()


def test_names_that_do_not_fit_any_more_are_left(tmp_path: Path) -> None:
    """Somebody took a tensor out of the file."""
    save("vit, renamed", tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "full.pt", model_only=True)
    document = torch.load(tmp_path / "full.pt", weights_only=True)
    del document["model"][names_json.decode(document["file_names"], 10**6)[0].names[0]]
    torch.save(document, tmp_path / "less.pt")
    convert(tmp_path / "less.pt", tmp_path / "back")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == document["model"].keys()
    assert not (tmp_path / "back" / "names.json").exists()


def test_a_damaged_file_of_names_is_named(tmp_path: Path) -> None:
    save("vit, renamed", tmp_path / "own")
    (tmp_path / "own" / "names.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"own/names\.json is truncated"):
        convert(tmp_path / "own", tmp_path / "dcp", "dcp")


def test_where_no_name_differs_there_is_no_file(tmp_path: Path) -> None:
    model = sw.shard(nn.Linear(3, 4))
    sw.checkpoint.save(tmp_path / "own", model)
    assert not (tmp_path / "own" / "names.json").exists()


# The file -------------------------------------------------------------------------------------------------------------


def lazy(tensors: State) -> dict[str, LazyTensor]:
    """Tensors as conversions take them."""
    return {n: LazyTensor(t.dtype, tuple(t.shape), partial(torch.clone, t)) for n, t in tensors.items()}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_permuted_tensors(sizes: list[int], data: st.DataObject) -> None:
    """Whatever the order of dims, in any range: there, and back, through the text."""
    order = data.draw(st.permutations(range(len(sizes))))
    tensor = torch.arange(float(torch.Size(sizes).numel())).view(sizes)
    moved = tensor.permute(order).contiguous()
    runs = IndexMap.paired(sizes, Strided(0, tensor.stride()), Strided(0, _strides(moved, order)))
    named = [names_json.NamedTensor(("a", "b"), tuple(sizes), (Place("c", tuple(moved.shape), runs),))]
    (again,) = names_json.decode(names_json.encode(named), 10**6)
    assert (again.names, again.shape, again.places[0].shape) == (("a", "b"), tuple(sizes), tuple(moved.shape))
    assert again.places[0].runs.tuples() == runs.tuples()
    with pytest.MonkeyPatch.context() as patch:
        most = data.draw(st.integers(1, 2 * tensor.numel()))
        patch.setattr("shardwise.checkpoint.interchange.rearranged._GATHERED_NUMEL", most)
        model = as_in_memory(lazy({"c": moved}), [again])
        assert model["a"] is model["b"]
        assert torch.equal(model["a"].load(), tensor)
        files = as_stored(lazy({"a": tensor, "b": tensor}), [again])
        assert files.keys() == {"c"}
        assert torch.equal(files["c"].load(), moved)


def _strides(moved: torch.Tensor, order: list[int]) -> tuple[int, ...]:
    """Of the permuted copy, in the order of the dims of the tensor that was permuted."""
    strides = [0] * len(order)
    for dim, stride in zip(order, moved.stride(), strict=True):
        strides[dim] = stride
    return tuple(strides)


def test_a_transposed_matrix_is_a_few_numbers() -> None:
    runs = IndexMap.paired((700, 900), Strided(0, (900, 1)), Strided(0, (1, 700)))
    text = names_json.encode([names_json.NamedTensor(("a",), (700, 900), (Place("b", (900, 700), runs),))])
    assert len(text) < 700 * 40


WHOLE = {"names": ["a"], "shape": [4], "places": [["b", [4], [[0, 0, 4]]]]}


@pytest.mark.parametrize(
    "entry",
    [
        {**WHOLE, "names": []},
        {**WHOLE, "places": []},
        {**WHOLE, "shape": [5]},
        {**WHOLE, "shape": [-4, -1]},
        {**WHOLE, "places": [["b", [4], [[0, 1, 4]]]]},
        {**WHOLE, "places": [["b", [4], [[0, -1, 4]]]]},
        {**WHOLE, "places": [["b", [4], [[0, 0, 2], [1, 2, 2]]]]},
        {**WHOLE, "places": [["b", [4], [[0, 0, 1, 4, 1, 0]]]]},
        {**WHOLE, "places": [["b", [4], [[0, 0, 0, 10**15, 1, 1]]]]},
        {**WHOLE, "places": [["b", [4], [[0, 0, 1, 10**15, 1, 1]]]]},
        {**WHOLE, "places": [["b", [4], [[0, 0, 10**30]]]]},
        {**WHOLE, "places": [["b", [4], [0]]]},
        {"names": ["a"]},
        7,
    ],
)
def test_what_cannot_be_is_refused(entry: Any) -> None:
    names_json.decode(json.dumps({"format": 1, "tensors": [WHOLE]}), 10**6)
    text = json.dumps({"format": 1, "tensors": [entry]})
    with pytest.raises(
        ValueError,
        match=r"Error: |are incomplete|are no names|negative size|runs (do not fit|go beyond)|elements overlap",
    ):
        names_json.decode(text, 10**6)


def test_names_of_other_tensors_are_refused() -> None:
    (named,) = names_json.decode(json.dumps({"format": 1, "tensors": [WHOLE]}), 10**6)
    for tensors in ({"b": torch.ones(5)}, {"c": torch.ones(4)}, {"b": torch.ones(4), "a": torch.ones(4)}):
        with pytest.raises(ValueError, match=r"there (is|are)"):
            as_in_memory(lazy(tensors), [named])
    half = replace(named, places=(Place("b", (5,), named.places[0].runs),))
    with pytest.raises(ValueError, match="'b' is incomplete"):
        as_stored(lazy({"a": torch.ones(4)}), [half])
