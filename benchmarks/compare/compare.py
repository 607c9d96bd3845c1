"""Which features of docs/compare.md FSDP1, FSDP2, DeepSpeed and Megatron-FSDP have on two or four CPU ranks over gloo.

    python benchmarks compare                                   # 15 minutes; DeepSpeed and Megatron-FSDP if installed
    python benchmarks compare --only weights --peers fsdp1
    python benchmarks compare --out compare                     # and write results/DATE-compare.*

Each cell is a job of its own, whose ranks no launcher ends: what each found or said last is the answer, or that ranks
still waited. A tiny GPT is trained in fp32 and compared with an unsharded one. Saves of a larger one are killed at
three moments, on all ranks and on rank 1 alone; a fresh job then loads what the engine takes for the newest step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.common import facts, launch, report
from benchmarks.steps.engines import missing

CELLS: dict[str, tuple[str, ...]] = {
    "weights": ("shardwise", "fsdp1", "fsdp2", "deepspeed", "megatron"),
    "cut": ("deepspeed",),
    "skips_a_unit": ("fsdp1", "fsdp2", "deepspeed"),
    "dies": ("fsdp1", "fsdp2", "deepspeed"),
    "skips_a_step": ("fsdp1", "fsdp2", "deepspeed"),
    "killed_save": ("deepspeed", "fsdp2", "fsdp1"),
    "optimizers": ("deepspeed",),
    "in_backward": ("fsdp1", "fsdp2", "deepspeed"),
    "few_bits": ("deepspeed",),
    "tensor": ("fsdp1",),
    "tensor_own": ("deepspeed",),
    "sequences": ("fsdp1", "fsdp2"),
    "experts": ("fsdp2",),
    "experts_own": ("deepspeed",),
    "pipeline": ("fsdp1", "fsdp2"),
    "pipeline_own": ("deepspeed",),
}
"""What is tried, by trial, and with whom. `trials.py` says what each is."""
FOUR_RANKS = ("tensor", "pipeline")
FAULTS = ("skips_a_unit", "dies", "skips_a_step")
PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron_fsdp"}
MOMENTS = (0.2, 0.5, 0.8)
"""Of a save's time, after which it is killed."""
FORKS = multiprocessing.get_context("forkserver")
MOST_S, FAULT_S = 240.0, 30.0
"""Ranks that are left are killed after so long, in all and after a fault."""


@dataclass(frozen=True)
class Ended:
    """How a job went, by rank: what a rank found (None if it came to no end), and the last that it said."""

    found: list[tuple[bool, str] | None]
    said: list[str]
    waited: list[int]
    """Ranks that had to be killed."""
    seconds: float
    """From the fault to the end of the last rank."""


class Ranks:
    """The processes of a job, which end by themselves or are killed here. They are forked from one that has imported
    the engines, which takes longer than most jobs."""

    def __init__(self, trial: str, peer: str, directory: Path) -> None:
        self.directory, self.size = directory, 4 if trial in FOUR_RANKS else 2
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.size)}
        self.processes = [
            FORKS.Process(
                target=work, args=(trial, peer, directory, {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            )
            for rank in range(self.size)
        ]
        for process in self.processes:
            process.start()

    def running(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.is_alive()]

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.processes[rank].kill()

    def end(self, most_s: float = MOST_S) -> Ended:
        """Wait for all, most seconds at most and `FAULT_S` after a fault, then kill those that are left."""
        begun, until = self.directory / "begun", time.time() + most_s
        while self.running() and time.time() < until:
            time.sleep(0.1)
            if begun.exists() and (written := begun.read_text()):
                until = min(until, float(written) + FAULT_S)
        ended, left = time.time(), self.running()
        self.kill(left)
        for process in self.processes:
            process.join()
        started = float(begun.read_text()) if begun.exists() else ended
        return Ended(
            [self._found(rank) for rank in range(self.size)],
            [last_error((self.directory / f"said-{rank}").read_text(errors="replace")) for rank in range(self.size)],
            left,
            ended - started,
        )

    def _found(self, rank: int) -> tuple[bool, str] | None:
        path = self.directory / f"found-{rank}.json"
        return tuple(json.loads(path.read_text())) if path.exists() else None  # type: ignore[return-value]


def last_error(said: str) -> str:
    """Return the last line that names an error, else the last line."""
    lines = [re.sub(r"^\[rank\d\]:", "", line).strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
    return (errors or lines or ["nothing"])[-1][:200]


def cell(trial: str, peer: str) -> tuple[bool, str]:
    """Try it. Returns whether it did what is asked, and what was seen."""
    if trial == "killed_save":
        return killed_saves(peer)
    with tempfile.TemporaryDirectory() as name:
        ended = Ranks(trial, peer, Path(name)).end()
    return after_a_fault(ended) if trial in FAULTS else verdict(ended)


def verdict(ended: Ended) -> tuple[bool, str]:
    found = [one for one in ended.found if one is not None]
    if len(found) == len(ended.found):
        return all(right for right, _ in found), found[0][1]
    if ended.waited:
        return False, f"rank {ended.waited[0]} had not ended after {MOST_S:.0f} s"
    return False, next(said for said, one in zip(ended.said, ended.found, strict=True) if one is None)


def after_a_fault(ended: Ended) -> tuple[bool, str]:
    """What ranks made of a fault; right is to end and to name the rank or what differs, which a reader judges."""
    if all(ended.found):
        return False, "both ranks trained to the end and said nothing"
    if ended.waited:
        return False, f"rank {', '.join(map(str, ended.waited))} still waited after {FAULT_S:.0f} s"
    return True, f"all ended after {ended.seconds:.1f} s; rank 0: {ended.said[0]}"


# A save that is killed ------------------------------------------------------------------------------------------------


def killed_saves(peer: str) -> tuple[bool, str]:
    """Kill the third save at several moments. Right is that a job can go on each time, from the step before or it."""
    with tempfile.TemporaryDirectory() as name:
        for victims in ([0, 1], [1]):
            for moment in MOMENTS:
                who = "all ranks" if len(victims) > 1 else "rank 1"
                place = Path(name) / f"{who} killed after {moment:.0%} of a save"
                place.mkdir()
                kill_a_save(peer, place, victims, moment)
        return verdict(Ranks("resume", peer, Path(name)).end())


def kill_a_save(peer: str, directory: Path, victims: list[int], moment: float) -> None:
    """Train and save, and kill the third save; ranks that live on have a while to end."""
    ranks = Ranks("save", peer, directory)
    mark = directory / "saving-3-1"
    until = time.time() + MOST_S
    while not mark.exists() and ranks.running() and time.time() < until:
        time.sleep(0.0005)
    began, ended = (float((directory / f"{what}-2-1").read_text()) for what in ("saving", "saved"))
    time.sleep(moment * (ended - began))
    ranks.kill(victims)
    ranks.end(15.0)


# ----------------------------------------------------------------------------------------------------------------------


def work(trial: str, peer: str, directory: Path, environment: dict[str, str]) -> None:
    """On each rank."""
    from benchmarks.compare.trials import TRIALS

    os.environ.update(environment)
    rank = environment["RANK"]
    said = os.open(directory / f"said-{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(said, stream)
    dist.init_process_group("gloo")
    found = TRIALS[trial](peer, directory)
    dist.barrier()
    (directory / f"found-{rank}.json").write_text(json.dumps(found))
    with suppress(RuntimeError):
        dist.destroy_process_group()


def markdown(rows: list[dict[str, Any]]) -> str:
    from benchmarks.compare.trials import TRIALS

    def about(trial: str) -> str:
        return "A save that is killed." if trial == "killed_save" else str(TRIALS[trial].__doc__).strip()

    cells = [[row["trial"], row["peer"], "yes" if row["right"] else "no", row["seen"]] for row in rows]
    tried = "\n".join(f"- `{trial}`: {about(trial)}" for trial in dict.fromkeys(row["trial"] for row in rows))
    return (
        f"# What peers do\n\n{' '.join(str(__doc__).split(chr(10) * 2)[-1].split())}\n\n"
        f"{report.facts_line(machine())}\n\n{tried}\n\n{report.table(['tried', 'with', '', 'seen'], cells)}\n"
    )


def machine() -> dict[str, Any]:
    load = f"{os.getloadavg()[0]:.1f}"
    return {**facts.machine(), "megatron_fsdp": facts.version("megatron-fsdp"), "load": load}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--peers", nargs="+", choices=sorted({peer for peers in CELLS.values() for peer in peers}))
    parser.add_argument("--out", help="write results/DATE-OUT.md and .json")
    options = parser.parse_args()
    skipped = {peer: missing(package) for peer, package in PACKAGES.items()}
    for line in filter(None, skipped.values()):
        print(line)
    os.environ.update(launch.environment())
    FORKS.set_forkserver_preload(
        ["benchmarks.compare.trials", *(PACKAGES[peer] for peer in PACKAGES if not skipped[peer])]
    )
    rows = []
    for trial in options.only:
        for peer in CELLS[trial]:
            if skipped.get(peer) or (options.peers and peer not in options.peers):
                continue
            right, seen = cell(trial, peer)
            rows.append({"trial": trial, "peer": peer, "right": right, "seen": seen})
            print(trial, peer, "yes" if right else "no", seen, sep=" | ", flush=True)
    if options.out:
        report.write(options.out, {"facts": machine(), "rows": rows}, markdown(rows))
    return 0
