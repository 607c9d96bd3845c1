"""Measurements of shardwise beside its peers: `python benchmarks` lists them, `python benchmarks NAME` runs one."""

from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
"""The source tree."""


def program(name: str) -> list[str]:
    """Return the arguments with which Python or torchrun starts a benchmark; its options follow them."""
    return [str(HERE), name]


def on_ranks(ranks: int, *started: str) -> list[str]:
    """Return the arguments with which Python starts a program (or `-m`, a module) as ranks under torchrun."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *started]
