"""Ranges of published throughputs: on parts that can be counted in the head, and the table that plans read."""

import tomllib
from pathlib import Path

import pytest

from benchmarks.plans.planner import RESULTS
from benchmarks.plans.published import spread
from benchmarks.plans.published.rows import read
from benchmarks.plans.published.spread import Seen, held, newest, range_lines, ranges, seen, write_table
from shardwise.plan.hardware.spread import OTHERS

HUNDRED = [Seen("a", "x", 0.5 + n / 100) for n in range(1, 101)]


def test_a_range_holds_nine_tenths_and_the_forecast() -> None:
    of_a = ranges(HUNDRED)["a"]
    assert (of_a.low, of_a.high) == pytest.approx((0.55, 1.45))
    assert sum(one.part in of_a for one in HUNDRED) == 91
    slow = ranges([Seen("a", "x", 1.2 + n / 100) for n in range(10)])["a"]
    assert slow.low == 1.0


def test_devices_weigh_the_same_in_the_range_of_others() -> None:
    found = ranges([*HUNDRED, Seen("b", "y", 2.0)])
    assert set(found) == {OTHERS, "a"}, "one row is no range"
    assert found[OTHERS].high == 2.0
    assert found["a"].high < 1.5


def test_rows_are_judged_by_ranges_that_they_had_no_say_in() -> None:
    rows = [*HUNDRED, *(Seen("a", "z", 3.0) for _ in range(9))]
    assert ranges(rows)["a"].high == 3.0
    by_source = held(rows, lambda one: one.source)
    assert not any(one.source == "z" for one in by_source)
    assert len([one for one in held(rows, id) if one.source == "z"]) == 9
    assert "z 0 of 9" in "\n".join(range_lines(rows))


def test_the_packaged_table_is_what_the_results_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes new results writes the table too."""
    forecasts = newest(RESULTS)
    packaged = spread.TABLE
    monkeypatch.setattr(spread, "TABLE", tmp_path / "spread.toml")
    rows = seen(read(), lambda row: forecasts.get(row.name))
    write_table(rows, tomllib.loads(packaged.read_text())["source"])
    assert spread.TABLE.read_text() == packaged.read_text()
    assert len(held(rows, lambda one: one.source)) >= 0.85 * len(rows)
