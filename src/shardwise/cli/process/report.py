"""Reports of ranks that failed or were interrupted: files `rank-N.json` in a directory of the launcher."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shardwise.cli.process.exit import full_traceback, mistake
from shardwise.errors import CollectiveTimeout, OutOfMemory, PeerError

ENVIRONMENT = "SHARDWISE_REPORTS"
"""Environment variable with the directory for reports; it also tells a rank that shardwise launched it."""

LAUNCHER = "SHARDWISE_LAUNCHER"
"""Environment variable with the launcher's process id."""

_CAUSE_S = 3.0
"""How long a rank that failed because of another rank waits for the other's report."""
_STORE_ERRORS = ("DistNetworkError", "DistStoreError")
_PEER_IS_GONE = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket closed")
_NCCL_LOST_A_PEER = (
    *_PEER_IS_GONE,
    "remote process exited",
    "closed by remote peer",
    "communicator was aborted",
    "watchdog",
    "retrieving nccluniqueid from",
)
"""Texts in a `DistBackendError` that mean a lost peer. Other such errors are causes themselves: no memory for NCCL's
buffers, or one GPU used twice."""


@dataclass(frozen=True, slots=True)
class Report:
    """How one rank ended."""

    rank: int
    kind: Literal["mistake", "failed", "interrupted"]
    line: str
    """One-line message for a user's mistake; empty otherwise."""
    traceback: str
    """The full traceback; only the message if a step ran out of memory."""
    time_s: float
    """Time of the report, in seconds since the epoch."""
    consequence: bool
    """Whether the rank failed only because another rank had failed or was gone."""


def describe(error: BaseException, rank: int) -> Report:
    """Return the report of a rank that `error` ended."""
    line = mistake(error)
    kind: Literal["mistake", "failed", "interrupted"] = "failed"
    if line is not None:
        kind = "mistake"
    elif isinstance(error, KeyboardInterrupt):
        kind = "interrupted"
    story = str(error) if isinstance(error, OutOfMemory) else full_traceback(error)
    return Report(rank, kind, line or "", story, time.time(), _lost_a_peer(error))


def format_report(ending: Report, debug: bool = False) -> str:
    """Return the text for the user about how one rank ended."""
    if ending.kind == "mistake":
        line = f"error: rank {ending.rank}: {ending.line}"
        return f"{line}\n{ending.traceback}" if debug else line
    why = " because another rank failed or exited" if ending.consequence else ""
    return f"error: rank {ending.rank} failed{why}:\n{ending.traceback}"


def tell_torchrun(ending: Report) -> None:
    """Write a rank's ending to the file, if any, whose message torchrun shows in its last lines: they would bury it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        told = {"message": ending.line or ending.traceback, "extraInfo": {"timestamp": str(int(ending.time_s))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": told}), encoding="utf-8")


def write(directory: Path, report: Report) -> None:
    """Write a report atomically: readers see all of it or nothing."""
    partial = directory / f"rank-{report.rank}.partial"
    partial.write_text(json.dumps(asdict(report)), encoding="utf-8")
    partial.replace(partial.with_suffix(".json"))


def read(directory: Path) -> list[Report]:
    """Return the reports written so far, earliest first."""
    reports = [Report(**json.loads(path.read_text(encoding="utf-8"))) for path in directory.glob("rank-*.json")]
    return sorted(reports, key=lambda report: report.time_s)


def await_cause(directory: Path) -> None:
    """Wait, at most `_CAUSE_S`, until a rank has reported a cause. Call this before a rank ends as a consequence: once
    the first rank ends, the launcher ends all others, and the cause would be lost."""
    deadline = time.monotonic() + _CAUSE_S
    while all(report.consequence for report in read(directory)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _lost_a_peer(error: BaseException) -> bool:
    return any(_is_of_a_peer(link) for link in _chain(error))


def _is_of_a_peer(error: BaseException) -> bool:
    text, kind = str(error).lower(), type(error).__name__  # torch is not imported here
    if isinstance(error, PeerError | CollectiveTimeout | ConnectionError) or kind in _STORE_ERRORS:
        return True
    return any(words in text for words in (_NCCL_LOST_A_PEER if kind == "DistBackendError" else _PEER_IS_GONE))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
