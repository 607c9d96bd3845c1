"""Processes that act as ranks for tests. They are started once and run one function after another.

    def sums(numel: int) -> list[float]: ...            # module-level, so that ranks can import it

    def test_sums(ranks):
        first, second = ranks(2).run(sums, 5)           # one result per rank

Every rank has a default process group, gloo's or its device's (tests/device.py), one thread, poisoned released memory
and a fixed seed. Groups that a function leaves behind are destroyed, and what it has set through a `monkeypatch` that
it was given is undone. After a failure the ranks get a new default group. If ranks hang, their stacks are reported, and
they are killed and replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import functools
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import pytest

from tests import device

if TYPE_CHECKING:
    from collections.abc import Callable

START_TIMEOUT_S = 120
GROUP_TIMEOUT_S = 30
GRACE_S = 3.0
"""How long the other ranks may still run after one has failed."""
MOST_PROCESSES = 14


class RanksHung(AssertionError):
    """Ranks did not return in time. The message has their stacks."""


class RankPools:
    """Pools by world size and environment, started at first use. The least recently used ones are stopped."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, tuple[tuple[str, str], ...]], RankPool] = {}

    def __call__(self, world_size: int, **env: str) -> RankPool:
        device.skip_without(world_size)
        key = (world_size, tuple(sorted(env.items())))
        pool = self._pools.pop(key, None) or RankPool(world_size, **env)
        self._pools[key] = pool  # now the last
        while len(self._pools) > 1 and sum(p.world_size for p in self._pools.values()) > MOST_PROCESSES:
            self._pools.pop(next(iter(self._pools))).close()
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


class _Nursery:
    """A process that has imported torch and forks ranks on demand, so that pools start fast and share its memory."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        fd = theirs.fileno()
        self._process = subprocess.Popen([sys.executable, __file__, str(fd)], env=env, pass_fds=[fd])
        theirs.close()

    def fork(self, env: dict[str, str], fds: list[int]) -> int:
        """Fork a rank and return its process id. It gets copies of `fds`: its connection and its file for stacks."""
        socket.send_fds(self._socket, [pickle.dumps(env)], fds)
        self._socket.settimeout(START_TIMEOUT_S)
        return int(self._socket.recv(32))

    @staticmethod
    def serve(fd: int) -> None:
        _die_with_parent()
        import torch._dynamo  # optimizers and checkpointing import it late, each rank for itself
        import torch.distributed

        assert torch.distributed.is_available()
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for ranks, so they are not to become zombies
        orders = socket.socket(fileno=fd)
        while True:
            message, fds, _, _ = socket.recv_fds(orders, 2**20, 2)
            if not message:
                return
            if (pid := os.fork()) == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
                orders.close()
                _die_with_parent()
                os.environ.clear()
                os.environ.update(pickle.loads(message))
                faulthandler.register(signal.SIGUSR1, file=fds[1], all_threads=True)
                _serve(Connection(fds[0]))
                return
            orders.send(str(pid).encode())
            for copy in fds:
                os.close(copy)


@functools.cache
def _nursery() -> _Nursery:
    return _Nursery()


@dataclass
class _Worker:
    pid: int
    connection: Connection
    stacks: IO[bytes]

    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class RankPool:
    """`world_size` rank processes. A context manager; usable again after `close`."""

    def __init__(self, world_size: int, **env: str) -> None:
        self.world_size = world_size
        self._env = env
        self._workers: list[_Worker] = []
        self._store: Any = None
        self._generation = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call function(*arguments) on every rank. Returns the results by rank.

        Raises:
            the exception of a rank, with every rank's traceback as notes.
            RanksHung: not all ranks came back.
        """
        self._start()
        payload = pickle.dumps((function, arguments))
        message = pickle.dumps((sys.path, Path.cwd(), self._generation, payload))
        for worker in self._workers:
            worker.signal(signal.SIGCONT)
            worker.connection.send_bytes(message)
        replies = self._collect(timeout_s)
        missing = [rank for rank in range(self.world_size) if rank not in replies]
        hung = self._stacks(missing) if missing else ""
        if missing:
            self.close()
        elif not all(reply.intact for reply in replies.values()):
            self._generation += 1
        for worker in self._workers:
            worker.signal(signal.SIGSTOP)  # else every group's threads wake up 100 times a second
        failures = {rank: reply for rank, reply in replies.items() if reply.error is not None}
        if failures:
            raise _worst(failures, hung)
        if missing:
            raise RanksHung(f"ranks {missing} of {self.world_size} did not return in {timeout_s:g} s\n{hung}")
        return [replies[rank].result for rank in range(self.world_size)]

    def pids(self) -> list[int]:
        """Return the process ids by rank. Starts the processes if need be."""
        self._start()
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        for worker in self._workers:
            worker.signal(signal.SIGKILL)
            worker.connection.close()
            worker.stacks.close()
        while any(worker.alive() for worker in self._workers):
            time.sleep(0.001)
        self._workers = []
        self._store = None

    def _collect(self, timeout_s: float) -> dict[int, _Reply]:
        replies: dict[int, _Reply] = {}
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        deadline = time.monotonic() + timeout_s
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                with contextlib.suppress(EOFError, ConnectionResetError):  # died: it stays missing
                    replies[rank] = _Reply(*pickle.loads(connection.recv_bytes()))
                if rank not in replies or replies[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies

    def _stacks(self, ranks: list[int]) -> str:
        for rank in ranks:
            self._workers[rank].signal(signal.SIGUSR1)
        time.sleep(0.3)
        text = []
        for rank in ranks:
            worker = self._workers[rank]
            worker.stacks.seek(0)
            where = f"is at\n{worker.stacks.read().decode()}" if worker.alive() else "is gone"
            text.append(f"rank {rank} {where}")
        return "\n".join(text)

    def _start(self) -> None:
        if self._workers:
            return
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._generation += 1
        for rank in range(self.world_size):
            ours, theirs = socket.socketpair()
            stacks = tempfile.TemporaryFile()  # noqa: SIM115 (the worker's, closed with it)
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "SHARDWISE_HANG_TIMEOUT_S": "0",  # tests make ranks wait; tests/watchdog has ranks of its own
                "SHARDWISE_POISON": "1",
                **self._env,
            }
            pid = _nursery().fork(env, [theirs.fileno(), stacks.fileno()])
            theirs.close()
            self._workers.append(_Worker(pid, Connection(ours.detach()), stacks))


@dataclass
class _Reply:
    result: Any
    error: BaseException | None
    trace: str
    intact: bool
    """Whether the rank's default process group is still usable."""


def _worst(failures: dict[int, _Reply], hung: str) -> BaseException:
    """Return the failure that explains the others: a timeout only follows from another rank's error."""
    rank = min(failures, key=lambda r: (type(failures[r].error).__name__ == "CollectiveTimeout", r))
    error = failures[rank].error
    assert error is not None
    for other, reply in sorted(failures.items()):
        error.add_note(f"On rank {other}:\n{reply.trace}")
    if hung:
        error.add_note(hung)
    return error


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device.take(rank)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    generation, modules, world = -1, 0, None
    while True:
        try:
            sys.path[:], directory, wanted, payload = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.chdir(directory)  # the tests': a rank was forked by a process that began in another one's
        if wanted != generation:
            if dist.is_initialized():
                dist.destroy_process_group()
            timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
            prefixed = dist.PrefixStore(str(wanted), store)
            dist.init_process_group(device.backend(), store=prefixed, rank=rank, world_size=world_size, timeout=timeout)
            generation, world = wanted, dist.group.WORLD
        _drop_groups()  # only now: peers may have been connecting to them when this rank was done
        torch.manual_seed(0)
        reply = _call(payload)
        gc.collect()  # collectives hold shared memory
        if len(sys.modules) != modules:  # what is imported by now need not be searched for garbage each time
            modules = len(sys.modules)
            gc.freeze()
        intact = reply.error is None and dist.group.WORLD is world
        connection.send_bytes(pickle.dumps((reply.result, reply.error, reply.trace, intact)))


def _call(payload: bytes) -> _Reply:
    patches: list[pytest.MonkeyPatch] = []
    try:
        function, arguments = pickle.loads(payload)
        given = [
            each for argument in arguments for each in (argument.values() if isinstance(argument, dict) else [argument])
        ]
        patches += [each for each in given if isinstance(each, pytest.MonkeyPatch)]  # this rank's copies
        result = function(*arguments)
        pickle.dumps(result)
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            error = pickle.loads(pickle.dumps(error.with_traceback(None)))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return _Reply(None, error, trace, intact=False)
    finally:
        for each in patches:
            each.undo()
    return _Reply(result, None, "", intact=True)


def _drop_groups() -> None:
    """Destroy every process group but the default one."""
    import torch.distributed as dist

    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing outlives the test run


if __name__ == "__main__":
    _Nursery.serve(int(sys.argv[1]))
