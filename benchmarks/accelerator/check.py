"""Which checks there are. Each runs in a process of its own and has a limit of time of its own."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """A module with `CASES`, and how to run it."""

    name: str
    about: str
    limit_s: float
    module: str
    environment: dict[str, Any] = field(default_factory=dict)


_POISON = {"SHARDWISE_POISON": "1"}
_SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # cuBLAS repeats its bits only with a workspace of fixed size

CHECKS = (
    Check(
        "imports", "shardwise and the private names of torch that it uses", 40, "benchmarks.accelerator.checks.imports"
    ),
    Check(
        "parity",
        "world 1 against the plain model, bit by bit, released memory poisoned",
        60,
        "benchmarks.accelerator.checks.parity",
        _POISON | _SAME_BITS,
    ),
    Check(
        "tiny",
        "NCCL's path in a fake world of 8, tiny blocks: waits, launches, host time, beside FSDP2",
        60,
        "benchmarks.accelerator.checks.tiny_blocks",
    ),
    Check(
        "llama",
        "the same with blocks of Llama 2 7B",
        90,
        "benchmarks.accelerator.checks.llama_blocks",
    ),
    Check(
        "streams",
        "two ranks on one device: bits stay whichever stream is late",
        90,
        "benchmarks.accelerator.checks.late_streams",
        _POISON | _SAME_BITS,
    ),
    Check(
        "nccl",
        "real NCCL, world 1: dtypes, coalescing, streams, memory of a communicator",
        60,
        "benchmarks.accelerator.checks.nccl_alone",
        _POISON | _SAME_BITS,
    ),
    Check(
        "memory",
        "sw.memory and the forecast against the allocator",
        60,
        "benchmarks.accelerator.checks.memory_accounts",
    ),
    Check(
        "save",
        "asynchronous save: time blocked, pinned memory; resume bit by bit",
        60,
        "benchmarks.accelerator.checks.saves",
        _SAME_BITS,
    ),
    Check(
        "offload",
        "shards, gradients and state in host memory and on disk: bits, share of the link, beyond the device's memory",
        90,
        "benchmarks.accelerator.checks.offloaded",
        _POISON | _SAME_BITS,
    ),
    Check(
        "init",
        "initial numbers of 3.2 G parameters: drawn on the device and on the CPU",
        40,
        "benchmarks.accelerator.checks.initialisation",
    ),
    Check(
        "priority",
        "a small kernel beside products of matrices, by its stream's priority",
        25,
        "benchmarks.accelerator.checks.priorities",
    ),
    Check(
        "compile",
        "torch.compile against the plain model, compiled alike",
        75,
        "benchmarks.accelerator.checks.compiled",
        _POISON | _SAME_BITS,
    ),
    Check("more", "what needs two devices or more", 20, "benchmarks.accelerator.checks.two_devices"),
)
