"""Hosts on one machine: network namespaces that a veth pair joins, each with a name and process ids of its own.

    with Hosts() as (first, second):
        ranks = [host.start([sys.executable, "job.py"]) for host in (first, second)]

What decides that ranks share a host is not to be fooled by accident: each has its own hostname, its own process ids and
/proc (through which ranks open shared memory), its own /dev/shm and its own /etc/hosts. They share the disk, as hosts
with a network file system do. Nothing is left behind: namespaces, links and processes end with the process that made
them, however it ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.steps.expected import Unit
from tests.tiny import GPT2

ROOT = Path(__file__).parents[2]
_starts = itertools.count(1)
TOOLS = ("ip", "tc", "unshare", "nsenter", "hostname", "mount")
_ENTER = """set -e
mount -t tmpfs shm /dev/shm
mount --bind "$1" /etc/hosts
hostname "$2"
echo "$3" > /proc/sys/kernel/ns_last_pid
shift 3
"$@" &
wait $!
"""
"""What the first process of a host does before it starts a command. Two starts do not have the same process ids:
torchrun takes an agent of the same host and id for one that it has lost."""


class NoHosts(Exception):
    """There are no such hosts here, for this reason."""


@dataclass(eq=False)
class Host:
    """One of them."""

    name: str
    address: str
    names: Path
    """Its /etc/hosts."""
    _wire: subprocess.Popen[bytes]
    """The process that keeps its network."""
    jobs: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self,
        command: Sequence[str],
        output: Path | int = subprocess.PIPE,
        directory: Path | None = None,
        **more: str,
    ) -> subprocess.Popen[str]:
        """Start a command here, the first process of all that it starts: they end with it.

        Args:
            output: a file for what it prints, to which it appends.
            directory: where it starts, and the first place that Python looks for modules in.
            more: environment variables.
        """
        pid = str(100 * next(_starts))
        inside = ["sh", "-c", _ENTER, "sh", str(self.names), self.name, pid, *command]
        spaces = ["--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        whole = ["nsenter", f"--net=/proc/{self._wire.pid}/ns/net", "unshare", *spaces, *inside]
        path = os.pathsep.join([str(directory or ROOT), str(ROOT / "src"), str(ROOT)])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}
        for name in ("GLOO_SOCKET_IFNAME", "SHARDWISE_COLLECTIVES"):
            if name not in more:
                env.pop(name, None)
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(output.open("a", encoding="utf-8")) if isinstance(output, Path) else output
            job = subprocess.Popen(
                whole,
                cwd=directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.jobs.append(job)
        return job

    def torchrun(self, *program: str, first: Host, ranks: int = 2, hosts: str = "2", restarts: int = 0) -> list[str]:
        """Return the command that starts a program's ranks of this host, as every host of the job runs it."""
        options = [f"--nnodes={hosts}", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--rdzv-id=job"]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={first.name}:29500"]
        return [sys.executable, "-m", "torch.distributed.run", *options, *meeting, *program]

    def cut(self) -> None:
        """Take the cable out."""
        self._set("ip", "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Put the cable back in."""
        self._set("ip", "link", "set", "eth0", "up")

    def limit(self, mbit_per_s: float) -> None:
        """Slow down what this host sends."""
        burst_bytes = max(16_384, int(mbit_per_s * 1e6 / 8 * 0.004))  # 4 ms: as much as a busy machine sleeps through
        rate = ["tbf", "rate", f"{mbit_per_s * 1e6:.0f}bit", "burst", str(burst_bytes), "latency", "100ms"]
        self._set("tc", "qdisc", "replace", "dev", "eth0", "root", *rate)

    def lose_power(self) -> None:
        """End all of its processes at once; nobody is told."""
        self.cut()
        self.kill()

    def kill(self) -> None:
        """End all of its processes at once; its kernel closes their connections."""
        for job in self.jobs:
            job.kill()
        for job in self.jobs:
            job.wait()
        self.jobs.clear()

    def _set(self, *command: str) -> None:
        _run("nsenter", f"--net=/proc/{self._wire.pid}/ns/net", *command)


class Hosts:
    """Two hosts, host-a and host-b, for the duration of a `with` block, which is given them."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> tuple[Host, Host]:
        """Raises NoHosts if namespaces are not permitted, or a tool is missing."""
        if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
            raise NoHosts(f"{missing[0]} is not installed (iproute2 and util-linux have it)")
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
            names = folder / "hosts"
            found = []
            for number, letter in enumerate("ab", 1):
                wire = stack.enter_context(_network())
                found.append(Host(f"host-{letter}", f"10.77.0.{number}", names, wire))
                stack.callback(found[-1].kill)
            names.write_text(
                "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in found), encoding="utf-8"
            )
            first, second = found
            ends = (str(host._wire.pid) for host in found)
            _run("ip", "link", "add", "eth0", "netns", next(ends), "type", "veth", "peer", "eth0", "netns", next(ends))
            for host in found:
                host._set("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
                host._set("ip", "link", "set", "lo", "up")
                host.mend()
            greeting = first.start(["true"])
            said, _ = greeting.communicate()
            first.jobs.clear()
            if greeting.returncode:
                raise NoHosts(said.strip())
            self._stack = stack.pop_all()
        return first, second

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextlib.contextmanager
def _network() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a network of its own. It ends with its standard input, so also if this process is killed."""
    process = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        deadline = time.monotonic() + 10
        while process.poll() is None and not _is_elsewhere(process.pid):
            if time.monotonic() > deadline:
                raise NoHosts("a network namespace was not made within 10 s")
            time.sleep(0.01)
        if process.poll() is not None:
            raise NoHosts(process.stderr.read().decode().strip())
        yield process
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
        process.stderr.close()


def _is_elsewhere(pid: int) -> bool:
    """Whether a process has a network of its own."""
    try:
        return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    except OSError:  # it has just ended
        return False


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoHosts(f"{' '.join(command)}: {done.stderr.strip()}")


def across_bytes(units: Sequence[Unit], strategy: str, hosts: int = 2, ranks: int = 2) -> int:
    """Return the bytes that each host sends the others in one step.

    Between CPU ranks a slice goes directly to each rank that needs it: of the (N-1)/N of a unit that a rank sends in a
    collective, those for ranks of other hosts leave the host.
    """
    world_size, total = hosts * ranks, 0
    for unit in units:
        if strategy.startswith("hybrid"):  # one all_reduce of the rank's slice with those of the other hosts
            total += ranks * 2 * (unit.padded_bytes(ranks) // ranks) * (hosts - 1) // hosts
        else:
            passes = 2 if unit.stays_gathered else 3
            total += ranks * passes * unit.padded_bytes(world_size) // world_size * (world_size - ranks)
    return total


RECIPE = Path(__file__).parents[2] / "examples" / "hosts" / "torchrun.sh"
TIMEOUT_S, MARGIN_S = 8, 12
STEPS = 30
CONFIG = f"""{GPT2}
[train]
steps = {STEPS}
micro_batch = 1
lr = 1e-3

[checkpoint]
every = 4
"""
SLOW = """
import time
from shardwise.train import trainer
original = trainer.Trainer.step
def step(self, number):
    time.sleep(0.1)
    return original(self, number)
trainer.Trainer.step = step
"""


class Job:
    """A run of `shardwise train` on two hosts, as `examples/hosts/torchrun.sh` starts it."""

    def __init__(self, hosts: tuple[Host, ...], folder: Path, *overrides: str, number: str = "2") -> None:
        """overrides: of the configuration. number: of hosts, as the recipe takes it."""
        self.hosts, self.folder, self.overrides, self.number = hosts, folder, overrides, number
        (folder / "texts").mkdir()
        for i in range(12):
            (folder / "texts" / f"{i}.txt").write_text(f"the {i} quick brown foxes jump. " * (1 + i % 5))
        (folder / "run.toml").write_text(CONFIG)
        (folder / "sitecustomize.py").write_text(SLOW)

    def start(self, host: Host) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        more = {"PATH": path, "RANKS_PER_HOST": "2", "SHARDWISE_HANG_TIMEOUT_S": str(TIMEOUT_S)}
        line = ["sh", str(RECIPE), self.hosts[0].name, self.number, "run.toml", *self.overrides]
        host.start(line, self.output(host), self.folder, **more)

    def output(self, host: Host) -> Path:
        return self.folder / f"{host.name}.txt"

    def said(self, host: Host) -> str:
        return self.output(host).read_text(encoding="utf-8")

    def losses(self, name: str = "run") -> dict[int, float]:
        file = self.folder / "runs" / name / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row["loss"] for row in rows}

    def wait_until(self, what: str, holds: object, seconds: float) -> float:
        began = time.monotonic()
        while not holds():  # type: ignore[operator]
            words = "\n".join(self.said(host) for host in self.hosts)
            assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}\n{words}"
            time.sleep(0.1)
        return time.monotonic() - began
