"""One of several processes that train together, by the command and by the functions; prints the latter's losses.

Argument: how many steps. Which process it is stands in the environment, as for `shardwise train`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import optax

import shardwise.jax as swj
from shardwise.cli.app import run
from shardwise.errors import MismatchError


def main(steps: int) -> None:
    if status := run(["train", "tiny.toml", "train.steps=4"]):
        sys.exit(status)
    from tests.jax import small

    mesh = swj.mesh()
    step = swj.train_step(small.loss_fn, optax.adamw(small.LR), mesh)
    state = step.init(swj.init(small.create, mesh)(jax.random.key(0)))
    rows, number = small.ROWS // jax.process_count(), jax.process_index()
    losses = []
    for batch in small.batches(steps):
        mine: Any = {name: array[number * rows : (number + 1) * rows] for name, array in batch.items()}
        state, metrics = step(state, mine)
        losses.append(float(metrics["loss"]))
    uneven: Any = {name: array[: 2 * rows if number else rows // 2] for name, array in batch.items()}
    try:
        step(state, uneven)
        said = ""
    except MismatchError as error:
        said = str(error)
    print(json.dumps({"devices": mesh.size, "local": jax.local_device_count(), "losses": losses, "uneven": said}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
