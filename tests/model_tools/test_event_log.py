"""What a step does can be recorded over every kind of collectives."""

from __future__ import annotations

import torch

import shardwise as sw
from shardwise.model_tools.event_log import BACKWARD, FORWARD, EventLog, recording
from tests.engine.cases import collectives
from tests.engine.rig import Block, Net, on_ranks, seeded, squares


@on_ranks(2)
def test_gathers_and_reductions_are_recorded_over_every_kind() -> None:
    for kind in ("shm", "gloo", "torch"):
        with collectives(kind):
            model = sw.shard(seeded(Net), units={Block})
        log = EventLog()
        squares(model, torch.ones(2, 4)).backward()
        with recording(model, log):
            squares(model, torch.ones(2, 4)).backward()
        assert {"all_gather", "reduce_scatter"} <= {call.op for call in log.calls}, kind
        assert {FORWARD, BACKWARD} <= {span.what for span in log.spans}, kind
