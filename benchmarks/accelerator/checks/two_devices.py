"""What cannot be learned from one device, so that nobody takes this table for more than it is."""

from collections.abc import Iterator

import torch

from benchmarks.accelerator.bench import Bench, Cases
from benchmarks.accelerator.row import NO_ACCELERATOR, Row, impossible

_WHY = {
    "in-place gathers with peers' bytes": "NCCL refuses two ranks on one device, and one rank moves nothing",
    "coalescing with data": "one launch for several spans is NCCL's own doing, with peers alone",
    "overlap of gathers with compute": "needs transfers that take time",
    "hybrid groups": "needs 4 ranks: 2 shard groups of 2",
    "a second communicator for reductions": "its gain is that transfers do not queue behind one another",
    "a peer that dies or raises": "needs a peer under NCCL: its watchdog, its teardown",
}


def more(bench: Bench) -> Iterator[Row]:
    devices = 0 if bench.on_cpu else torch.accelerator.device_count()
    here = {0: NO_ACCELERATOR, 1: "one device"}.get(devices, f"{devices} devices, but this script uses one")
    for name, why in _WHY.items():
        yield impossible(name, f"{here}: {why}")


CASES: Cases = {"more": more}
