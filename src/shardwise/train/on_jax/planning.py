"""Compile a model's training step for devices that do not exist here, and report the memory and the communication.

XLA compiles for as many devices as the process has, and the number of CPU devices is fixed when JAX starts. So the
caller starts another process with that many devices. If JAX's CUDA plugin is installed, it compiles for GPUs that need
not exist. Nothing is allocated and nothing is run.
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
"""XLA flags of the other process. LLVM need not optimise, because the programs are never run."""
_MISTAKE = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """One mesh and training step to compile."""

    dp_shard: int
    dp_replicate: int
    micro_batch: int
    """Rows that a device processes at once."""
    accumulation: int
    remat: str
    """The argument `remat` of `shardwise.jax.train_step`."""


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """The programs to compile."""

    model: Mapping[str, Any] | str
    """A transformers configuration, or `module:function`, which is called with a `jax.random.key`."""
    devices: int
    seq_len: int
    dtype: str
    """JAX's name of the parameters' dtype."""
    compute_dtype: str | None
    """JAX's name of the dtype that the loss is computed in; None: the parameters' dtype."""
    settings: Sequence[Setting]
    device: str
    """Kind of device to compile for. The host's CPU is used instead if it is not one of the GPUs that
    `shardwise.jax.topology` knows, or their compiler is not installed."""


def compile_in_subprocess(request: CompileRequest) -> dict[str, Any]:
    """Compile in another process, which has `request.devices` CPU devices.

    Returns:
        "parameters": the number of parameters; "platform": the platform that the programs are compiled for; "rows": for
        each setting the dict of a `shardwise.jax.report.planning.Planned`, and in it "tables", text about the program.

    Raises:
        PlanError: a user's mistake that the other process found, with its message.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS.format(request.devices)}".strip()
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(asdict(request)),
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == _MISTAKE:
        raise PlanError(done.stdout.strip())
    if done.returncode:
        raise RuntimeError(f"the process that compiles exited with status {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _compiled(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compile and return what `compile_in_subprocess` returns, given the fields of a `CompileRequest`."""
    import math

    import jax
    import optax

    import shardwise.jax as swj
    from shardwise.jax.trees import parts_of
    from shardwise.train.on_jax.model import builder_from, loss_of

    build = builder_from(request["model"], request["dtype"])
    devices = _devices(request["device"], request["devices"])
    rows: list[Any] = []
    for setting in (Setting(**fields) for fields in request["settings"]):
        mesh = swj.mesh(dp_shard=setting.dp_shard, dp_replicate=setting.dp_replicate, devices=devices)
        shape = (setting.micro_batch * setting.accumulation * mesh.size, request["seq_len"])
        batch = {name: jax.ShapeDtypeStruct(shape, "int32") for name in ("ids", "labels")}
        settings = {"accumulation": setting.accumulation, "compute_dtype": request["compute_dtype"]}
        settings |= {"remat": setting.remat, "clip": 1.0}
        rows += swj.plan(build, loss_of, optax.adamw(1e-3), batch, [mesh], **settings).rows
    parameters = sum(
        math.prod(leaf.shape) for leaf in jax.tree.leaves(parts_of(swj.init(build, mesh).abstract()).params)
    )
    rows_with_tables = [{**row.to_dict(), "tables": f"{row.memory}\n\n{row.collectives}"} for row in rows]
    return {"parameters": parameters, "platform": devices[0].platform, "rows": rows_with_tables}


def _devices(kind: str, count: int) -> list[Any]:
    """Return the devices to compile for: GPUs that need not exist, if their compiler is installed; else the host's."""
    import jax

    from shardwise.jax.topologies import GPUS, has_gpu_compiler, topology

    return topology(kind, count) if kind in GPUS and has_gpu_compiler() else jax.devices()


def main() -> None:
    """Read a request as JSON from standard input and print the result as JSON; or print a user's mistake as one line
    and exit with status 2."""
    try:
        found = _compiled(json.load(sys.stdin))
    except UserError as error:
        print(" ".join(str(error).split()))
        sys.exit(_MISTAKE)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
