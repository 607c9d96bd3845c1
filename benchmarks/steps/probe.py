"""One measurement of `overhead.py` in a process of its own: `python -m benchmarks.steps.probe PROBE.json`; or, with
`--turns`, seconds of PROBE's repeats for each line on standard input: two processes take turns (`overhead_pairs.py`).

The process is rank 0 of a world that exists only in a fake process group, so collectives cost nothing and
move nothing; parameter values are garbage and never looked at. Prints the median time in seconds, of the processor:
everything happens in one thread, and what else runs on the machine then counts less.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.common.job import LEARNING_RATE
from benchmarks.steps.tiny import WIDTH, Scale, ScaleStack, TinyStack

PARAMETER_WIDTH = 64


@dataclass(frozen=True)
class Probe:
    """What to measure: `kind` is "step" (forward and backward) or "adamw" (the optimizer's step alone)."""

    kind: str
    engine: str
    world_size: int
    count: int
    """Units of a step, parameters of an optimizer."""
    repeats: int
    warmup: int = 5


def _join_fake_world(world_size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def _shard_fsdp2(model: nn.Module, units: list[nn.Module], world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for unit in [*units, model]:
        fully_shard(unit, mesh=mesh)


@dataclass(frozen=True)
class Timed:
    """What is timed, and what is done between two times of it."""

    action: Callable[[], object]
    between: Callable[[], object]

    def seconds(self, repeats: int) -> list[float]:
        """Of the processor."""
        times_s: list[float] = []
        for _ in range(repeats):
            started_s = time.process_time()
            self.action()
            times_s.append(time.process_time() - started_s)
            self.between()
        return times_s


def _step(probe: Probe) -> Timed:
    model = TinyStack(probe.count)
    if probe.engine == "fsdp2":
        _shard_fsdp2(model, list(model.blocks), probe.world_size)
    elif probe.engine == "shardwise":
        importlib.import_module("shardwise").shard(model, "full_shard")
    x = torch.randn(2, WIDTH, requires_grad=True)
    return Timed(lambda: model(x).sum().backward(), model.zero_grad)


def _local_rows(width: int, world_size: int) -> int:
    if width % world_size:
        raise ValueError(f"world size {world_size} must divide {width}, so that all three kinds hold equal pieces")
    return width // world_size


def _plain_parameters(probe: Probe) -> list[nn.Parameter]:
    """Ordinary tensors of the size that a rank's piece has under either engine."""
    rows = _local_rows(PARAMETER_WIDTH, probe.world_size)
    parameters = [nn.Parameter(torch.zeros(rows, PARAMETER_WIDTH)) for _ in range(probe.count)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return parameters


def _sharded_parameters(probe: Probe) -> list[nn.Parameter]:
    """An engine's parameters with the gradients its own backward gave them."""
    model = ScaleStack(probe.count, PARAMETER_WIDTH)
    if probe.engine == "fsdp2":
        # Units change nothing for DTensors, which are one for each parameter.
        _shard_fsdp2(model, [], probe.world_size)
    else:
        # A unit for each parameter, so that this rank holds an equal piece of every one.
        importlib.import_module("shardwise").shard(model, "full_shard", units={Scale})
    model(torch.zeros(1, PARAMETER_WIDTH)).sum().backward()
    return list(model.parameters())


def _adamw(probe: Probe) -> Timed:
    plain = probe.engine == "plain"
    parameters = _plain_parameters(probe) if plain else _sharded_parameters(probe)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.zero_()  # garbage from the fake world may hold slow subnormal numbers
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    return Timed(optimizer.step, lambda: None)


def main(text: str, in_turns: bool) -> None:
    probe = Probe(**json.loads(text))
    torch.set_num_threads(1)
    _join_fake_world(probe.world_size)
    timed = {"step": _step, "adamw": _adamw}[probe.kind](probe)
    timed.seconds(probe.warmup)
    if not in_turns:
        print(json.dumps(median(timed.seconds(probe.repeats))))
        return
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(timed.seconds(probe.repeats)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "--turns" in sys.argv)
