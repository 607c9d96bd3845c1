"""One profile of some steps: what each rank records, and what rank 0 makes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from shardwise import device_tools
from shardwise.errors import UserError, one_line
from shardwise.model_tools.event_log import EventLog, record_exchanges, recording
from shardwise.train.process.ranks import Ranks
from shardwise.train.profile.clocks import offsets
from shardwise.train.profile.rank_file import RankFile
from shardwise.train.profile.summary import summarised
from shardwise.train.profile.trace import write_trace
from shardwise.train.run.profiles import TRACE, Profile

T = TypeVar("T")


class NoProfile(Exception):
    """A profile cannot be made; the message says why. Raised on every rank."""


class Session:
    """Records from its beginning to its end, both between steps."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        """Begin. Every rank must call this."""
        self.log = EventLog()
        self._ranks = ranks
        self._offsets = offsets(ranks)
        self._stack = ExitStack()
        self._stack.enter_context(recording(model, self.log))
        for channel in ranks.channels:
            record_exchanges(channel, self.log, "run", ranks.world_size, self._stack)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler writes to standard error
        self._profiler = torch.profiler.profile(activities=_activities(ranks.device))
        self._failure: Exception | None = None
        """What kept the profiler from recording."""
        device_tools.wait(ranks.device)
        self._trying(self._profiler.start)

    def _trying(self, call: Callable[[], object]) -> None:
        if self._failure is None:
            try:
                call()
            except Exception as error:
                self._failure = error

    def close(self) -> None:
        """Stop recording, whatever comes of it. Not collective."""
        device_tools.wait(self._ranks.device)
        self._trying(self._profiler.stop)
        self._stack.close()

    def end(self, directory: Path, first_step: int) -> Profile | None:
        """End: write the trace of all ranks to a directory of the run. Every rank must call this; rank 0 gets the
        summary, which is not written yet.

        Raises:
            NoProfile: a rank could not record, or a file cannot be written.
        """
        self.close()
        try:
            self.work(lambda: self._write_own(directory))
            return self.work(lambda: self._put_together(directory, first_step) if self._ranks.is_first else None)
        except NoProfile:
            with suppress(OSError):
                _file(directory, self._ranks.rank).unlink(missing_ok=True)
            raise

    def work(self, task: Callable[[], T]) -> T:
        """Run a task as `Ranks.work`, to its end on every rank. Every rank must call this.

        Raises:
            NoProfile: a task raised an Exception; of several, the first rank's is named.
        """
        results: list[T] = []

        def attempt() -> str:
            try:
                results.append(task())
            except UserError as error:
                return str(error)
            except Exception as error:
                return one_line(error, with_type=True)
            return ""

        failures = [*filter(None, self._ranks.all_gather_object(self._ranks.work(attempt)))]
        if failures:
            raise NoProfile(failures[0])
        return results[0]

    def _write_own(self, directory: Path) -> None:
        if self._failure is not None:
            raise self._failure
        raw = directory / f"rank-{self._ranks.rank:05d}.json"
        partial = raw.with_name(f"{raw.name}.tmp")  # torch's; it stays if the disk is full, of which torch says nothing
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(raw))
            if not raw.exists():
                raise UserError(_cut_short(raw))
            RankFile.write(_file(directory, self._ranks.rank), self.log, json.loads(raw.read_text(encoding="utf-8")))
        except OSError as error:
            raise _not_written(directory, error) from None
        except json.JSONDecodeError:
            raise UserError(_cut_short(raw)) from None
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
                raw.unlink(missing_ok=True)

    def _put_together(self, directory: Path, first_step: int) -> Profile:
        """Read all ranks' files, write the trace and return the summary."""
        paths = {rank: _file(directory, rank) for rank in range(self._ranks.world_size)}
        missing = [rank for rank, path in paths.items() if not path.exists()]
        try:
            files = [
                RankFile.read(path, rank).moved(self._offsets[rank].offset_ns)
                for rank, path in paths.items()
                if rank not in missing
            ]
            write_trace(directory / TRACE, files)
            for rank, path in paths.items():
                if rank not in missing:
                    path.unlink()
        except OSError as error:
            with suppress(OSError):
                (directory / TRACE).unlink(missing_ok=True)
            raise _not_written(directory, error) from None
        return summarised(files, first_step, max(one.within_ns for one in self._offsets), missing)


def _cut_short(raw: Path) -> str:
    return f"{raw} was cut short: is the disk full?"


def _not_written(directory: Path, error: OSError) -> UserError:
    return UserError(f"the profile cannot be written to {directory}: {error.strerror or error}")


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.json.gz"


def _activities(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    kinds = torch.profiler.ProfilerActivity
    own = getattr(kinds, device.type.upper(), None)
    return [kinds.CPU] if own in {None, kinds.CPU} else [kinds.CPU, own]


def lines(profile: Profile, trace: Path) -> list[str]:
    """Return the summary for a terminal."""
    shares = profile.mean_shares
    width = max(map(len, shares))
    found = [
        f"profile of steps {profile.first_step} to {profile.last_step}: {profile.step_time_s:.3g} s a step, "
        f"{len(profile.shares)} ranks, clocks within {1e6 * profile.clock_s:.0f} us",
        *(f"  {name:{width}}  {share:6.1%}" for name, share in shares.items() if share >= 5e-4),
    ]
    unit = profile.slowest_unit
    if unit is not None:
        found.append(
            f"slowest unit: {unit.name or 'root'}, {unit.compute_s:.3g} s a step computing and {unit.waiting_s:.3g} s "
            "waiting for its collectives"
        )
    if len(profile.shares) > 1:
        slowest = profile.slowest_rank
        found.append(f"slowest rank: {slowest}, others wait {profile.waited_for_s[slowest]:.3g} s a step for it")
    if profile.missing:
        found.append(f"without ranks {', '.join(map(str, profile.missing))}: their files are on other machines' disks")
    found += [f"{one.what}: {one.advice}" for one in profile.advice]
    return [*found, f"trace: {trace} (open it in https://ui.perfetto.dev)"]
