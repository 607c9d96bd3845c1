"""The forecast of a job's memory and time from its recorded step."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import Job, suited_to
from shardwise.plan.dry_run.recording import GROUPED, Allocate, Kernel, Recording, StepEvent, StepPhase
from shardwise.plan.hardware.devices import Hardware
from shardwise.plan.hardware.node import node_of
from shardwise.plan.hardware.spread import spread_of
from shardwise.plan.models.source import ModelLike, ModelSource, resolve
from shardwise.plan.offload.host_work import host_task
from shardwise.plan.offload.memory import offloaded
from shardwise.plan.simulate.allocator import ROUND_BYTES, Segments, peak_of, reserved_bytes
from shardwise.plan.simulate.mfu import Dimensions, mfu
from shardwise.plan.simulate.network import Cluster
from shardwise.plan.simulate.other_engines.model import engine_allocations, ordered_as
from shardwise.plan.simulate.roofline import DEFAULT, Roofline
from shardwise.plan.simulate.simulation import simulate
from shardwise.plan.simulate.timeline import Timeline
from shardwise.plan.simulate.trace import write_trace
from shardwise.policy.kinds import KINDS

MIB = 2**20
CONTEXT_BYTES = 512 * MIB
"""Memory of a CUDA context with the kernels of torch, cuBLAS and NCCL loaded; outside the allocator."""
CONTEXT_SOURCE = (
    "assumed: about 300 MiB since CUDA 11.7, over 1 GiB before; https://github.com/pytorch/pytorch/issues/107667"
)
CONTEXT_RANGE_BYTES = (300 * MIB, 1024 * MIB)
"""The range that `CONTEXT_SOURCE` reports."""
NCCL_BYTES = 688 * MIB
"""Memory of the buffers of one communicator; outside the allocator."""
NCCL_SOURCE = "688 MiB per communicator, as measured on A100s: https://github.com/NVIDIA/nccl/issues/964"
_WORKSPACES = {"h100": 32 * MIB, "h200": 32 * MIB, "b200": 32 * MIB}
"""Bytes of cuBLAS's workspace for one stream and thread, by the beginning of the device's name: 32 MiB from Hopper on,
otherwise `_WORKSPACE_BYTES`, 8.1 MiB (PyTorch's aten/src/ATen/cuda/CublasHandlePool.cpp). Inside the allocator."""
_WORKSPACE_BYTES = 8320 * 1024
_WORKSPACE_THREADS = 2
"""Threads with a workspace: that of forward and that of backward."""


_HOUR_S = 3600
_DAY_HOURS = 24


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a job, in the currency of the price. Devices are paid for as long as the job has them, busy or
    not."""

    per_device_hour: float
    """The price of one device for an hour."""
    per_step: float
    """Cost of a step on all devices."""
    per_million_tokens: float
    per_day: float
    """Cost of a day of all devices."""


def cost_of(per_device_hour: float, devices: int, step_time_s: float, tokens_per_step: float) -> Cost:
    """Return the cost of a job.

    Args:
        per_device_hour: the price of one device for an hour.
        devices: the number of the job's devices.
        step_time_s: seconds of a step.
        tokens_per_step: tokens of a step over all devices.
    """
    per_step = per_device_hour * devices * step_time_s / _HOUR_S
    return Cost(
        per_device_hour=per_device_hour,
        per_step=per_step,
        per_million_tokens=per_step / tokens_per_step * 1e6,
        per_day=per_device_hour * devices * _DAY_HOURS,
    )


@dataclass(frozen=True)
class Forecast:
    """Memory, time and throughput of one configuration, for one rank."""

    job: Job
    parameters: int
    """Elements of all parameters, global."""
    peak_memory_bytes: int
    """The most live bytes, rounded as the device's allocator rounds: PyTorch's "allocated"."""
    reserved_memory_bytes: int
    """Bytes that the caching allocator takes from the device for them: PyTorch's "reserved"."""
    context_bytes: int
    """Bytes of the CUDA context, outside the allocator."""
    nccl_bytes: int
    """Bytes of the communicators' buffers, outside the allocator."""
    usable_bytes: int
    """Bytes that the device has for a program: reserved memory, context and NCCL's buffers together."""
    memory: dict[str, int]
    """Bytes at the peak by kind, every kind of `sw.memory`; adds up to `peak_memory_bytes`."""
    peak_at: tuple[str, str]
    """(phase, fqn of the module) at the peak."""
    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    """Model FLOPs utilisation: 6 N + 12 L d s operations per token over the dense peak of the compute dtype; 4 instead
    of 6 for frozen parameters; N without the experts that a token is not sent to and what gets no gradient."""
    compute_s: float
    """Seconds of a step in which the compute stream runs kernels."""
    exposed_comm_s: float
    """Seconds of a step in which computation waits for communication."""
    exposed_offload_s: float
    """Seconds of a step in which computation waits for copies from and to host and disk."""
    copies_s: float
    """Seconds that these copies take before the optimizer's step, in the busier direction: a lower bound of the time
    until then."""
    step_copies_s: float
    """The part of `exposed_offload_s` in the optimizer's step, where copies overlap with no computation."""
    host_bytes_per_rank: int
    """Pinned host memory for what is offloaded there. On a CPU rank it is part of `memory`."""
    disk_bytes_per_rank: int
    bytes_sent_per_rank: int
    """Bytes that a rank sends in a step."""
    flops_per_rank: int
    """Operations executed in a step, recomputation included."""
    price_per_hour: float | None
    """Price of one device: the job's, else that of the hardware data; None if neither is known."""
    recording: Recording
    """The recorded step that the forecast was made from."""

    @property
    def fits(self) -> bool:
        """Whether the device's memory suffices, and the host's for what is offloaded there."""
        on_device = self.reserved_memory_bytes + self.context_bytes + self.nccl_bytes
        return on_device <= self.usable_bytes and self.host_bytes_per_node <= self.host_has_bytes

    @property
    def late_s(self) -> float:
        """Seconds of a step in which computation waits because the host has not launched the next kernel."""
        return self.step_time_s - self.compute_s - self.exposed_comm_s - self.exposed_offload_s

    @property
    def host_bytes_per_node(self) -> int:
        """`host_bytes_per_rank` of all ranks of a node."""
        return self.host_bytes_per_rank * self.job.gpus_per_node

    @property
    def disk_bytes_per_node(self) -> int:
        """`disk_bytes_per_rank` of all ranks of a node."""
        return self.disk_bytes_per_rank * self.job.gpus_per_node

    @property
    def host_has_bytes(self) -> float:
        """Memory of a node's host; infinite if the device is sold in hosts of any size."""
        has = node_of(self.job.hardware).memory_bytes
        return inf if has is None else has.value

    @property
    def tokens_per_s_range(self) -> tuple[float, float] | None:
        """The range in which tokens per second and GPU are expected: most published runs were as close to their
        forecasts (`plan.hardware.spread`). None if nothing comparable was published."""
        spread = spread_of(self.job.hardware)
        return None if spread is None else spread.around(self.tokens_per_s_per_gpu)

    @property
    def cost(self) -> Cost | None:
        """The cost of the job; None if the price of a device is not known."""
        if self.price_per_hour is None:
            return None
        devices = self.job.world_size
        tokens = self.tokens_per_s_per_gpu * devices * self.step_time_s
        return cost_of(self.price_per_hour, devices, self.step_time_s, tokens)

    @cached_property
    def timeline(self) -> Timeline:
        """When everything in the step runs. Raises PlanError if the forecast has no events, like most of a search's."""
        if not self.recording.events:
            raise PlanError(
                "a search keeps only the events of its best configuration; call sw.plan.forecast(model, ...) for "
                "this job"
            )
        return _timeline(self.recording)

    def trace(self, path: Path | str) -> Path:
        """Write the timeline in the format of Chrome's and Perfetto's trace viewers. Returns the path."""
        return write_trace(self.timeline, path)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON: every field but the recording, the range of tokens per second, the job's
        choices, whether it fits, and its cost."""
        own = {"job", "recording", "price_per_hour"}
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        plain["peak_at"] = {"phase": self.peak_at[0], "module": self.peak_at[1]}
        plain["tokens_per_s_range"] = self.tokens_per_s_range
        cost = None if self.cost is None else asdict(self.cost)
        plain |= {"host_bytes_per_node": self.host_bytes_per_node, "disk_bytes_per_node": self.disk_bytes_per_node}
        return {"job": self.job.to_dict(), **plain, "fits": self.fits, "cost": cost}


def forecast(model: ModelLike, **arguments: Any) -> Forecast:
    """Forecast the memory and speed of training a model, without a GPU.

    The real engine runs dry for one rank; memory and time are simulated from its recording.

    Args:
        model: a packaged shape's name, the path of a config.json or Hugging Face directory, a transformers
            configuration as a dict with its "model_type", "module:function", or a callable that builds an nn.Module
            (called on the meta device).
        arguments: fields of `Job`, by name. If `seq_len` is not given and the model's longest sequence is shorter than
            the default, it is the model's longest. Sequences longer than `max_position_embeddings` are refused; with
            rotary positions, which go on, there is a warning.

    Raises:
        PlanError: an unknown model or device, a model that cannot be run dry, or sequences too long for it.
        ConfigError: an invalid argument.
    """
    source = resolve(model)
    job = Job.of(**suited_to(source, arguments))
    if (warning := source.beyond(job.seq_len)) is not None:
        warnings.warn(f"shardwise: {warning}", stacklevel=2)
    return forecast_of(recorded(source, job))


def recorded(source: ModelSource, job: Job, rank: int = 0) -> Recording:
    """Return the recording of a job. Args and raises: as `record`."""
    from shardwise.plan.dry_run.step import record  # imports torch
    from shardwise.plan.models.adapted import with_adapters

    return record(with_adapters(source.builder(job.attention), job.lora, job.compute_dtype, job.tp), job, rank)


def _signature() -> inspect.Signature:
    """Return the signature that `help` and editors show: the model, then every field of a job."""
    model = inspect.signature(forecast).parameters["model"]
    choices = [choice.replace(kind=choice.KEYWORD_ONLY) for choice in inspect.signature(Job).parameters.values()]
    return inspect.Signature([model, *choices], return_annotation="Forecast")


forecast.__signature__ = _signature()  # type: ignore[attr-defined]


def forecast_of(recording: Recording) -> Forecast:
    """Return the forecast for a recorded step.

    Raises:
        PlanError: an unknown device or interconnect.
    """
    job, facts = recording.job, recording.facts
    hardware = job.hardware
    replayed = engine_allocations(recording)
    moved = offloaded(recording, replayed.events)
    events = (*_workspaces(job, hardware), *moved.events)
    rounding = 1 if job.on_cpu else ROUND_BYTES
    peak = peak_of(events, rounding)
    context = (0 if job.on_cpu else CONTEXT_BYTES) if job.context_bytes is None else job.context_bytes
    nccl = nccl_bytes_of(job)
    usable = int(hardware.memory.usable_bytes.value)
    timeline = _timeline(recording)
    tokens_per_s = facts.tokens_per_rank(job) / job.ranks_per_batch / timeline.step_time_s
    used = facts.params - facts.unused - _idle_params(recording)
    dimensions = Dimensions(used, facts.embeddings, facts.layers, facts.width, min(facts.trainable, used))
    return Forecast(
        job=job,
        parameters=facts.params,
        peak_memory_bytes=peak.nbytes,
        reserved_memory_bytes=peak.nbytes
        if job.on_cpu
        else reserved_bytes(events, Segments(job.segments), usable - context - nccl, replayed.streams, replayed.late),
        context_bytes=context,
        nccl_bytes=nccl,
        usable_bytes=usable,
        memory={kind: peak.kinds.get(kind, 0) for kind in KINDS},
        peak_at=(peak.phase, peak.module),
        step_time_s=timeline.step_time_s,
        tokens_per_s_per_gpu=tokens_per_s,
        mfu=mfu(tokens_per_s, dimensions, facts.sequence, hardware.peak(job.compute_dtype)),
        compute_s=timeline.step_time_s - timeline.exposed_comm_s - timeline.exposed_offload_s - timeline.late_s,
        exposed_comm_s=timeline.exposed_comm_s,
        exposed_offload_s=timeline.exposed_offload_s,
        copies_s=timeline.copies_s,
        step_copies_s=timeline.step_copies_s,
        host_bytes_per_rank=moved.host_bytes,
        disk_bytes_per_rank=moved.disk_bytes,
        bytes_sent_per_rank=round(timeline.bytes_sent),
        flops_per_rank=timeline.flops,
        price_per_hour=price_of(job),
        recording=recording,
    )


def nccl_bytes_of(job: Job) -> int:
    """Return the bytes of the buffers of a job's communicators."""
    if job.nccl_bytes is not None:
        return job.nccl_bytes
    sizes = [job.replicas, job.shard_ranks, job.cp, job.tp]
    sizes += [job.ep, job.shard_ranks // job.ep] if job.ep > 1 else []
    groups = sum(ranks > 1 for ranks in sizes) * (2 if job.separate_reductions else 1)
    return 0 if job.on_cpu else groups * NCCL_BYTES


def _idle_params(recording: Recording) -> int:
    """Return the number of parameters of experts that a token is not sent to: grouped products hold them but do not
    compute with them."""
    tokens = recording.facts.sequence * recording.job.micro_batch / recording.job.cp
    idle = 0.0
    for event in recording.events:
        if isinstance(event, Kernel) and event.phase is StepPhase.FORWARD and event.name in GROUPED and event.matmul:
            groups, _, n, k = event.matmul
            idle += groups * recording.job.ep * n * k - event.flops / (2 * tokens)
    return round(idle * recording.job.tp / recording.job.accumulation)


def price_of(job: Job) -> float | None:
    """Return the price of one device for an hour: the job's, else that of the hardware data, else None."""
    listed = job.hardware.price
    return job.price_per_hour if job.price_per_hour is not None or listed is None else listed.per_hour.value


def _timeline(recording: Recording) -> Timeline:
    job = recording.job
    hardware = job.hardware
    cluster = Cluster(hardware, job.node_interconnect, job.gpus_per_node, job.nodes, DEFAULT.links, job.tp, job.ep)
    events = ordered_as(job.engine, recording.events)
    roofline = Roofline(hardware, DEFAULT, job.compile)
    work = host_task(job, recording.facts, offloaded(recording, recording.events))
    return simulate(events, roofline, cluster, job.slots, job.separate_reductions, work)


def _workspaces(job: Job, hardware: Hardware) -> tuple[StepEvent, ...]:
    if job.on_cpu:
        return ()
    nbytes = next((n for name, n in _WORKSPACES.items() if hardware.name.startswith(name)), _WORKSPACE_BYTES)
    return tuple(Allocate(-1 - n, nbytes, "other", "", StepPhase.SETUP) for n in range(_WORKSPACE_THREADS))
