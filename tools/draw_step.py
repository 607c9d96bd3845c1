"""Draw one training step of `full_shard` as it was recorded: docs/pictures/step.svg.

`python tools/draw_step.py [FILE]` trains a model of four blocks for two steps as rank 0 of 2, with collectives that
move nothing and note every call, and draws the second step. The order of everything and who waits for what are
recorded; how long things take is nominal (`SECONDS`), since nothing is moved and the model is tiny.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.collective_log import CollectiveLog
from shardwise.fsdp.collectives import Buffer, BufferKind, Combine, FlatSpan, Reduction, Work
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.torch_collectives import DryCollectives

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "step.svg"
BLOCKS = 4
ROOT = "root"
SECONDS = {
    "forward": 1.0,
    "backward": 2.0,
    "optimizer": 1.3,
    "all_gather": 0.8,
    "reduce_scatter": 1.1,
    ("forward", ROOT): 0.35,
    ("backward", ROOT): 0.7,
    ("all_gather", ROOT): 0.4,
    ("reduce_scatter", ROOT): 0.5,
}
"""Of a block, and of the root where it takes another time."""


# Recording ------------------------------------------------------------------------------------------------------------


class Note(NamedTuple):
    """Something that happened, in the order in which the rank's program came to it."""

    what: str
    """forward, backward, optimizer (computed now); all_gather, reduce_scatter (issued now); gathered, reduced (waited
    for now); claim, release (of a buffer); exchange."""
    unit: str = ""
    buffer: int = -1


class Noted:
    """A collective under way; notes when it is waited for."""

    def __init__(self, work: Work, notes: list[Note], note: Note) -> None:
        self._work = work
        self._notes = notes
        self._note = note

    def wait(self) -> None:
        self._notes.append(self._note)
        self._work.wait()


class NotingCollectives(DryCollectives):
    """One rank of several, without the others; notes every call."""

    def __init__(self, rank: int, world_size: int, notes: list[Note]) -> None:
        super().__init__(rank, world_size, "cpu")
        self.notes = notes
        self.kinds: list[BufferKind] = []
        self.units: dict[int, str] = {}
        """By label."""

    def allocate(self, nbytes: int, kind: BufferKind) -> Buffer:
        self.kinds.append(kind)
        return super().allocate(nbytes, kind)

    def claim(self, buffer: Buffer) -> None:
        self.notes.append(Note("claim", buffer=buffer.index))

    def release(self, buffer: Buffer) -> None:
        self.notes.append(Note("release", buffer=buffer.index))

    def all_gather(self, buffer: Buffer, spans: tuple[FlatSpan, ...], label: int = 0) -> Work:
        self.notes.append(Note("all_gather", self.units[label], buffer.index))
        work = super().all_gather(buffer, spans, label)
        return Noted(work, self.notes, Note("gathered", self.units[label], buffer.index))

    def reduce_scatter(self, buffer: Buffer, reductions: tuple[Reduction, ...], label: int = 0) -> Work:
        self.notes.append(Note("reduce_scatter", self.units[label], buffer.index))
        work = super().reduce_scatter(buffer, reductions, label)
        return Noted(work, self.notes, Note("reduced", self.units[label], buffer.index))

    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        self.notes.append(Note("exchange"))
        return super().exchange(message, combine, label)


class Computed(nn.Module):
    """A linear layer that notes when its forward and its backward are computed."""

    def __init__(self, name: str, inputs: int, outputs: int, notes: list[Note]) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self._name = name
        self._notes = notes

    def forward(self, x: Tensor) -> Tensor:
        self._notes.append(Note("forward", self._name))
        y: Tensor = self.linear(x)
        y.register_hook(lambda grad: self._notes.append(Note("backward", self._name)))
        return y * 1.0  # the unit's own hook, on this, comes before the one above


class Model(nn.Module):
    """Blocks, and a root with parameters of its own before and after them."""

    def __init__(self, notes: list[Note]) -> None:
        super().__init__()
        self.enter = Computed(ROOT, 4, 16, notes)
        self.blocks = nn.Sequential(*(Computed(f"block {i + 1}", 16, 16, notes) for i in range(BLOCKS)))
        self.leave = Computed(ROOT, 16, 4, notes)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))  # type: ignore[no-any-return]


class Recording(NamedTuple):
    """One step, and which of the shard group's buffers are slots and which are reduce slots."""

    notes: Sequence[Note]
    kinds: Sequence[BufferKind]


def record() -> Recording:
    """The second step of rank 0 of 2."""
    torch.manual_seed(0)
    notes: list[Note] = []
    ranks = NotingCollectives(0, 2, notes)
    model = Model(notes)
    mesh = Mesh(ranks, DryCollectives(0, 1, "cpu"), torch.device("cpu"))
    sw.shard(
        model, "full_shard", mesh=mesh, units=lambda fqn, module: fqn.startswith("blocks.") and fqn.count(".") == 1
    )
    for index, name in enumerate([ROOT, *(f"block {i + 1}" for i in range(BLOCKS))]):
        ranks.units[CollectiveLog.gather_label(index)] = ranks.units[CollectiveLog.reduce_label(index)] = name
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        notes.clear()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        notes.append(Note("optimizer"))
    return Recording(notes, ranks.kinds)


# Timing ---------------------------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """Something that takes time, in nominal seconds."""

    row: str
    what: str
    unit: str
    start: float
    stop: float


@dataclass
class Timeline:
    """Bars by row, and points at which ranks compare what they did."""

    bars: list[Bar] = field(default_factory=list)
    exchanges: list[float] = field(default_factory=list)

    def add(self, row: str, what: str, unit: str, start: float, stop: float) -> None:
        if stop > start:
            self.bars.append(Bar(row, what, unit, start, stop))

    def of(self, row: str, what: str, unit: str) -> list[Bar]:
        """The bars of one kind, in time."""
        return sorted(bar for bar in self.bars if (bar.row, bar.what, bar.unit) == (row, what, unit))

    @property
    def stop(self) -> float:
        return max(bar.stop for bar in self.bars)


def _seconds(what: str, unit: str) -> float:
    return SECONDS[what, unit] if (what, unit) in SECONDS else SECONDS[what]


def row_of(buffer: int, kinds: Sequence[BufferKind]) -> str:
    """The row in which a buffer is drawn."""
    position = kinds[: buffer + 1].count(kinds[buffer]) - 1
    return f"{'slot' if kinds[buffer] is BufferKind.GATHER else 'reduce slot'} {position}"


def lay_in_time(recording: Recording) -> Timeline:
    """Let compute, all_gathers and reduce_scatters each be one queue, as on a GPU."""
    timeline = Timeline()
    now = 0.0
    free = {"all_gather": 0.0, "reduce_scatter": 0.0}
    ends: dict[tuple[str, int], float] = {}
    claimed: dict[int, float] = {}
    landed: dict[int, tuple[str, float]] = {}
    for note in recording.notes:
        row = "" if note.buffer < 0 else row_of(note.buffer, recording.kinds)
        if note.what in {"forward", "backward", "optimizer"}:
            stop = now + _seconds(note.what, note.unit)
            timeline.add("compute", note.what, note.unit, now, stop)
            now = stop
        elif note.what in free:
            start = max(now, free[note.what])
            stop = free[note.what] = start + _seconds(note.what, note.unit)
            timeline.add(note.what, note.what, note.unit, start, stop)
            ends[note.what, note.buffer] = stop
            if note.what == "reduce_scatter":
                timeline.add(row, "collecting", note.unit, claimed[note.buffer], now)
                claimed[note.buffer] = now
        elif note.what == "claim":
            claimed[note.buffer] = now
        elif note.what == "gathered":
            now = max(now, ends["all_gather", note.buffer])
            arrival = ends["all_gather", note.buffer]
            timeline.add(row, "unsharding", note.unit, claimed[note.buffer], arrival)
            landed[note.buffer] = note.unit, arrival
        elif note.what == "release":
            unit, arrival = landed.pop(note.buffer)
            timeline.add(row, "unsharded", unit, arrival, now)
        elif note.what == "reduced":
            now = max(now, ends["reduce_scatter", note.buffer])
            timeline.add(row, "reducing", note.unit, claimed.pop(note.buffer), ends["reduce_scatter", note.buffer])
        else:
            timeline.exchanges.append(now)
    return timeline


# Drawing --------------------------------------------------------------------------------------------------------------

LEFT, TOP, ROW, SCALE = 148, 96, 34, 54
"""Pixels: of the names of rows, above the rows, of a row, of a second."""
COLORS = {ROOT: "#8a8f98", "block 1": "#3b7dd8", "block 2": "#1f9e89", "block 3": "#e08a1e", "block 4": "#9b59b6"}
BAR = ROW - 8
"""Pixels: the height of a bar."""
PALE = {"unsharding", "collecting"}
INK, FAINT = "#24292f", "#d0d7de"
FONT = 'font-family="Helvetica, Arial, sans-serif"'


class Remark(NamedTuple):
    """A number in the picture and the sentence under it."""

    row: str
    time: float
    words: str


def _remarks(timeline: Timeline) -> Iterator[Remark]:
    def of(row: str, what: str, unit: str, position: int = 0) -> Bar:
        return timeline.of(row, what, unit)[position]

    gather, scatter = "all_gather", "reduce_scatter"
    yield Remark(gather, of(gather, gather, "block 1").start, "Nothing computes yet that could hide the first gathers.")
    yield Remark(gather, of(gather, gather, "block 2").start, "Prefetch: block 2 is gathered while block 1 computes.")
    first = next(bar for bar in timeline.bars if (bar.what, bar.unit) == ("unsharded", "block 1"))
    yield Remark(first.row, first.stop, "Block 1's forward is over: it is resharded, and block 4 takes the slot.")
    last = next(bar for bar in timeline.bars if (bar.what, bar.unit) == ("unsharded", "block 4"))
    yield Remark(
        last.row, timeline.exchanges[0], "Block 4 stays unsharded, because its own backward is what comes next."
    )
    yield Remark(
        gather, of(gather, gather, "block 3", 1).start, "Block 3 is gathered again, for its backward, ahead of time."
    )
    collecting = next(bar for bar in timeline.bars if (bar.what, bar.unit) == ("collecting", "block 4"))
    yield Remark(collecting.row, collecting.start, "Backward of block 4 begins: a reduce slot collects its gradients.")
    yield Remark(
        scatter, of(scatter, scatter, "block 4").start, "... and is reduced while the backward of block 3 computes."
    )
    again = next(bar for bar in timeline.bars if (bar.what, bar.unit) == ("collecting", "block 2"))
    yield Remark(again.row, again.start, "Block 2 takes that reduce slot: here its last reduction is waited for.")
    yield Remark(
        "compute", timeline.exchanges[1], "Backward is over: the sums are waited for and gradients handed out."
    )


def draw(recording: Recording) -> str:
    """The picture, as SVG."""
    timeline = lay_in_time(recording)
    slots = [row_of(buffer, recording.kinds) for buffer in range(len(recording.kinds))]
    rows = ["compute", "all_gather", "reduce_scatter", *slots]
    gaps = {slots[0], next(slot for slot in slots if slot.startswith("reduce"))}
    tops: dict[str, float] = {}
    top = float(TOP)
    for row in rows:
        top += 14 * (row in gaps)
        tops[row] = top
        top += ROW
    remarks = list(_remarks(timeline))
    width, height = LEFT + SCALE * timeline.stop + 24, top + 40 + 19 * -(-len(remarks) // 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" {FONT} font-size="12" fill="{INK}">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        _text(16, 26, "One step of full_shard: a root and 4 blocks, 3 slots, one of 2 ranks", "start", 16),
        *_legend(),
        *_rows(rows, tops, recording, timeline, width),
        *(_bar(bar, tops[bar.row]) for bar in timeline.bars),
        *_exchanges(timeline, top),
    ]
    for number, remark in enumerate(remarks, start=1):
        parts.append(_badge(LEFT + SCALE * remark.time, tops[remark.row] - 1, number))
        column, line = divmod(number - 1, -(-len(remarks) // 2))
        x, y = 28 + column * (width - 28) / 2, top + 36 + 19 * line
        parts += [_badge(x, y - 4, number), _text(x + 14, y, remark.words, "start")]
    return "\n".join([*parts, "</svg>\n"])


def _rows(
    rows: Sequence[str], tops: dict[str, float], recording: Recording, timeline: Timeline, width: float
) -> Iterator[str]:
    for row in rows:
        name = row
        if "slot" in row and all(bar.unit == ROOT for bar in timeline.bars if bar.row == row):
            name = f"{row} (root's)"
        yield _text(LEFT - 10, tops[row] + 20, name, "end")
        yield f'<path d="M{LEFT} {tops[row] + ROW - 3:.1f}H{width - 16:.0f}" stroke="{FAINT}"/>'


def _legend() -> Iterator[str]:
    x = 16.0
    for words, fill, opacity in (
        ("in a row of a slot: its all_gather runs, or it collects gradients", COLORS["block 1"], 0.3),
        ("the unit can be used, or its gradients are being reduced", COLORS["block 1"], 1.0),
    ):
        yield f'<rect x="{x:.0f}" y="42" width="18" height="12" rx="2" fill="{fill}" fill-opacity="{opacity}"/>'
        yield _text(x + 24, 52, words, "start")
        x += 400
    yield f'<path d="M{x:.0f} 40V56" stroke="{INK}" stroke-dasharray="3 3"/>'
    yield _text(x + 8, 52, "ranks compare what they did", "start")


def _bar(bar: Bar, top: float) -> str:
    x, width = LEFT + SCALE * bar.start, SCALE * (bar.stop - bar.start)
    color = COLORS.get(bar.unit, "#57606a")
    pale = bar.what in PALE
    label = bar.unit or bar.what
    if bar.row == "compute" and width > 100 and bar.unit:
        label = f"{bar.unit} {bar.what}"
    label = label if width > 6.5 * len(label) else label.removeprefix("block ") if bar.unit != ROOT else ""
    box = (
        f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{BAR}" rx="3" fill="{color}"'
        f' fill-opacity="{0.3 if pale else 1}" stroke="white"/>'
    )
    return box + _text(x + width / 2, top + 18, label, "middle", 12, INK if pale else "white")


def _exchanges(timeline: Timeline, bottom: float) -> Iterator[str]:
    for name, time in zip(("forward is over", "backward is over"), timeline.exchanges, strict=True):
        x = LEFT + SCALE * time
        yield f'<path d="M{x:.1f} {TOP - 8}V{bottom:.1f}" stroke="{INK}" stroke-dasharray="3 3"/>'
        yield _text(x, TOP - 13, name, "middle")


def _badge(x: float, y: float, number: int) -> str:
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="white" stroke="{INK}"/>'
    return circle + _text(x, y + 4, str(number), "middle", 11)


def _text(x: float, y: float, words: str, anchor: str, size: int = 12, fill: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(words)}</text>'
    )


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    path.write_text(draw(record()), encoding="utf-8")
