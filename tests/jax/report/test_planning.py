"""Plans of several meshes, from programs that are not run."""

from __future__ import annotations

import pytest

swj = pytest.importorskip("shardwise.jax", reason="the extra jax is not installed")

import json  # noqa: E402

import jax  # noqa: E402
import optax  # noqa: E402

from shardwise.errors import PlanError  # noqa: E402
from tests.jax import small  # noqa: E402


def test_a_row_for_each_mesh() -> None:
    meshes = [small.on(1), small.on(4), small.on(8, dp_shard=4, dp_replicate=2)]
    before = len(jax.live_arrays())
    plan = swj.plan(small.create, small.loss_fn, optax.adamw(1e-2), small.abstract_batch(256), meshes, clip=1.0)
    assert len(jax.live_arrays()) <= before
    assert [row.devices for row in plan.rows] == [1, 4, 8]
    one, four, eight = plan.rows
    for name in ("parameters", "optimizer state"):
        whole, quarter, hybrid = (next(k.device_bytes for k in row.memory.kinds if k.name == name) for row in plan.rows)
        assert quarter == hybrid == pytest.approx(whole / 4, rel=0.01)
    assert one.collectives.parts == ()
    assert four.collectives.counts().keys() >= {"all-gather"}
    assert any(part.axes == "dp_replicate" for part in eight.collectives.parts)
    assert one.flops > 3 * eight.flops
    fitting = plan.fitting(four.memory.peak_bytes)
    assert four in fitting
    assert one not in fitting
    assert len(str(plan).splitlines()) == 4
    assert json.loads(json.dumps(plan.to_dict()))["rows"][1]["axes"] == {"dp_replicate": 1, "dp_shard": 4, "tp": 1}


def test_no_mesh() -> None:
    with pytest.raises(PlanError, match="give at least one mesh"):
        swj.plan(small.create, small.loss_fn, optax.adamw(1e-2), small.abstract_batch(), [])
