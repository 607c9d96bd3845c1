"""Full parameters outside forwards, by hand, and methods besides forward."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.errors import MismatchError, UsageError
from shardwise.fsdp.parameter_group import ParameterState
from tests.engine.cases import AT_MOST_TWO_AND_FOUR, Case, collectives
from tests.engine.rig import Block, Net, Twins, batch, count, on_ranks, recording, seeded, squares, unwarned, warned
from tests.ranks import RankPools


def heads_apart(fqn: str, module: nn.Module) -> bool:
    return isinstance(module, Block) or fqn in {"enter", "leave"}


def twins_of(case: Case, **options: Any) -> Twins:
    if case.replicas > 1 and case.shards > 1:
        options["mesh"] = init_device_mesh("cpu", (case.replicas, case.shards))
    options = {"units": heads_apart, "reshard_after_forward": case.reshard, **options}
    return Twins(strategy=case.strategy, **options)


class Trunk(Net):
    """Its head is for the loss to read."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


def read_head(model: Any, x: Tensor) -> Tensor:
    """A loss outside the model's forward, in chunks."""
    hidden = model(x)
    if isinstance(model.leave.weight, sw.ShardedParameter):
        sw.unshard(model.leave)
    parts = [F.linear(chunk, model.leave.weight, model.leave.bias).square().sum() for chunk in hidden.chunk(3)]
    return torch.stack(parts).sum()


def close(twins: Twins, exact: bool) -> None:
    """Sums over replicas at four ranks, and sums over ranks of accumulated gradients, associate otherwise."""
    if exact:
        twins.same_gradients()
    for p, q in zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("case", AT_MOST_TWO_AND_FOUR, ids=str)
def test_a_loss_reads_a_head_that_was_unsharded(ranks: RankPools, case: Case) -> None:
    ranks(case.world_size).run(_loss_outside, case)


def _loss_outside(case: Case) -> None:
    twins = twins_of(case, build=Trunk, loss=read_head)
    for accumulates in (False, True):
        with unwarned():
            if accumulates:
                with sw.no_sync(twins.sharded):
                    twins.backward()
            twins.backward()
        assert isinstance(twins.sharded.leave.weight, sw.ShardedParameter), "a backward ends what was unsharded by hand"  # type: ignore[union-attr]
        close(twins, exact=case.world_size == 2 and not accumulates)
        for model, optimizer in zip((twins.plain, twins.sharded), twins.optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            if case.world_size == 2:
                optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p.detach())  # type: ignore[operator]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_everything_unsharded_for_a_while(strategy: str) -> None:
    """More units than there are slots: each forward meanwhile gathers nothing."""
    with recording():
        twins = Twins(lambda: Net(depth=6), strategy=strategy, units=heads_apart)
        twins.train(1)
    sw.unshard(twins.sharded)
    assert all(type(p) is nn.Parameter for p in twins.sharded.parameters())
    held = sw.memory(twins.sharded).now["gathered_slots"]
    before = count(twins.engine, "all_gather") if strategy != "no_shard" else 0
    for step in range(3):
        with torch.no_grad():
            assert torch.equal(twins.sharded(batch(step)), twins.plain(batch(step)))
    assert strategy == "no_shard" or count(twins.engine, "all_gather") == before
    sw.reshard(twins.sharded)
    assert all(isinstance(p, sw.ShardedParameter) for p in twins.sharded.parameters())
    sw.unshard(twins.sharded)
    assert sw.memory(twins.sharded).now["gathered_slots"] == held, "in the same memory as before"
    twins.train(2)
    assert all(isinstance(p, sw.ShardedParameter) for p in twins.sharded.parameters())


@on_ranks(1, 2)
def test_a_step_while_a_unit_is_unsharded_is_seen_by_the_next_forward() -> None:
    twins = Twins(units=heads_apart)
    twins.backward()
    model: Any = twins.sharded
    sw.unshard(model.blocks[0])
    twins.step()
    assert torch.equal(model(batch(0)), twins.plain(batch(0)))
    sw.unshard(model.blocks[0])
    assert torch.equal(model.blocks[0].up.weight, twins.plain.blocks[0].up.weight)  # type: ignore[union-attr, index]
    with torch.no_grad():
        for p in model.blocks[1].parameters():
            p.local.mul_(2)
        for p in twins.plain.blocks[1].parameters():  # type: ignore[union-attr, index]
            p.mul_(2)
    sw.unshard(model.blocks)
    assert torch.equal(model.blocks[1].up.weight, twins.plain.blocks[1].up.weight)  # type: ignore[union-attr, index]
    twins.train(2)


@on_ranks(2)
def test_what_wants_sharded_parameters_gets_them() -> None:
    twins = Twins(units=heads_apart)
    model = twins.sharded
    sw.unshard(model)
    assert all(isinstance(value, sw.ShardedParameter) for value in model.state_dict().values())
    twins.train(1)
    sw.unshard(model)
    with sw.unsharded(model, writeback=True), torch.no_grad():
        for p, q in zip(model.parameters(), twins.plain.parameters(), strict=True):
            p.mul_(0.5)
            q.mul_(0.5)
    assert all(isinstance(p, sw.ShardedParameter) for p in model.parameters())
    twins.train(1)
    sw.unshard(model.blocks)  # type: ignore[arg-type]
    replica = copy.deepcopy(model)
    assert all(isinstance(p, sw.ShardedParameter) for p in replica.parameters())
    assert torch.equal(replica(batch(0)), twins.plain(batch(0)))


@on_ranks(2)
def test_clipping_meets_the_gradients_of_what_is_unsharded() -> None:
    twins = Twins(units=heads_apart)
    twins.backward()
    sw.unshard(twins.sharded)
    expected = torch.nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.1)
    torch.testing.assert_close(sw.clip_grad_norm_(twins.sharded, 0.1), expected)
    sw.reshard(twins.sharded)
    close(twins, exact=False)


@on_ranks(2)
def test_first_unsharded_in_inference_mode() -> None:
    twins = Twins(units=heads_apart)
    with torch.inference_mode():
        sw.unshard(twins.sharded)
        assert torch.equal(twins.sharded(batch(0)), twins.plain(batch(0)))
    twins.train(2)


@on_ranks(2)
def test_an_exception_gives_back_what_was_unsharded() -> None:
    twins = Twins(units=heads_apart)
    model: Any = twins.sharded
    sw.unshard(model.leave)
    handle = model.blocks[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch(0))
    handle.remove()
    twins.train(2)
    sw.unshard(model.leave)
    handle = model.blocks[1].up.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        squares(model, batch(0)).backward()
    handle.remove()
    model.zero_grad()
    twins.train(2)


@on_ranks(2)
def test_by_hand_inside_a_forward() -> None:
    """A fused loss, which wants plain parameters, in the model's forward; given back there, or by backward."""

    class Fused(Net):
        gives_back = True

        def forward(self, x: Tensor) -> Tensor:
            for block in (self.enter, *self.blocks):
                x = block(x)
            sharded = isinstance(self.leave.weight, sw.ShardedParameter)
            if sharded:
                sw.unshard(self.leave)
            y: Tensor = Scaled.apply(x, self.leave.weight)  # type: ignore[no-untyped-call]
            if sharded and self.gives_back:
                sw.reshard(self.leave)
            return y

    for gives_back in (True, False):
        Fused.gives_back = gives_back
        with unwarned():
            twins = Twins(Fused, units=heads_apart)
            for _ in range(3):
                twins.backward()
                twins.same_gradients()
                twins.step()


class Scaled(torch.autograd.Function):
    """As fused losses do: the gradient in a buffer like the weight, filled in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        assert type(weight) is not sw.ShardedParameter
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        grad_weight = torch.zeros_like(weight)
        grad_weight += grads[0].t() @ x
        return grads[0] @ weight, grad_weight


@on_ranks(2)
def test_resharded_before_backward_is_right_and_warned_of() -> None:
    twins = Twins(Trunk, units=heads_apart)
    twins.plain_backward([lambda model, r=rank: read_head(model, twins.batch(r)) for rank in twins.every_rank])
    loss = read_head(twins.sharded, twins.batch())
    with warned("something still holds a view of unit 'leave'"):
        sw.reshard(twins.sharded.leave)  # type: ignore[arg-type]
    loss.backward()
    twins.same_gradients()


@on_ranks(1, 2)
def test_what_by_hand_refuses() -> None:
    model: Any = sw.shard(seeded(Net), units=heads_apart)
    with pytest.raises(UsageError, match="Linear is not sharded"):
        sw.unshard(nn.Linear(2, 2))
    with sw.unsharded(model), pytest.raises(UsageError, match=r"sw\.unshard inside sw\.unsharded"):
        sw.unshard(model)
    sw.unshard(model.leave)
    with torch.no_grad():
        model.leave.weight.mul_(2)
    if dist.get_world_size() > 1:
        with pytest.raises(UsageError, match=r"'leave.weight' was written in place.*writeback=True"):
            sw.reshard(model.leave)
    refused = []

    def inside_backward(grad: Tensor) -> None:
        with pytest.raises(UsageError, match=r"sw\.reshard inside a backward"):
            sw.reshard(model)
        refused.append(True)

    model.blocks[0].up.weight.register_hook(inside_backward)
    squares(model, batch(0)).backward()
    assert refused


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("what", ["alone", "another"])
def test_ranks_that_unshard_different_modules_are_told(ranks: RankPools, transport: str, what: str) -> None:
    said = ranks(2).run(_one_unshards, transport, what)
    assert all("'leave'" in text for text in said), said


def _one_unshards(transport: str, what: str) -> str:
    with collectives(transport):
        model: Any = sw.shard(seeded(Net), units=heads_apart)
    model(batch(0))
    sw.unshard(model)
    sw.reshard(model)
    began = time.monotonic()
    with pytest.raises(MismatchError) as caught:
        _unshard_by_rank(model, what)
    assert time.monotonic() - began < 10
    return str(caught.value)


def _unshard_by_rank(model: Any, what: str) -> None:
    if dist.get_rank() == 0:
        sw.unshard(model.leave)
    elif what == "another":
        sw.unshard(model.enter)
    model(batch(0))


# Methods --------------------------------------------------------------------------------------------------------------


class Coder(Net):
    """Two ways in."""

    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.enter(x) * scale
        for block in self.blocks:
            x = block(x)
        return x

    def decode(self, x: Tensor) -> Tensor:
        return x @ self.leave.weight.t() + self.leave.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def coded(model: Any, x: Tensor) -> Tensor:
    output: Tensor = model.decode(model.encode(x, scale=0.5))
    return output.square().mean()


def in_blocks_alone(fqn: str, module: nn.Module) -> bool:
    return isinstance(module, Block)


@pytest.mark.parametrize("case", AT_MOST_TWO_AND_FOUR, ids=str)
def test_other_methods_are_forwards(ranks: RankPools, case: Case) -> None:
    ranks(case.world_size).run(_methods, case)


def _methods(case: Case) -> None:
    """The root's, called twice in a step, and within forward as well."""
    twins = twins_of(case, build=Coder, loss=coded, units=in_blocks_alone)
    for name in ("encode", "decode", "encode"):
        sw.register_forward_method(twins.sharded, name)
    for loss in (coded, squares, coded):
        twins.backward(loss)
        close(twins, exact=case.world_size == 2)
        for optimizer in twins.optimizers:
            optimizer.zero_grad()
    if case.world_size == 2:
        twins.train(2)


class Projecting(Block):
    def project(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(x)
        return out


class Normed(nn.LayerNorm):
    def normed(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias)


class Affine(nn.Linear):
    def affine(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def of_parts() -> nn.Module:
    model: Any = Net(block=Projecting)
    model.enter = Affine(4, 6)
    for block in model.blocks:
        block.norm = Normed(6)
    return model


def of_parts_loss(model: Any, x: Tensor) -> Tensor:
    hidden = model.blocks[0].norm.normed(model.enter.affine(x))
    return squares(model, x) + model.blocks[1].project(hidden).sum()


@on_ranks(2)
def test_methods_of_a_block_and_of_a_part_of_a_unit() -> None:
    """And of a copy of the model, which are the copy's."""
    twins = Twins(of_parts, loss=of_parts_loss, units=in_blocks_alone)
    model: Any = twins.sharded
    sw.register_forward_method(model.blocks[1], "project")
    sw.register_forward_method(model.blocks[0].norm, "normed")
    sw.register_forward_method(model.enter, "affine")
    for _ in range(2):
        twins.backward()
        close(twins, exact=False)
        for optimizer in twins.optimizers:
            optimizer.zero_grad()
    replica = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        hidden = batch(0, 0, 5, 6)
        expected = twins.plain.blocks[1].project(hidden)  # type: ignore[union-attr, index, operator]
        assert torch.equal(replica.blocks[1].project(hidden), expected)


@on_ranks(2)
def test_a_method_that_raises_leaves_the_model_usable() -> None:
    twins = Twins(Coder, loss=coded, units=in_blocks_alone)
    model: Any = twins.sharded
    for name in ("encode", "decode"):
        sw.register_forward_method(model, name)
    with pytest.raises(RuntimeError, match="shape"):
        model.encode(torch.zeros(5, 3))
    assert all(unit.parameters.state is not ParameterState.IN_USE for unit in twins.engine.units)
    twins.backward()
    for name in ("nothing", "forward", "enter", "blocks"):
        with pytest.raises(UsageError, match=f"no method {name!r} besides forward"):
            sw.register_forward_method(model, name)
    with pytest.raises(UsageError, match="not sharded"):
        sw.register_forward_method(nn.Linear(2, 2), "extra_repr")


def test_modules_without_parameters_have_nothing_to_hold() -> None:
    model = sw.shard(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)))
    for module in model:
        sw.unshard(module)
    model(torch.ones(1, 4)).sum().backward()
    for module in model:
        sw.reshard(module)
    assert all(isinstance(parameter, sw.ShardedParameter) for parameter in model.parameters())
    with pytest.raises(UsageError, match="Linear is not sharded"):
        sw.unshard(nn.Linear(2, 2))


class Stopped(Block):
    """Ctrl-C comes in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise KeyboardInterrupt


def test_reshard_gives_up_a_forward_that_was_interrupted() -> None:
    model = seeded(Net)
    model.blocks[1].__class__ = Stopped
    sw.shard(model, units={Block, Stopped})
    with pytest.raises(KeyboardInterrupt):
        model(batch(0, 0))
    assert not all(isinstance(parameter, sw.ShardedParameter) for parameter in model.parameters())
    sw.reshard(model.blocks[0])
    assert all(isinstance(parameter, sw.ShardedParameter) for parameter in model.parameters())
    model.blocks[1].__class__ = Block
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    plain = seeded(Net)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2.0)
    assert torch.equal(model(batch(0, 0)), plain(batch(0, 0)))
