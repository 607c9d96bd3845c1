"""A model built on the meta device gets, shard by shard, the numbers of the seeded build on one real device."""

from __future__ import annotations

import importlib
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.errors import LayoutError
from shardwise.modules.deferred_init.materialize import materialize, skip_init
from tests.modules.deferred_init.rig import (
    Build,
    Everything,
    Rewritten,
    awkward,
    on_meta,
    rewriting,
    same,
    transformer,
)
from tests.parity.architectures import ARCHITECTURES
from tests.ranks import RankPools

SEED = 21


# Comparing --------------------------------------------------------------------------------------------------------


def differences(build: Build) -> list[str]:
    """What differs between a real build and a sharded one from the meta device. Every rank must call this."""
    torch.manual_seed(SEED)
    real = build()
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    model = on_meta(build)
    sw.shard(model)
    ours, theirs = sw.full_state_dict(model, rank0_only=False), real.state_dict()
    ours |= {name: tensor for name, tensor in model.named_buffers() if name not in ours}
    theirs |= {name: tensor for name, tensor in real.named_buffers() if name not in theirs}
    found = [f"{name} is there once" for name in sorted({*ours} ^ {*theirs})]
    found += [name for name in theirs if name in ours and not same(ours[name], theirs[name])]
    return found if torch.equal(torch.get_rng_state(), state) else [*found, "random state"]


# Models of transformers -------------------------------------------------------------------------------------------

HARD = ["llama", "gpt2", "bert", "t5", "vit", "mixtral", "mamba", "whisper"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_transformers_on_ranks(ranks: RankPools, world_size: int) -> None:
    for found in ranks(world_size).run(differences_by_name, HARD, timeout_s=200):
        assert found == {name: [] for name in HARD}


def differences_by_name(names: list[str]) -> dict[str, list[str]]:
    return {name: differences(partial(transformer, name)) for name in names}


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES} - {*HARD, "wav2vec2"}))
def test_other_transformers(name: str) -> None:
    assert differences(partial(transformer, name)) == []


def half_llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(**ARCHITECTURES["llama"].config)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def test_transformer_built_in_half_precision() -> None:
    assert differences(half_llama) == []


def test_transformer_cast_to_half_precision() -> None:
    assert differences(lambda: transformer("llama").to(torch.bfloat16)) == []


def test_configuration_is_left_alone() -> None:
    model: Any = on_meta(partial(transformer, "gpt2"))
    config, before = model.config, model.config.to_dict()
    sw.shard(model)
    assert model.config is config
    assert config.to_dict() == before


class Classifier(nn.Module):
    """A model of transformers inside a plain module."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = transformer("bert")
        self.head = nn.Linear(32, 5)


def test_transformer_in_a_plain_module() -> None:
    assert differences(Classifier) == []


def test_numbers_drawn_on_meta_are_said() -> None:
    model = on_meta(partial(transformer, "wav2vec2"))  # one of its parameters is made by torch.Tensor(n)
    with pytest.warns(UserWarning, match=r"masked_spec_embed was drawn .*differ from those of an unsharded build"):
        sw.shard(model)


def changed(name: str) -> nn.Module:
    model = transformer(name)
    model.extra = nn.Linear(3, 5)
    return model


def sharded_changed(name: str) -> dict[str, Tensor]:
    torch.manual_seed(SEED)
    model = on_meta(partial(changed, name))
    with pytest.warns(UserWarning, match=r"changed after construction: extra\.bias.*differ from those of an unsh"):
        sw.shard(model)
    return sw.full_state_dict(model, rank0_only=False)


def test_changed_transformer_is_the_same_at_any_world_size(ranks: RankPools) -> None:
    [alone] = ranks(1).run(sharded_changed, "llama")
    assert alone["extra.weight"].std() > 0
    for outcome in ranks(2).run(sharded_changed, "llama"):
        assert outcome.keys() == alone.keys()
        assert all(same(outcome[name], alone[name]) for name in alone)


# Plain modules ----------------------------------------------------------------------------------------------------


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_plain_modules_on_ranks(ranks: RankPools, world_size: int) -> None:
    for build in (Everything, awkward, encoder_layer):
        assert ranks(world_size).run(differences, build) == [[]] * world_size


class Clones(nn.Module):
    """What torch deep-copies, as its documentation has it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(12, 4, 24, batch_first=True), 3, nn.LayerNorm(12)
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 3, 24), 2)
        self.after = nn.Linear(3, 3)


def whole_transformer() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that are not batch_first
        return nn.Transformer(12, 3, 2, 3, 24)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("build", [Clones, whole_transformer])
def test_copied_layers_have_the_copied_numbers(ranks: RankPools, build: Build, world_size: int) -> None:
    """The layer that is copied draws once, wherever it went afterwards."""
    assert ranks(world_size).run(differences, build) == [[]] * world_size


class KeepsOriginal(nn.Module):
    def __init__(self, forgotten: int = 0) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(12, 4, 24, batch_first=True)
        self.encoder = nn.TransformerEncoder(self.layer, 2)
        self.head = nn.Linear(12, 3)


def test_a_layer_that_stands_beside_its_copies() -> None:
    with pytest.warns(UserWarning, match="assumed to be copies of it"):
        assert differences(KeepsOriginal) == []


def test_layers_that_were_put_in_later_draw() -> None:
    def build() -> nn.Module:
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 24, batch_first=True), 2)
        model.layers[1] = nn.TransformerEncoderLayer(12, 3, 36)
        return model

    assert differences(build) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_constructors_that_rewrite_children_are_called_again(ranks: RankPools, world_size: int) -> None:
    for build in (rewriting, rewriting_inside):
        assert ranks(world_size).run(differences_unwarned, build) == [[]] * world_size


def rewriting_inside() -> nn.Module:
    return nn.Sequential(rewriting(), nn.Linear(3, 3), Everything())


def differences_unwarned(build: Build) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return differences(build)


def test_what_a_constructor_did_and_cannot_be_done_again_is_said() -> None:
    with pytest.warns(
        UserWarning,
        match=r"Rewritten was built.*to 0\.down\.weight afterwards is lost.*differ from those of.*reset_parameters",
    ):
        sw.shard(on_meta(lambda: nn.Sequential(Rewritten(3))))


def test_what_was_written_after_building_is_said() -> None:
    model: Any = on_meta(Everything)
    nn.init.zeros_(model.final.weight)
    with pytest.warns(UserWarning, match=r"Everything was built.*to final\.weight afterwards is lost"):
        sw.shard(model)


def test_what_is_going_to_be_written_is_no_loss() -> None:
    model = on_meta(lambda: Rewritten(3))
    with warnings.catch_warnings(), skip_init(name for name, _ in model.named_parameters()):
        warnings.simplefilter("error")
        sw.shard(model)


class PartlyIgnored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.third.weight.hint = "kept"  # type: ignore[attr-defined]
        self.third.bias.requires_grad_(False)
        self.tied = nn.Linear(5, 2)
        self.tied.weight = self.third.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x))) + self.tied(self.first(x))  # type: ignore[no-any-return]


def ignoring() -> None:
    torch.manual_seed(SEED)
    real = PartlyIgnored()
    torch.manual_seed(SEED)
    model = on_meta(PartlyIgnored)
    sw.shard(model, ignored=[*model.third.parameters()])  # type: ignore[union-attr, operator]
    assert type(model.third.weight) is nn.Parameter  # type: ignore[union-attr]
    assert model.tied.weight is model.third.weight  # type: ignore[union-attr]
    assert model.third.weight.hint == "kept"  # type: ignore[union-attr, operator]
    assert not model.third.bias.requires_grad  # type: ignore[union-attr]
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    full = sw.full_state_dict(model, rank0_only=False)
    assert all(same(full[name], tensor) for name, tensor in real.state_dict().items())
    model(torch.ones(2, 3)).sum().backward()
    assert model.third.weight.grad is not None  # type: ignore[union-attr]


@pytest.mark.parametrize("world_size", [1, 2])
def test_ignored_parameters_get_their_numbers(ranks: RankPools, world_size: int) -> None:
    ranks(world_size).run(ignoring)


class Ignorable(nn.Module):
    def __init__(self, forgotten: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))


def test_ignored_parameters_that_nothing_initialises_raise() -> None:
    model: Any = on_meta(Ignorable)
    with pytest.raises(LayoutError, match=r"Ignorable\.scale \(scale\).*nothing initialised it"):
        sw.shard(model, ignored=[model.scale])


def test_parents_that_initialise_units_below() -> None:
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = on_meta(lambda: nn.Transformer(12, 3, 2, 2, 24))  # its own reset reaches into every layer
    sw.shard(model, units={nn.TransformerEncoderLayer, nn.TransformerDecoderLayer})
    weight = sw.full_state_dict(model)["encoder.layers.1.linear1.weight"]
    assert weight.abs().max() > 12**-0.5  # of Xavier's, wider than what nn.Linear draws


def test_real_tensors_stay() -> None:
    with torch.device("meta"):
        first = nn.Linear(4, 4)
    second = nn.Linear(4, 4)
    expected = {name: tensor.clone() for name, tensor in second.state_dict().items()}
    model = nn.Sequential(first, second)
    sw.shard(model)
    full = sw.full_state_dict(model)
    assert all(torch.equal(full[f"1.{name}"], tensor) for name, tensor in expected.items())


# Errors -----------------------------------------------------------------------------------------------------------


class Forgetful(nn.Module):
    def __init__(self, forgotten: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))


class ThroughNumpy(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            self.weight.detach().numpy()[:] = 1


def test_uninitialised_parameter() -> None:
    with pytest.raises(LayoutError, match=r"Forgetful\.scale \(1\.scale\).*nothing initialised it"):
        sw.shard(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Forgetful())))


def test_initialisation_out_of_sight() -> None:
    with pytest.raises(LayoutError, match=r"ThroughNumpy .*cannot be recorded.*real device"):
        sw.shard(on_meta(lambda: ThroughNumpy(3, 3)))


# Memory -----------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the storages of real tensors that operations return, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return out


def peak_bytes(name: str) -> tuple[int, int, int, int]:
    """(peak, all weights, the largest unit's, the largest tensor's)."""
    model = on_meta(partial(transformer, name, num_hidden_layers=12))
    sizes = [p.numel() * 4 for p in model.parameters()]
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    live = LiveBytes()

    def counted(*arguments: Any, **options: Any) -> None:
        with live:
            materialize(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("shardwise.engine.setup.materialisers"), "materialize", counted)
        sw.shard(model)
    return live.peak, sum(sizes), sum(p.numel() * 4 for p in blocks[0].parameters()), max(sizes)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_one_unit_at_a_time(ranks: RankPools, name: str) -> None:
    for peak, total, unit, tensor in ranks(3).run(peak_bytes, name):
        padding = 32 * 1024
        assert peak < total / 3 + unit + tensor + padding
        assert total > 3 * (unit + tensor) + padding


def test_nothing_is_computed_in_a_dry_run() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2**20, 2**20), nn.Linear(2**20, 2**20)))
    state = torch.get_rng_state()
    with FakeTensorMode():
        sw.shard(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(p.numel() for p in model.parameters()) == 2 * (2**40 + 2**20)
