"""Reduced gradients in the host's memory while a device computes: the same bits, nothing unordered, and on the device
no more than a few slices. Played on CPU ranks."""

from __future__ import annotations

import copy
import gc
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.engine.extensions.offloaded import gradient_stores
from shardwise.engine.lookup import require_engine
from shardwise.errors import ConfigError, UsageError
from shardwise.fsdp.reducer import Flight, InFlight
from shardwise.offload.offloaded_slice import OffloadedSlice, SliceState
from shardwise.offload.shard_store import BUFFERS, ShardStore
from shardwise.offload.stores import any_offloaded
from shardwise.offload.tiers.device_buffers import DeviceBuffers
from shardwise.offload.tiers.host_memory import HostMemory
from tests.engine.rig import Net, Twins, batch, on_ranks, seeded, squares
from tests.engine.streams import played
from tests.offload.rig import (
    LEAST,
    accumulated,
    edited_steps,
    momentum,
)
from tests.optim.rig import Tied

ALONE = {"gradients": "cpu"}
ALL = {**ALONE, "params": "cpu", "optimizer": "cpu", "ring_bytes": LEAST}
ON_HOST = {**ALONE, "params": "cpu", "optimizer": "cpu", "step": "cpu"}


def store_of(model: nn.Module) -> ShardStore:
    (found,) = gradient_stores(require_engine(model))
    return found


def slices_of(model: nn.Module) -> list[OffloadedSlice]:
    units = require_engine(model).units
    slices = [group.gradients.slice for unit in units for group in unit.groups if group.trainable]
    assert all(slices)
    return slices  # type: ignore[return-value]


# What users see -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_gradients_that_users_keep_are_theirs() -> None:
    """The object, its piece or neither, of some parameters or all; others go on being added to."""
    offload = sw.Offload(pin=False, **ALONE)
    with played() as order:
        twins = Twins(offload=offload)
        kept: list[Any] = []
        numbers: list[Tensor] = []
        for step in range(4):
            twins.backward()
            twins.same_gradients()
            parameters = list(twins.sharded.parameters())
            chosen = [parameters[3].grad, parameters[7].grad]
            kept += chosen if step % 2 else [gradient.local for gradient in chosen]  # type: ignore[union-attr]
            numbers += [gradient.local.clone() for gradient in chosen]  # type: ignore[union-attr]
            for model in (twins.plain, twins.sharded):
                for index, parameter in enumerate(model.parameters()):
                    if step < 2 or index > 5:
                        parameter.grad = None
            twins.backward()
            twins.same_gradients()
            twins.step()
            twins.same_parameters()
        for held, before in zip(kept, numbers, strict=True):
            assert torch.equal(getattr(held, "local", held), before)
        slices = len({id(each) for each in slices_of(twins.sharded)})
        assert store_of(twins.sharded).tier.nbytes >= 4096 * slices
    assert order.races == []


@pytest.mark.parametrize("place", [None, ALONE], ids=["on device", "offloaded"])
@on_ranks(2)
def test_gradients_that_were_replaced_and_kept_are_not_added_to(place: dict[str, Any] | None) -> None:
    offload = None if place is None else sw.Offload(pin=False, **place)
    with played() as order:
        model = sw.shard(seeded(Net), offload=offload)
        squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
        kept: list[Any] = [parameter.grad for parameter in model.parameters()]
        numbers = [gradient.full_tensor() for gradient in kept]
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = 0.5 * gradient
        squares(model, batch(1)).backward()  # type: ignore[no-untyped-call]
        for gradient, before in zip(kept, numbers, strict=True):
            assert torch.equal(gradient.full_tensor(), before)
    assert order.races == []


def by_data(tensor: Any) -> None:
    tensor.local.data.mul_(0.5)


def by_numpy(tensor: Any) -> None:
    tensor.local.numpy()[:] *= 0.5


def by_fused(tensor: Any) -> None:
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": True}
    torch._fused_sgd_([tensor.local], [torch.ones_like(tensor.local)], [], **options, **flags)  # type: ignore[arg-type]


def in_inference_mode(tensor: Any) -> None:
    with torch.inference_mode():
        tensor.local.mul_(0.5)


def to_parts_in_inference_mode(tensor: Any) -> None:
    piece = tensor.local
    with torch.inference_mode():
        tensor.mul_(0.5)
        piece[1:].add_(1.0)
        torch._foreach_mul_([piece], 0.5)


def by_copy(tensor: Any) -> None:
    tensor.copy_(torch.full_like(tensor, 2.0))


def by_list(tensor: Any) -> None:
    torch._foreach_add_([tensor], 1.0)


WRITES = [by_data, by_numpy, by_fused, in_inference_mode, to_parts_in_inference_mode]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@on_ranks(2)
def test_no_write_to_a_piece_is_lost(write: Callable[[Any], None]) -> None:
    """Also one that the tensor's version does not tell of. Other slices come and go between."""

    def run(offload: sw.Offload | None) -> list[Tensor]:
        model = sw.shard(seeded(Net), offload=offload)
        squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
        parameters: list[Any] = list(model.parameters())
        found = []
        for _ in range(2):
            for tensor in (*parameters, *(parameter.grad for parameter in parameters)):
                write(tensor)
            found += [tensor.detach().full_tensor() for p in parameters for tensor in (p, p.grad)]
        return found

    with played() as order:
        expected = run(None)
        for place in (ALONE, ALL):
            assert all(map(torch.equal, run(sw.Offload(pin=False, **place)), expected))
    assert order.races == []


@on_ranks(2)
def test_weights_that_were_written_in_inference_mode_are_gathered_anew() -> None:
    """Where units stay gathered, the version tells that."""

    def run(offload: sw.Offload | None) -> list[float]:
        model = sw.shard(seeded(Net), "shard_grad_op", offload=offload)
        losses = [squares(model, batch(0)).item()]
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.local.mul_(0.5)  # type: ignore[attr-defined]
            losses.append(squares(model, batch(0)).item())
        return [*losses, squares(model, batch(0)).item()]

    with played() as order:
        expected = run(None)
        assert len({*expected}) == 2
        assert run(sw.Offload(pin=False, params="cpu", **ALONE)) == expected
    assert order.races == []


@on_ranks(4)
def test_what_a_collective_writes_to_a_piece_is_not_lost() -> None:
    """Replicas' equal pieces, which a script sums once more."""
    mesh = init_device_mesh("cpu", (2, 2))

    def run(offload: sw.Offload | None) -> list[Tensor]:
        model = sw.shard(seeded(Net), "hybrid_shard", mesh=mesh, offload=offload)
        squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad.local, group=mesh.get_group(0))  # type: ignore[union-attr]
        return [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]

    with played() as order:
        assert all(map(torch.equal, run(sw.Offload(pin=False, **ALONE)), run(None)))
    assert order.races == []


@on_ranks(2)
def test_slices_that_are_only_read_do_not_go_back() -> None:
    """By norms, steps and whoever looks at whole gradients."""
    with played():
        model = sw.shard(seeded(lambda: Net(6)), offload=sw.Offload(pin=False, **ALONE))
        squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
        store_of(model).finish()
        with mock.patch.object(HostMemory, "write", side_effect=AssertionError("a gradient was written")):
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            for kind in (torch.optim.AdamW, sw.optim.AdamWBF16):
                kind(model.parameters(), lr=0.1).step()
            torch.optim.AdamW(model.parameters(), foreach=False).step()
            for parameter in model.parameters():
                parameter.grad.full_tensor()  # type: ignore[union-attr]
                copy.deepcopy(parameter.grad)
            store_of(model).finish()


@pytest.mark.parametrize("place", [ALONE, ON_HOST], ids=["device steps", "host steps"])
@on_ranks(2)
def test_norms_are_formed_in_backward(place: dict[str, Any]) -> None:
    """So clipping reads nothing for them, also after a second backward; with the bits of gradients on the device."""
    with played() as order:
        models = [sw.shard(seeded(lambda: Net(6)), offload=o) for o in (None, sw.Offload(pin=False, **place))]
        for step in range(2):
            for model in models:
                squares(model, batch(step)).backward()  # type: ignore[no-untyped-call]
            store_of(models[1]).finish()
            with mock.patch.object(HostMemory, "read", side_effect=AssertionError("read for a norm")):
                norms = [nn.utils.get_total_norm([p.grad for p in m.parameters()]) for m in models]  # type: ignore[misc]
            assert norms[0].item() == norms[1].item()
    assert order.races == []


@pytest.mark.parametrize("write", [*WRITES, torch.Tensor.zero_, by_copy, by_list], ids=lambda write: write.__name__)
@on_ranks(2)
def test_a_norm_is_that_of_what_was_written_last(write: Callable[[Any], None]) -> None:
    """However it was written, and wherever steps are taken."""

    def run(offload: sw.Offload | None) -> list[float]:
        model = sw.shard(seeded(Net), offload=offload)
        parameters: list[Any] = list(model.parameters())
        norms = []
        for step in range(2):
            for parameter in parameters[:: 1 + step]:
                if parameter.grad is not None:
                    write(parameter.grad)
                    norms.append(parameter.grad.norm().item())
            squares(model, batch(step)).backward()  # type: ignore[no-untyped-call]
            norms += [parameter.grad.norm().item() for parameter in parameters]
            for parameter in parameters[:: 2 - step]:
                write(parameter.grad)
            norms += [parameter.grad.norm().item() for parameter in parameters]
        return norms

    with played() as order:
        expected = run(None)
        for place in (ALONE, ON_HOST):
            assert run(sw.Offload(pin=False, **place)) == expected
    assert order.races == []


class Wide(nn.Module):
    """Its norms have other bits if they are formed in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 2**18)
        self.down = nn.Linear(2**18, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


@on_ranks(4)
def test_replicas_agree_on_norms_though_one_rank_reads_gradients() -> None:
    """They are formed on the device again, also where the host steps: as those of replicas, and without offload."""
    mesh = init_device_mesh("cpu", (2, 2))

    def norms_of(offload: sw.Offload | None) -> list[float]:
        model = sw.shard(seeded(Wide), "hybrid_shard", mesh=mesh, offload=offload)
        squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
        parameters: list[Any] = list(model.parameters())
        if dist.get_rank() == 1:
            assert not any(parameter.grad.local.isnan().any() for parameter in parameters)
        return [sw.clip_grad_norm_(model, math.inf, order).item() for order in (2.0, 3.0)]

    with played() as order:
        assert norms_of(sw.Offload(pin=False, **ON_HOST)) == norms_of(None)
    assert order.races == []


@on_ranks(2)
def test_a_norm_is_not_formed_of_what_a_view_may_write() -> None:
    """A view of before the sum, which tells no version."""

    def run(offload: sw.Offload | None) -> list[float]:
        model = sw.shard(seeded(lambda: Net(6)), offload=offload)
        parameters: list[Any] = list(model.parameters())
        squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
        held = [parameter.grad.local for parameter in parameters]
        squares(model, batch(1)).backward()  # type: ignore[no-untyped-call]
        for view in held:
            view.data.add_(1.0)
        return [parameter.grad.norm().item() for parameter in parameters]

    with played() as order:
        assert run(sw.Offload(pin=False, **ALONE)) == run(None)
    assert order.races == []


class Shallow(Net):
    """Runs one of its blocks, so that two forwards of one backward reduce that block's unit twice in a row."""

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks[0](self.enter(x)))  # type: ignore[no-any-return]


@on_ranks(2)
def test_a_norm_is_not_formed_while_another_sum_is_under_way() -> None:
    def run(offload: sw.Offload | None) -> list[float]:
        model = sw.shard(seeded(Shallow), offload=offload)
        (squares(model, batch(0)) + squares(model, batch(1))).backward()  # type: ignore[no-untyped-call]
        return [parameter.grad.norm().item() for parameter in model.parameters() if parameter.grad is not None]

    with played() as order:
        assert run(sw.Offload(pin=False, **ALONE)) == run(None)
    assert order.races == []


@on_ranks(2)
def test_hooks_and_edits_of_gradients() -> None:
    """A hook that reads and writes each gradient as it is handed out; a gradient of the user's own."""

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def run(offload: sw.Offload | None) -> list[float]:
        model = sw.shard(seeded(Net), offload=offload)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
        optimizer = momentum(model.parameters())
        found = []
        for step in range(3):
            squares(model, batch(step)).backward()  # type: ignore[no-untyped-call]
            first = next(model.parameters())
            first.grad = torch.full_like(first, 0.25)
            squares(model, batch(step + 50)).backward()  # type: ignore[no-untyped-call]
            found += [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return [gradient.double().sum().item() for gradient in found]

    with played() as order:
        assert run(sw.Offload(pin=False, **ALONE)) == run(None)
    assert order.races == []


@on_ranks(2)
def test_copies_and_models_whose_memory_was_released() -> None:
    with played() as order:
        twins = Twins(offload=sw.Offload(pin=False, **ALONE))
        twins.train(2)
        copied = copy.deepcopy(twins.sharded)
        squares(copied, twins.batch()).backward()  # type: ignore[no-untyped-call]
        assert all(each.state is not SliceState.READING for each in slices_of(copied))
        sw.release(twins.sharded)
        assert store_of(twins.sharded).ring_bytes == 0
        twins.backward()
        sw.release(twins.sharded)
        twins.same_gradients()
        twins.step()
        twins.train(1)
    assert order.races == []


@on_ranks(2)
def test_parameters_that_train_later() -> None:
    with played() as order:
        twins = Twins(Tied, offload=sw.Offload(pin=False, **ALONE))
        twins.train(1)
        for model in (twins.plain, twins.sharded):
            model.blocks[1].requires_grad_(True)  # type: ignore[operator, index]
            model.blocks[0].requires_grad_(False)  # type: ignore[operator, index]
        twins.train(2)
    assert order.races == []


@on_ranks(2)
def test_a_larger_unit_that_trains_later() -> None:
    """The ring has grown then, and holds no smaller buffer."""

    def run(offload: sw.Offload | None) -> tuple[list[Tensor], nn.Module]:
        model: Any = seeded(lambda: nn.Sequential(nn.Linear(4, 4000), nn.Linear(4000, 8)))
        model[1].requires_grad_(False)
        sw.shard(model, units={nn.Linear}, offload=offload)
        optimizer = momentum(model.parameters())
        for step in range(5):
            model[1].requires_grad_(step >= 2)
            for micro in range(2):
                squares(model, batch(2 * step + micro)).backward()  # type: ignore[no-untyped-call]
            sw.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return list(sw.full_state_dict(model, rank0_only=False).values()), model

    with played() as order:
        expected, _ = run(None)
        found, model = run(sw.Offload(pin=False, **ALONE))
        assert all(map(torch.equal, found, expected))
        slices = slices_of(model)
        assert store_of(model).ring_bytes == len(slices) * max(each.nbytes for each in slices)
    assert order.races == []


@on_ranks(1)
def test_where_they_cannot_lie() -> None:
    with pytest.raises(ConfigError, match=r"offload.gradients='nvme': must be None or 'cpu'"):
        sw.Offload(gradients="nvme", path="x")
    with played():
        model = sw.shard(Net(), offload=sw.Offload(pin=False, **ALONE))
        muon = sw.optim.whole_matrix(torch.optim.Muon, model, lr=0.1, adamw={"lr": 0.1})
        squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(UsageError, match="keeps the state of whole matrices on their owners"):
            muon.step()


@on_ranks(2)
def test_without_a_device_nothing_changes() -> None:
    twins = Twins(offload=sw.Offload(**ALONE))  # type: ignore[arg-type]
    twins.train(2)
    assert gradient_stores(twins.engine) == []
    assert not any_offloaded(twins.engine.units)


# Memory ---------------------------------------------------------------------------------------------------------------


DEPTH = 12


def live() -> list[Tensor]:
    """All tensors that Python knows."""
    gc.collect()
    return [value for value in gc.get_objects() if type(value) in (Tensor, nn.Parameter)]


def live_bytes(model: nn.Module, before: Sequence[Tensor]) -> int:
    """Of what has come since, but for the pinned segments of the model's gradients."""
    found = {}
    for tensor in live():
        found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    segments = [
        segment.memory
        for store in gradient_stores(require_engine(model))
        for segment in store.tier._segments  # type: ignore[attr-defined]
    ]
    for tensor in (*before, *segments):
        found.pop(tensor.untyped_storage()._cdata, None)
    return sum(found.values())


def measured(
    offload: sw.Offload | None, uses: Callable[[nn.Module], object] | None, strategy: str = "full_shard"
) -> tuple[int, int, int]:
    """Live bytes when gradients are there, what `sw.memory` says of them, and the largest ring that there was."""
    rings = [0]

    def noted(store: ShardStore) -> Tensor:
        buffer = new_buffer(store)
        rings.append(store.ring_bytes)
        return buffer

    new_buffer, before = ShardStore._new_buffer, live()
    with played(), mock.patch.object(ShardStore, "_new_buffer", noted):
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(DEPTH)])
        sw.shard(model, strategy, units={nn.Linear}, offload=offload)
        with sw.no_sync(model) if uses is None else nullcontext():
            model(torch.ones(2, 256)).sum().backward()
        for _ in range(2):
            model(torch.ones(2, 256)).sum().backward()
        if uses is not None:
            uses(model)
        found = live_bytes(model, before), sw.memory(model).now["grad_shards"]
    return *found, max(rings)


def clipped(model: nn.Module) -> None:
    sw.clip_grad_norm_(model, 1.0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    torch.optim.AdamW(model.parameters()).zero_grad(set_to_none=False)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
@pytest.mark.parametrize("uses", [None, clipped], ids=["without communication", "clipping"])
@on_ranks(1, 2)
def test_the_device_has_a_few_slices(uses: Callable[[nn.Module], object] | None, strategy: str) -> None:
    nbytes = DEPTH * 256 * 256 * 4 // torch.distributed.get_world_size()
    usual, told, _ = measured(None, uses, strategy)
    assert told == nbytes
    ours, told, ring = measured(sw.Offload(pin=False, **ALONE), uses, strategy)
    assert 0 < told == ring <= BUFFERS * nbytes // DEPTH
    beside = 2 * nbytes // DEPTH  # a tensor of a weight's size, which may or may not have been collected
    assert usual - ours == pytest.approx(nbytes - ring, abs=beside), (usual, ours, nbytes, ring, beside)


class Mixed(nn.Module):
    """Three dtypes, and so three groups."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(64, 64).bfloat16()
        self.usual = nn.Linear(64, 64)
        self.wide = nn.Parameter(torch.ones(64, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        narrow: Tensor = self.narrow(x.bfloat16())
        return x + narrow.float() + self.usual(x) * self.wide.float()


@on_ranks(1, 2)
def test_units_of_several_groups_share_the_ring() -> None:
    new_buffer, numbers = ShardStore._new_buffer, []

    def noted(store: ShardStore) -> Tensor:
        buffer = new_buffer(store)
        numbers.append(store._made)
        return buffer

    with played() as order, mock.patch.object(ShardStore, "_new_buffer", noted):
        model = nn.Sequential(*[Mixed() for _ in range(6)])
        sw.shard(model, units={Mixed}, offload=sw.Offload(pin=False, **ALONE))
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            sw.clip_grad_norm_(model, 1.0)
    assert numbers == [1, 2, 3, 4]
    assert order.races == []


@on_ranks(4)
def test_norms_of_several_groups_are_formed_beside_replicas() -> None:
    """Whose sums are added to one group's slice after another: each is still there when its norms are formed."""
    mesh = init_device_mesh("cpu", (2, 2))

    def summed(offload: sw.Offload | None) -> nn.Module:
        model = seeded(lambda: nn.Sequential(*[Mixed() for _ in range(3)]))
        sw.shard(model, "hybrid_shard", units={Mixed}, mesh=mesh, offload=offload)
        model(torch.ones(2, 64)).sum().backward()
        return model

    with played() as order:
        models = [summed(offload) for offload in (None, sw.Offload(pin=False, **ALONE))]
        store_of(models[1]).finish()
        with mock.patch.object(HostMemory, "read", side_effect=AssertionError("read for a norm")):
            norms = [sw.clip_grad_norm_(model, math.inf).item() for model in models]
        assert norms[0] == norms[1]
    assert order.races == []


@on_ranks(2)
def test_steps_in_backward_leave_nothing_to_write() -> None:
    with played() as order:
        twins = Twins(offload=sw.Offload(pin=False, **ALONE))
        twins.backward()
        twins.step()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            sw.optimizer_in_backward(twins.sharded, twins.optimizers[1])
        lines = ["shardwise: Offload(gradients='cpu') has no effect with sw.optimizer_in_backward, which frees each"]
        assert [str(one.message)[: len(lines[0])] for one in told] == lines[: int(dist.get_rank() == 0)]
        with mock.patch.object(HostMemory, "write", side_effect=AssertionError("a gradient was written")):
            for _ in range(2):
                twins.backward()
                twins.step()
                twins.same_parameters()
        assert sw.memory(twins.sharded).now["grad_shards"] == 0
        assert not any_offloaded(twins.engine.units)
    assert order.races == []


@on_ranks(2)
def test_slices_that_are_added_to_come_while_backward_computes() -> None:
    """Read since their unit's backward began, not when the sum wants them."""
    states: list[SliceState] = []

    def load(each: OffloadedSlice) -> Tensor:
        states.append(each.state)
        return usual(each)

    usual = OffloadedSlice.load
    with played() as order, mock.patch.object(OffloadedSlice, "load", load):
        model = sw.shard(seeded(lambda: Net(6)), offload=sw.Offload(pin=False, **ALONE))
        for step in range(3):
            squares(model, batch(step)).backward()  # type: ignore[no-untyped-call]
    assert order.races == []
    assert len([state for state in states if state is not SliceState.RESIDENT]) == 2 * len(slices_of(model))
    assert states.count(SliceState.OFFLOADED) <= 2, "the root's alone, whose backward begins first and ends last"


# Faults ---------------------------------------------------------------------------------------------------------------


def used(buffers: DeviceBuffers, buffer: Tensor) -> None:
    """A buffer is claimed by a stream that does not wait for the copy that left it."""
    buffers._users[buffer.data_ptr()] = {buffers._current()}


def not_waited_for(flight: Flight) -> None:
    """Sums are taken to be there when they were begun."""
    for work in flight.works:
        work._keep = None  # type: ignore[attr-defined]
    flight.is_summed = True


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a use does not wait for its copy": (DeviceBuffers, "use", lambda *_: None),
    "a copy does not wait for uses": (DeviceBuffers, "before", lambda *_: []),
    "a buffer is used again too early": (DeviceBuffers, "claim", used),
    "a copy does not wait for the sum": (InFlight, "_add", lambda _, flight: not_waited_for(flight)),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
@on_ranks(2)
def test_an_order_that_is_missing_would_be_found(fault: str | None) -> None:
    with played() as order, nullcontext() if fault is None else mock.patch.object(*FAULTS[fault]):
        model = sw.shard(seeded(Net), offload=sw.Offload(pin=False, **ALONE))
        edited_steps(model, torch.no_grad)
        accumulated(model)
    assert (order.races == []) == (fault is None)


def two_slices() -> tuple[HostMemory, OffloadedSlice, OffloadedSlice]:
    """At rest, with zeros; the ring has two buffers, of which the one that is given back first is taken first."""
    tier = HostMemory(torch.device("cpu"), "gradients", pin=False)
    store = ShardStore(tier)
    one, two = (OffloadedSlice(store, 1024, torch.float32) for _ in range(2))
    for each in (one, two):
        each.begin_anew()
        each.leave()
        each.finish()
    return tier, one, two


@pytest.mark.parametrize("forgets", [False, True])
@on_ranks(1)
def test_a_write_follows_a_read_of_its_place_to_another_buffer(forgets: bool) -> None:
    """Which nobody used, so that no use of a buffer orders them."""
    with played() as order:
        tier, one, two = two_slices()
        two.read_ahead()
        one.read_ahead()
        two.finish()
        one.finish()
        if forgets:
            tier._read.clear()
        one.claim().fill_(1.0)
        one.leave()
    assert (order.races != []) == forgets


@pytest.mark.parametrize("forgets", [False, True])
@on_ranks(1)
def test_a_read_follows_a_write_of_its_place_from_another_buffer(forgets: bool) -> None:
    with played() as order:
        tier, one, two = two_slices()
        kept = one.claim().fill_(1.0)
        two.flat()
        del kept
        two.let_go()
        one.leave()
        one.finish()
        if forgets:
            tier._written.clear()
        assert one.flat().eq(1.0).all()
    assert (order.races != []) == forgets
