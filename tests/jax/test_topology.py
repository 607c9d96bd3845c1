"""Devices that are not there: mistakes, and where JAX's CUDA plugin is installed, a GPU's program."""

from __future__ import annotations

import pytest

swj = pytest.importorskip("shardwise.jax", reason="the extra jax is not installed")

import os  # noqa: E402
from typing import Any  # noqa: E402

import optax  # noqa: E402

from shardwise.errors import UsageError  # noqa: E402
from shardwise.jax.topologies import GPUS, has_gpu_compiler  # noqa: E402
from tests.jax import small  # noqa: E402


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            ("h10", 8),
            r"topology\('h10'\): must be one of a100, h100, h200, or a TPU such as 'v5e:4x4'; did you mean h100",
        ),
        (("h100",), r"topology\('h100', None\): the number of GPUs must be"),
        (("h100", 0), r"topology\('h100', 0\): the number of GPUs must be"),
        (("v5e:4x4", 8), "leave the count out, because the shape of a TPU gives it"),
        (("h100", 8), r"needs JAX's CUDA plugin, which is not installed: pip install"),
        (("v5e:4x4",), "needs libtpu, which is not installed: pip install"),
    ],
)
def test_mistakes_are_one_line(asked: tuple[Any, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.jax.topologies.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=said):
        swj.topology(*asked)


@pytest.mark.skipif(
    not has_gpu_compiler() or os.environ.get("JAX_PLATFORMS") != "cpu",
    reason="needs JAX's CUDA plugin, and JAX_PLATFORMS=cpu",
)
@pytest.mark.parametrize("kind", GPUS)
def test_a_gpus_program_reduce_scatters(kind: str) -> None:
    mesh = swj.mesh(devices=swj.topology(kind, 8))
    step = swj.train_step(small.loss_fn, optax.adamw(small.LR), mesh, compute_dtype="bf16")
    state = step.init(swj.init(small.create, mesh).abstract())
    program = step.lower(state, small.abstract_batch(512)).compile()
    found = swj.collectives(program)
    assert found.platform == "gpu"
    assert set(found.counts()) == {"all-gather", "reduce-scatter"}
    assert {"layers.down, layers.up", "embed"} <= {part.what for part in found.parts}
    assert {part.dtype for part in found.parts} <= {"bf16", "f32"}
