"""Steps of a model compiled for devices that are not there, in a process of its own: what they need and send.

XLA compiles for as many devices as a process has, and a CPU has as many as it is told when JAX starts; so the process
that asks starts another one, which has so many. Where JAX's CUDA plugin is installed it compiles for GPUs that are not
there. Nothing is allocated and nothing is run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.errors import PlanError, UserError

FLAGS = "--xla_force_host_platform_device_count={} --xla_backend_optimization_level=0"
"""LLVM's optimisation is for programs that run."""
_MISTAKE = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """One mesh and step to compile."""

    fsdp: int
    replica: int
    micro_batch: int
    """Rows of a device at once."""
    accumulation: int
    remat: str
    """As `shardwise.jax.train_step` calls it."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What to compile."""

    model: Mapping[str, Any] | str
    """A configuration of transformers, or `module:function`, called with a `jax.random.key`."""
    devices: int
    seq_len: int
    dtype: str
    """JAX's name of the dtype of parameters."""
    compute_dtype: str | None
    """Likewise of what the loss computes in; None: as parameters."""
    settings: Sequence[Setting]
    device: str
    """The kind for which to compile, if `shardwise.jax.topology` knows it; else it is the host's processor."""


def compiled_apart(wish: Wish) -> dict[str, Any]:
    """Compile in a process that has so many devices of the host.

    Returns:
        "parameters", their number; "platform" that the programs are for; "rows", for each setting the dict of a
        `shardwise.jax.report.planning.Planned`, with "page", a part of a page about it.

    Raises:
        PlanError: a mistake that the other process found, in its words.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS.format(wish.devices)}".strip()
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(asdict(wish)),
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == _MISTAKE:
        raise PlanError(done.stdout.strip())
    if done.returncode:
        raise RuntimeError(f"the process that compiles ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _compiled(wish: Mapping[str, Any]) -> dict[str, Any]:
    """What `compiled_apart` returns, for the fields of a `Wish`."""
    import math

    import jax
    import optax

    import shardwise.jax as swj
    from shardwise.jax.report.page import needs
    from shardwise.jax.trees import parts_of
    from shardwise.train.on_jax.model import builder_from, loss_of

    build = builder_from(wish["model"], wish["dtype"])
    devices = _devices(wish["device"], wish["devices"])
    rows: list[Any] = []
    for setting in (Setting(**fields) for fields in wish["settings"]):
        mesh = swj.mesh(fsdp=setting.fsdp, replica=setting.replica, devices=devices)
        shape = (setting.micro_batch * setting.accumulation * mesh.size, wish["seq_len"])
        batch = {name: jax.ShapeDtypeStruct(shape, "int32") for name in ("ids", "labels")}
        settings = {"accumulation": setting.accumulation, "compute_dtype": wish["compute_dtype"]}
        settings |= {"remat": setting.remat, "clip": 1.0}
        rows += swj.plan(build, loss_of, optax.adamw(1e-3), batch, [mesh], **settings).rows
    parameters = sum(
        math.prod(leaf.shape) for leaf in jax.tree.leaves(parts_of(swj.init(build, mesh).abstract()).params)
    )
    told = [{**row.to_dict(), "page": "\n".join(needs(row.memory, row.collectives))} for row in rows]
    return {"parameters": parameters, "platform": devices[0].platform, "rows": told}


def _devices(kind: str, count: int) -> list[Any]:
    """GPUs that are not there, where their compiler is; else those of the host."""
    import jax

    from shardwise.jax.topologies import GPUS, has_gpu_compiler, topology

    return topology(kind, count) if kind in GPUS and has_gpu_compiler() else jax.devices()


def main() -> None:
    """A wish as JSON comes in, what was found goes out; or a mistake in one line, and status 2."""
    try:
        found = _compiled(json.load(sys.stdin))
    except UserError as error:
        print(" ".join(str(error).split()))
        sys.exit(_MISTAKE)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
