"""Which modules become units, and whose each parameter is."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from torch import nn

import shardwise as sw
from shardwise.engine.setup.planners import Units, planners_for
from shardwise.errors import ConfigError, LayoutError
from shardwise.fsdp.shard import UnitPlan, assign_parameters, choose_units
from tests.engine.rig import Block, Net


def chosen(model: nn.Module, units: Units = None) -> list[str]:
    return [fqn for fqn, _ in choose_units(model, planners_for(units))]


def plans(model: nn.Module, units: Units = None) -> dict[str, list[str]]:
    """Parameters by unit."""
    found = assign_parameters(model, choose_units(model, planners_for(units)))
    return {plan.fqn: [fqn for fqn, _, _ in plan.parameters] for plan in found}


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


class Hf(nn.Module):
    """As transformers models are built."""

    _no_split_modules: ClassVar[list[str]] = ["Layer"]

    def __init__(self, vocab: int = 100) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 8)
        self.stack = nn.Module()
        self.stack.first, self.stack.second = Layer(), Layer()  # in no ModuleList
        self.small = nn.Linear(8, 8)
        self.head = nn.Linear(8, vocab, bias=False)


# Automatic ------------------------------------------------------------------------------------------------------------


def test_no_split_modules_and_what_is_large_beside_them() -> None:
    assert chosen(Hf()) == ["embed", "stack.first", "stack.second", "head"]
    assert chosen(Hf(vocab=5)) == ["stack.first", "stack.second"]


def test_no_split_modules_of_a_model_inside_another() -> None:
    assert chosen(nn.ModuleDict({"lm": Hf(), "adapter": nn.Linear(2, 2)})) == [
        "lm.embed",
        "lm.stack.first",
        "lm.stack.second",
        "lm.head",
    ]


def test_nested_no_split_modules_give_the_outermost() -> None:
    model = Hf()
    model.stack.first.attention = Layer()  # type: ignore[union-attr, assignment]
    assert "stack.first.attention" not in chosen(model)


def test_repeated_blocks_of_a_module_list() -> None:
    assert chosen(Net(3)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert plans(Net(2))[""] == ["enter.weight", "enter.bias", "leave.weight", "leave.bias"]


def test_repeated_blocks_of_a_sequential_and_a_list_of_lists() -> None:
    assert chosen(nn.Sequential(Block(), Block(), nn.Tanh())) == ["0", "1"]
    stages = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])])
    assert chosen(nn.ModuleDict({"stages": stages})) == [f"stages.{i}.{j}" for i in (0, 1) for j in (0, 1)]


def test_a_large_embedding_and_head_alone() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(50, 6), "net": Net(2), "head": nn.Linear(6, 50)})
    assert chosen(model) == ["embed", "net.blocks.0", "net.blocks.1", "head"]


def test_a_tied_embedding_stays_with_the_root() -> None:
    model = Hf()
    model.head.weight = model.embed.weight
    assert chosen(model) == ["stack.first", "stack.second"]
    assert plans(model)[""][0] == "embed.weight"


def test_nothing_repeated_is_one_unit() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4))
    assert chosen(model) == []
    assert list(plans(model)) == [""]


# Asked for ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [Block, {Block}, [Block], (Block, nn.Embedding)], ids=str)
def test_classes(units: Units) -> None:
    assert chosen(Net(2), units) == ["blocks.0", "blocks.1"]


def test_nested_classes_give_nested_units() -> None:
    found = assign_parameters(Net(1), choose_units(Net(1), planners_for({Block, nn.Linear})))
    assert [plan.fqn for plan in found] == [""]  # of another instance: nothing of it is here
    model = Net(1)
    found = assign_parameters(model, choose_units(model, planners_for({Block, nn.Linear})))
    around = {plan.fqn: [ancestor.fqn for ancestor in plan.ancestors] for plan in found}
    assert around == {
        "": [],
        "enter": [""],
        "blocks.0": [""],
        "blocks.0.up": ["", "blocks.0"],
        "blocks.0.down": ["", "blocks.0"],
        "leave": [""],
    }


def test_a_least_numel_collects_from_the_leaves_up() -> None:
    """Block: norm 12, up 91, down 84."""
    assert chosen(Net(1), 80) == ["blocks.0.up", "blocks.0.down"]
    assert chosen(Net(1), 100) == ["blocks.0"]
    assert chosen(Net(2), 10_000) == []


def test_a_callable_sees_every_name_but_no_containers() -> None:
    seen: list[str] = []

    def units(fqn: str, module: nn.Module) -> bool:
        seen.append(fqn)
        return fqn.endswith("down")

    model = Net(1)
    assert chosen(model, units) == ["blocks.0.down"]
    assert seen == [name for name, _ in model.named_modules() if name not in {"", "blocks"}]


# Whose parameters -----------------------------------------------------------------------------------------------------


def test_every_parameter_has_one_owner() -> None:
    model = Net(3)
    owned = [fqn for names in plans(model).values() for fqn in names]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())


def test_tied_weights_belong_to_the_lowest_common_ancestor_of_their_users() -> None:
    model = nn.ModuleDict({"left": Net(2), "right": Net(1)})
    left: Any = model["left"]
    left.blocks[1].up.weight = left.blocks[0].up.weight
    owners = plans(model, {Net, Block})
    assert "left.blocks.0.up.weight" in owners["left"]
    assert all("blocks.0.up.weight" not in fqn for fqn in owners["left.blocks.0"])
    right: Any = model["right"]
    right.leave.weight = left.leave.weight
    assert "left.leave.weight" in plans(model, {Net, Block})[""]


def test_a_tied_parameter_has_all_its_sites() -> None:
    model = Hf()
    model.head.weight = model.embed.weight
    (root, *_) = assign_parameters(model, choose_units(model, planners_for(None)))
    sites = {fqn: [(site.module, site.name) for site in sites] for fqn, _, sites in root.parameters}
    assert sites["embed.weight"] == [(model.embed, "weight"), (model.head, "weight")]


def test_a_module_in_two_places_is_one_unit() -> None:
    block = Block()
    model = nn.ModuleList([block, Block(), block])
    assert [name for name in plans(model, {Block}) if name] == ["0", "1"]


def test_units_left_without_parameters_are_dropped() -> None:
    model = nn.ModuleList([nn.Sequential(Block()), nn.Sequential(Block()), nn.Sequential(nn.Tanh())])
    found = assign_parameters(model, choose_units(model, planners_for({nn.Sequential, Block})))
    assert [plan.fqn for plan in found] == ["", "0.0", "1.0"]
    assert all(isinstance(plan, UnitPlan) and [a.fqn for a in plan.ancestors] == [""] for plan in found[1:])


def test_skipped_parameters_are_nobodys() -> None:
    model = Net(1)
    kept = model.enter.weight
    found = assign_parameters(model, choose_units(model, planners_for(None)), {id(kept)})
    assert "enter.weight" not in [fqn for plan in found for fqn, _, _ in plan.parameters]


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [0, -3, True, False, set(), {3}, [Block, "Block"], {int}, "Block", 2.5], ids=str)
def test_values_that_say_no_units_raise(units: Any) -> None:
    with pytest.raises(ConfigError, match="units="):
        sw.shard(Net(1), units=units)


def test_a_class_that_is_not_there_is_told_those_that_are() -> None:
    with pytest.raises(
        ConfigError, match=r"\['Conv2d'\]: the model has no such module; it has Block, LayerNorm, Linear, "
    ):
        sw.shard(Net(1), units={nn.Conv2d})


@pytest.mark.parametrize("slots", [0, -1, True, 2.0, "3"])
def test_slots_that_are_no_number_raise(slots: Any) -> None:
    with pytest.raises(ConfigError, match="slots="):
        sw.shard(Net(1), slots=slots)


def test_a_model_without_parameters_to_shard() -> None:
    """None at all: it is left alone."""
    plain = nn.Tanh()
    assert sw.shard(plain) is plain
    assert not plain._forward_hooks
    model = nn.Linear(2, 2)
    with pytest.raises(LayoutError, match="Linear has no parameters except ignored ones"):
        sw.shard(model, ignored=model.parameters())


def test_a_part_of_a_sharded_model_is_sharded_already() -> None:
    model = sw.shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    with pytest.raises(
        LayoutError, match=r"Linear is sharded already, in a model where its parameter is named '1\.weight'"
    ):
        sw.shard(model[1])


def test_lazy_parameters_raise() -> None:
    with pytest.raises(LayoutError, match=r"1\.weight has no shape yet.*call the model once"):
        sw.shard(nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.norm = nn.LayerNorm(4)


class HandsOut(nn.Module):
    """As in transformers: `Words` counts as a block, and its table is handed out to be called alone."""

    _no_split_modules = ("Words", "Linear")

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def get_input_embeddings(self) -> nn.Module:
        return self.words.table


def test_an_embedding_that_is_handed_out_lies_in_no_block() -> None:
    assert [fqn for fqn, _ in choose_units(HandsOut(), planners_for(None))] == ["words.table", "layers.0", "layers.1"]
