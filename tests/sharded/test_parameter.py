"""A sharded parameter as torch's modules, autograd and users see it."""

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.errors import UsageError
from shardwise.fsdp.layout import build_layout
from shardwise.fsdp.sharded_parameter import Placement, ShardedParameter
from tests.sharded.threads import cut, on_threads, randn

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=5)


def rank_0_of_2(*tensors: Tensor) -> list[ShardedParameter]:
    """Make rank 0's handles on tensors, for operations that need no peer."""

    class Group:
        rank, world_size = 0, 2

    return cut(Group(), tensors)


@pytest.fixture
def sharded() -> ShardedParameter:
    return rank_0_of_2(*randn((4, 6)))[0]


def module_of(*parameters: ShardedParameter) -> nn.Module:
    module = nn.Module()
    for i, parameter in enumerate(parameters):
        module.register_parameter(f"p{i}", nn.Parameter(parameter))
    return module


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.integers(1, 4))
def test_full_tensor_is_the_whole(shapes: list[tuple[int, ...]], world_size: int) -> None:
    tensors = randn(*shapes)
    for wholes in on_threads(world_size, lambda group: [p.full_tensor() for p in cut(group, tensors)]):
        for whole, tensor in zip(wholes, tensors, strict=True):
            assert type(whole) is Tensor
            assert torch.equal(whole, tensor)
            assert whole.shape == tensor.shape


def test_it_is_a_parameter_of_global_shape(sharded: ShardedParameter) -> None:
    module = module_of(sharded)
    parameter = dict(module.named_parameters())["p0"]
    assert type(parameter) is ShardedParameter
    assert isinstance(parameter, nn.Parameter)
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert (parameter.shape, parameter.ndim, parameter.numel()) == ((4, 6), 2, 24)
    assert parameter.local is sharded.local
    assert parameter.local.shape == (12,)
    assert (parameter.fqn, parameter.fragment.start, parameter.fragment.stop) == ("p0", 0, 12)
    assert not isinstance(sharded, nn.Parameter)


def test_a_piece_of_another_size_is_refused(sharded: ShardedParameter) -> None:
    with pytest.raises(ValueError, match="piece of 'p0' on rank 0 has 12 elements"):
        ShardedParameter(torch.zeros(4, 3), sharded.placement)


def test_state_dict_gives_handles_that_load(sharded: ShardedParameter) -> None:
    module = module_of(sharded)
    handle = module.state_dict()["p0"]
    assert type(handle) is ShardedParameter
    assert handle.local is sharded.local
    assert not isinstance(handle, nn.Parameter)
    doubled = {"p0": handle * 2}
    module.load_state_dict(doubled)
    assert torch.equal(sharded.local, doubled["p0"].local)
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({"p0": torch.zeros(12)})


def test_aliases_in_inference_mode(sharded: ShardedParameter) -> None:
    module = module_of(sharded)
    with torch.inference_mode():
        aliases = [sharded.detach(), sharded.data, module.state_dict()["p0"]]
    for number, alias in enumerate(aliases):
        alias.fill_(number)
        assert sharded.local.eq(number).all()


@pytest.mark.parametrize("whole", [torch.randn(4, 6), torch.randn(6, 4).t(), torch.arange(24).view(4, 6)])
def test_copying_a_plain_tensor_of_the_whole_shape_takes_the_own_piece(
    sharded: ShardedParameter, whole: Tensor
) -> None:
    parameter = nn.Parameter(sharded)
    before = sharded.local._version
    with torch.no_grad():
        assert parameter.copy_(whole) is parameter
    assert torch.equal(sharded.local, whole.reshape(-1)[:12].float())
    assert sharded.local._version > before
    parameter.data = torch.ones(4, 6)
    assert torch.equal(sharded.local, torch.ones(12))
    for wrong in (torch.ones(6), torch.ones(12), torch.ones(1, 6)):
        with torch.no_grad(), pytest.raises(UsageError, match=r"copy_.. takes a plain tensor of the whole shape"):
            parameter.copy_(wrong)


def test_writing_an_empty_piece_bumps_its_version_too() -> None:
    empty = rank_0_of_2(*randn((30, 2), (3,)))[1]
    assert not empty.local.numel()
    before = empty.local._version
    empty.copy_(torch.ones(3))
    assert empty.local._version > before


def test_a_deepcopy_of_a_state_tensor_is_a_piece_of_its_own(sharded: ShardedParameter) -> None:
    first, second = copy.deepcopy([sharded, sharded])
    assert first is second
    assert type(first) is ShardedParameter
    assert first.placement is sharded.placement
    assert torch.equal(first.local, sharded.local)
    sharded.zero_()
    assert first.local.any()
    assert isinstance(copy.deepcopy(nn.Parameter(sharded)), nn.Parameter)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(sharded: ShardedParameter, set_to_none: bool) -> None:
    module = module_of(sharded)
    parameter = next(module.parameters())
    parameter.grad = torch.ones_like(parameter).detach()
    module.zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert parameter.grad is None
    else:
        assert isinstance(parameter.grad, ShardedParameter)
        assert not parameter.grad.local.any()


def test_gradients_of_another_shape_are_torchs_error(sharded: ShardedParameter) -> None:
    parameter = nn.Parameter(sharded)
    with pytest.raises(RuntimeError, match="size"):
        parameter.grad = rank_0_of_2(*randn((6, 4)))[0]


def test_writing_bumps_the_version_of_the_piece(sharded: ShardedParameter) -> None:
    parameter = nn.Parameter(sharded)
    writes: list[Callable[[], Any]] = [
        lambda: parameter.mul_(2),
        lambda: parameter.data.add_(1),
        lambda: torch._foreach_mul_([parameter], 2.0),
        lambda: parameter.copy_(parameter.detach().clone()),
    ]
    with torch.no_grad():
        for write in writes:
            before = sharded.local._version
            write()
            assert sharded.local._version > before


def test_whoever_had_the_data_before_keeps_it(sharded: ShardedParameter) -> None:
    """As an average of weights is swapped in and out: torch would leave the old memory to those who hold it."""
    (average,) = rank_0_of_2(torch.full((4, 6), 7.0))
    before = sharded.local.clone()
    backup, detached = sharded.data, sharded.detach().detach()
    sharded.data = average
    assert torch.equal(sharded.local, average.local)
    assert torch.equal(backup.local, before)
    assert torch.equal(detached.local, before)
    sharded.data = backup
    assert torch.equal(sharded.local, before)
    sharded.data, average.data = average.data, sharded.data
    assert torch.equal(average.local, before)
    assert torch.equal(sharded.local, torch.full_like(before, 7.0))
    sharded.data.add_(1)  # and as long as nothing was assigned, it is the same memory
    assert torch.equal(sharded.local, torch.full_like(before, 8.0))


def test_data_copies_into_the_piece(sharded: ShardedParameter) -> None:
    parameter, memory = nn.Parameter(sharded), sharded.local
    expected = memory * 3
    parameter.data = parameter.data * 3
    assert parameter.local is memory
    assert torch.equal(memory, expected)
    with pytest.raises(UsageError, match=r"cannot convert 'p0' from torch.float32"):
        parameter.data = parameter.data.double()


def test_conversions_of_a_module_raise(sharded: ShardedParameter) -> None:
    module = module_of(sharded)
    for convert in (lambda: module.to(torch.bfloat16), module.half, module.double):
        with pytest.raises(UsageError, match="precision"):
            convert()
    assert module.float().get_parameter("p0").local is sharded.local


def test_repr_shows_what_it_holds(sharded: ShardedParameter) -> None:
    assert repr(sharded) == (
        "ShardedParameter('p0', shape=(4, 6), dtype=torch.float32, device=cpu, local=[0:12], requires_grad=False)"
    )


REFUSED: dict[str, Callable[[ShardedParameter], Any]] = {
    "copy": copy.copy,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "numpy": lambda p: p.numpy(),
    "tolist": lambda p: p.tolist(),
    "array": lambda p: p.__array__(),
    "dlpack": lambda p: np.from_dlpack(p.detach()),
    "share_memory_": lambda p: p.share_memory_(),
    "apply_": lambda p: p.detach().apply_(abs),
    "data_ptr": lambda p: p.data_ptr(),
    "item": lambda p: nn.Parameter(rank_0_of_2(torch.ones(1, 1))[0]).item(),
    "bool": lambda p: bool(rank_0_of_2(torch.ones(()))[0]),
    "linear": lambda p: F.linear(torch.ones(2, 6), p),
    "matmul": lambda p: p @ torch.ones(6, 2),
    "mT": lambda p: p.mT,
    "view": lambda p: p.view(-1),
    "reshape": lambda p: p.reshape(6, 4),
    "row": lambda p: p[0],
    "slice": lambda p: p[1:3],
    "embedding": lambda p: F.embedding(torch.tensor([1]), p),
    "softmax": lambda p: p.softmax(-1),
    "cumsum": lambda p: p.cumsum(0),
    "sort": lambda p: p.sort(),
    "stack": lambda p: torch.stack([p, p]),
    "normal_": lambda p: p.detach().normal_(),
    "rand_like": torch.rand_like,
    "dropout": lambda p: F.dropout(p, 0.5),
    "dot": lambda p: torch.tensordot(p, p),
    "max_dim": lambda p: p.max(dim=0),
    "sum_dim": lambda p: p.sum(dim=0),
    "norm_dim": lambda p: p.norm(dim=1),
    "std_dim": lambda p: p.std(dim=0),
    "negative_order": lambda p: torch.linalg.vector_norm(p, -1),
    "set_row": lambda p: p.detach().__setitem__(0, 1.0),
    "new_zeros": lambda p: p.new_zeros(4, 6),
    "plain_global": lambda p: p + torch.ones(4, 6),
    "plain_broadcast": lambda p: p * torch.ones(6),
    "plain_local": lambda p: p + torch.ones(12),
    "into_plain": lambda p: torch.zeros(4, 6).copy_(p),
    "into_plain_number": lambda p: torch.zeros(()).add_(p),
    "out_plain": lambda p: torch.add(p, 1, out=torch.zeros(4, 6)),
    "foreach_plain": lambda p: torch._foreach_add_([p.detach()], [torch.ones(4, 6)]),
    "foreach_into_plain": lambda p: torch._foreach_add_([torch.zeros(1)], [p.detach()]),
    "foreach_scale": lambda p: torch._foreach_mul([p.detach()], p.detach()),
    "differently_cut": lambda p: p + rank_0_of_2(*randn((7,), (4, 6)))[1],
    "foreach_differently_cut": lambda p: torch._foreach_add([p], [rank_0_of_2(*randn((7,), (4, 6)))[1]]),
    "data_to_other_dtype": lambda p: setattr(p, "data", p.double()),
}


@pytest.mark.parametrize("operation", REFUSED.values(), ids=REFUSED)
def test_nothing_is_silently_local(sharded: ShardedParameter, operation: Callable[[ShardedParameter], Any]) -> None:
    before = sharded.local.clone()
    with torch.no_grad(), pytest.raises(UsageError):
        operation(nn.Parameter(sharded))
    assert torch.equal(sharded.local, before)


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ("matmul", ["aten.mm", "'p0'", "sw.unsharded", ".full_tensor()", "forward"]),
        ("save", ["torch.save", "'p0'", "sw.full_state_dict"]),
        ("item", ["'p0'", ".full_tensor()"]),
        ("normal_", ["aten.normal_", "can fill only a parameter of a sharded model"]),
        ("plain_global", ["'p0' (4, 6)", "plain tensor of shape (4, 6)"]),
        ("differently_cut", ["'p0' (4, 6)", "'p1' (4, 6)"]),
    ],
)
def test_errors_name_the_parameter_and_the_way_out(sharded: ShardedParameter, operation: str, words: list[str]) -> None:
    with torch.no_grad(), pytest.raises(UsageError) as raised:
        REFUSED[operation](nn.Parameter(sharded))
    assert [word for word in words if word not in str(raised.value)] == []


def test_it_works_on_fake_tensors() -> None:
    class Group:
        rank, world_size = 1, 4

    layout = build_layout([("w", (8, 8))], 4, 4)
    with FakeTensorMode():
        parameter = nn.Parameter(ShardedParameter(torch.zeros(16), Placement(layout, 0, Group())))
        optimizer = torch.optim.AdamW([parameter], fused=True)
        parameter.grad = torch.ones_like(parameter).detach()
        optimizer.step()
        state = optimizer.state[parameter]["exp_avg"]
    assert state.shape == (8, 8)
    assert state.local.shape == (16,)
