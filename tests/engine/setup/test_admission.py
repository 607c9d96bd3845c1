"""What `sw.shard` refuses before it changes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.errors import LayoutError, UsageError


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.emb(x))  # type: ignore[no-any-return]


def chain(*more: nn.Module) -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), *more)


def is_untouched(model: nn.Module) -> bool:
    return not any(isinstance(parameter, sw.ShardedParameter) for parameter in model.parameters())


# Ties -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tied_parameter_whose_module_was_sharded_first_is_named(device: str) -> None:
    with torch.device(device):
        model = Tied()
    sw.shard(model.emb)
    with pytest.raises(LayoutError, match=r"'out.weight' is tied to 'emb.weight'.*leave the earlier call out"):
        sw.shard(model)
    with pytest.raises(LayoutError, match=r"'out.weight' is tied to 'emb.weight'"):
        sw.shard(model, ignored=[model.out.weight])


def test_a_parameter_tied_to_another_sharded_model_is_named() -> None:
    first, second = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    second.weight = first.weight
    sw.shard(first)
    with pytest.raises(LayoutError, match=r"'weight' is tied to 'weight' of another model"):
        sw.shard(second)


def test_sharding_inside_unsharded_is_refused() -> None:
    model = chain()
    sw.shard(model[0])
    with sw.unsharded(model[0]), pytest.raises(UsageError, match=r"inside sw.unsharded"):
        sw.shard(model)


# Memory ---------------------------------------------------------------------------------------------------------------


def same_data(model: Any) -> None:
    model[2].weight = nn.Parameter(model[0].weight.data)


def part_of_the_data(model: Any) -> None:
    model[2].bias = nn.Parameter(model[0].weight.data[1])


def transposed(model: Any) -> None:
    model[2].weight = nn.Parameter(model[0].weight.data.t())


def a_column(model: Any) -> None:
    model[2].bias = nn.Parameter(model[0].weight.data[:, 2])


def expanded(model: Any) -> None:
    model[2].weight = nn.Parameter(model[0].bias.data.expand(4, 4))


def from_numpy(model: Any) -> None:
    model[2].weight = nn.Parameter(torch.from_numpy(model[0].weight.detach().numpy()))


def a_buffer(model: Any) -> None:
    model[2].register_buffer("copy", model[0].weight.detach())


OVERLAPS: list[tuple[Callable[[Any], None], str]] = [
    (same_data, "'0.weight' and '2.weight'"),
    (part_of_the_data, "'0.weight' and '2.bias'"),
    (transposed, "'0.weight' and '2.weight'"),
    (a_column, "'0.weight' and '2.bias'"),
    (expanded, "'0.bias' and '2.weight'"),
    (from_numpy, "'0.weight' and '2.weight'"),
    (a_buffer, "'0.weight' and '2.copy'"),
]


@pytest.mark.parametrize(("tie", "names"), OVERLAPS, ids=[tie.__name__ for tie, _ in OVERLAPS])
def test_tensors_over_the_same_memory_are_refused(tie: Callable[[Any], None], names: str) -> None:
    model = chain()
    tie(model)
    with pytest.raises(LayoutError, match=rf"{names} are different tensors over the same memory.*\.clone\(\)"):
        sw.shard(model)
    assert is_untouched(model)


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_so_are_those_without_memory(device: str) -> None:
    with FakeTensorMode() if device == "fake" else torch.device("meta"):
        model = chain()
        same_data(model)
        with pytest.raises(LayoutError, match=r"'0.weight' and '2.weight'"):
            sw.shard(model)


def test_an_ignored_parameter_may_not_share_the_memory_of_a_sharded_one() -> None:
    model = chain()
    same_data(model)
    with pytest.raises(LayoutError, match=r"'0.weight' and '2.weight'"):
        sw.shard(model, ignored=[model[2].weight])
    sw.shard(model, ignored=[model[0].weight, model[2].weight])


def test_parts_of_one_allocation_that_do_not_overlap_are_fine() -> None:
    flat, model = torch.randn(52), chain()
    model[0].weight = nn.Parameter(flat[:16].view(4, 4))
    model[0].bias = nn.Parameter(flat[16:20])
    columns = flat[20:].view(4, 8)
    model[2].weight = nn.Parameter(columns[:, :4])
    model[2].register_buffer("others", columns[:, 4:])
    model.append(nn.Linear(0, 4, bias=False))
    model[3].weight = nn.Parameter(flat[3:3].view(4, 0))
    expected = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    sw.shard(model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in sw.full_state_dict(model).items())


def test_buffers_may_share_memory_with_one_another() -> None:
    model = chain()
    model.register_buffer("table", torch.arange(6.0))
    model.register_buffer("head", model.table[:3])
    model[2].bias = nn.Parameter(torch.zeros(4))
    sw.shard(model)
    model.table.zero_()
    assert not model.head.any()


def test_many_parameters_of_one_allocation_are_compared_quickly() -> None:
    """Pair by pair this would take minutes."""
    flat = torch.zeros(20_000)
    model = nn.Module()
    for i in range(20_000):
        model.register_parameter(f"p{i}", nn.Parameter(flat[i : i + 1]))
    model.register_buffer("last", flat[-1:])
    with pytest.raises(LayoutError, match=r"'p19999' and 'last'"):
        sw.shard(model)


# Kinds of parameters --------------------------------------------------------------------------------------------------


class Logged(Tensor):
    """With functions of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Tagged(nn.Parameter):
    """One that carries something besides."""

    tag = "tagged"


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_parameter_that_asks_for_gradients_of_another_dtype_is_refused_by_name() -> None:
    model = chain().bfloat16()
    model[0].bias.grad_dtype = None  # as torch likes
    model[2].weight.grad_dtype = torch.float32
    with pytest.raises(LayoutError, match=r"'2\.weight' has grad_dtype torch\.float32"):
        sw.shard(model)
    assert is_untouched(model)
    sw.shard(model, ignored=[model[2].weight])


def test_other_tensor_subclasses_are_refused_by_name() -> None:
    model = chain()
    model[0].bias = nn.Parameter(torch.zeros(4).as_subclass(Logged))
    with pytest.raises(LayoutError, match=r"'0.bias' is a Logged, a tensor subclass"):
        sw.shard(model)
    sw.shard(model, ignored=[model[0].bias])


def test_parameters_that_are_not_dense_are_refused_by_name() -> None:
    model = chain()
    model[0].weight = nn.Parameter(torch.eye(4).to_sparse())
    with pytest.raises(LayoutError, match=r"'0.weight' is torch.sparse_coo: only dense"):
        sw.shard(model)


def test_a_parameter_class_without_operations_of_its_own_trains() -> None:
    model = chain()
    weight = model[0].weight
    model[0].weight = Tagged(weight.detach().clone())
    sw.shard(model)
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad.full_tensor().any()


# Modules --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript_modules_with_parameters_are_refused_by_name(how: str) -> None:
    linear = nn.Linear(4, 4)
    scripted = torch.jit.script(linear) if how == "script" else torch.jit.trace(linear, torch.zeros(1, 4))
    model = chain(scripted)
    with pytest.raises(LayoutError, match=r"'3' is a torch.jit \w+"):
        sw.shard(model)
    with pytest.raises(LayoutError, match=r"the model is a torch.jit \w+"):
        sw.shard(scripted)
    assert is_untouched(model)
    sw.shard(model, ignored=list(scripted.parameters()))
    model(torch.ones(2, 4)).sum().backward()


def test_torchscript_modules_without_parameters_are_fine() -> None:
    model = sw.shard(chain(torch.jit.script(nn.GELU())))
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    "container",
    [
        lambda: nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)]),
        lambda: nn.ModuleDict({"a": nn.Linear(2, 2)}),
        lambda: nn.ParameterList([torch.zeros(2)]),
        lambda: nn.ParameterDict({"a": torch.zeros(2)}),
    ],
)
def test_a_container_that_nobody_calls_is_refused(container: Callable[[], nn.Module]) -> None:
    model = container()
    with pytest.raises(LayoutError, match=r"which is never called, so nothing would gather its parameter '\w+"):
        sw.shard(model, units=lambda fqn, module: False)
    assert is_untouched(model)


def test_a_container_whose_modules_are_all_units_trains() -> None:
    model = sw.shard(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    model[1](model[0](torch.ones(1, 2))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_who_else_refers_to_such_a_parameter_computes_with_the_one_that_trains() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Tagged(torch.eye(4))
            self.again = [self.weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.again[0]

    model = Listed()
    sw.shard(model, precision=sw.Precision(param="bf16", reduce="fp32"))
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad.full_tensor().any()
    assert model.again[0].tag == "tagged"
