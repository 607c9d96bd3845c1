"""Weights and state in every combination of places: one training run, to the bit, from place to place."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from tests.engine.rig import on_ranks
from tests.offload.rig import LEAST, Run, shared_folder

PLACES = (None, "cpu", "nvme")


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
