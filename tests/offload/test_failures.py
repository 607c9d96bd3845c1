"""A disk that fails on one rank: all ranks raise, go on raising, and go on together from the last checkpoint."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError, CollectiveTimeout, ConfigError, PeerError, UsageError
from shardwise.offload.stores import of_owner
from tests.engine.rig import Net, Twins, adamw, on_ranks, squares
from tests.offload.rig import LEAST, failing, momentum, shared_folder
from tests.optim.rig import same_states

PLACES: list[dict[str, Any]] = [
    {"optimizer": "nvme", "ring_bytes": LEAST},
    {"params": "nvme", "optimizer": "nvme", "ring_bytes": LEAST},
]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.local.clone() for p in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("of", PLACES, ids=["states", "both"])
@pytest.mark.parametrize("broken", ["read", "write"])
@on_ranks(2)
def test_a_disk_that_fails_on_one_rank_stops_every_rank(broken: str, of: dict[str, Any]) -> None:
    path = shared_folder()
    twins = Twins(offload=sw.Offload(path=path, **of))
    twins.train(2)
    sw.checkpoint.save(f"{path}/one", twins.sharded, twins.optimizers[1])
    kind, text = (UsageError, "is lost") if dist.get_rank() == 0 else (PeerError, r"another rank failed in .*is lost")
    squares(twins.sharded, twins.batch()).backward()
    with failing(broken, 3), pytest.raises(kind, match=text):
        twins.optimizers[1].step()
    with pytest.raises(kind, match=r"Load the last checkpoint with sw.checkpoint.load"):
        twins.optimizers[1].step()
    with pytest.raises(CheckpointError if dist.get_rank() else UsageError, match="Load the last checkpoint"):
        sw.checkpoint.save(f"{path}/two", twins.sharded, twins.optimizers[1])
    twins.optimizers[1].zero_grad()
    sw.checkpoint.load(f"{path}/one", twins.sharded, twins.optimizers[1])
    twins.train(2)
    same_states(twins)


@on_ranks(2)
def test_a_disk_that_is_full_on_one_rank_is_told_to_every_rank_by_shard() -> None:
    offload, is_first = sw.Offload(path=shared_folder(), **PLACES[1]), dist.get_rank() == 0

    def full(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if is_first:
            patch.setattr("shardwise.files.scratch_file.allocate", full)
        with pytest.raises(UsageError if is_first else PeerError, match=r"no room for \d+ bytes .*No space left"):
            sw.shard(Net(), offload=offload)
    Twins(offload=offload).train(1)


@on_ranks(2)
def test_a_read_that_fails_in_forward_on_one_rank_stops_every_rank() -> None:
    twins = Twins(offload=sw.Offload(path=shared_folder(), params="nvme"))
    twins.train(1)
    sw.release(twins.sharded)
    kind, text = (UsageError, "is lost") if dist.get_rank() == 0 else (CollectiveTimeout, "rank 0 raised .*is lost")
    for _ in range(2):
        with failing("read", 0), pytest.raises(kind, match=text):
            squares(twins.sharded, twins.batch())


@on_ranks(2)
def test_a_ring_that_is_too_small_on_one_rank_stops_every_rank_before_anything_is_updated() -> None:
    path, is_first = shared_folder(), dist.get_rank() == 0
    twins = Twins(offload=sw.Offload(optimizer="nvme", path=path, ring_bytes=4096 if is_first else LEAST))
    twins.backward()
    before = weights(twins.sharded)
    with pytest.raises(ConfigError if is_first else PeerError, match=r"offload.ring_bytes=4096"):
        twins.optimizers[1].step()
    assert not twins.optimizers[1].state
    assert all(map(torch.equal, weights(twins.sharded), before))


@pytest.mark.parametrize("ring_bytes", [2**46, 2**80])
@on_ranks(2)
def test_a_ring_that_there_is_no_memory_for_is_told_in_a_line(ring_bytes: int) -> None:
    path, is_first = shared_folder(), dist.get_rank() == 0
    twins = Twins(offload=sw.Offload(optimizer="nvme", path=path, ring_bytes=ring_bytes if is_first else LEAST))
    twins.backward()
    with pytest.raises(ConfigError if is_first else PeerError, match=rf"offload.ring_bytes={ring_bytes} .*ask for"):
        twins.optimizers[1].step()
    assert not twins.optimizers[1].state


@on_ranks(2)
def test_a_step_in_backward_that_fails_on_one_rank_stops_every_rank() -> None:
    path, is_first = shared_folder(), dist.get_rank() == 0
    twins = Twins(offload=sw.Offload(path=path, **PLACES[0]))
    sw.optimizer_in_backward(twins.sharded, twins.optimizers[1])
    squares(twins.sharded, twins.batch()).backward()
    loss = squares(twins.sharded, twins.batch())
    with failing("write", 2), pytest.raises(UsageError if is_first else PeerError, match="is lost"):
        loss.backward()
    with pytest.raises((UsageError, CheckpointError), match=r"a backward raised after some units|Load the last"):
        sw.checkpoint.save(f"{path}/one", twins.sharded, twins.optimizers[1])


@on_ranks(2)
def test_what_is_lost_must_be_in_the_checkpoint_that_is_loaded() -> None:
    path, is_first = shared_folder(), dist.get_rank() == 0
    twins = Twins(offload=sw.Offload(path=path, **PLACES[1]))
    twins.train(2)
    sw.checkpoint.save(f"{path}/whole", twins.sharded, twins.optimizers[1])
    sw.checkpoint.save(f"{path}/weights", twins.sharded)
    sw.checkpoint.load(f"{path}/weights", twins.sharded, twins.optimizers[1], strict=False)  # nothing is lost yet
    squares(twins.sharded, twins.batch()).backward()
    with failing("write", 2), pytest.raises((UsageError, PeerError), match="is lost"):
        twins.optimizers[1].step()
    with pytest.raises(
        CheckpointError if is_first else PeerError, match=r"lacks optimizer state of .*when a disk failed"
    ):
        sw.checkpoint.load(f"{path}/weights", twins.sharded, twins.optimizers[1], strict=False)
    twins.optimizers[1].zero_grad()
    with failing("write_some", 0), pytest.raises((UsageError, PeerError), match="is lost"):
        sw.checkpoint.load(f"{path}/whole", twins.sharded, twins.optimizers[1])
    with pytest.raises((UsageError, PeerError), match="is lost"):
        twins.optimizers[1].step()
    sw.checkpoint.load(f"{path}/whole", twins.sharded, twins.optimizers[1], strict=False)
    twins.train(2)
    same_states(twins)


@on_ranks(2)
def test_what_another_optimizer_kept_is_lost_where_it_is_not_loaded() -> None:
    path, is_first = shared_folder(), dist.get_rank() == 0
    twins = Twins(offload=sw.Offload(path=path, **PLACES[0]))
    twins.train(2)
    sw.checkpoint.save(f"{path}/whole", twins.sharded, twins.optimizers[1])
    old, parameter = twins.optimizers[1], next(twins.sharded.parameters())
    fresh = adamw(twins.sharded.parameters())
    sw.checkpoint.save(f"{path}/fresh", twins.sharded, fresh)
    kept = old.state[parameter]["exp_avg"]
    before = kept.local
    squares(twins.sharded, twins.batch()).backward()
    with failing("write", 2), pytest.raises((UsageError, PeerError), match="is lost"):
        old.step()
    old.zero_grad()
    twins.optimizers[1] = adamw(twins.sharded.parameters())
    sw.checkpoint.load(f"{path}/whole", twins.sharded, twins.optimizers[1])
    twins.train(1)
    same_states(twins)
    squares(twins.sharded, twins.batch()).backward()
    weights_before = weights(twins.sharded)
    with pytest.raises(UsageError if is_first else PeerError, match="only another optimizer's state was loaded"):
        old.step()
    assert all(map(torch.equal, weights(twins.sharded), weights_before))
    with pytest.raises((UsageError, CheckpointError), match="only another optimizer's state was loaded"):
        sw.checkpoint.save(f"{path}/two", twins.sharded, old)
    if is_first:
        with pytest.raises(UsageError, match="only another optimizer's state was loaded"):
            kept.to_local()
    sw.checkpoint.load(f"{path}/whole", twins.sharded, old)
    assert torch.equal(old.state[parameter]["exp_avg"].local, before)
    old.step()
    fresh.step()  # it had no state that could be lost


@on_ranks(1)
def test_state_that_outlives_its_optimizer_keeps_its_room() -> None:
    twins = Twins(offload=sw.Offload(path=shared_folder(), **PLACES[0]))
    twins.train(2)
    kept = [state["exp_avg"] for state in twins.optimizers[1].state.values()]
    before = [state.local for state in kept]
    twins.optimizers = [momentum(model.parameters()) for model in (twins.plain, twins.sharded)]
    twins.train(2)
    assert all(torch.equal(state.local, then) for state, then in zip(kept, before, strict=True))


@pytest.mark.parametrize("of", PLACES, ids=["states", "both"])
@on_ranks(2)
def test_optimizers_of_several_kinds_have_rooms_of_their_own(of: dict[str, Any]) -> None:
    twins = Twins(offload=sw.Offload(path=shared_folder(), **of))
    others = [momentum(model.parameters()) for model in (twins.plain, twins.sharded)]
    firsts = twins.optimizers
    for _ in range(3):
        for pair in (firsts, others):
            twins.optimizers = pair
            twins.train(1)
            same_states(twins)
    store = of_owner(twins.engine.root).states
    nbytes = store.tier.nbytes
    del others, pair, firsts
    twins.optimizers = [momentum(model.parameters()) for model in (twins.plain, twins.sharded)]
    twins.train(2)
    same_states(twins)
    assert store.tier.nbytes == nbytes, "rooms of optimizers that are gone are taken by those that come"


def with_amsgrad(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


def with_momentum(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["momentum"] = 0.5


@pytest.mark.parametrize(
    ("build", "change", "name"),
    [(torch.optim.AdamW, with_amsgrad, "max_exp_avg_sq"), (torch.optim.SGD, with_momentum, "momentum_buffer")],
)
@on_ranks(1)
def test_options_that_change_what_is_kept_are_refused_before_anything_is_updated(
    build: type[torch.optim.Optimizer], change: Callable[[torch.optim.Optimizer], None], name: str
) -> None:
    twins = Twins(optimizer=build, offload=sw.Offload(path=shared_folder(), **PLACES[0]))
    twins.train(1)
    change(twins.optimizers[1])
    before = weights(twins.sharded)
    squares(twins.sharded, twins.batch()).backward()
    with pytest.raises(UsageError, match=rf"would now make state '{name}' of torch.float32 for '.*'"):
        twins.optimizers[1].step()
    assert all(map(torch.equal, weights(twins.sharded), before))
