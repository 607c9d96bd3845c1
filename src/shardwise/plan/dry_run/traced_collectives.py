"""Dry collectives that record every call; for a GPU job, as `StreamCollectives` launches them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from shardwise.comm.all_to_all import AllToAllPart, sent_parts
from shardwise.engine.setup.mesh_axes import DividedMesh
from shardwise.fsdp.collectives import (
    FINISHED,
    Buffer,
    Combine,
    FlatSpan,
    Reduction,
    Work,
    check_reductions,
    deliver,
    finishing_op,
    slice_of,
)
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.torch_collectives import DryCollectives
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recorder import Pending, Recorder
from shardwise.plan.dry_run.recording import SAME_EXPERTS, reductions_of, slices_of


class TracedCollectives(DryCollectives):
    """The collectives of one group in a dry run. A group of one rank moves nothing and records no collectives.

    Tensors are CPU tensors in any case; a GPU job differs from a CPU job only in what the engine asks of its
    collectives.
    """

    def __init__(
        self,
        group: str,
        rank: int,
        world_size: int,
        recorder: Recorder,
        on_streams: bool = False,
        marks: Collection[str] = (),
    ) -> None:
        """
        Args:
            group: shard, replicate, secondary, `SAME_EXPERTS`, `TENSOR` or `EXPERTS`.
            on_streams: whether the job's devices are accelerators.
            marks: "grads" if this is the first group that reduces a unit's gradients, "reduced" if it is the last.
        """
        super().__init__(rank, world_size, torch.device("cpu"))
        self.on_streams = on_streams
        self.group = group
        self._recorder = recorder
        self._records_order = on_streams and world_size > 1
        self._marks = marks

    def mark(self) -> Work:
        """Record that gathers from here on wait for the computation so far. No communication."""
        if self._records_order:
            self._recorder.fence("written", self.group)
        return super().mark()

    def writing(self, buffer: Buffer, after: Work = FINISHED) -> AbstractContextManager[None]:
        """Record the operations inside as running on the slices' stream. No communication."""
        if self.world_size == 1:
            return super().writing(buffer, after)
        return self._recorder.on_stream(slices_of(self.group))

    def settle(self) -> None:
        """Record that computation from here on waits for the copies of slices so far. No communication."""
        if self._records_order:
            self._recorder.fence("settled", self.group)

    def all_gather(self, buffer: Buffer, spans: tuple[FlatSpan, ...], label: int = 0) -> Work:
        """Record the call. No communication."""
        work = super().all_gather(buffer, spans, label)
        nbytes = sum(span.shard_bytes for span in spans) * self.world_size
        return self._issue("all_gather", nbytes, self._recorder.unit_of(buffer.bytes), work)

    @torch.no_grad()
    def reduce_scatter(self, buffer: Buffer, reductions: tuple[Reduction, ...], label: int = 0) -> Work:
        """Record the call and, on streams, the kernels that process its sums. No communication."""
        unit = self._recorder.unit_of(buffer.bytes)
        nbytes = sum(reduction.flat.nbytes for reduction in reductions)
        if not self._records_order:
            return self._reduce("reduce_scatter", nbytes, unit, super().reduce_scatter(buffer, reductions, label))
        check_reductions(reductions, self.world_size)
        work = self._reduce("reduce_scatter", nbytes, unit, FINISHED)
        with self._recorder.on_stream(reductions_of(self.group)):
            for r in reductions if finishing_op(reductions, self.world_size) is None else ():
                deliver(slice_of(r.flat, self.rank, self.world_size), r, self._factors)
        return work

    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        """Record the call. No communication."""
        unit = self._recorder.unit_of(tensor)
        return self._reduce("all_reduce", tensor.nbytes, unit, super().all_reduce(tensor, op, after, label))

    def all_to_all(self, buffer: Buffer, parts: tuple[AllToAllPart, ...], into: Tensor, label: int = 0) -> Work:
        """Record the call, with the bytes that this rank sends. No communication."""
        return self._issue("all_to_all", sum(part.nbytes for part, _ in sent_parts(parts, self.rank)), None, FINISHED)

    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        """Record the call, if the devices are accelerators: there it is no collective. No communication."""
        if self._records_order:
            self._recorder.exchange(self.group, self.world_size)
        return super().exchange(message, combine, label)

    def _reduce(self, op: str, nbytes: int, unit: str | None, work: Work) -> Work:
        if unit is None:  # a norm, flags
            return self._issue(op, nbytes, unit, work)
        if "grads" in self._marks:
            self._recorder.mark("grads", unit)
        issued = self._issue(op, nbytes, unit, work)
        if "reduced" not in self._marks:
            return issued

        def over() -> None:
            issued.wait()
            self._recorder.mark("reduced", unit)

        return Pending(over)

    def _issue(self, op: str, nbytes: int, unit: str | None, work: Work) -> Work:
        if self.world_size == 1:
            return work
        return self._recorder.issue(op, self.group, nbytes, self.world_size, unit or "")


def traced_mesh(recorder: Recorder, rank: int, job: Job) -> Mesh:
    """Return the data axes of one rank. Ranks that share matrix products are consecutive; so are, counted in such
    groups, the ranks of a shard group. Of these, ranks with the same experts are `ep` apart."""
    rank //= job.tp
    shards, on_streams = job.shard_ranks, not job.on_cpu
    replicate = rank // shards, job.replicas
    shard, over = _groups(recorder, on_streams, "shard", (rank % shards, shards), replicate)
    asked = job.reshard_after_forward
    secondary = None if isinstance(asked, bool) or asked in {None, 1} else asked
    smaller = None
    if secondary is not None and shards not in {1, secondary}:
        smaller = TracedCollectives("secondary", shard.rank % secondary, secondary, recorder, on_streams)
    device = torch.device("cpu")
    if job.ep > 1:
        among = rank % shards // job.ep, shards // job.ep
        same_experts = Mesh(*_groups(recorder, on_streams, SAME_EXPERTS, among, replicate), device)
        return DividedMesh(shard, over, device, same_experts=same_experts)
    return Mesh(shard, over, device, secondary=smaller, secondary_size=secondary)


def _groups(
    recorder: Recorder, on_streams: bool, name: str, shard: tuple[int, int], replicate: tuple[int, int]
) -> tuple[TracedCollectives, TracedCollectives]:
    """Return a shard group of this name and its replicate group, given a rank's place and the size of each."""
    marks: dict[str, list[str]] = {name: [], "replicate": []}
    marks[name if shard[1] > 1 or replicate[1] == 1 else "replicate"].append("grads")
    marks["replicate" if replicate[1] > 1 else name].append("reduced")
    return (
        TracedCollectives(name, *shard, recorder, on_streams, marks[name]),
        TracedCollectives("replicate", *replicate, recorder, on_streams, marks["replicate"]),
    )
