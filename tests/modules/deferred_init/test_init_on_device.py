"""`sw.init_on_device`: numbers that depend on the seed and the model alone, from the distributions of the build."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise import device_tools
from shardwise.errors import DifferentModelsError, LayoutError
from shardwise.modules.deferred_init.builder import record
from shardwise.modules.deferred_init.materialize import skip_init
from shardwise.modules.deferred_init.memory import RealStorages
from shardwise.modules.deferred_init.op import Op
from shardwise.modules.deferred_init.seeds import Seeds
from shardwise.modules.deferred_init.tape import Tape
from tests.engine.allocations import Live, traced
from tests.modules.deferred_init.rig import Everything, awkward, on_meta, rewriting, same, transformer
from tests.ranks import RankPools

Build = Callable[[], nn.Module]
SEED = 5


def drawn(build: Build, seed: int | None = SEED, **options: Any) -> dict[str, Tensor]:
    """A model's numbers, drawn on the device. Every rank must call this."""
    if seed is not None:
        torch.manual_seed(seed)
    model = on_meta(build)
    with sw.init_on_device():
        sw.shard(model, **options)
    named = sw.full_state_dict(model, rank0_only=False)
    return named | {name: tensor for name, tensor in model.named_buffers() if name not in named}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)


# What the numbers depend on ---------------------------------------------------------------------------------------


BUILDS: list[Build] = [Everything, awkward, rewriting, partial(transformer, "llama")]


def of_every_build(strategy: str) -> list[dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if "hybrid" in strategy else None
    return [drawn(build, strategy=strategy, mesh=mesh) for build in BUILDS]


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(2, "full_shard"), (2, "no_shard"), (4, "full_shard"), (4, "hybrid_shard"), (4, "shard_grad_op")],
)
def test_the_same_at_any_world_size_under_any_strategy(ranks: RankPools, world_size: int, strategy: str) -> None:
    alone = [drawn(build) for build in BUILDS]
    for outcome in ranks(world_size).run(of_every_build, strategy, timeout_s=200):
        for build, ours, theirs in zip(BUILDS, outcome, alone, strict=True):
            assert equal(ours, theirs), build


@pytest.mark.parametrize("units", [{nn.Linear}, 1, lambda fqn, module: False])
def test_the_same_whatever_the_units(units: Any) -> None:
    assert equal(drawn(Everything, units=units), drawn(Everything))


def test_other_seeds_and_later_models_have_others() -> None:
    first = drawn(Everything)
    second = drawn(Everything, seed=None)
    assert equal(drawn(Everything), first)
    for other in (second, drawn(Everything, seed=SEED + 1)):
        for name in ("embedding.weight", "lstm.weight_ih_l0", "blocks.1.linear1.weight"):
            assert not torch.equal(first[name], other[name])


def test_no_two_tensors_are_alike() -> None:
    model = drawn(lambda: nn.Sequential(*(nn.Linear(9, 9) for _ in range(6))))
    weights = [model[f"{layer}.weight"] for layer in range(6)]
    assert len({tuple(weight.flatten().tolist()) for weight in weights}) == 6


def test_generators_move_by_the_key_alone() -> None:
    drawn(Everything)
    after = torch.get_rng_state()
    torch.manual_seed(SEED)
    torch.randint(2**63 - 1, ())
    assert torch.equal(after, torch.get_rng_state())
    before = torch.get_rng_state()
    drawn(partial(nn.LayerNorm, 5), seed=None)  # nothing is random in it
    assert torch.equal(before, torch.get_rng_state())


def test_an_error_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    with sw.init_on_device(), pytest.raises(LayoutError, match="scale"):
        sw.shard(on_meta(partial(Forgetful, 1)))
    assert torch.equal(before, torch.get_rng_state())


class Forgetful(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))


def on_one_rank_alone(rank: int) -> None:
    model = on_meta(partial(nn.Linear, 3, 3))
    if rank:
        sw.shard(model)
    else:
        with sw.init_on_device():
            sw.shard(model)


def test_ranks_that_would_draw_elsewhere_are_told(ranks: RankPools) -> None:
    for outcome in ranks(2).run(partial(_raised, on_one_rank_alone)):
        assert "inside sw.init_on_device() on every rank or on none" in outcome


def _raised(call: Callable[[int], None]) -> str:
    try:
        call(torch.distributed.get_rank())
    except DifferentModelsError as error:
        return str(error)
    return ""


# Whether they are right -------------------------------------------------------------------------------------------


class Initialised(nn.Module):
    """A parameter that one call initialises; `wide` has enough numbers for statistics."""

    def __init__(self, initialise: Callable[[Tensor], object], shape: tuple[int, ...] = (64, 96)) -> None:
        super().__init__()
        self.initialise, self.shape = initialise, shape
        self.weight = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.initialise(self.weight)


def initialised(initialise: Callable[[Tensor], object], shape: tuple[int, ...] = (64, 96)) -> tuple[Tensor, Tensor]:
    """Drawn on the device, and by a plain build."""
    build = partial(Initialised, initialise, shape)
    torch.manual_seed(SEED)
    return drawn(build)["weight"], build().weight.detach()


def from_numpy(weight: Tensor) -> None:
    weight.copy_(torch.from_numpy(np.linspace(0, 1, weight.numel(), dtype=np.float32)).view_as(weight))


def computed(weight: Tensor) -> None:
    weight.copy_(1 / 10000 ** (torch.arange(weight.numel()).view_as(weight) / weight.numel()))


@pytest.mark.parametrize(
    "initialise",
    [
        nn.init.zeros_,
        nn.init.ones_,
        nn.init.eye_,
        partial(nn.init.constant_, val=0.37),
        from_numpy,
        computed,
        lambda w: w.normal_(generator=torch.Generator().manual_seed(4)),
    ],
)
def test_what_is_not_random_equals_the_plain_build(initialise: Callable[[Tensor], object]) -> None:
    ours, theirs = initialised(initialise)
    assert same(ours, theirs)


def test_dirac_equals_the_plain_build() -> None:
    ours, theirs = initialised(nn.init.dirac_, (8, 6, 3))
    assert same(ours, theirs)


@pytest.mark.parametrize(
    "initialise",
    [
        nn.init.normal_,
        partial(nn.init.normal_, mean=1.0, std=0.02),
        partial(nn.init.uniform_, a=-2.0, b=0.5),
        nn.init.kaiming_normal_,
        partial(nn.init.kaiming_uniform_, a=math.sqrt(5)),
        nn.init.xavier_uniform_,
        nn.init.xavier_normal_,
        partial(nn.init.trunc_normal_, std=0.3, a=-0.4, b=0.5),
        partial(nn.init.trunc_normal_, mean=3.0, std=1.0, a=-1.0, b=1.0),
        lambda w: w.bernoulli_(0.3),
        lambda w: w.exponential_(2.0),
        lambda w: w.copy_(torch.randn(w.shape).abs() + torch.rand_like(w)),
    ],
)
@pytest.mark.filterwarnings("ignore:mean is more than 2 std")
def test_what_is_random_has_the_distribution_of_the_plain_build(initialise: Callable[[Tensor], object]) -> None:
    ours, theirs = (weight.flatten().double().sort().values for weight in initialised(initialise))
    assert not torch.equal(ours, theirs)
    # Kolmogorov-Smirnov: two samples of n from one distribution differ by more than this once in 10,000 times
    n = ours.numel()
    values = torch.cat([ours, theirs])
    above = (torch.searchsorted(ours, values, right=True) - torch.searchsorted(theirs, values, right=True)).abs().max()
    assert above / n < 2.23 * math.sqrt(2 / n)
    assert abs(ours.mean() - theirs.mean()) < 6 * theirs.std() / math.sqrt(n)


def test_orthogonal_is_orthogonal() -> None:
    ours, theirs = initialised(nn.init.orthogonal_)
    torch.testing.assert_close(ours @ ours.T, torch.eye(64), atol=1e-5, rtol=0)
    assert not torch.equal(ours, theirs)


def test_sparse_has_its_zeros() -> None:
    ours, _ = initialised(partial(nn.init.sparse_, sparsity=0.25))
    assert (ours == 0).sum(0).tolist() == [16] * 96


def test_truncated_stays_inside() -> None:
    ours, _ = initialised(partial(nn.init.trunc_normal_, std=1.0, a=-1.0, b=1.0))
    assert ours.abs().max() <= 1
    assert ours.abs().max() > 0.99


class Depends(nn.Module):
    """Parameters that read one another, or that go on from a state that was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.third, self.fourth = nn.Parameter(torch.empty(50)), nn.Parameter(torch.empty(50))
        self.register_buffer("of_second", torch.empty(8))
        self.register_buffer("own", torch.empty(20))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.second.weight.copy_(self.first.weight)
        self.first.weight.mul_(2)
        self.get_buffer("of_second").copy_(self.second.weight.max(1).values)
        state = torch.get_rng_state()
        self.third.normal_()
        torch.set_rng_state(state)
        self.fourth.normal_()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.get_buffer("own").normal_()


def test_parameters_that_read_one_another() -> None:
    ours = drawn(Depends)
    assert torch.equal(ours["first.weight"], 2 * ours["second.weight"])
    assert torch.equal(ours["of_second"], ours["second.weight"].max(1).values)
    assert torch.equal(ours["third"], ours["fourth"])
    torch.manual_seed(3)
    assert torch.equal(ours["own"], torch.randn(20))


def test_copied_layers_are_copies() -> None:
    ours = drawn(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 24, batch_first=True), 2))
    assert torch.equal(ours["layers.0.linear1.weight"], ours["layers.1.linear1.weight"])
    assert ours["layers.0.linear1.weight"].std() > 0


def test_a_transformer_has_its_own_scales() -> None:
    ours = drawn(partial(transformer, "gpt2", n_embd=128, n_layer=4))
    torch.manual_seed(SEED)
    theirs = transformer("gpt2", n_embd=128, n_layer=4).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if tensor.std() == 0:
            assert same(ours[name], tensor)
        else:
            assert ours[name].std() == pytest.approx(float(tensor.std()), rel=0.1)


# What is drawn ----------------------------------------------------------------------------------------------------


def count_draws(build: Build, blank: Callable[[nn.Module], list[str]] = lambda model: []) -> tuple[list[str], int]:
    """The operations that were drawn by seed, and the numbers of this rank."""
    done: list[str] = []
    model = on_meta(build)
    run = RealStorages.run

    def counted(self: Any, op: Op, seed: int | None = None) -> None:
        if op.draw is not None:
            done.append(str(op.func))
        run(self, op, seed)

    with pytest.MonkeyPatch.context() as patch, skip_init(blank(model)), sw.init_on_device():
        patch.setattr(RealStorages, "run", counted)
        sw.shard(model, units=lambda fqn, module: False)
    return done, sum(1 for p in model.parameters() if p.local.numel())  # type: ignore[attr-defined]


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))


def drawn_and_kept() -> tuple[int, int]:
    done, kept = count_draws(stack)
    return len(done), kept


def test_a_rank_draws_only_what_it_keeps_a_part_of(ranks: RankPools) -> None:
    """One unit of eight equal tensors: each rank of four has two."""
    assert ranks(4).run(drawn_and_kept) == [(2, 2)] * 4


def test_nothing_is_drawn_for_what_somebody_writes() -> None:
    state = torch.get_rng_state()
    done, _ = count_draws(partial(transformer, "llama"), lambda model: [name for name, _ in model.named_parameters()])
    assert done == []
    assert torch.equal(torch.get_rng_state(), state)


def test_a_new_head_has_the_numbers_that_it_would_have() -> None:
    whole = drawn(Everything)
    torch.manual_seed(SEED)
    model = on_meta(Everything)
    with sw.init_on_device(), skip_init(name for name, _ in model.named_parameters() if "bilinear" not in name):
        sw.shard(model)
    ours = sw.full_state_dict(model)
    assert torch.equal(ours["bilinear.weight"], whole["bilinear.weight"])


WIDTH = 96


def peak_bytes() -> tuple[int, int]:
    model = on_meta(lambda: nn.Sequential(*(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))) for _ in "ab")))
    with traced() as allocations, sw.init_on_device():
        sw.shard(model)
    live = Live(allocations)
    return live.peak_bytes, live.now_bytes


def test_one_tensor_at_a_time(ranks: RankPools) -> None:
    tensor_bytes = 4 * WIDTH * WIDTH
    for peak, stays in ranks(2).run(peak_bytes):
        assert peak - stays < 2 * tensor_bytes  # the tensor, and random states
        assert 6 * tensor_bytes < stays


# Elsewhere --------------------------------------------------------------------------------------------------------


def test_what_has_no_kernel_on_the_device_is_done_on_the_cpu() -> None:
    failed: list[Any] = []

    def missing_once(*arguments: Any, **options: Any) -> Tensor:
        if not failed:
            failed.append(arguments)
            raise NotImplementedError
        return torch.ops.aten.normal_.default(*arguments, **options)

    tape = Tape(Seeds(torch.device("cpu")))
    with tape.recording():
        recorded = torch.zeros(40).normal_()[3:].mul_(2)
    [part] = tape.cut([[recorded]])
    [expected] = tape.play(part)
    tape._ops = [replace(op, func=missing_once) if op.draw else op for op in tape._ops]
    [found] = tape.play(part)
    assert failed
    assert torch.equal(found, expected)


class Accelerated(nn.Module):
    """What builds do on the CPU, which on an accelerator meets tensors that the build had from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.empty(12, 8)) for _ in range(4))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.a.is_meta:
            return  # where torch would refuse to multiply it by numbers of numpy's
        nn.init.orthogonal_(self.a)
        nn.init.sparse_(self.b, 0.25)
        self.c.copy_(torch.randn(12, 8) * torch.from_numpy(np.arange(8, dtype=np.float32)))
        self.c[torch.tensor([1, 3])] = 0
        self.d.normal_().mul_(torch.linspace(0, 1, 8)).add_(torch.full((8,), 2.0))
        self.d[:, 2:4].uniform_()


class AllOn(TorchDispatchMode):
    """Checks that operations get and give tensors of one device, but for copies from elsewhere."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = () if func is torch.ops.aten._to_copy.default else (args, kwargs)
        for tensor in tree_leaves((given, out)):
            assert not isinstance(tensor, Tensor) or tensor.device == self.device, func
        return out


def test_every_operation_runs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played with fake tensors of an accelerator."""
    device = torch.device("cuda", 0)
    seeds: list[tuple[torch.device, int]] = []

    def copied(self: Tensor, source: Tensor) -> Tensor:
        copy: Tensor = torch.ops.aten.copy_.default(self, source)
        return copy

    @contextmanager
    def seeded(device: torch.device, seed: int) -> Iterator[None]:
        seeds.append((device, seed))
        yield

    monkeypatch.setattr(device_tools, "seeded", seeded)
    # The method asks for the driver before it comes to fake tensors; the operation does not.
    monkeypatch.setattr(Tensor, "copy_", copied)
    model = on_meta(Accelerated)
    tape = Tape(Seeds(device))
    recorded = record(model, tape)
    with FakeTensorMode(allow_non_fake_inputs=True), AllOn(device):
        for name, parameter in model.named_parameters():
            [part] = tape.cut([[recorded[id(parameter)]]])
            [real] = tape.play(part)
            assert (real.device, real.shape) == (device, parameter.shape), name
    assert len(seeds) > 6
    assert {where for where, _ in seeds} == {device}
