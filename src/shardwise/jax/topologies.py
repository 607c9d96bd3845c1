"""Descriptions of devices that this machine lacks, so that XLA can compile for them with their own compilers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax

from shardwise.errors import UsageError
from shardwise.suggest import did_you_mean


@dataclass(frozen=True)
class _Gpu:
    """The properties of a GPU that XLA's compiler needs."""

    title: str
    capability: tuple[int, int]
    cores: int
    """Number of streaming multiprocessors."""
    fpus_per_core: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    """The most that a kernel may opt in to."""
    l2_bytes: int
    ghz: float
    memory_bytes: int
    memory_bytes_per_s: float

    def target(self) -> str:
        """Return XLA's GpuTargetConfigProto, as text."""
        major, minor = self.capability
        return f"""
            platform_name: "CUDA"
            device_description_str: "{self.title}"
            dnn_version_info {{ major: 9 minor: 7 }}
            runtime_version {{ major: 12 minor: 8 }}
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {self.cores}
              fpus_per_core: {self.fpus_per_core}
              clock_rate_ghz: {self.ghz}
              device_memory_size: {self.memory_bytes}
              memory_bandwidth: {self.memory_bytes_per_s:.0f}
              l2_cache_size: {self.l2_bytes}
              shared_memory_per_core: {self.shared_bytes_per_core}
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared_bytes_per_block}
              threads_per_block_limit: 1024
              threads_per_warp: 32
              threads_per_core_limit: 2048
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
            }}
        """


_AMPERE = ((8, 0), 108, 64, 167936, 166912, 40 * 2**20, 1.41)
_HOPPER = ((9, 0), 132, 128, 233472, 232448, 50 * 2**20, 1.98)
GPUS = {
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", *_AMPERE, 80 * 2**30, 2.039e12),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", *_HOPPER, 80 * 2**30, 3.35e12),
    "h200": _Gpu("NVIDIA H200", *_HOPPER, 141 * 10**9, 4.8e12),
}
"""GPUs by name. Limits of a compute capability are from the table in the CUDA programming guide; counts, clocks and
memory from the devices' data sheets."""
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def topology(kind: str, count: int | None = None) -> list[Any]:
    """Return devices that this machine lacks, for `mesh(devices=...)` and programs that are compiled but never run.

    Args:
        kind: "a100", "h100" or "h200", which need JAX's CUDA plugin; or libtpu's name of a TPU and its shape, such as
            "v5e:4x4", which needs libtpu.
        count: number of GPUs; omit it for a TPU, whose shape gives it.

    Raises:
        UsageError: an unknown kind, an invalid count, or a plugin that is not installed.
    """
    from jax.experimental import topologies

    if ":" in kind:
        if count is not None:
            raise UsageError(f"topology({kind!r}, {count!r}): leave the count out, because the shape of a TPU gives it")
        if find_spec("libtpu") is None:
            raise UsageError(f"topology({kind!r}) needs libtpu, which is not installed: pip install 'jax[tpu]'")
        try:
            return list(topologies.get_topology_desc(platform="tpu", topology_name=kind).devices)
        except RuntimeError as error:
            raise UsageError(f"topology({kind!r}): libtpu does not know it: {str(error).splitlines()[0]}") from None
    if kind not in GPUS:
        raise UsageError(
            f"topology({kind!r}): must be one of {', '.join(GPUS)}, or a TPU such as "
            f"'v5e:4x4'{did_you_mean(kind, GPUS)}"
        )
    if not isinstance(count, int) or count < 1:
        raise UsageError(f"topology({kind!r}, {count!r}): the number of GPUs must be a whole number of at least 1")
    if not has_gpu_compiler():
        raise UsageError(
            f"topology({kind!r}) needs JAX's CUDA plugin, which is not installed: "
            f"pip install jax-cuda12-plugin=={jax.__version__}"
        )
    try:
        found = topologies.get_topology_desc(
            platform="cuda", topology_name=kind, target_config=GPUS[kind].target(), topology=f"1x1x{count}"
        )
    except NotImplementedError:
        raise UsageError(
            f"topology({kind!r}): without a GPU, JAX loads its CUDA plugin only if JAX_PLATFORMS=cpu is set when "
            "it starts"
        ) from None
    return list(found.devices)


def has_gpu_compiler() -> bool:
    """Whether one of JAX's CUDA plugins is installed. It needs no GPU."""
    return find_spec("jax_plugins") is not None and any(find_spec(name) is not None for name in _PLUGINS)
