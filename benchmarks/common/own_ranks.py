"""For a benchmark whose ranks are the script itself: torchrun starts it again, and what each rank found comes back."""

import json
import os
import subprocess
import sys
from typing import Any

import torch.distributed as dist

from benchmarks import on_ranks, program


def is_rank() -> bool:
    """Whether this process is one of the ranks."""
    return "RANK" in os.environ


def tell(found: Any) -> None:
    """Hand what this rank found, as JSON has it, to the process that started the ranks. Every rank must call this."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print(json.dumps(everyone))


def run(ranks: int, **environment: str) -> list[Any]:
    """Start this script's command again on so many ranks, one thread each. Returns what they found, by rank."""
    name = sys.argv[0].split()[-1]
    command = [sys.executable, *on_ranks(ranks, *program(name), *sys.argv[1:])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found
