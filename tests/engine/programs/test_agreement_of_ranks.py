"""Ranks whose programs differ: training is right if they call the same units in the same order, else it raises."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import CollectiveTimeout, MismatchError, ShardwiseError
from tests.engine.cases import collectives
from tests.engine.rig import Block, Net, Twins, batch, on_ranks, seeded, squares
from tests.ranks import RankPool, RankPools

STRATEGIES = ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"]
TRANSPORTS = ["shm", "gloo"]


class ByRank(nn.Module):
    """A module in which ranks do different things. The plain model is told whose part it plays (`playing`)."""

    playing: int | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank() if ByRank.playing is None else ByRank.playing


@contextmanager
def playing(rank: int) -> Iterator[None]:
    ByRank.playing = rank
    try:
        yield
    finally:
        ByRank.playing = None


class ByRankTwins(Twins):
    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            losses = [self._as(rank) for rank in self.every_rank]
            expected = self.plain_backward(losses)
            own = self.loss(self.sharded, self.batch())
            own.backward()
            assert torch.equal(own.detach(), expected[dist.get_rank()])
            self.steps += 1
            self.same_gradients()
            self.step()
            self.same_parameters()

    def _as(self, rank: int) -> Callable[[nn.Module], Tensor]:
        def loss(model: nn.Module) -> Tensor:
            with playing(rank):
                return self.loss(model, self.batch(rank))

        return loss


# The same units in the same order, of which different parts take part in backward ------------------------------------


class SkipsInside(ByRank):
    """A unit with stochastic depth inside: it is called on every rank, and skips its block on some."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.turn = SkipsInside.made
        SkipsInside.made += 1

    def forward(self, x: Tensor) -> Tensor:
        return x if (self.rank + self.turn) % 2 else self.block(x)


class DetachedPrefix(ByRank):
    """A model whose blocks are trained from another depth on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for depth, block in enumerate(self.blocks):
            x = block(x.detach() if depth == 1 + self.rank else x)
        return self.leave(x)


class HeadByRank(ByRank):
    """A model whose heads are all called, while each rank's loss uses only one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 6)])
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.trunk:
            x = layer(x)
        return [head(x) for head in self.heads][2 * self.rank]


class HiddenByRank(ByRank):
    """A model whose blocks have auxiliary losses beside their outputs. The rank decides which of them the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.aside = nn.ModuleList(nn.Linear(6, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        aside = []
        for block, beside in zip(self.blocks, self.aside, strict=True):
            x = block(x)
            aside.append(beside(x).square())
        return x if self.rank else torch.cat([x, aside[1]], -1)


def one_linear(fqn: str, module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Block, SkipsInside)) and ".block." not in fqn and fqn.count(".") < 2


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("build", [DetachedPrefix, HeadByRank, HiddenByRank])
@on_ranks(2, timeout_s=20)
def test_different_parts_of_one_program_train_as_in_plain_torch(
    build: type[nn.Module], strategy: str, transport: str
) -> None:
    with collectives(transport):
        twins = ByRankTwins(build, units=one_linear, strategy=strategy)
    twins.train(3)


def skipping() -> nn.Module:
    SkipsInside.made = 0
    return Net(block=SkipsInside)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2, 3, timeout_s=20)
def test_stochastic_depth_inside_units_trains_as_in_plain_torch(strategy: str, transport: str) -> None:
    with collectives(transport):
        twins = ByRankTwins(skipping, units=[SkipsInside], strategy=strategy)
    twins.train(3)


# Different units ------------------------------------------------------------------------------------------------------


class OneHead(ByRank):
    """A model that calls only this rank's head."""

    heads_of_ranks = (0, 3)

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[OneHead.heads_of_ranks[self.rank]](x)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Assert that the block takes less than this. A rank that misses its peers would wait for the group's 30 s."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


@pytest.fixture(autouse=True)
def _loaded(ranks: RankPools, request: pytest.FixtureRequest) -> None:
    """Make ranks import what torch loads lazily, which on a busy machine takes longer than what is timed here."""
    ranks(request.node.callspec.params.get("world_size", 2)).run(_load)


def _load() -> None:
    sw.shard(seeded(Net))(batch(0))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("heads", [(0, 3), (0, 6), (0, 1), (5, 2)])
@on_ranks(2, timeout_s=30)
def test_ranks_that_call_different_units_are_told_which_within_seconds(heads: tuple[int, int], transport: str) -> None:
    OneHead.heads_of_ranks = heads
    with collectives(transport):
        model = sw.shard(seeded(OneHead))
    with torch.no_grad(), within(8), pytest.raises(MismatchError) as caught:
        model(batch(0))
    assert all(f"'heads.{head}'" in str(caught.value) for head in heads)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", ["no_shard", "shard_optimizer"])
@on_ranks(2, timeout_s=30)
def test_no_gradients_are_handed_out_where_ranks_trained_different_units(strategy: str, transport: str) -> None:
    OneHead.heads_of_ranks = (0, 3)
    with collectives(transport):
        model = sw.shard(seeded(OneHead), strategy)
    with within(8), pytest.raises(MismatchError) as caught:
        squares(model, batch(0)).backward()
    assert "'heads.0'" in str(caught.value)
    assert "'heads.3'" in str(caught.value)
    assert all(parameter.grad is None for parameter in model.parameters())


@on_ranks(2, timeout_s=30)
def test_a_rank_may_evaluate_alone_where_every_rank_holds_the_weights() -> None:
    """As under DDP: nothing is gathered, so nobody has to be asked."""
    twins = Twins(strategy="no_shard")
    twins.train(1)
    if dist.get_rank() == 0:
        with torch.no_grad():
            assert torch.equal(twins.sharded(batch(9)), twins.plain(batch(9)))
    twins.train(1)


@on_ranks(2, timeout_s=30)
def test_a_rank_may_evaluate_alone_while_all_look_at_parameters() -> None:
    twins = Twins(strategy="shard_optimizer")
    twins.train(1)
    twins.sharded(batch(9)).sum()  # the weights of now are gathered
    found = {}
    for name, parameter in twins.sharded.named_parameters():
        found[name] = parameter.full_tensor()  # type: ignore[operator]
        if dist.get_rank() == 0:
            with torch.no_grad():
                twins.sharded(batch(9))
    assert all(torch.equal(found[name], parameter) for name, parameter in twins.plain.named_parameters())


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2, timeout_s=30)
def test_a_rank_that_leaves_a_forward_early_is_told_apart(transport: str) -> None:
    class Shorter(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks[: len(self.blocks) - 2 * dist.get_rank()]:
                x = block(x)
            return self.leave(x)

    with collectives(transport):
        model = sw.shard(seeded(Shorter))
    with torch.no_grad(), within(8), pytest.raises(MismatchError, match="the end of an outermost forward"):
        model(batch(0))


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2, timeout_s=30)
def test_a_rank_that_raises_in_forward_ends_its_peers_at_once(transport: str) -> None:
    class Raises(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for depth, block in enumerate(self.blocks):
                x = block(x)
                if depth == 1 and dist.get_rank() == 1:
                    raise ValueError("mine alone")
            return self.leave(x)

    with collectives(transport):
        model = sw.shard(seeded(Raises))
    expected = ValueError if dist.get_rank() else CollectiveTimeout
    with within(8), pytest.raises(expected, match="mine alone" if dist.get_rank() else "rank 1 raised"):
        model(batch(0))
    dist.barrier()  # neither leaves before the other has heard


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2, timeout_s=30)
def test_exceptions_that_all_ranks_catch_leave_training_as_it_was(transport: str) -> None:
    class Raises(Net):
        raising = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[1](self.blocks[0](self.enter(x)))
            if Raises.raising:
                raise ValueError("everybody's")
            return self.leave(x)

    with collectives(transport):
        twins = Twins(Raises)
    for _ in range(3):
        Raises.raising = True
        with pytest.raises(ValueError, match="everybody's"):
            twins.sharded(batch(0))
        Raises.raising = False
        twins.train(1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_timeout_is_waited_out_once(transport: str) -> None:
    with RankPool(2) as pool:  # gloo closes the connections of a group that timed out
        pool.run(_time_out, transport, timeout_s=60)


def _time_out(transport: str) -> None:
    os.environ["SHARDWISE_TIMEOUT_S"] = "1.5"
    try:
        with collectives(transport):
            model = sw.shard(seeded(Net))
    finally:
        del os.environ["SHARDWISE_TIMEOUT_S"]
    if dist.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(CollectiveTimeout):
            model(batch(0))
        assert 1 < time.monotonic() - start < 2.5
        with within(0.5), pytest.raises(ShardwiseError):
            model(batch(0))
    else:
        time.sleep(4)
