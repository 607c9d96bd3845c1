"""JAX's processes in a run, and the run's devices."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from shardwise.errors import MeshError, UserError
from shardwise.jax.checkpoint.processes import Processes
from shardwise.jax.devices import DATA_AXES, can_wait_for_ever, rows
from shardwise.suggest import divisors
from shardwise.train.config.schema import Config

T = TypeVar("T")
HOST_DEVICES = 8
"""Number of CPU devices that JAX is asked for if the configuration does not give a number."""
_FLAG = "--xla_force_host_platform_device_count"
_COORDINATOR = "JAX_COORDINATOR_ADDRESS"


class RunProcesses(Processes):
    """The processes of a run. Every method is collective."""

    def connect(self, over: Mesh) -> None:
        """Connect this process's CPU devices with those of other processes, for all groups along the mesh's axes.

        gloo connects a group at its first collective, where the peer that arrives first waits at most half a minute for
        the others. Without this call that would happen in the first step, before which each process compiles, and one
        may take much longer than another. Once connected, groups wait for half an hour.
        """
        if self.world_size == 1 or over.devices.flat[0].platform != "cpu":
            return
        ones = jax.make_array_from_callback((over.size,), rows(over), lambda at: np.ones(over.size)[at])
        spec = rows(over).spec
        programs = []
        for axes in [*((axis,) for axis in DATA_AXES), DATA_AXES]:
            add = partial(jax.lax.psum, axis_name=axes)
            total = jax.shard_map(add, mesh=over, in_specs=spec, out_specs=spec, check_vma=False)
            programs.append(jax.jit(total).lower(ones).compile())
        self.any(False)  # returns when all processes have compiled
        jax.block_until_ready([program(ones) for program in programs])


def started(config: Config) -> tuple[RunProcesses, list[Any]]:
    """Join the other processes, if the environment names them, and return the run's processes and devices.

    The processes are those of `jax.distributed`, given by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID. One process has all devices of its machine; on CPUs the processes together get as many devices as
    `parallel.ranks` says.

    Raises MeshError if there are fewer devices than `parallel.ranks`, or with several processes another number; and
    UserError if the environment does not say which process this is.
    """
    wanted = config.parallel.ranks
    number, own = (_number(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
    if os.environ.get(_COORDINATOR) and (number is None or own is None or own >= number):
        raise UserError(
            f"{_COORDINATOR} is set, so JAX_NUM_PROCESSES (the number of processes) and JAX_PROCESS_ID (this "
            f"process's number, from 0) must be set too; they are {number} and {own}"
        )
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags:  # affects only CPU devices, and only if set before JAX is first used
        count = HOST_DEVICES if wanted == "auto" else max(1, wanted // (number or 1))
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={count}".strip()
    if os.environ.get(_COORDINATOR) and not jax.distributed.is_initialized():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(os.environ[_COORDINATOR], number, own)
    devices = jax.devices()
    if can_wait_for_ever(devices):
        jax.config.update("jax_enable_compilation_cache", False)
    if wanted == "auto":
        return RunProcesses(), devices
    if wanted > len(devices) or (jax.process_count() > 1 and wanted != len(devices)):
        raise MeshError(
            f"parallel.ranks={wanted}, but JAX has {len(devices)} devices ({devices[0].platform}); set it to "
            f"{'at most ' if jax.process_count() == 1 else ''}{len(devices)}, or leave parallel.ranks out"
        )
    return RunProcesses(), devices[:wanted]


def _number(name: str) -> int | None:
    """Return the value of an environment variable, None if unset. Raises UserError if it is not a whole number."""
    said = os.environ.get(name)
    if said is not None and not said.isdecimal():
        raise UserError(f"{name}={said!r} in the environment: must be a whole number")
    return None if said is None else int(said)


def axes_of(config: Config, devices: int) -> tuple[int, int]:
    """Return the sizes of the mesh axes dp_shard and dp_replicate. Raises MeshError if the shard group does not divide
    the devices."""
    parallel = config.parallel
    if parallel.strategy == "no_shard":
        return 1, devices
    if parallel.strategy != "hybrid_shard":
        return devices, 1
    group = parallel.shard_group or len(jax.local_devices())
    if devices % group:
        raise MeshError(
            f"parallel.shard_group={group} does not divide the {devices} devices; use one of {divisors(devices)}"
        )
    return group, devices // group
