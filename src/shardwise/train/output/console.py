"""A run's terminal output: a live display on a TTY, a line every few seconds elsewhere, tables at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from shardwise.pages import COLOURS
from shardwise.policy.kinds import KINDS, MEMORY_WORDS, STATE_KINDS
from shardwise.tables import format_bytes
from shardwise.train.output.sparkline import History
from shardwise.train.run.metrics import StepMetrics
from shardwise.train.run.sample import Sample

if TYPE_CHECKING:
    from shardwise.train.build.auto import Outlook

_PLAIN_INTERVAL_S = 5.0
_CURVE, _LEAST_CURVE, _BESIDE_CURVE = 48, 8, 54
"""Characters of a curve at most and at least, and of what is beside it."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of the model and its optimizer by kind (`STATE_KINDS`), sharded and unsharded."""

    largest: Mapping[str, int]
    """Bytes of each kind on the rank that holds most of that kind, as counted."""
    replicated: Mapping[str, int]
    """Bytes of each kind on every rank under DDP, as computed."""

    @property
    def largest_bytes(self) -> int:
        """Sum of `largest` over kinds."""
        return sum(self.largest.values())

    @property
    def replicated_bytes(self) -> int:
        """Sum of `replicated` over kinds."""
        return sum(self.replicated.values())


def compared_with_ddp(by_rank: Sequence[Mapping[str, int]], replicated: Mapping[str, int]) -> Footprint:
    """Return the bytes of this run's ranks beside those of DDP.

    Args:
        by_rank: for every rank, bytes by kind as counted by `sw.memory(model).peak`.
        replicated: bytes by kind under DDP, from `shardwise.model_tools.memory.replicated`.
    """
    return Footprint({kind: max(rank[kind] for rank in by_rank) for kind in STATE_KINDS}, replicated)


class RunConsole:
    """The terminal output of one run. It is quiet on all ranks except the first, so callers need not check their rank.

    Use it as a context manager; the live display exists only inside.
    """

    def __init__(
        self,
        steps: int,
        every: int = 1,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            steps: optimizer steps of the whole run.
            every: steps between updates (`log.every`).
            quiet: print nothing.
            console: where to print; None = standard output.
            clock: returns seconds; plain lines are at least 5 s apart.
        """
        self.console = console if console is not None else Console(quiet=quiet, highlight=False)
        self.unit = "tokens"
        """What a step's number of tokens counts."""
        self._steps = steps
        self._every = every
        self._clock = clock
        self._last_line_s = float("-inf")
        self._first_step_s: float | None = None
        self._steps_before = 0
        """Steps taken before this launch, which may have resumed the run."""
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
        )
        self._task = self._progress.add_task("steps", total=steps)
        self._losses, self._speeds = History(), History()
        self._live: Live | None = None
        if self.console.is_terminal and not self.console.quiet:
            self._live = Live(self._progress, console=self.console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def doing(self, text: str) -> None:
        """Show below the progress bar what the run is doing, until the next update. Only on a TTY."""
        if self._live is not None:
            self._live.update(Group(self._progress, Text(text)))

    def say(self, text: str) -> None:
        """Print one line, without markup or wrapping."""
        self.console.print(escape(text), soft_wrap=True)

    def step(self, metrics: StepMetrics) -> None:
        """Show a step, unless it is too early for the next update by `every` or, without a TTY, by the clock."""
        now = self._clock()
        self._losses.add(metrics.loss)
        self._speeds.add(metrics.tokens_per_s)
        if self._first_step_s is None or metrics.step <= self._steps_before:  # the run may have gone back
            self._first_step_s = now - metrics.step_time_s
            self._steps_before = metrics.step - 1
        last = metrics.step == self._steps
        if metrics.step % self._every and not last:
            return
        if self._live is not None:
            self._progress.update(self._task, completed=metrics.step)
            self._live.update(_View(self, metrics))
        elif last or now - self._last_line_s >= _PLAIN_INTERVAL_S:
            self._last_line_s = now
            taken = metrics.step - self._steps_before
            left_s = (now - self._first_step_s) / taken * (self._steps - metrics.step)
            self.say(f"step {metrics.step}/{self._steps}  {step_line(metrics, self.unit)}  left {_duration(left_s)}")

    def view(self, metrics: StepMetrics) -> Group:
        """Return what a terminal shows after a step: progress, curves so far, and memory by kind."""
        width = max(_LEAST_CURVE, min(_CURVE, self.console.width - _BESIDE_CURVE))
        norm = "" if metrics.grad_norm is None else f"   grad norm {metrics.grad_norm:.2f}"
        rows = Table.grid(padding=(0, 2))
        rows.add_row("loss", self._losses.line(width), f"{metrics.loss:.4f}   lr {metrics.lr:.2e}{norm}")
        rows.add_row(f"{self.unit}/s", self._speeds.line(width), f"{metrics.tokens_per_s:,.0f}")
        held = format_bytes(sum(filter(None, metrics.memory.values())))
        rows.add_row("memory", memory_bar(metrics.memory, width), f"{held} on rank 0")
        return Group(self._progress, rows, memory_key(metrics.memory))

    def evaluated(self, step: int, loss: float, metrics: Mapping[str, float] | None = None) -> None:
        """Print the held-out loss and metrics after `step` steps."""
        more = "".join(f"  {name} {value:.4g}" for name, value in (metrics or {}).items())
        self.say(f"step {step}/{self._steps}  held-out loss {loss:.4f}{more}")

    def answered(self, step: int, count: int, metrics: Mapping[str, float], file: Path) -> None:
        """Print the metrics of answers after `step` steps, and where the answers are."""
        found = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.say(f"step {step}/{self._steps}  {count:,} answers  {found}  {file}")

    def interrupted(self, step: int, first_step: int, saved: Path | None) -> None:
        """Print that the run was interrupted, and whether it was saved.

        Args:
            step: number of steps taken.
            first_step: how many of them were taken before this launch.
            saved: the checkpoint after that step; None if the run saves none.
        """
        if step == first_step:
            self.say(f"interrupted before step {step + 1}; start it again to continue")
        elif saved is not None:
            self.say(f"interrupted after step {step}: saved as {saved}; start it again to continue")
        else:
            self.say(f"interrupted after step {step}; checkpoint.every=0, so nothing was saved")

    def sample(self, sample: Sample) -> None:
        """Print generated text, with the prompt dimmed, or where that cannot be seen a mark behind it."""
        mark, title = ("", "prompt dimmed") if self.console.color_system else (" » ", "what the model wrote follows »")
        text = f"[dim]{escape(_printable(sample.prompt))}[/dim]{mark}{escape(_printable(sample.continuation))}"
        self.console.print(Panel(text, title=f"a sample ({title})", title_align="left"))

    def summary(self, strategy: str, world_size: int, footprint: Footprint, step_time_s: float | None) -> None:
        """Print the table at the end, and the median step time unless no step was taken."""
        self.console.print(summary_table(strategy, world_size, footprint))
        share = footprint.largest_bytes / footprint.replicated_bytes
        took = "" if step_time_s is None else f"; median step {step_time_s:.3f} s, measured"
        is_sharded = world_size > 1 and strategy != "no_shard"
        why = "; of so small a model, buffers take more than sharding saves" if is_sharded and share >= 1 else ""
        self.say(f"{share:.2f} of DDP's bytes per rank (DDP keeps all of them on every rank{why}){took}")

    def offloaded(self, place: str, memory: Mapping[str, int]) -> None:
        """Print rank 0's bytes by kind in a place beside the device; nothing if there are none."""
        if memory:
            held = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in memory.items())
            self.say(f"rank 0 also has {format_bytes(sum(memory.values()))} {place}: {held}")

    def beside_plan(self, outlook: Outlook, peak: Mapping[str, int], step_time_s: float) -> None:
        """Print planned beside measured values: bytes by kind on rank 0, and the median step time."""
        self.console.print(plan_table(outlook, peak))
        change = step_time_s / outlook.step_time_s - 1
        self.say(f"step: {outlook.step_time_s:.3f} s planned, {step_time_s:.3f} s measured (median, {change:+.0%})")


class _View:
    """What a terminal shows after a step, made when it is drawn: a few times a second, however short steps are."""

    def __init__(self, console: RunConsole, metrics: StepMetrics) -> None:
        self._console, self._metrics = console, metrics

    def __rich__(self) -> Group:
        return self._console.view(self._metrics)


def step_line(metrics: StepMetrics, unit: str = "tokens") -> str:
    """Return a step's metrics as text, without the step's number. unit: what `metrics.tokens` counts."""
    norm = "" if metrics.grad_norm is None else f"grad norm {metrics.grad_norm:.2f}  "
    return (
        f"loss {metrics.loss:.4f}  lr {metrics.lr:.2e}  {norm}"
        f"{metrics.tokens_per_s:,.0f} {unit}/s  rank 0: {format_bytes(sum(filter(None, metrics.memory.values())))}"
    )


def memory_bar(memory: Mapping[str, int | None], width: int) -> Text:
    """Return bytes by kind as one bar. Kinds that are smaller than half a character are left out."""
    whole = sum(filter(None, memory.values())) or 1
    bar = Text()
    for kind, size in _held(memory):
        bar.append("█" * round(width * size / whole), COLOURS[kind])
    return bar


def memory_key(memory: Mapping[str, int | None]) -> Text:
    """Return bytes by kind as text in the bar's colours, largest first, without kinds that are empty or were not
    measured."""
    return Text(", ").join(
        Text(f"{MEMORY_WORDS[kind]} {format_bytes(size)}", COLOURS[kind]) for kind, size in _held(memory)
    )


def _held(memory: Mapping[str, int | None]) -> list[tuple[str, int]]:
    return sorted(((kind, size) for kind, size in memory.items() if size), key=lambda item: -item[1])


def summary_table(strategy: str, world_size: int, footprint: Footprint) -> Table:
    """Return a table of bytes per rank: counted under this strategy, and computed for DDP from the same tensors at
    their global size."""
    rows = [(kind, footprint.largest[kind], footprint.replicated[kind]) for kind in STATE_KINDS]
    rows.append(("all", footprint.largest_bytes, footprint.replicated_bytes))
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return _bytes_table(f"bytes per rank on {ranks}", (f"{strategy}, counted", "DDP, computed"), rows)


def plan_table(outlook: Outlook, peak: Mapping[str, int]) -> Table:
    """Return a table of bytes by kind: planned at the step's peak, and measured, each kind at its own highest. A dash
    means that the kind was not measured."""
    planned = outlook.memory
    rows = [(kind, planned.get(kind, 0), peak.get(kind)) for kind in KINDS if planned.get(kind) or peak.get(kind)]
    both = [kind for kind, _, measured in rows if measured is not None]
    rows.append(("all that was measured", sum(planned.get(k, 0) for k in both), sum(peak[k] for k in both)))
    return _bytes_table("rank 0, planned and measured", ("planned", "measured"), rows)


def _bytes_table(title: str, columns: tuple[str, str], rows: Sequence[tuple[str, int, int | None]]) -> Table:
    """Return a table with one row per kind and a line above the last row."""
    table = Table(title=title, title_justify="left")
    table.add_column("kind")
    for column in columns:
        table.add_column(column, justify="right")
    for number, (kind, *sizes) in enumerate(rows, 2):
        cells = ("-" if size is None else format_bytes(size) for size in sizes)
        table.add_row(kind, *cells, end_section=number == len(rows))
    return table


def _duration(seconds: float) -> str:
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


def _printable(text: str) -> str:
    """Replace control characters other than line ends and tabs, because they would move the cursor."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
