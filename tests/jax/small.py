"""Small models that tests of several files train, and what their programs have in common."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardwise.jax as swj

VOCAB, WIDTH, ROWS, LENGTH = 64, 32, 16, 8
LR = 3e-3
"""Of AdamW: 50 steps halve the loss and no more, so that what devices round differently stays small beside it."""


def create(key: Any) -> dict[str, Any]:
    """Two stacked blocks between an embedding and its transpose; every array divides by 8."""
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (VOCAB, WIDTH)) * 0.1,
        "layers": {
            "up": jax.random.normal(keys[1], (2, WIDTH, 4 * WIDTH)) * 0.1,
            "down": jax.random.normal(keys[2], (2, 4 * WIDTH, WIDTH)) * 0.1,
        },
    }


def loss_fn(params: Any, batch: Any, rng: Any, rows: bool = True) -> tuple[Any, Any]:
    """Next-token cross-entropy, over targets that are not negative."""
    tokens, targets = batch["tokens"], batch["targets"]

    def block(x: Any, layer: Any) -> tuple[Any, None]:
        x = swj.keep_rows(x) if rows else x
        return x + jax.nn.relu(x @ layer["up"]) @ layer["down"], None

    x, _ = jax.lax.scan(block, params["embed"][tokens], params["layers"])
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, jnp.maximum(targets, 0))
    return (losses * (targets >= 0)).sum(), (targets >= 0).sum()


def batches(count: int, rows: int = ROWS) -> list[dict[str, np.ndarray]]:
    """Targets are missing in places, and more so in the first rows."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        tokens = rng.integers(0, VOCAB, (rows, LENGTH), dtype=np.int32)
        missing = rng.random((rows, LENGTH)) < np.linspace(0.8, 0.0, rows)[:, None]
        found.append({"tokens": tokens, "targets": np.where(missing, -1, (tokens * 3 + 1) % VOCAB).astype(np.int32)})
    return found


def abstract_batch(rows: int = ROWS) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32) for name in ("tokens", "targets")}


def on(devices: int, **axes: int) -> Any:
    """A mesh of the first so many devices."""
    return swj.mesh(**axes, devices=jax.devices()[:devices])


@cache
def whole() -> Any:
    """The functional model's initial parameters, on the host."""
    return jax.tree.map(np.asarray, jax.jit(create)(jax.random.key(0)))


def start(mesh: Any) -> Any:
    """They, sharded; nothing is compiled."""
    return swj.shard(whole(), mesh)


@cache
def losses(devices: int, steps: int, **settings: Any) -> tuple[float, ...]:
    """Of a run of the functional model; shared by tests, as its programs are."""
    axes = {name: settings.pop(name) for name in ("dp_shard", "tp", "dp_replicate") if name in settings}
    mesh = on(devices, **axes)
    step = swj.train_step(loss_fn, optax.adamw(LR), mesh, **settings)
    state = step.init(start(mesh))
    found = []
    for batch in batches(steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return tuple(found)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float) -> None:
        sharded = nnx.with_partitioning(nnx.initializers.normal(0.1), (None, "dp_shard"))
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, kernel_init=sharded, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Any, scale: float = 1.0) -> Any:
        return x + scale * self.dropout(self.down(nnx.relu(self.up(x))))


class Net(nnx.Module):
    """Blocks in a list, one annotated kernel each, an embedding used twice, running means, dropout."""

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.1) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, dropout) for _ in range(2)])
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.head = self.embed

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head.attend(self.norm(x))


def module_loss_fn(model: Net, batch: Any, rng: Any) -> tuple[Any, Any]:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), jnp.maximum(batch["targets"], 0))
    weight = batch["targets"] >= 0
    return (losses * weight).sum(), weight.sum()
