"""Two processes that are the ranks of one gloo group on this machine, and both use the one device."""

import datetime
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_MEETING_S = 30
RANKS = 2

Body = Callable[..., Any]
"""A function of a module; its first argument is a folder that both ranks see. What it returns is pickled."""


class RankFailed(RuntimeError):
    """A rank raised, crashed or hung; says which and where."""


def on_two_ranks(body: Body, arguments: tuple[Any, ...], limit_s: float) -> list[Any]:
    """Run `body(folder, *arguments)` on both ranks; returns what they returned."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        processes = [
            context.Process(target=_rank, args=(rank, folder, body, arguments, pipes[rank][1]), daemon=True)
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for _, ours in pipes:
            ours.close()
        try:
            return _results([theirs for theirs, _ in pipes], time.monotonic() + limit_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _results(pipes: list[Any], end_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < RANKS:
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, max(0.0, end_s - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(set(range(RANKS)) - set(results))} did not end in time")
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                try:
                    ok, told = pipe.recv()
                except EOFError:
                    raise RankFailed(f"rank {rank} crashed") from None
                if not ok:
                    print(told)
                    raise RankFailed(f"rank {rank}: {told.strip().splitlines()[-1]}")
                results[rank] = told
    return [results[rank] for rank in range(RANKS)]


def _rank(rank: int, folder: str, body: Body, arguments: tuple[Any, ...], pipe: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=RANKS,
            timeout=datetime.timedelta(seconds=_MEETING_S),
        )
        told = (True, body(Path(folder), *arguments))
        dist.barrier()  # nobody's memory goes while the other one may read it
    except Exception:
        told = (False, traceback.format_exc())
    pipe.send(told)
    pipe.close()
