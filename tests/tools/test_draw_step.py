"""The picture of a step is of the engine as it is."""

from itertools import pairwise

from tools.draw_step import PICTURE, Note, draw, lay_in_time, record, row_of


def test_the_picture_is_what_is_recorded_now() -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw(record()), "run: python tools/draw_step.py"


def test_slots_are_held_by_one_unit_at_a_time() -> None:
    timeline = lay_in_time(record())
    for row in {bar.row for bar in timeline.bars}:
        bars = sorted((bar for bar in timeline.bars if bar.row == row), key=lambda bar: bar.start)
        for earlier, later in pairwise(bars):
            assert earlier.stop <= later.start, f"{row}: {earlier} and {later}"


def test_every_claim_ends() -> None:
    recording = record()
    held: set[str] = set()
    for note in recording.notes:
        if note.what == "claim":
            row = row_of(note.buffer, recording.kinds)
            assert row not in held
            held.add(row)
        elif note.what in {"release", "reduced"}:
            held.remove(row_of(note.buffer, recording.kinds))
    assert held == set()
    assert recording.notes[-1] == Note("optimizer")
