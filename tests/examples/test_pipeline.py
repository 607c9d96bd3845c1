"""Sharded pipeline stages: the losses of one process, and one gather and one reduction of each unit in a step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.examples.rig import EXAMPLES, assert_shown, losses, module, torchrun

COUNTED = f"""
import importlib.util
from collections import Counter
from unittest import mock
import shardwise as sw
from shardwise.engine.lookup import require_engine

spec = importlib.util.spec_from_file_location("pipeline", {str(EXAMPLES / "pipeline.py")!r})
pipeline = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pipeline)
calls, shard = Counter(), sw.shard

def counting(model, **options):
    engine = require_engine(shard(model, **options))
    own = engine.mesh.shard
    for name in ("all_gather", "reduce_scatter"):
        def count(collectives, *arguments, original=getattr(type(own), name), name=name, **more):
            calls[name] += collectives is own
            return original(collectives, *arguments, **more)
        setattr(type(own), name, count)
    calls["units"] = len(engine.units)
    return model

with mock.patch.object(sw, "shard", counting):
    pipeline.main()
print(f"{{calls['all_gather']}} gathers, {{calls['reduce_scatter']}} reductions, {{calls['units']}} units", flush=True)
"""


@pytest.mark.slow
def test_stages_train_as_one_process(tmp_path: Path) -> None:
    found = torchrun(4, "examples/pipeline.py", tmp_path)
    assert_shown("Pipeline stages", found)
    example = module("pipeline")
    model = example.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        batches = [example.batch_of(step, data_rank) for data_rank in range(2)]
        parts = [example.MICRO_BATCHES * example.loss_of(model(tokens), targets) for tokens, targets in batches]
        loss = torch.stack(parts).mean()
        if step % 10 == 0:
            assert losses(found)[f"step {step}"] == pytest.approx(loss.item(), abs=2e-4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_a_stage_is_gathered_and_reduced_once_in_a_step(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(COUNTED)
    printed = " ".join(torchrun(4, "counted.py", tmp_path))  # ranks may print on one line
    counts = re.findall(r"(\d+) gathers, (\d+) reductions, (\d+) units", printed)
    assert len(counts) == 4
    for gathers, reductions, units in counts:
        assert int(gathers) == int(reductions) == 60 * int(units) > 0
