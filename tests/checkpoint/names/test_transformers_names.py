"""Models that transformers stores otherwise than it keeps them: every one of their bytes, at any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import verify
from shardwise.errors import CheckpointError, UsageError
from tests.checkpoint.states import State, everything, same
from tests.engine.cases import Case
from tests.engine.rig import adamw, on_ranks
from tests.ranks import RankPools

transformers = pytest.importorskip("transformers")

from tests.checkpoint.architectures import ARCHITECTURES, Architecture  # noqa: E402

SAVED_BY = Case("full_shard", 2)
LOADED_BY = (Case("full_shard", 1), Case("full_shard", 3), Case("shard_grad_op", 2), Case("hybrid_shard", 4))
CHUNK_BYTES = 200
"""Staged at once in these tests, so that every loop goes round."""


def train(architecture: Architecture, case: Case, seed: int = 5) -> tuple[nn.Module, Any]:
    """A step, which gives an optimizer state; of models that are not called, of made-up gradients."""
    model = case.shard(architecture.build(seed))
    optimizer = adamw(model.parameters())
    if architecture.inputs is not None:
        architecture.outputs(model).square().mean().backward()
    else:
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def train_and_save(name: str, path: Path, max_file_bytes: int) -> tuple[State, State, Tensor | None]:
    architecture = ARCHITECTURES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.checkpoint.format.local_tensor._CHUNK_BYTES", CHUNK_BYTES)
        model, optimizer = train(architecture, SAVED_BY)
        sw.checkpoint.save(path, model, optimizer, max_file_bytes=max_file_bytes)
    full = sw.full_state_dict(model, rank0_only=False)
    with torch.no_grad():
        outputs = None if architecture.inputs is None else architecture.outputs(model)
    return everything(model, optimizer), full, outputs


def load(name: str, case: Case, path: Path) -> State:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.checkpoint.format.local_tensor._CHUNK_BYTES", CHUNK_BYTES)
        model, optimizer = train(ARCHITECTURES[name], case, seed=99)
        loaded = sw.checkpoint.load(path, model, optimizer)
        assert loaded.missing == loaded.unexpected == loaded.wrong_shape == ()
    return everything(model, optimizer)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_files_are_those_of_save_pretrained_and_load_anywhere(name: str, ranks: RankPools, tmp_path: Path) -> None:
    architecture, path = ARCHITECTURES[name], tmp_path / "c"
    (state, full, outputs), _ = ranks(2).run(train_and_save, name, path, 10**9)
    verify(path)
    model, info = architecture.kind.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    theirs = model.state_dict()
    assert theirs.keys() == full.keys()
    for key, value in full.items():
        assert torch.equal(theirs[key], value), key
    if outputs is not None:
        with torch.no_grad():
            assert torch.equal(architecture.outputs(model.eval()), outputs)
    model.save_pretrained(tmp_path / "theirs")
    assert _header(path) == _header(tmp_path / "theirs")
    for case in LOADED_BY:
        for loaded in ranks(case.world_size).run(load, name, case, path):
            same(loaded, state)


def _header(directory: Path) -> dict[str, Any]:
    """Dtypes and shapes by name, and the metadata."""
    with (directory / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: {**entry, "data_offsets": None} for name, entry in header.items()}


@pytest.mark.parametrize("name", ["mixtral, stacked experts", "gte, joined projections"])
def test_several_files(name: str, ranks: RankPools, tmp_path: Path) -> None:
    (state, full, _), _ = ranks(2).run(train_and_save, name, tmp_path / "c", 4000)
    assert len(list((tmp_path / "c").glob("model-*.safetensors"))) > 3
    model = ARCHITECTURES[name].kind.from_pretrained(tmp_path / "c")
    for key, value in full.items():
        assert torch.equal(model.state_dict()[key], value), key
    for loaded in ranks(3).run(load, name, Case("full_shard", 3), tmp_path / "c"):
        same(loaded, state)


def test_the_names_are_found_once_for_each_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import core_model_loading

    model = sw.shard(ARCHITECTURES["mixtral, stacked experts"].build())
    sw.checkpoint.save(tmp_path / "a", model)
    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", None)
    sw.checkpoint.save(tmp_path / "b", model)
    first, second = (tmp_path / where / "model.safetensors" for where in "ab")
    assert first.read_bytes() == second.read_bytes()


@on_ranks(2)
def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["mixtral, stacked experts"]
    sw.checkpoint.save(tmp_path / "c", sw.shard(architecture.build(num_local_experts=2)))
    model = sw.shard(architecture.build())
    with pytest.raises(CheckpointError, match=r"mlp\.experts\.down_proj \(here \(3, 16, 24\), stored \(2, 16, 24\)\)"):
        sw.checkpoint.load(tmp_path / "c", model)


@on_ranks(1)
def test_what_is_joined_has_to_be_of_one_dtype(tmp_path: Path) -> None:
    model = ARCHITECTURES["gte, joined projections"].build()
    projection = next(name for name, _ in model.named_parameters() if "k_proj.weight" in name)
    module = model.get_submodule(projection.rpartition(".")[0])
    sw.shard(model, ignored=[module.to(torch.bfloat16).weight])
    with pytest.raises(
        UsageError,
        match=rf"'{projection}' is stored as part of .* in BF16, but another part is stored in F32: give both",
    ):
        sw.checkpoint.save(tmp_path / "c", model)


def doubling() -> Any:
    """An operation that is not a copy, as a model's own conversions may have."""
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Double(ConversionOps):  # type: ignore[misc]
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
            tensors = next(iter(input_dict.values()))
            return {target_patterns[0]: 2 * (tensors[0] if isinstance(tensors, list) else tensors)}

        @property
        def reverse_op(self) -> Any:
            return self

    return WeightConverter("o_proj", "o_proj", [Double()])


@on_ranks(2)
def test_what_transformers_computes_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import conversion_mapping

    architecture = ARCHITECTURES["llama"]
    model = sw.shard(architecture.build())
    sw.checkpoint.save(tmp_path / "c", model)
    model._weight_conversions = [doubling()]
    with pytest.raises(UsageError, match=r"'model\.layers\.0\.self_attn\.o_proj\.weight' cannot be written in place"):
        sw.checkpoint.save(tmp_path / "d", model)
    assert not (tmp_path / "d").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: [doubling()])
        with pytest.raises(CheckpointError, match=r"computes 'model\.layers\.0\.self_attn\.o_proj\.weight'"):
            sw.checkpoint.load(tmp_path / "c", sw.shard(architecture.build()))
