"""What `sw.shard` does with tied weights, buffers, meta models, ranks with other models, and units sharded before."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.engine.extensions.secondary_shards import secondary_pieces
from shardwise.engine.lookup import require_engine
from shardwise.errors import ConfigError, DifferentModelsError, LayoutError, MeshError, UsageError
from shardwise.fsdp.parameter_group import ParameterState
from shardwise.fsdp.unit import output_tensors
from tests import device
from tests.engine.rig import Block, Net, Twins, batch, count, on_ranks, recording, seeded, squares, unwarned, warned
from tests.engine.setup.rig import Tied

# Ties -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer", "no_shard"])
@on_ranks(1, 2)
def test_tied_weights_update_on_every_rank(strategy: str) -> None:
    """One parameter, owned by the lowest common ancestor of its users, with the sum of their gradients."""
    twins = Twins(Tied, strategy=strategy)
    twins.train(3)
    model: Any = twins.sharded
    assert model.head.weight is model.embed.weight
    assert model.blocks[3].up.weight is model.blocks[1].up.weight
    assert model.blocks[1].up.weight.unit is twins.engine.root
    untied = twins.optimizers[1].state[model.embed.weight]["exp_avg"].full_tensor()
    assert torch.equal(untied, twins.optimizers[0].state[twins.plain.embed.weight]["exp_avg"])  # type: ignore[index]


# Agreement ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["shape", "dtype", "frozen", "buffer", "strategy", "slots"])
@on_ranks(2)
def test_ranks_with_different_models_raise_on_every_rank(what: str) -> None:
    model = Net()
    odd = dist.get_rank() == 1
    options: dict[str, Any] = {}
    if odd and what == "shape":
        model.leave = nn.Linear(6, 4)
    if odd and what == "dtype":
        model.leave.double()
    if odd and what == "frozen":
        model.leave.requires_grad_(False)
    if odd and what == "buffer":
        model.register_buffer("more", torch.zeros(3))
    if odd and what == "strategy":
        options = {"strategy": "shard_grad_op"}
    if odd and what == "slots":
        options = {"slots": 4}
    with pytest.raises(DifferentModelsError, match=f"rank {dist.get_rank()}"):
        sw.shard(model, **options)
    dist.barrier()  # nobody is left behind in a collective


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignored": "leave.weight"}, "ignored: 'leave.weight' is not a parameter; pass parameters"),
        ({"ignored": ["leave.weight"]}, "ignored: 'leave.weight' is not a parameter; pass parameters"),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward='yes': must be None, True, False or a number"),
        ({"reshard_after_forward": 0}, "reshard_after_forward=0: must be None, True, False or a number"),
    ],
)
@on_ranks(1)
def test_arguments_of_another_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sw.shard(Net(), **options)


@on_ranks(2)
def test_initial_values_are_rank_0s() -> None:
    """Parameters and buffers that differ are broadcast, and rank 0 says so."""
    plain = seeded(Net)
    plain.register_buffer("steps", torch.tensor([7]))
    torch.manual_seed(7 + dist.get_rank())
    model = Net()
    model.register_buffer("steps", torch.tensor([7 + dist.get_rank()]))
    if dist.get_rank() == 0:
        with warned("initial values differ between ranks for"):
            sw.shard(model)
    else:
        with unwarned():
            sw.shard(model)
    assert torch.equal(model.steps, torch.tensor([7]))  # type: ignore[arg-type]
    for name, p in model.named_parameters():
        assert torch.equal(p.full_tensor(), plain.get_parameter(name))  # type: ignore[attr-defined]


# Buffers --------------------------------------------------------------------------------------------------------------


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 1.25))
        self.register_buffer("hidden", torch.full((3,), 0.5), persistent=False)
        self.register_buffer("count", torch.tensor(0))
        self.again = nn.Module()
        self.again.register_buffer("scale", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.scale + self.hidden


@on_ranks(2)
def test_buffers_stay_whole_and_keep_their_kind() -> None:
    twins = Twins(Buffered)
    twins.train(2)
    model: Any = twins.sharded
    assert "scale" in model.state_dict()
    assert "hidden" not in model.state_dict()
    assert type(model.scale) is Tensor
    assert model.count.item() == 2
    cast: Any = sw.shard(seeded(Buffered), precision=sw.Precision(buffers="bf16"))
    assert cast.scale.dtype == cast.hidden.dtype == torch.bfloat16
    assert cast.count.dtype == torch.int64
    assert cast.again.scale is cast.scale  # a buffer in two places stays one


# The meta device ------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_meta_models() -> None:
    """The same numbers on every rank and at every world size, tied weights included, training as a plain model."""
    with torch.device("meta"):
        model = Tied()
    model.blocks[0].up.weight.register_hook(lambda grad: grad * 2.0)
    torch.manual_seed(3 + dist.get_rank())
    sw.shard(model)
    assert model.head.weight is model.embed.weight
    weights = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    plain = Tied()
    plain.load_state_dict(weights, strict=False)
    plain.head.weight, plain.blocks[3].up.weight = plain.embed.weight, plain.blocks[1].up.weight
    squares(model, batch(0, 0)).backward()
    squares(plain, batch(0, 0)).backward()
    for name, p in plain.named_parameters():
        factor = 2.0 if name == "blocks.0.up.weight" else 1.0  # the hook came along
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), p.grad * factor)  # type: ignore[union-attr]
    checksum = torch.tensor([sum(w.double().sum() for w in weights.values())])
    dist.all_reduce(checksum, dist.ReduceOp.MAX)
    assert checksum.item() == sum(w.double().sum() for w in weights.values())


@on_ranks(2)
def test_what_nothing_initialises_on_meta_raises() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    with pytest.raises(LayoutError, match=r"Bare.weight .*was built on the meta device"):
        sw.shard(Bare())


# Adoption -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer", "no_shard"])
@pytest.mark.parametrize("used_before", [False, True])
@on_ranks(1, 2)
def test_a_second_shard_on_an_ancestor_adopts_units(used_before: bool, strategy: str) -> None:
    """FSDP2's style: each block, then the model."""
    plain, model = seeded(Net), seeded(Net)
    for block in model.blocks:  # type: ignore[union-attr]
        sw.shard(block, strategy)
        if used_before:
            squares(block, batch(0, None, 5, 6)).backward()
            block.zero_grad()
    sw.shard(model, strategy)
    engine = require_engine(model)
    assert [unit.fqn for unit in engine.units] == ["", *(f"blocks.{i}" for i in range(4))]
    assert [p.fqn for p in model.parameters()] == [name for name, _ in plain.named_parameters()]  # type: ignore[attr-defined]
    twins = Twins.__new__(Twins)
    twins.world_size, twins.loss, twins.shape, twins.steps = dist.get_world_size(), squares, (5, 4), 0
    twins.plain, twins.sharded, twins.engine = plain, model, engine
    twins.optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, model)]
    twins.train(3)
    norms = [torch.nn.utils.get_total_norm([p.detach() for p in m.parameters()]) for m in (plain, model)]
    torch.testing.assert_close(norms[1], norms[0])
    with pytest.raises(UsageError, match="sharded already"):
        sw.shard(model)


@on_ranks(2)
def test_units_are_adopted_after_a_backward_that_raised() -> None:
    """While sums of its later units were under way. What was the root has no parameters, so it is no unit any more."""
    plain, model = seeded(Stacked), seeded(Stacked)
    sw.shard(model.inner, units={nn.Linear})  # type: ignore[arg-type]

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("on purpose")

    first: Any = model.inner[0]  # type: ignore[index]
    handle = first.weight.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        squares(model.inner, batch(0)).backward()  # type: ignore[arg-type]
    handle.remove()
    sw.shard(model, units={nn.Linear})
    twins = Twins.__new__(Twins)
    twins.world_size, twins.loss, twins.shape, twins.steps = dist.get_world_size(), squares, (5, 4), 0
    twins.plain, twins.sharded, twins.engine = plain, model, require_engine(model)
    twins.optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, model)]
    model.zero_grad()
    twins.train(3)


class Stacked(nn.Module):
    """Five layers of one size, four of which form a model of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.leave = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.leave(torch.tanh(self.inner(x)))
        return out


def halves() -> DeviceMesh:
    """Make groups of two ranks out of four."""
    return init_device_mesh(device.kind(), (2, 2), mesh_dim_names=("replicate", "shard"))


@pytest.mark.parametrize(
    ("below", "above", "message"),
    [
        ({}, {"strategy": "no_shard"}, r"strategy='no_shard', but 'blocks.0' below was sharded with 'full_shard'"),
        ({}, {"strategy": "shard_grad_op"}, "strategy='shard_grad_op'"),
        ({"reshard_after_forward": 2}, {"reshard_after_forward": 4}, "reshard_after_forward=4, but .* with 2"),
        ({}, {"mesh": "halves"}, r"mesh=\(\(\d, \d\), \(\d,\)\), but .* with \(\(0, 1, 2, 3\), \(\d,\)\)"),
        ({"mesh": "halves"}, {"mesh": "all"}, r"mesh=\(\(0, 1, 2, 3\)"),
        ({"mesh": "halves"}, {"reshard_after_forward": 2}, r"mesh=\(\(0, 1, 2, 3\).*give every sw.shard"),
    ],
)
@on_ranks(4)
def test_what_adopted_units_cannot_change_raises(below: dict[str, Any], above: dict[str, Any], message: str) -> None:
    """And leaves the units below as they were."""
    meshes = {"halves": lambda: halves()["shard"], "all": lambda: init_device_mesh(device.kind(), (4,))}
    below, above = ({k: meshes[v]() if k == "mesh" else v for k, v in given.items()} for given in (below, above))
    model: Any = seeded(Net)
    for block in model.blocks:
        sw.shard(block, **below)
    with pytest.raises(UsageError, match=message):
        sw.shard(model, **above)
    squares(model.blocks[0], batch(0, None, 5, 6)).backward()
    assert type(model.enter.weight) is nn.Parameter
    sw.shard(model, **below)
    squares(model, batch(0)).backward()


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": 2},
        {"reshard_after_forward": False},
        {"mesh": "halves"},
        {"strategy": "hybrid_shard", "mesh": "both"},
        {"precision": sw.Precision(param="bf16", reduce="fp32")},
    ],
    ids=str,
)
@pytest.mark.parametrize("again", [True, False])
@on_ranks(4)
def test_adopted_units_train_with_what_they_were_sharded_with(options: dict[str, Any], again: bool) -> None:
    """Whether the ancestor's call repeats that or leaves it out: the same numbers as one call for all gives."""
    meshes = {"halves": lambda: halves()["shard"], "both": halves}
    options = {k: meshes[v]() if k == "mesh" else v for k, v in options.items()}
    model, whole = seeded(Net), sw.shard(seeded(Net), **options)
    for block in model.blocks:  # type: ignore[union-attr]
        sw.shard(block, **options)
    sw.shard(model, **(options if again else {k: v for k, v in options.items() if k == "strategy"}))
    ours, expected = require_engine(model), require_engine(whole)
    assert ours.mesh.spans == expected.mesh.spans
    assert ours.mesh.secondary_size == expected.mesh.secondary_size
    assert [u.reshards_after_forward for u in ours.units] == [u.reshards_after_forward for u in expected.units]
    assert ours.resharding == expected.resharding
    assert ours.precision == expected.precision
    for step in range(2):
        losses = [squares(m, batch(step)) for m in (model, whole)]
        assert torch.equal(*losses)
        for m, loss in zip((model, whole), losses, strict=True):
            loss.backward()
            torch.optim.SGD(m.parameters(), lr=0.1).step()
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a.local, b.local)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": sw.Precision(param="bf16")}, r"'blocks.1' with Precision\(param='bfloat16'.*precision=\.\.\."),
        ({"reshard_after_forward": False}, r"reshard_after_forward=True and 'blocks.1' with False"),
    ],
)
@on_ranks(2)
def test_what_differs_below_must_be_said_for_the_rest(options: dict[str, Any], said: str) -> None:
    model: Any = seeded(Net)
    sw.shard(model.blocks[0])
    sw.shard(model.blocks[1], **options)
    with pytest.raises(UsageError, match=said):
        sw.shard(model)
    name, value = next(iter(options.items()))
    sw.shard(model, **{name: value})
    assert len(sw.describe(model).units) == 5


@pytest.mark.parametrize("of_blocks", [False, True, 2])
@pytest.mark.parametrize("of_model", [False, True, 2])
@on_ranks(4)
def test_units_keep_the_resharding_that_they_were_sharded_with(of_blocks: bool | int, of_model: bool | int) -> None:
    """Blocks 1 and 2 have another than the rest."""

    def some_blocks(model: Any) -> None:
        for block in model.blocks[1:3]:
            sw.shard(block, reshard_after_forward=of_blocks)

    with recording():
        twins = Twins(first=some_blocks, reshard_after_forward=of_model)
        twins.train(3)
    expected = [of_model, of_model, of_blocks, of_blocks, of_model]
    assert [unit.settings.resharding for unit in twins.engine.units] == expected
    secondary = secondary_pieces(twins.engine)
    for unit, resharding in zip(twins.engine.units, expected, strict=True):
        assert (unit.parameters.state is ParameterState.UNSHARDED) == (resharding is False), unit.fqn
        assert (unit in secondary) == (resharding == 2 and resharding is not True), unit.fqn
    kept = sum(resharding is False for resharding in expected)
    before = count(twins.engine, "all_gather")
    with torch.no_grad():
        twins.sharded(twins.batch())
    assert count(twins.engine, "all_gather") == before + 5, "weights are new"
    with torch.no_grad():
        twins.sharded(twins.batch())
    assert count(twins.engine, "all_gather") == before + 10 - kept


@on_ranks(2)
def test_outputs_of_the_ancestor_have_a_dtype_of_their_own() -> None:
    """What concerns the sharded module alone need not be asked for below."""
    model: Any = seeded(Net)
    for block in model.blocks:
        sw.shard(block, precision=sw.Precision(param="bf16"))
    sw.shard(model, precision=sw.Precision(param="bf16", output="fp32"))
    assert model(batch(0)).dtype is torch.float32


# Slots ----------------------------------------------------------------------------------------------------------------


def every_block_and_linear(fqn: str, module: nn.Module) -> bool:
    return isinstance(module, (Block, nn.Linear))


@on_ranks(1, 2)
def test_too_few_slots_for_the_nesting_of_units_raise_in_shard() -> None:
    model = Net()
    with pytest.raises(ConfigError, match="slots=2: this model's nested units need at least 3"):
        sw.shard(model, units=every_block_and_linear, slots=2)
    assert all(type(p) is nn.Parameter for p in model.parameters())  # it may be tried again
    squares(sw.shard(model, units=every_block_and_linear, slots=3), batch(0)).backward()
    with pytest.raises(ConfigError, match=r"slots=1: .* at least 2"):
        sw.shard(Net(), units=lambda fqn, module: False, slots=1)


@on_ranks(2)
def test_nesting_counts_adopted_units() -> None:
    model: Any = Net()
    for block in model.blocks:
        sw.shard(block.up)
    with pytest.raises(ConfigError, match=r"slots=2: .* at least 3"):
        sw.shard(model, units={Block}, slots=2)
    sw.shard(model, units={Block})
    squares(model, batch(0)).backward()


@on_ranks(2)
def test_units_that_stay_gathered_need_no_slots_for_nesting() -> None:
    model = sw.shard(Net(), "shard_grad_op", units=every_block_and_linear, slots=2)
    squares(model, batch(0)).backward()


class Calls(nn.Module):
    """A block that calls another one which is not its submodule: that units are nested only shows when they run."""

    def __init__(self, other: nn.Module | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.other = [other] if other is not None else []

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for other in self.other:
            x = other(x)
        return x * self.weight


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks: list[Calls] = []
        for _ in range(4):
            blocks.append(Calls(blocks[-1] if blocks else None))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[-1](x)  # type: ignore[no-any-return]


@on_ranks(2)
def test_nesting_that_only_shows_when_units_run_raises_then() -> None:
    model = sw.shard(Chain(), units={Calls}, slots=3)
    with pytest.raises(ConfigError, match=r"raise slots .now 3. to at least 4"):
        model(batch(0, None, 5, 6))
    Twins(Chain, units={Calls}, slots=4, shape=(5, 6)).train(2)


# Conversions ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_cannot_be_right_raises_and_names_the_way_out() -> None:
    model = sw.shard(seeded(Net))
    conversions = [model.half, model.double, lambda: model.to(torch.bfloat16), lambda: model.to("meta")]
    for convert in conversions:
        with pytest.raises(UsageError, match=r"convert it before sw.shard|Convert the model before sw.shard"):
            convert()
    for part in (model, model.blocks[0].up, nn.Sequential(model)):  # type: ignore[index, union-attr]
        with pytest.raises(UsageError, match=r"share the tensors that sw.full_state_dict\(model\) returns"):
            part.share_memory()
    with pytest.raises(UsageError, match=r"before sw.shard"):
        model.blocks[0].up.half()  # type: ignore[index, union-attr]
    with pytest.raises(UsageError, match=r"copy.deepcopy .* whole sharded model"):
        copy.deepcopy(model.blocks[0].up)  # type: ignore[index, union-attr]
    for save in (lambda: pickle.dumps(model), lambda: torch.save(model, io.BytesIO())):
        with pytest.raises(UsageError, match="full_state_dict"):
            save()
    with pytest.raises(UsageError, match="full_state_dict"):
        torch.save(model.state_dict(), io.BytesIO())
    assert model.to(torch.float32) is model
    assert model.cpu() is model
    assert model.float() is model
    squares(model, batch(0)).backward()


@on_ranks(1)
def test_arguments_that_cannot_be_used() -> None:
    for options, message in (
        ({"strategy": "ful_shard"}, "did you mean 'full_shard'"),
        ({"slots": 0}, "slots=0"),
        ({"units": {nn.Conv2d}}, "no such module"),
        ({"precision": "bf16"}, "pass sw.Precision"),
        ({"reshard_after_forward": 0}, "reshard_after_forward=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            sw.shard(Net(), **options)  # type: ignore[arg-type]
    quiet = nn.ReLU()
    assert sw.shard(quiet) is quiet, "a module without parameters is left alone"


@on_ranks(2)
def test_ignored_parameters_are_left_alone() -> None:
    model: Any = seeded(Net)
    ignored = [model.leave.weight, model.leave.bias]
    sw.shard(model, ignored=ignored)
    assert model.leave.weight is ignored[0]
    assert type(model.leave.weight) is nn.Parameter
    squares(model, batch(0)).backward()
    assert model.leave.weight.grad is not None
    assert isinstance(model.enter.weight, sw.ShardedParameter)


@on_ranks(2)
def test_replacing_a_parameter_after_shard_raises() -> None:
    model: Any = sw.shard(seeded(Net))
    model.leave.weight = nn.Parameter(torch.zeros(3, 6))
    with pytest.raises(UsageError, match=r"'leave.weight' was added to the model"):
        model(batch(0))
    with torch.no_grad(), pytest.raises(UsageError, match=r"'leave.weight' was replaced"):
        model(batch(0))


@on_ranks(2)
def test_a_smaller_group_that_is_larger_than_the_shard_group_raises() -> None:
    with pytest.raises(MeshError, match="reshard_after_forward=4 does not divide the shard group of 2 ranks"):
        sw.shard(Net(), reshard_after_forward=4)


# Freezing and unfreezing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer", "no_shard"])
@on_ranks(1, 2)
def test_requires_grad_toggles_after_shard(strategy: str) -> None:
    """Whole units and single parameters, both directions, mid-training."""
    twins = Twins(lambda: frozen(Net(), "blocks.1", "blocks.2.up"), strategy=strategy, optimizer=momentum)
    slots = sw.memory(twins.sharded).now["reduce_slots"]
    twins.train(2)
    changes = [{"blocks.1": True, "blocks.2.up": True}, {"blocks.0": False, "leave": False}]
    for flags in (*changes, {"blocks.0": True, "blocks.1": False}):
        for fqn, flag in flags.items():
            twins.plain.get_submodule(fqn).requires_grad_(flag)
            twins.sharded.get_submodule(fqn).requires_grad_(flag)
        twins.train(2)
    assert sw.memory(twins.sharded).now["reduce_slots"] <= 2 * slots + 4096


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer", "no_shard"])
@on_ranks(1, 2)
def test_freezing_and_thawing_in_turn_goes_on_in_the_same_reduce_slots(strategy: str) -> None:
    twins = Twins(strategy=strategy, optimizer=momentum)
    seen = []
    for flag in (True, False, True, False, True):
        for model in (twins.plain, twins.sharded):
            model.get_submodule("blocks.1").requires_grad_(flag)
        twins.train(1)
        seen.append([slot.buffer.bytes.data_ptr() for slot in twins.engine.reducer.slots.all])
    assert seen[0]
    assert seen == seen[:1] * 5


def frozen(model: nn.Module, *fqns: str) -> nn.Module:
    for fqn in fqns:
        model.get_submodule(fqn).requires_grad_(False)
    return model


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


# Outputs that alias parameters ----------------------------------------------------------------------------------------


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class PrivateSlots(Slotted):
    """An object with an inherited slot, one whose name Python mangles, and one that is never set."""

    __slots__ = ("__mine", "never")

    def __init__(self, value: Any) -> None:
        super().__init__(None)
        self.__mine = value
        del self.value

    def __getattr__(self, name: str) -> Any:
        if name == "value":
            return self.__mine
        raise AttributeError(name)


@dataclasses.dataclass
class Data:
    value: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


WRAPS: dict[str, Any] = {
    "bare": (lambda v: v, lambda o: o),
    "tuple": (lambda v: (v, 1), lambda o: o[0]),
    "list": (lambda v: [v], lambda o: o[0]),
    "dict": (lambda v: {"v": v}, lambda o: o["v"]),
    "dataclass": (Data, lambda o: o.value),
    "frozen": (Frozen, lambda o: o.value),
    "object": (Plain, lambda o: o.value),
    "slots": (Slotted, lambda o: o.value),
    "private slots": (PrivateSlots, lambda o: o.value),
    "nested": (lambda v: Plain([Data(v)]), lambda o: o.value[0].value),
}


class Lends(nn.Module):
    """A module that returns its weight, or a view of it, in some container."""

    def __init__(self, wrap: str, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.wrap, self.how = wrap, how

    def forward(self, x: Tensor) -> Any:
        x = x @ self.weight
        return x, WRAPS[self.wrap][0](self.weight if self.how == "itself" else self.weight.t())


class Borrows(nn.Module):
    def __init__(self, wrap: str, how: str) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.lenders = nn.ModuleList(Lends(wrap, how) for _ in range(4))
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        lent = []
        for lender in self.lenders:
            x, wrapped = lender(x)
            lent.append(WRAPS[self.wrap][1](wrapped))
        for weight in lent:
            x = torch.tanh(x) @ weight
        return x


@pytest.mark.parametrize("how", ["itself", "view"])
@pytest.mark.parametrize("wrap", list(WRAPS))
@on_ranks(2)
def test_outputs_that_alias_parameters(wrap: str, how: str) -> None:
    """Exact, by leaving the slot to the holder, and said; in registered and unregistered containers alike."""
    twins = Twins(lambda: Borrows(wrap, how))
    with warned("still holds a view"):
        twins.train(2)
    with torch.no_grad(), warned("still holds a view"):
        assert torch.equal(twins.sharded(batch(0)), twins.plain(batch(0)))


def test_what_is_looked_into() -> None:
    """Attributes and slots of objects that Python made; not what functions and C's objects refer to."""
    looked_for = torch.ones(1)
    found = [*output_tensors([Slotted(looked_for), PrivateSlots(looked_for), Plain(Slotted(looked_for))])]
    assert len(found) == 3
    assert not [
        *output_tensors([lambda: looked_for, functools.partial(torch.add, looked_for), torch.float32, slice(3)])
    ]


@on_ranks(2)
def test_a_leaf_hidden_where_nobody_can_look_is_never_silently_wrong() -> None:
    class Hides(Lends):
        def forward(self, x: Tensor) -> Any:
            weight = self.weight
            return x @ weight, lambda: weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lenders = nn.ModuleList(Hides("bare", "itself") for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x, hidden = self.lenders[0](x)
            x, _ = self.lenders[1](x)
            return x @ hidden()  # type: ignore[no-any-return]

    model = sw.shard(seeded(Model))
    with torch.no_grad():
        assert model(batch(0, None, 5, 6)).isnan().all()


@on_ranks(2)
def test_a_dropped_model_gives_its_memory_back() -> None:
    model = sw.shard(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    squares(model, batch(1)).backward()
    optimizer.step()
    shard = weakref.ref(model._shardwise_engine.units[0].groups[0].shard)  # type: ignore[union-attr, operator]
    del model, optimizer
    gc.collect()
    assert shard() is None
