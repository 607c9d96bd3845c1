"""Runs of two real ranks that save every step, killed where one is told, and started again.

    python -m tests.checkpoint.publish.crash_lab KIND DIRECTORY   # a line of JSON a kill; KIND: of KINDS, or "moments"

A lab is a process that has imported everything and forks the ranks of each run, so that a run takes a fraction of a
second. What the ranks do is what the trainer does: `Checkpoints.resume`, then a step and `Checkpoints.save` in turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import pickle
import random
import select
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # what building an optimizer imports: once here, not in every rank
import torch.distributed as dist
import xxhash
from torch import nn

import shardwise as sw
from shardwise.checkpoint import verify
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.train.config.schema import CheckpointConfig
from shardwise.train.data.order import Position
from shardwise.train.output.checkpoints import Checkpoints
from shardwise.train.process.ranks import Ranks
from tests.checkpoint.publish.file_changes import Change, Death, watching
from tests.checkpoint.states import step
from tests.engine.rig import adamw

RANKS = 2
STEPS = 4
WATCHED_STEP = 3
"""The first save that also drops an old checkpoint."""
KEEP = 2
END_TIMEOUT_S = 30.0
"""How long the ranks that live on may take to end."""


class Hung(AssertionError):
    """Ranks did not end in time."""


@dataclass(frozen=True)
class Setting:
    """What the ranks of a run have in common."""

    directory: Path
    """Of the checkpoints."""
    width: int = 6
    asynchronous: bool = False
    collectives: str = ""
    """SHARDWISE_COLLECTIVES; empty: what is chosen."""
    steps: int = STEPS


@dataclass(frozen=True)
class Kill:
    """Where a run is killed: before the `at`-th change that `leader` makes to files in the watched save."""

    leader: int
    at: int
    everybody: bool = False
    """All ranks, not the leader alone."""
    half: bool = False
    """In the middle of a write."""


@dataclass
class Ending:
    """How one rank's run ended."""

    resumed: int = 0
    """Steps that the checkpoint had which it went on from; 0: it started anew."""
    digests: dict[int, str] = field(default_factory=dict)
    """Of all that this rank held, by the number of steps taken."""
    changes: list[str] = field(default_factory=list)
    """Made in the watched save."""
    sizes: list[int] = field(default_factory=list)
    """Of the writes among them, in bytes; 0 for others."""
    error: str = ""
    ended_s: float = 0.0
    """Monotonic."""
    imported: list[str] = field(default_factory=list)
    """Modules of the package's that were not there yet."""


@dataclass
class Run:
    """A run that has ended."""

    endings: list[Ending | None]
    """By rank; None: killed."""
    saved: int
    """The newest step whose save had returned on some rank."""
    hit: str
    """What was about to happen when the kill came."""
    longest_end_s: float
    """From the kill to the end of the last rank that lived on."""


class Shared:
    """A page that all ranks of a run share with the lab: where each one is."""

    _WORDS = 8
    SAVED, PID, KILLED_NS, PHASE = range(4)

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._text = mmap.PAGESIZE // 2

    def set(self, rank: int, word: int, value: int) -> None:
        struct.pack_into("<q", self._page, 8 * (rank * self._WORDS + word), value)

    def get(self, rank: int, word: int) -> int:
        return int(struct.unpack_from("<q", self._page, 8 * (rank * self._WORDS + word))[0])

    def say(self, rank: int, text: str, is_last: bool = False) -> None:
        """What a rank is about to do. After the last, which it is killed at, nothing counts that its threads say."""
        start = self._text + 512 * rank + 256 * is_last
        self._page[start : start + 256] = text.encode()[:256].ljust(256, b"\0")

    def said(self, rank: int) -> str:
        start = self._text + 512 * rank
        texts = (self._page[at : at + 256].rstrip(b"\0") for at in (start + 256, start))
        return next((text for text in texts if text), b"").decode(errors="replace")


class Net(nn.Module):
    """Two layers, so that a save makes few changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(4, width, bias=False)
        self.leave = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.tanh(self.enter(x)))  # type: ignore[no-any-return]


_AT_START = frozenset(sys.modules)


# A rank -------------------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """What one rank of a run does."""

    setting: Setting
    shared: Shared
    rank: int
    kill: Kill | None
    killed_from_outside: bool
    """Then every save is watched."""
    ending: Ending = field(default_factory=Ending)
    _saving: int = 0
    """The newest step that this rank has begun to save."""

    def run(self, store: Path) -> Ending:
        """Go on from what is there, and save every step."""
        if self.setting.collectives:
            os.environ["SHARDWISE_COLLECTIVES"] = self.setting.collectives
        dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=self.rank, world_size=RANKS)
        torch.manual_seed(7)
        model = sw.shard(Net(self.setting.width))
        try:
            self._train(model, adamw(model.parameters()))
        except Exception as error:
            self.ending.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self.ending.ended_s = time.monotonic()
        self.ending.imported = [name for name in sys.modules if name.startswith("shardwise") and name not in _AT_START]
        return self.ending

    def _train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        config = CheckpointConfig(every=1, keep=KEEP, asynchronous=self.setting.asynchronous)
        checkpoints = Checkpoints(self.setting.directory, config, Ranks(self.rank, RANKS, torch.device("cpu")))
        self.shared.say(self.rank, "resuming")
        resumed = checkpoints.resume(model, optimizer)
        if resumed is not None:
            self.ending.resumed = resumed.step
            self.ending.digests[resumed.step] = digest(model, optimizer)
        self.setting.directory.mkdir(exist_ok=True)
        with watching(self.setting.directory, self._look, self._die):
            with checkpoints.finished(model):
                for taken in range(self.ending.resumed + 1, self.setting.steps + 1):
                    self.shared.say(self.rank, f"training step {taken}")
                    step(model, optimizer, taken)
                    self.ending.digests[taken] = digest(model, optimizer)
                    self._saving = taken
                    checkpoints.save(taken, model, optimizer, Position(0, 0, taken), {})
                    # Where it is asynchronous, it has waited for the one before.
                    self._saved(taken - 1 if self.setting.asynchronous else taken)
            self._saved(self.setting.steps)
        self.shared.say(self.rank, "ending")

    def _saved(self, taken: int) -> None:
        self.shared.set(self.rank, Shared.SAVED, taken)
        after_last = self.kill is not None and self.kill.at == len(self.ending.changes) and taken >= WATCHED_STEP
        if after_last and self.kill is not None and self.rank == self.kill.leader:
            self._die()

    def _look(self, change: Change) -> Death | None:
        self.shared.say(self.rank, f"saving step {self._saving}: {change}")
        if self.killed_from_outside or not self._belongs(change):
            return None
        self.ending.changes.append(str(change))
        self.ending.sizes.append(change.nbytes if change.writes else 0)
        if self.kill is None or self.rank != self.kill.leader or len(self.ending.changes) <= self.kill.at:
            return None
        self.shared.say(self.rank, f"saving step {self._saving}: {change}", is_last=True)
        return Death.HALF if self.kill.half else Death.BEFORE

    def _belongs(self, change: Change) -> bool:
        """To the watched save and the dropping after it. An asynchronous one lies between others, in time too."""
        if self.setting.asynchronous:
            dropped = f"step-{WATCHED_STEP - KEEP:06d}"
            watched = f"step-{WATCHED_STEP:06d}"
            return self._saving >= WATCHED_STEP and change.path.startswith((watched, dropped))
        return self._saving == WATCHED_STEP

    def _die(self) -> NoReturn:
        assert self.kill is not None
        self.shared.set(self.rank, Shared.KILLED_NS, time.monotonic_ns())
        for other in range(RANKS):
            if self.kill.everybody and other != self.rank:
                os.kill(self.shared.get(other, Shared.PID), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every byte that this rank holds of the model and the optimizer."""
    total = xxhash.xxh3_64()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, ShardedParameter)
        held = {"": parameter, **optimizer.state[parameter]}
        for key in sorted(held):
            value = held[key]
            local = value.local if isinstance(value, ShardedParameter) else value
            total.update(f"{name} {key}".encode())
            total.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


# The lab ------------------------------------------------------------------------------------------------------------


Outside = Callable[[Shared, list[int]], list[int]]
"""Is given all process ids, kills ranks as it likes and returns which."""


class Lab:
    """Forks runs. Its process must have no threads: it runs no model itself."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._runs = 0
        gc.freeze()  # ranks need not look through what the lab has imported, nor copy its pages

    def run(
        self,
        setting: Setting,
        kill: Kill | None = None,
        outside: Callable[[Shared, list[int]], list[int]] | None = None,
    ) -> Run:
        """Run to the end, whatever it is.

        Args:
            outside: called once all ranks have begun.

        Raises Hung if a rank does not end in time.
        """
        self._runs += 1
        store, shared = self._work / f"store-{self._runs}", Shared()
        pids, pipes = [], []
        for rank in range(RANKS):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(read)
                worker = Rank(setting, shared, rank, kill, outside is not None)
                _as_rank(write, worker, store)
            os.close(write)
            shared.set(rank, Shared.PID, pid)
            pids.append(pid)
            pipes.append(read)
        killed = outside(shared, pids) if outside else []
        try:
            endings = self._wait(pids, pipes, shared)
        finally:
            for pid, pipe in zip(pids, pipes, strict=True):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
                os.close(pipe)
            store.unlink(missing_ok=True)
        for name in (name for ending in endings if ending for name in ending.imported):
            importlib.import_module(name)  # for the ranks of later runs
        by = kill.leader if kill else next(iter(killed), 0)
        killed_s = shared.get(by, Shared.KILLED_NS) / 1e9
        longest = max((ending.ended_s - killed_s for ending in endings if ending and killed_s), default=0.0)
        saved = max(shared.get(rank, Shared.SAVED) for rank in range(RANKS))
        return Run(endings, saved, shared.said(by), longest)

    def _wait(self, pids: list[int], pipes: list[int], shared: Shared) -> list[Ending | None]:
        """Every rank's report. A rank that is gone is reaped at once, as a launcher does."""
        reports: dict[int, bytes] = dict.fromkeys(range(RANKS), b"")
        waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
        deadline = time.monotonic() + 2 * END_TIMEOUT_S
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], 0.5)
            for pipe in ready:
                if data := os.read(pipe, 2**20):
                    reports[waiting[pipe]] += data
                else:
                    rank = waiting.pop(pipe)
                    os.waitpid(pids[rank], 0)
                    if not reports[rank]:
                        deadline = min(deadline, time.monotonic() + END_TIMEOUT_S)
            if time.monotonic() > deadline:
                where = [f"rank {rank}: {shared.said(rank)}" for rank in waiting.values()]
                raise Hung(f"ranks did not end in {END_TIMEOUT_S:g} s: {'; '.join(where)}")
        return [pickle.loads(reports[rank]) if reports[rank] else None for rank in range(RANKS)]


def _as_rank(pipe: int, worker: Rank, store: Path) -> NoReturn:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the lab
    try:
        torch.set_num_threads(1)
        report = pickle.dumps(worker.run(store))
        while report:
            report = report[os.write(pipe, report) :]
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


# Judging ------------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What became of one kill."""

    kill: dict[str, Any]
    hit: str
    saved: int
    """Steps whose save had returned on some rank, or whose directory had its final name."""
    left: list[str]
    """In the directory of checkpoints after the kill."""
    resumed: int
    survivors: dict[int, str]
    """By rank: the error with which each ended, or "" for none."""
    ended_s: float
    problems: list[str]
    """Empty if all is well."""


def judge(lab: Lab, setting: Setting, whole: Run, crashed: Run, kill: dict[str, Any]) -> Verdict:
    """Start a crashed run again and compare it with one that nobody killed."""
    left = sorted(path.name for path in setting.directory.iterdir()) if setting.directory.exists() else []
    committed = [int(name.removeprefix("step-")) for name in left if name.removeprefix("step-").isdecimal()]
    saved = max([crashed.saved, *committed])
    problems = [f"{name} was renamed and does not verify" for name in _damaged(setting.directory, saved)]
    if any(ending and not ending.error for ending in crashed.endings) and saved < setting.steps:
        problems.append(f"a rank ended without an error and the newest checkpoint is of step {saved}")
    if crashed.longest_end_s > END_TIMEOUT_S:
        problems.append(f"a rank that lived on took {crashed.longest_end_s:.1f} s to end")
    again = lab.run(setting)
    resumed = 0
    for rank, (ending, expected) in enumerate(zip(again.endings, whole.endings, strict=True)):
        assert expected is not None
        if ending is None or ending.error:
            problems.append(f"rank {rank} did not go on: {ending.error if ending else 'it is gone'}")
            continue
        resumed = ending.resumed
        if ending.resumed < saved:
            problems.append(f"step {saved} was committed and it went on from {ending.resumed}")
        for taken, found in ending.digests.items():
            if found != expected.digests[taken]:
                problems.append(f"rank {rank} has other numbers after step {taken}")
    after = sorted(path.name for path in setting.directory.iterdir())
    wanted = [f"step-{taken:06d}" for taken in range(setting.steps - KEEP + 1, setting.steps + 1)]
    if after != wanted:
        problems.append(f"left behind: {sorted(set(after) ^ set(wanted))}")
    survivors = {rank: ending.error for rank, ending in enumerate(crashed.endings) if ending is not None}
    return Verdict(kill, crashed.hit, saved, left, resumed, survivors, crashed.longest_end_s, problems)


def _damaged(directory: Path, newest: int) -> list[str]:
    """The newest checkpoint must be whole; of older ones the run may just have been dropping files."""
    path = directory / f"step-{newest:06d}"
    if not newest:
        return []
    try:
        verify(path)
    except Exception as error:
        return [f"{path.name} ({error})"]
    return []


def kills(whole: Run, leader: int, everybody: bool, thorough: bool) -> Iterator[Kill]:
    """One at every change of the watched save, one after the last, and one in the middle of every write. Unless
    `thorough`, of equal calls in a row the first and the last alone."""
    ending = whole.endings[leader]
    assert ending is not None
    calls = ["", *(change.split()[0] for change in ending.changes), "", ""]
    for at, size in enumerate([*ending.sizes, 0]):
        if not thorough and calls[at] == calls[at + 1] == calls[at + 2]:
            continue
        yield Kill(leader, at, everybody)
        if size > 1:
            yield Kill(leader, at, everybody, half=True)


def everywhere(work: Path, leader: int, everybody: bool, thorough: bool = True, **options: Any) -> Iterator[Verdict]:
    """Kill one run after another, each at the next place."""
    lab = Lab(work)
    setting = Setting(work / "checkpoints", **options)
    whole = whole_run(lab, setting)
    for kill in kills(whole, leader, everybody, thorough):
        shutil.rmtree(setting.directory, ignore_errors=True)
        crashed = lab.run(setting, kill)
        if None not in crashed.endings:
            raise AssertionError(f"{kill} killed nobody: saves of the same run differ")
        yield judge(lab, setting, whole, crashed, asdict(kill))


def whole_run(lab: Lab, setting: Setting) -> Run:
    """A run that nobody kills."""
    shutil.rmtree(setting.directory, ignore_errors=True)
    whole = lab.run(setting)
    for ending in whole.endings:
        if ending is None or ending.error:
            raise AssertionError(f"a run that nobody killed failed: {ending.error if ending else 'it is gone'}")
    return whole


VICTIMS = ((0,), (1,), (0, 1))
"""Of kills at random moments, in turn."""


def at_random(work: Path, moments: int, seed: int = 0, **options: Any) -> Iterator[Verdict]:
    """Kill so many runs, of larger checkpoints, at random moments of their training and saving."""
    lab, generator = Lab(work), random.Random(seed)
    setting = Setting(work / "checkpoints", width=100_000, steps=6, **options)
    began_s = time.monotonic()
    whole = whole_run(lab, setting)
    length_s = time.monotonic() - began_s
    judged = 0
    while judged < moments:
        victims, after_s = VICTIMS[judged % len(VICTIMS)], generator.uniform(0.0, length_s)
        shutil.rmtree(setting.directory, ignore_errors=True)
        crashed = lab.run(setting, outside=_killer(victims, after_s))
        if not all(crashed.endings):  # else it had ended before
            judged += 1
            yield judge(lab, setting, whole, crashed, {"victims": victims, "after_s": after_s})


def _killer(victims: tuple[int, ...], after_s: float) -> Outside:
    """Kill ranks so long after the first of them has begun to train."""

    def kill(shared: Shared, pids: list[int]) -> list[int]:
        while not shared.said(victims[0]).startswith(("training", "saving")):
            time.sleep(0.001)
        time.sleep(after_s)
        for victim in victims:
            shared.set(victim, Shared.KILLED_NS, time.monotonic_ns())
            os.kill(pids[victim], signal.SIGKILL)
        return list(victims)

    return kill


KINDS: dict[str, tuple[int, bool]] = {
    "rank-0": (0, False),
    "rank-1": (1, False),
    "all-at-rank-0": (0, True),
    "all-at-rank-1": (1, True),
}


def main(kind: str, work: str, options: str = "{}") -> None:
    given = json.loads(options)
    found = at_random(Path(work), **given) if kind == "moments" else everywhere(Path(work), *KINDS[kind], **given)
    for verdict in found:
        print(json.dumps(asdict(verdict)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
