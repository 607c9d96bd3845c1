"""The devices of a job, and the memory that its processes take outside the allocator."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from shardwise.errors import ConfigError
from shardwise.plan.hardware.devices import Hardware, Interconnect, find_device, find_interconnect
from shardwise.policy.checks import check_choice, check_count

USUAL_GPU = "h100-sxm-80gb"

MOST_RANKS = 2**20
"""The most ranks of a job: more devices than any cluster has, but few enough to list numbers of ranks quickly."""
SEGMENTS = ("fixed", "expandable")
"""How the caching allocator takes memory: PyTorch's default; or `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`."""


@dataclass(frozen=True, slots=True)
class Machines:
    """The devices and nodes that a job runs on."""

    gpu: object = USUAL_GPU
    """A name from the hardware data, the path of a file like those, or a `sw.plan.Hardware`. One of kind "cpu" has the
    kernels and the allocator of a CPU."""
    gpus_per_node: int = 8
    nodes: int = 1
    interconnect: object = None
    """The network between nodes, as for `find_interconnect`. None: the GPU's usual one."""
    segments: str = "fixed"
    """How the caching allocator takes memory: one of `SEGMENTS`."""
    context_bytes: int | None = None
    """Bytes of the device's context, outside the allocator. None: the usual size."""
    nccl_bytes: int | None = None
    """Bytes of the communicators' buffers, outside the allocator. None: the usual size."""
    price_per_hour: float | None = None
    """Price of one device, in any currency. None: that of the hardware data, if there is one."""

    @property
    def hardware(self) -> Hardware:
        """The device that `gpu` names. Raises PlanError for an unknown one."""
        return find_device(self.gpu)  # type: ignore[arg-type]

    @property
    def node_interconnect(self) -> Interconnect:
        """The interconnect between nodes: `interconnect`, or the device's usual one. Raises PlanError for an unknown
        one."""
        return find_interconnect(self.interconnect or self.hardware.interconnect)  # type: ignore[arg-type]

    @property
    def on_cpu(self) -> bool:
        """Whether operations run on a CPU."""
        return self.hardware.kind == "cpu"

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.gpus_per_node * self.nodes

    def _check_machines(self) -> None:
        for name in ("gpus_per_node", "nodes"):
            check_count(name, getattr(self, name), 1)
        if self.world_size > MOST_RANKS:
            raise ConfigError(
                f"gpus_per_node={self.gpus_per_node} x nodes={self.nodes} are {self.world_size:,} devices; at "
                f"most {MOST_RANKS:,} are supported"
            )
        for name in ("context_bytes", "nccl_bytes"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 0)
        check_choice("segments", self.segments, SEGMENTS)
        price: object = self.price_per_hour
        if price is not None and (isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < inf):
            raise ConfigError(f"price_per_hour={price!r}: must be a price above 0 for one device")
