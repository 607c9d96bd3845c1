"""Machines: versions, devices, links, shared memory, limits, clocks, NCCL's settings and the disk."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from shardwise import device_tools
from shardwise.diagnosis.result import Checks, Finding
from shardwise.tables import format_bytes
from shardwise.together import Together

_PACKAGES = ("torch", "numpy", "safetensors", "xxhash", "transformers")
_SHM_BYTES = 256 * 2**20
"""Free shared memory below which ranks of a host fail sooner or later: containers have 64 MiB unless told otherwise."""
_FILES = 1024
"""Open files that a rank may need: sockets to peers, files of a checkpoint, the data."""
_DISK_BYTES = 2**30
_TRIED_BYTES = 32 * 2**20
_SLOW_DISK = 10 * 2**20
"""Bytes a second; a checkpoint of a small model takes minutes at that."""
_SKEW_S = 1.0
_TRIALS = 5
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "RCCL_", "UCX_")
_OWN_BY_RANK = frozenset({"NCCL_DEBUG_FILE"})
_SLOWS = {
    "NCCL_P2P_DISABLE": "GPUs of a host then exchange through host memory",
    "NCCL_SHM_DISABLE": "ranks of a host then exchange through the network",
    "NCCL_IB_DISABLE": "hosts then exchange through TCP",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rank knows about its process and its machine."""

    host: str
    versions: dict[str, str]
    device: str
    device_bytes: int | None
    interfaces: dict[str, str]
    """Network interfaces that are up, but loopback, with their rates."""
    ports_down: tuple[str, ...]
    """InfiniBand ports that are not active."""
    shm_bytes: int | None
    """Free in /dev/shm; None where there is none."""
    open_files: int
    locked_is_limited: bool
    settings: dict[str, str]


def facts_here(device: torch.device) -> Facts:
    """Return this rank's facts. Does not communicate."""
    ports = {str(path.parent): _text(path) for path in Path("/sys/class/infiniband").glob("*/ports/*/state")}
    shm = Path("/dev/shm")
    return Facts(
        host=socket.gethostname(),
        versions=_versions(device),
        device="cpu" if device.type == "cpu" else device_tools.name(device),
        device_bytes=None if device.type == "cpu" else device_tools.total_bytes(device),
        interfaces=dict(_interfaces()),
        ports_down=tuple(port for port, state in ports.items() if "ACTIVE" not in state),
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_is_limited=bool(ports) and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY,
        settings={name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)},
    )


def check_machines(checks: Checks, device: torch.device, directory: Path) -> list[Facts]:
    """Add the checks of machines; return every rank's facts. Every rank must call this.

    Args:
        directory: where checkpoints would be; a file of 32 MiB is written there for a moment, by one rank of each host.
    """
    ranks = checks.ranks
    with ranks.together():
        own = facts_here(device)
    facts = ranks.all_gather_object(own)
    hosts = list(dict.fromkeys(one.host for one in facts))
    devices = ", ".join(dict.fromkeys(one.device for one in facts))
    network = ", ".join(f"{name} {rate}" for name, rate in own.interfaces.items()) or "no interface but loopback"
    found = machine_findings(facts)
    passed = {
        "versions": ", ".join(f"{name} {number}" for name, number in own.versions.items()),
        "devices": f"{len(facts)} rank(s) on {len(hosts)} host(s): {devices}",
        "links": network if len(hosts) > 1 else f"one host; {network}",
        "shared memory": f"{format_bytes(own.shm_bytes or 0)} are free",
        "limits": f"{own.open_files:,} open files",
        "NCCL settings": ", ".join(f"{name}={value}" for name, value in own.settings.items()) or "none is set",
    }
    for name, words in passed.items():
        checks.conclude(name, [finding for check, finding in found if check == name], words)
    skews_s = clock_skews_s(ranks)
    worst_s = max(map(abs, skews_s))
    words = f"within {worst_s * 1e3:.0f} ms of rank 0's"
    checks.conclude("clocks", clock_findings(skews_s), words, {"skew_s": worst_s})
    _check_disk(checks, directory, is_first=own.host not in [one.host for one in facts[: ranks.rank]])
    return facts


def machine_findings(facts: Sequence[Facts]) -> list[tuple[str, Finding]]:
    """Return what is wrong on some host, or differs from rank 0's: names of checks, and findings."""
    several = len({one.host for one in facts}) > 1
    each = [(*_differences(rank, one, facts[0]), *_lacks(one, several)) for rank, one in enumerate(facts)]
    return [(check, Finding(about, words)) for found in each for check, about, words in found]


def _differences(rank: int, one: Facts, first: Facts) -> Iterator[tuple[str, str, str]]:
    for name, number in one.versions.items():
        if number != first.versions.get(name):
            words = f"{first.versions.get(name, 'absent')} on rank 0, {number} on rank {rank} ({one.host})"
            yield "versions", name, f"{words}: install the same on all hosts"
    if (one.device, one.device_bytes) != (first.device, first.device_bytes):
        theirs, ours = (f"{each.device} of {format_bytes(each.device_bytes or 0)}" for each in (first, one))
        words = f"has {ours}, rank 0 has {theirs}: all would go at the pace and size of the lesser"
        yield "devices", f"rank {rank}", f"{words}; give all ranks alike devices"
    for name in sorted((one.settings.keys() | first.settings.keys()) - _OWN_BY_RANK):
        here, there = one.settings.get(name, "unset"), first.settings.get(name, "unset")
        if here != there:
            yield "NCCL settings", name, f"{there} on rank 0, {here} on rank {rank}: set it alike on all ranks"
        if name in _SLOWS and here not in {"0", "unset"} and one.device != "cpu":
            yield "NCCL settings", name, f"is {here}: {_SLOWS[name]}; unset it unless the hardware needs it"


def _lacks(one: Facts, several: bool) -> Iterator[tuple[str, str, str]]:
    """several: whether there are several hosts."""
    if several and not one.interfaces:
        yield "links", one.host, "no network interface is up but loopback: bring one up, or leave the host out"
    for port in one.ports_down:
        yield "links", f"{one.host} {port}", "is not active: look at its cable and at ibstat"
    if one.shm_bytes is not None and one.shm_bytes < _SHM_BYTES:
        words = f"/dev/shm has {format_bytes(one.shm_bytes)} free of {format_bytes(_SHM_BYTES)}"
        yield "shared memory", one.host, f"{words}: start its container with --shm-size=8g"
    if one.open_files < _FILES:
        yield "limits", one.host, f"ulimit -n is {one.open_files}: raise it to {_FILES} or more"
    if one.locked_is_limited:
        yield "limits", one.host, "ulimit -l is limited, and InfiniBand pins memory: set it to unlimited"


def clock_skews_s(ranks: Together) -> list[float]:
    """Return how far each rank's clock is ahead of rank 0's, in seconds. Every rank must call this.

    Ranks leave an exchange at about the same time and read their clocks there; the trial with the least spread counts.
    """
    trials = []
    for _ in range(_TRIALS):
        ranks.any(False)
        trials.append(ranks.all_gather_object(time.time()))
    best = min(trials, key=lambda times: max(times) - min(times))
    return [one - best[0] for one in best]


def clock_findings(skews_s: Sequence[float]) -> Iterator[Finding]:
    """Yield a finding for each rank whose clock is not rank 0's."""
    for rank, skew_s in enumerate(skews_s):
        if abs(skew_s) > _SKEW_S:
            words = f"its clock is {skew_s:+.1f} s from rank 0's: logs and timeouts mislead; synchronise it (chrony)"
            yield Finding(f"rank {rank}", words, {"skew_s": skew_s})


def _check_disk(checks: Checks, directory: Path, is_first: bool) -> None:
    """is_first: whether this is the first rank of its host."""
    found: list[Finding] = []
    words, numbers = "", {"free_bytes": 0.0, "write_bytes_per_s": 0.0, "read_bytes_per_s": 0.0}
    if is_first:
        try:
            free = shutil.disk_usage(directory).free
            write, read = _disk_rates(directory) if free > 2 * _TRIED_BYTES else (0.0, 0.0)
            found = list(disk_findings(f"{socket.gethostname()}:{directory}", free, write))
            words = f"{format_bytes(free)} free, writes {format_bytes(write)}/s, reads {format_bytes(read)}/s (cached)"
            numbers = {"free_bytes": free, "write_bytes_per_s": write, "read_bytes_per_s": read}
        except OSError as error:
            found = [Finding(str(directory), f"cannot be written: {error.strerror}; name another with directory=")]
    checks.conclude("disk", found, words, numbers)


def disk_findings(where: str, free: float, write: float) -> Iterator[Finding]:
    """Yield a finding if the disk has too little room, or is too slow. `write`: bytes a second."""
    if free < _DISK_BYTES:
        yield Finding(where, f"{format_bytes(free)} are free: make room, or save elsewhere")
    elif write < _SLOW_DISK:
        yield Finding(where, f"writes {format_bytes(write)}/s: save to a faster disk, or with asynchronous=True")


def _disk_rates(directory: Path) -> tuple[float, float]:
    """Return the bytes a second of a write that reaches the disk, and of a read."""
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=directory, prefix="shardwise-doctor-") as file:
        start_s = time.perf_counter()
        for _ in range(_TRIED_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written_s = time.perf_counter()
        file.seek(0)
        while file.read(len(block)):
            pass
        read_s = time.perf_counter()
    return _TRIED_BYTES / (written_s - start_s), _TRIED_BYTES / (read_s - written_s)


def _versions(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | device_tools.library_versions(device)


def _interfaces() -> Iterator[tuple[str, str]]:
    for path in sorted(Path("/sys/class/net").glob("*")):
        if path.name != "lo" and _text(path / "operstate") in {"up", "unknown"}:
            speed = _text(path / "speed")
            yield path.name, f"{speed} Mb/s" if speed.isdecimal() else "of unknown rate"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # an interface without a rate
        return ""
