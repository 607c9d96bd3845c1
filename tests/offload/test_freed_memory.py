"""What a first step made and freed again does not stay with the process."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest

from shardwise.offload import freed_memory, state_store
from tests.engine.rig import Twins, on_ranks
from tests.offload.rig import LEAST, on_disk, shared_folder, store

GROWS = """
import ctypes
from pathlib import Path
import torch
from shardwise.offload.freed_memory import give_back_freed

def resident():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024

M_MMAP_THRESHOLD = -3
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**29)  # to which it grows by itself where large pieces come and go
before, pieces = resident(), [torch.zeros(size) for _ in range(48) for size in (2**20, 2**15)]
kept = pieces[1::2]  # between the large ones
del pieces
held = resident() - before
give_back_freed()
print(held >> 20, (resident() - before) >> 20)
"""


@pytest.mark.skipif(freed_memory._trim is None, reason="this C library gives back as it likes")
def test_what_is_freed_below_what_stays_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", GROWS], capture_output=True, text=True, check=True, timeout=120)
    held, after = map(int, done.stdout.split())
    assert held > 100
    assert after < 32


@on_ranks(1)
def test_portions_of_a_first_step_and_no_others_give_back_what_they_freed() -> None:
    twins = Twins(offload=on_disk(shared_folder(), ring_bytes=LEAST))
    with mock.patch.object(state_store, "give_back_freed") as given_back:
        twins.train(1)
        (allocation,) = store(twins)._allocations.values()
        assert given_back.call_count == len(allocation.portions) > 4
        twins.train(2)
        assert given_back.call_count == len(allocation.portions)
