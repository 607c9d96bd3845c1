"""The output of a search while it runs: a live table on a terminal, lines on standard error elsewhere."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from shardwise.cli.process.exit import Exit

if TYPE_CHECKING:
    from shardwise.plan.dry_run.job import Job
    from shardwise.plan.search.exploration import Candidate
    from shardwise.plan.search.search import Question

_FIRST_LINE_S = 3.0
_LINES_S = 10.0
"""Time between lines on standard error."""
_TICK_S = 0.2


class Searching:
    """A context manager around a search. Ctrl-C inside prints the results so far and ends the process."""

    def __init__(self, question: Question, wanted: bool = True) -> None:
        """
        Args:
            question: the question that the search answers.
            wanted: whether standard output may be used; if not, lines go to standard error even on a terminal.
        """
        self._question = question
        self._judged: dict[Job, Candidate] = {}
        """The candidates judged so far, by job: a search in which nothing fits judges the leanest job again."""
        self._total = 0
        self._began_s = time.monotonic()
        self._over = threading.Event()
        self._handler: Any = None
        self._wanted = wanted
        self._live: Any = None
        self._thread = threading.Thread(target=self._tell, daemon=True)

    def __call__(self, done: int, total: int, candidate: Candidate) -> None:
        """Record a judged configuration. Called by the search; `done` is not used."""
        self._judged[candidate.job] = candidate
        self._total = total

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._interrupted)
        if self._wanted and sys.stdout.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                get_renderable=self._picture, console=Console(highlight=False), transient=True, refresh_per_second=4
            )
            self._live.start()
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    def _end(self) -> None:
        self._over.set()
        if self._live is not None:
            self._live.stop()

    @property
    def _found(self) -> list[Candidate]:
        return list(self._judged.values())  # a copy, because another thread may add to it meanwhile

    def _picture(self) -> Any:
        from rich.text import Text

        rows = self._table()
        return Text("\n\n".join(part for part in (rows, self._line()) if part))

    def _table(self) -> str:
        """Return the table of the configurations that fit so far; empty if there is none yet."""
        if not self._found:
            return ""
        from shardwise.plan.report.rendering import rows_text
        from shardwise.plan.search.exploration import ranked

        return rows_text(ranked(self._found, self._question.objective, self._question.budget_bytes))

    def _line(self) -> str:
        seconds = f"{time.monotonic() - self._began_s:.0f} s"
        found = self._found
        if not found:
            return f"planning: loading torch and running the model dry, {seconds}"
        forecast = [candidate for candidate in found if candidate.forecast is not None]
        done = f"planning: {len(found)} of {self._total} configurations settled by {len(forecast)} forecasts"
        return f"{done}, {seconds}"

    def _tell(self) -> None:
        """Print a line on standard error from time to time. Runs in a thread."""
        due_s = _FIRST_LINE_S
        while not self._over.wait(_TICK_S):
            if time.monotonic() - self._began_s >= due_s:
                due_s += _LINES_S
                print(self._line() + self._best(), file=sys.stderr, flush=True)

    def _best(self) -> str:
        from shardwise.plan.report.report import full_name
        from shardwise.plan.search.exploration import ranked

        best = ranked(self._found, self._question.objective, self._question.budget_bytes).best
        if best is None:
            return ""
        return f"; best so far: {full_name(best.job)}, {best.tokens_per_s_per_gpu:,.0f} tokens/s per GPU"

    def _interrupted(self, number: int, frame: FrameType | None) -> NoReturn:
        """Print the results so far and end the process at once, because an exception can be swallowed in an import."""
        self._end()
        known = self._table()
        print(f"interrupted; {self._line()}{'' if known else '; nothing that fits is known yet'}", file=sys.stderr)
        if known and self._wanted:
            print(known)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(Exit.INTERRUPTED)
