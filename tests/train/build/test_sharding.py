from typing import Any

import pytest
from torch import nn

from shardwise.errors import ConfigError
from shardwise.policy.offload import Offload
from shardwise.train.build import sharding
from shardwise.train.build.sharding import blocks, compile_blocks, needs_loss_scaling, shard_model
from shardwise.train.config.schema import OffloadConfig, ParallelConfig
from shardwise.train.process.ranks import started


def test_units_by_class_name_that_the_model_has_not() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 1, 4), nn.Linear(4, 4))
    with started() as ranks:
        with pytest.raises(ConfigError, match="no module of class 'Linaer'; did you mean Linear"):
            shard_model(model, ParallelConfig(units=["Linaer"]), ranks)
        with pytest.raises(ConfigError, match=r"no module of class 'Xyz'; it has .*LayerNorm.*TransformerEncoderLayer"):
            shard_model(model, ParallelConfig(units=["Xyz"]), ranks)


@pytest.mark.parametrize(
    "asked",
    [
        {"params": "cpu"},
        {"optimizer": "cpu", "ring_mib": 1},
        {"gradients": "cpu"},
        {"optimizer": "cpu", "step": "cpu"},
        {},
    ],
)
def test_each_place_reaches_the_engine_by_itself(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(sharding.sw, "shard", lambda model, *_, **settings: given.update(settings) or model)
    with started() as ranks:
        shard_model(nn.Linear(2, 2), ParallelConfig(), ranks, OffloadConfig(**asked))
    places = {key: value for key, value in asked.items() if key != "ring_mib"}
    ring_bytes = asked["ring_mib"] * 2**20 if "ring_mib" in asked else None
    assert given["offload"] == (Offload(**places, ring_bytes=ring_bytes) if asked else None)


@pytest.mark.parametrize(("dtype", "scaled"), [(None, False), ("bf16", False), ("fp16", True)])
def test_only_fp16_needs_loss_scaling(dtype: Any, scaled: bool) -> None:
    assert needs_loss_scaling(ParallelConfig(param_dtype=dtype)) is scaled


def test_the_outermost_repeated_blocks_are_compiled() -> None:
    def block() -> nn.Module:
        return nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})

    model = nn.ModuleDict(
        {"encoder": nn.ModuleDict({"layers": nn.ModuleList([block(), block()])}), "head": nn.Linear(2, 2)}
    )
    layers = list(model["encoder"]["layers"])  # type: ignore[index]
    assert list(blocks(model)) == layers
    assert compile_blocks(model) == 2
    assert all(layer._compiled_call_impl is not None for layer in layers)
    assert model["head"]._compiled_call_impl is None
