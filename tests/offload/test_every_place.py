"""Weights and state in every combination of places: one training run, to the bit, from place to place."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.engine.rig import Net, batch, on_ranks, seeded, squares
from tests.offload.test_on_disk import LEAST, shared_folder

PLACES = (None, "cpu", "nvme")


class Everything(Net):
    """Two blocks share a matrix; one block and a part of another do not train, and are in few bits if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]
        self.blocks[1].requires_grad_(False)
        self.blocks[3].norm.requires_grad_(False)  # type: ignore[union-attr]


class Run:
    """A model and its optimizer, with offload or without."""

    def __init__(self, frozen: str | None, offload: sw.Offload | None) -> None:
        precision = sw.Precision(frozen=frozen)
        self.model: nn.Module = sw.shard(seeded(Everything), precision=precision, offload=offload)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.05)

    def step(self, index: int) -> list[float]:
        """Two micro-batches, the first without communication, and a clipped step. Returns losses and norm."""
        with sw.no_sync(self.model):
            first = squares(self.model, batch(2 * index))
            first.backward()
        second = squares(self.model, batch(2 * index + 1))
        second.backward()
        norm = sw.clip_grad_norm_(self.model, 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [first.item(), second.item(), norm.item()]

    def weights(self) -> dict[str, Tensor]:
        return sw.full_state_dict(self.model, rank0_only=False)


@on_ranks(2)
def test_one_run_goes_through_every_combination_of_places() -> None:
    path = shared_folder()
    for frozen in (None, "nf4"):
        usual = Run(frozen, None)
        usual.step(0)
        sw.checkpoint.save(f"{path}/{frozen}-0", usual.model, usual.optimizer)
        for index, (params, optimizer) in enumerate(itertools.product(PLACES, PLACES)):
            offload = sw.Offload(params=params, optimizer=optimizer, path=path, ring_bytes=LEAST)
            run = Run(frozen, offload)
            sw.checkpoint.load(f"{path}/{frozen}-{index}", run.model, run.optimizer)
            for step in (2 * index + 1, 2 * index + 2):
                assert run.step(step) == usual.step(step), (params, optimizer, frozen)
            sw.checkpoint.save(f"{path}/{frozen}-{index + 1}", run.model, run.optimizer)
            ours, theirs = run.weights(), usual.weights()
            assert all(torch.equal(ours[name], value) for name, value in theirs.items()), (params, optimizer, frozen)
    dist.barrier()
    assert not [found for found in Path(path).iterdir() if found.is_file()], "scratch files have no names"
