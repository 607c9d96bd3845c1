"""Training over the nccl collectives and a double of NCCL's process group: real bytes, NCCL's dtypes, coalesced
launches, and backward in another thread than the caller's. Results are those of the plain model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.comm.nccl_double import backward_elsewhere, doubled
from tests.engine.cases import CASES, Case
from tests.engine.rig import Block, Net, Twins, adamw, batch, on_ranks, same_tensors, seeded, squares
from tests.ranks import RankPools

THREADS = pytest.mark.parametrize("thread", [contextlib.nullcontext, backward_elsewhere], ids=["here", "elsewhere"])


class Adapted(Block):
    """A frozen block with a low-rank adapter: a frozen and a trainable group in one unit."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b(self.a(x))


class TwoDtypes(Block):
    """A block that computes in fp32 and has a vector in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale.float())


class Rotated(Block):
    """A block that rotates pairs of numbers with complex parameters, like rotary embeddings and spectral layers."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.polar(torch.ones(3), torch.linspace(0.1, 0.5, 3)))
        self.register_buffer("counted", torch.arange(3, dtype=torch.int16))
        self.register_buffer("back", self.turn.detach().clone().conj())

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_real(torch.view_as_complex(x.reshape(-1, 3, 2)) * self.turn)
        return super().forward(turned.reshape(x.shape))


class Recomputed(Block):
    """A block that is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "adapted": Adapted,
    "two dtypes": TwoDtypes,
    "rotated": Rotated,
    "recomputed": Recomputed,
}


@THREADS
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("name", BLOCKS)
@on_ranks(2)
def test_the_numbers_are_those_of_the_plain_model(name: str, strategy: str, thread: Any) -> None:
    with doubled(), thread():
        Twins(lambda: Net(block=BLOCKS[name]), strategy=strategy, units={BLOCKS[name]}).train(3)


def run(case: Case, block: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """Return the weights after three steps with accumulation, clipping and an evaluation."""
    model = case.shard(seeded(lambda: Net(block=block)))
    optimizer = adamw(model.parameters())
    for step in range(3):
        with sw.no_sync(model):
            squares(model, batch(step)).backward()
        squares(model, batch(step + 10)).backward()
        sw.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            squares(model, batch(step + 20))
    return {name: tensor.clone() for name, tensor in sw.full_state_dict(model, rank0_only=False).items()}


def run_both_ways(case: Case, name: str) -> None:
    expected = run(case, BLOCKS[name])
    with doubled(), backward_elsewhere() as threads:
        found = run(case, BLOCKS[name])
    assert set(threads) == {"device_0"}
    if case.world_size in (2, 4):
        same_tensors(expected, found)
    else:  # a third of a sum is not the sum of rounded thirds
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adapted", "rotated"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_numbers_are_those_of_cpu_collectives(ranks: RankPools, case: Case, name: str) -> None:
    ranks(case.world_size).run(run_both_ways, case, name)


@on_ranks(2)
def test_a_unit_is_one_launch_whatever_its_groups() -> None:
    with doubled() as launches:
        model = sw.shard(seeded(lambda: Net(depth=2, block=Adapted)), units={Adapted})
        model.requires_grad_(True)  # frozen and trainable ones keep their groups
        launches.clear()
        squares(model, batch(0)).backward()
    gathers = [len(launch.dtypes) for launch in launches if launch.op == "all_gather"]
    reductions = [len(launch.dtypes) for launch in launches if launch.op == "reduce_scatter"]
    assert (gathers, reductions) == ([1, 2, 2, 2, 2], [2, 2, 1]), "the root, and each block for forward and backward"


@on_ranks(2)
def test_initial_values_of_every_dtype_are_broadcast() -> None:
    """From rank 0, where ranks differ: complex parameters, buffers of small integers, a conjugate view."""

    def build() -> nn.Module:
        model = Net(depth=1, block=Rotated)
        block = model.blocks[0]
        for tensor in (block.turn.data, block.counted, block.back):
            tensor.add_(torch.distributed.get_rank())
        return model

    with doubled(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "shardwise: initial values differ between ranks")
        model = sw.shard(seeded(build))
        whole = sw.full_state_dict(model, rank0_only=False)
    expected = Net(depth=1, block=Rotated).blocks[0]
    for name in ("turn", "counted", "back"):
        assert torch.equal(whole[f"blocks.0.{name}"], getattr(expected, name))


@THREADS
@on_ranks(2)
def test_a_backward_that_raised_leaves_nothing_behind(thread: Any) -> None:
    """Again and again: whether the one before is still under way is told by what autograd holds."""

    def raising(grad: Tensor) -> None:
        raise ValueError("no gradient today")

    with doubled(), thread():
        twins = Twins(lambda: Net(block=Recomputed))
        for _ in range(4):
            for _ in range(3):
                loss = squares(twins.sharded, twins.batch())
                handle = twins.sharded.blocks[1].up.weight.register_hook(raising)
                with pytest.raises(ValueError, match="today"):
                    loss.backward()
                handle.remove()
            twins.train(1)


@THREADS
@on_ranks(2)
def test_two_backwards_of_one_forward_the_first_of_which_raised(thread: Any) -> None:
    """Nothing comes between them that would clear up."""
    with doubled(), thread():
        twins = Twins()
        raises = [True]

        def perhaps(grad: Tensor) -> None:
            if raises and raises.pop():
                raise ValueError("no gradient today")

        def twice(model: nn.Module, x: Tensor) -> Tensor:
            loss = squares(model, x)
            if model is twins.sharded:
                handle = model.blocks[1].up.weight.register_hook(perhaps)  # type: ignore[union-attr]
                with pytest.raises(ValueError, match="today"):
                    loss.backward(retain_graph=True)
                handle.remove()
            return loss

        for _ in range(3):
            raises[:] = [True]
            twins.backward(twice)
            twins.same_gradients()
            twins.step()
            twins.same_parameters()
