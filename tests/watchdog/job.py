"""A training script of which rank 1 does something wrong in its sixth step: `python job.py ENGINE FAULT DIRECTORY`.

ENGINE is "shardwise" or "fsdp2". RANK and so on are in the environment, without a launcher that ends ranks."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.train.process.ranks import Ranks

STEPS, FAULTY = 9, 5
RANK = int(os.environ["RANK"])
TIMEOUT_S = float(os.environ.get("SHARDWISE_HANG_TIMEOUT_S", "20"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3))
        self.skips = -1

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != self.skips:
                x = layer(x)
        return x


def sharded(engine: str) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    if engine == "shardwise":
        import shardwise as sw

        return sw.shard(model, units=[nn.Sequential])
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def do_wrong(fault: str, model: nn.Module) -> None:
    if fault == "data loading hangs":
        threading.Event().wait()
    elif fault == "works for long":
        until = time.monotonic() + 3 * TIMEOUT_S
        while time.monotonic() < until:
            sum(range(1000))
    elif fault == "native code holds the lock":
        ctypes.PyDLL(None).sleep(1000)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raises":
        raise RuntimeError("row 7 is no picture")
    elif fault == "skips a unit":
        model.skips = 1  # type: ignore[assignment]
    elif fault == "another collective":
        dist.barrier()


def main() -> None:
    engine, fault, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    dist.init_process_group("gloo")
    (directory / f"pid-{os.getpid()}").touch()
    model = sharded(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if fault == "slow":
        from shardwise.watchdog import watchdog

        watchdog._WINDOW_S = 6
    more = {"slow": 15, "runs on": 2000}.get(fault, 0)
    for step in range(STEPS + more):
        if step >= FAULTY and RANK == 1:
            if step == FAULTY:
                (directory / "begun").write_text(str(time.time()))
                if fault == "breaks early":
                    break
                do_wrong(fault, model)
            if fault == "slow":
                time.sleep(1.5)
        if fault == "a task of one rank takes long" and step == FAULTY:
            ranks = Ranks(RANK, dist.get_world_size(), torch.device("cpu"))
            ranks.work(lambda: time.sleep(2 * TIMEOUT_S if RANK == 1 else 0))
        model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
    if fault == "breaks early":
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
