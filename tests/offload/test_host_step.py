"""Optimizers that step on the host while a device computes: the same bits, nothing unordered, and no copies of what
rests in host memory. Played on CPU ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import device_tools
from shardwise.engine.lookup import require_engine
from shardwise.errors import ConfigError, PeerError, UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.offload import host_threads
from shardwise.offload.host_step import HostStep
from shardwise.offload.stores import of_owner
from shardwise.offload.tiers.host_memory import HostMemory
from shardwise.sharded.extensions.offloaded import OffloadedParameter
from tests.engine.rig import Net, Twins, batch, on_ranks, same_tensors, seeded, squares
from tests.engine.streams import played
from tests.offload.rig import LEAST, amsgrad, failing, shared_folder
from tests.optim.rig import same_states

ON_HOST = host_threads.on_host
"""Replaced by one of the simulation inside `played`."""


HOST: dict[str, Any] = {"optimizer": "cpu", "step": "cpu", "pin": False}
PLACES: dict[str, dict[str, Any]] = {
    "state": HOST,
    "weights": {**HOST, "params": "cpu"},
    "gradients": {**HOST, "gradients": "cpu"},
    "all": {**HOST, "params": "cpu", "gradients": "cpu"},
}


def on_disk() -> dict[str, Any]:
    return {**HOST, "optimizer": "nvme", "path": shared_folder(), "ring_bytes": LEAST}


# What is copied -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_nothing_in_host_memory_is_copied_for_a_step() -> None:
    with played():
        model = sw.shard(seeded(lambda: Net(6)), offload=sw.Offload(**PLACES["all"]))
        optimizer = amsgrad(model.parameters())
        for step in range(2):
            squares(model, batch(step)).backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():  # what waits to be written is written
                for tensor in (parameter, parameter.grad):
                    assert isinstance(tensor, OffloadedParameter)
                    tensor.slice.in_host_memory()
            copies = [mock.patch.object(HostMemory, way, side_effect=AssertionError(way)) for way in ("read", "write")]
            with copies[0], copies[1]:
                optimizer.step()
            optimizer.zero_grad()
        assert not any(buffer.nbytes for buffer, _ in of_owner(require_engine(model).root).host_step._free)


@pytest.mark.parametrize("clips", [sw.clip_grad_norm_, nn.utils.clip_grad_norm_], ids=["ours", "torch"])
@on_ranks(2)
def test_gradients_at_rest_are_clipped_there(clips: Callable[..., Tensor]) -> None:
    """Also zeroed; the norm is the device's."""
    with played() as order:
        model = sw.shard(seeded(lambda: Net(6)), offload=sw.Offload(**PLACES["all"]))
        on_device = sw.shard(seeded(lambda: Net(6)))
        for each in (model, on_device):
            squares(each, batch(1)).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            assert isinstance(parameter.grad, OffloadedParameter)
            parameter.grad.slice.in_host_memory()
        copies = [mock.patch.object(HostMemory, way, side_effect=AssertionError(way)) for way in ("read", "write")]
        with copies[0], copies[1]:
            norm = clips(model.parameters(), 0.1)
        assert norm.item() == clips(on_device.parameters(), 0.1).item()
        for ours, theirs in zip(model.parameters(), on_device.parameters(), strict=True):
            assert torch.equal(ours.grad.local, theirs.grad.local)  # type: ignore[union-attr]
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=False)
        assert not any(parameter.grad.local.any() for parameter in model.parameters())  # type: ignore[union-attr]
    assert order.races == []


@on_ranks(2)
def test_only_weights_come_back_to_the_device() -> None:
    """What is staged is 8 bytes for each of a rank's trained parameters, down, and 4 up."""
    with played():
        twins = Twins(optimizer=amsgrad, offload=sw.Offload(**PLACES["state"]))
        copied: list[int] = []
        copy_ = Tensor.copy_

        def counted(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if non_blocking:
                copied.append(self.nbytes)
            return copy_(self, source, non_blocking)

        twins.backward()
        with mock.patch.object(Tensor, "copy_", counted):
            twins.step()
        twins.same_parameters()
    own = sum(p.local.nbytes for p in twins.sharded.parameters())  # type: ignore[attr-defined]
    assert sum(copied) == 3 * own


@on_ranks(2)
def test_views_that_users_hold_see_the_step() -> None:
    with played() as order:
        twins = Twins(optimizer=amsgrad, offload=sw.Offload(**PLACES["all"]))
        views = [p.local for p in twins.sharded.parameters()]  # type: ignore[attr-defined]
        for _ in range(2):
            twins.backward()
            gradients = [p.grad.local for p in twins.sharded.parameters() if p.grad is not None]  # type: ignore[attr-defined]
            twins.step()
            del gradients
            twins.same_parameters()
            for view, parameter in zip(views, twins.sharded.parameters(), strict=True):
                assert view.data_ptr() == parameter.local.data_ptr() or not view.numel()  # type: ignore[attr-defined]
    assert order.races == []


@on_ranks(1)
def test_the_device_holds_no_state() -> None:
    with played():
        model = sw.shard(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), offload=sw.Offload(**PLACES["all"]))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    found, nbytes = sw.memory(model), 4 * 65 * 64 * 4
    assert found.now["optimizer"] == 0
    slices = 4 * 5 * 4096  # of four units, in whole pages
    assert found.host == {"param_shards": slices, "grad_shards": slices, "optimizer": 2 * nbytes + 8 * 4}  # and counts


@on_ranks(1)
def test_what_is_staged_for_a_step_is_counted() -> None:
    with played():
        model = sw.shard(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), offload=sw.Offload(**PLACES["state"]))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
    state = 2 * 4 * 65 * 64 * 4 + 8 * 4
    staged = 2 * 4 * 65 * 64 * 4  # weights and gradients: one portion, of one buffer a step
    assert sw.memory(model).host == {"optimizer": state, "temporaries": 2 * staged}


def forgets_arrivals(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_tools, "wait_for", lambda event: None)


def forgets_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostStep, "finish", lambda self: self._host_copies.clear())


@pytest.mark.parametrize(
    ("fault", "place"), [(forgets_arrivals, "all"), (forgets_arrivals, "state"), (forgets_weights, "state")]
)
@on_ranks(1)
def test_an_order_that_is_missing_would_be_found(fault: Callable[[pytest.MonkeyPatch], None], place: str) -> None:
    with pytest.MonkeyPatch.context() as patch, played() as order:
        fault(patch)
        Twins(optimizer=amsgrad, offload=sw.Offload(**PLACES[place])).train(3)
    assert order.races != []


# What the step leaves -------------------------------------------------------------------------------------------------


class OnDevice(Tensor):
    """A tensor of a device on which nothing computes. A copy to the host that nobody waits for has not arrived."""

    held: Tensor

    def __new__(cls, held: Tensor) -> Self:
        self: Self = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device="meta")
        self.held = held
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten._to_copy.default, f"{func} of a tensor on the device"
        held: Tensor = args[0].held
        return torch.full_like(held, torch.nan) if kwargs.get("non_blocking") else held.clone()


def stepped(prepare: Callable[[torch.optim.Optimizer], object], **offload: Any) -> dict[str, Tensor]:
    """Return the weights after three steps; `prepare` is called with the optimizer before each."""
    with played():
        model = sw.shard(seeded(Net), offload=sw.Offload(**{**HOST, **offload}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        for step in range(3):
            squares(model, batch(step)).backward()  # type: ignore[no-untyped-call]
            prepare(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return sw.full_state_dict(model, rank0_only=False)


@on_ranks(2)
def test_numbers_on_the_device_arrive_before_the_step() -> None:
    """Torch's fused steps copy learning rates and scales to the parameters' device without waiting."""

    def give(kind: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
        def prepare(optimizer: Any) -> None:
            optimizer.param_groups[0].update(lr=kind(torch.tensor(0.02)), betas=(0.5, 0.9))
            optimizer.grad_scale, optimizer.found_inf = kind(torch.tensor(4.0)), kind(torch.tensor(0.0))

        return prepare

    same_tensors(stepped(give(Tensor.clone)), stepped(give(OnDevice)))


@pytest.mark.parametrize("place", ["cpu", "nvme"])
@on_ranks(2)
def test_state_that_was_loaded_to_the_device(place: str) -> None:
    """As torch's `load_state_dict` does, and `sw.checkpoint.load` with the counter of a fused step."""

    def load(optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            assert isinstance(parameter, ShardedParameter)
            for name, value in state.items():
                held = value.local if isinstance(value, ShardedParameter) else value
                on_device = OnDevice(held.clone())
                is_sharded = isinstance(value, ShardedParameter)
                state[name] = ShardedParameter(on_device, parameter.placement) if is_sharded else on_device

    options = {"optimizer": place, "path": shared_folder()}
    same_tensors(stepped(lambda optimizer: None, **options), stepped(load, **options))


class Alternating(nn.Module):
    """Uses its second layer in every other forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.other = Net(), nn.Linear(4, 3)
        self.uses_other = True

    def forward(self, x: Tensor) -> Tensor:
        self.uses_other = not self.uses_other
        both: Tensor = self.net(x)
        return both + self.other(x) if self.uses_other else both


@on_ranks(2)
def test_parameters_that_are_first_used_later() -> None:
    """Torch's fused SGD takes no step of parameters of which only some have momentum."""
    with played():
        model = sw.shard(seeded(Alternating), offload=sw.Offload(**PLACES["all"]))
        on_device = sw.shard(seeded(Alternating))
        for each in (model, on_device):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
            for step in range(3):
                squares(each, batch(step)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        weights = [sw.full_state_dict(each, rank0_only=False) for each in (model, on_device)]
    for fqn, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][fqn], rtol=1e-5, atol=1e-6, msg=fqn)


@on_ranks(2)
def test_results_of_state_on_the_host_are_formed_on_the_device() -> None:
    """Backends of an accelerator, such as NCCL, take no tensor of the host. Here nothing comes back from the device."""
    with played():
        twins = Twins(optimizer=amsgrad, offload=sw.Offload(**PLACES["state"]))
        twins.train(1)
        state = twins.optimizers[1].state[next(twins.sharded.parameters())]["exp_avg"]
        calls: list[Callable[[], object]] = [state.full_tensor, state.norm, state.sum, state.max, state.any]
        with mock.patch.object(state.placement.shard_group, "device", torch.device("meta")):
            for call in calls:
                with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
                    call()


# The kernel and the cores ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
@on_ranks(2)
def test_a_kernel_that_nobody_chose_is_fused(kind: Any) -> None:
    """And computes what the others do, to the last bits of fp32."""
    name = f"_fused_{kind.__name__.lower()}_"
    fused: Any = getattr(torch, name)
    threads: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        threads.append(torch.get_num_threads())
        return fused(*arguments, **options)

    def trained(offload: sw.Offload | None) -> dict[str, Tensor]:
        model = sw.shard(seeded(Net), offload=offload)
        optimizer = kind(model.parameters(), lr=0.01)
        for step in range(3):
            squares(model, batch(step)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return sw.full_state_dict(model, rank0_only=False)

    before = torch.get_num_threads()
    expected = trained(None)
    with (
        played(),
        mock.patch.object(torch, name, counted),
        mock.patch.object(host_threads, "on_host", ON_HOST),
        mock.patch.object(host_threads, "fair_share", return_value=2),
    ):
        weights = trained(sw.Offload(**PLACES["all"]))
    assert torch.get_num_threads() == before
    for fqn, weight in weights.items():
        torch.testing.assert_close(weight, expected[fqn], rtol=1e-5, atol=1e-6, msg=fqn)
    assert set(threads) == {2}


def test_ranks_share_the_cores_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are bound to cores of their own share none; two to a socket share that."""
    monkeypatch.setattr(host_threads, "available_cores", lambda: frozenset(range(12)))

    def share(cores: Sequence[range]) -> int:
        monkeypatch.setattr(host_threads, "_neighbours", {})
        host_threads.share_with({str(rank): each for rank, each in enumerate(cores)})
        return host_threads.fair_share()

    everything = range(24)
    assert share([]) == 12
    assert share([range(12)] * 5) == 2
    assert share([range(12), range(12, 24)]) == 12
    assert share([range(12)] * 2 + [range(12, 24)] * 2) == 6
    assert share([range(12), everything, everything]) == 4
    with pytest.warns(UserWarning, match="12 cores for the steps of 16 ranks"):
        assert share([range(12)] * 16) == 1


@on_ranks(4)
def test_ranks_learn_of_each_others_cores() -> None:
    """Also those of other replicas, and of ranks that are bound."""
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2))
    with (
        played(),
        mock.patch.object(host_threads, "_neighbours", {}),
        mock.patch.object(host_threads, "available_cores", return_value=frozenset({rank // 3, 7})),
    ):
        sw.shard(Net(), "hybrid_shard", mesh=mesh, offload=sw.Offload(**PLACES["all"]))
        assert sorted(map(sorted, host_threads._neighbours.values())) == [[0, 7]] * 3 + [[1, 7]]


# Checkpoints and errors -----------------------------------------------------------------------------------------------


class FailsOnOneRank(torch.optim.SGD):
    """Raises on the last rank, in its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if dist.get_rank() == dist.get_world_size() - 1:
            raise MemoryError("the host is full")


@on_ranks(2)
def test_an_error_of_one_rank_reaches_all() -> None:
    with played():
        model = sw.shard(seeded(Net), offload=sw.Offload(**PLACES["all"]))
        optimizer = FailsOnOneRank(model.parameters(), lr=0.1)
        squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(MemoryError if dist.get_rank() else PeerError, match="the host is full"):
            optimizer.step()


class FailsLater(torch.optim.SGD):
    """Raises in the step of the second portion, if asked."""

    steps: int | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if FailsLater.steps is not None:
            FailsLater.steps += 1
            if FailsLater.steps == 2:
                raise MemoryError("the host is full")
        super().step()


@on_ranks(1)
def test_a_disk_that_fails_beside_the_step() -> None:
    """Nothing of the step is left for later ones: what was brought for it, copies under way."""
    path = shared_folder()
    with played() as order:
        twins = Twins(
            optimizer=lambda parameters: FailsLater(parameters, lr=0.1, momentum=0.9, foreach=False),
            offload=sw.Offload(**on_disk()),
        )
        twins.train(2)
        sw.checkpoint.save(f"{path}/one", twins.sharded, twins.optimizers[1])
        squares(twins.sharded, batch(0)).backward()  # type: ignore[no-untyped-call]
        FailsLater.steps = 0
        with failing("write", 0), pytest.raises((UsageError, MemoryError)):
            twins.optimizers[1].step()
        FailsLater.steps = None
        twins.optimizers[1].zero_grad()
        sw.checkpoint.load(f"{path}/one", twins.sharded, twins.optimizers[1])
        twins.train(2)
        same_states(twins)
    assert order.races == []


def test_it_needs_state_on_the_host() -> None:
    with pytest.raises(
        ConfigError, match=r"offload.step='cpu' steps with state that rests on the host: set offload.op"
    ):
        sw.Offload(params="cpu", step="cpu")
    with pytest.raises(ConfigError, match=r"offload.step='gpu': must be None or 'cpu'"):
        sw.Offload(optimizer="cpu", step="gpu")


@on_ranks(2)
def test_without_a_device_nothing_changes() -> None:
    twins = Twins(offload=sw.Offload(params="cpu", optimizer="cpu", gradients="cpu", step="cpu"))
    twins.train(2)
    same_states(twins)
    assert of_owner(twins.engine.root).host_step is None
