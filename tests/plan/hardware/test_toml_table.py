"""Sections of hardware files, read key by key."""

from collections.abc import Callable
from typing import Any

import pytest

from shardwise.plan.hardware.toml_table import HardwareFileError, TomlTable

DATA: dict[str, Any] = {"rate": 3, "name": "x", "curve": [[2, 4], [1, 8.5]], "inner": {"rate": float("nan"), "n": True}}


def test_what_is_right_is_read() -> None:
    section = TomlTable(DATA, "outer", tuple(DATA))
    assert (section.number("rate"), section.text("name", ""), section.count("rate", 1)) == (3.0, "x", 3)
    assert section.points("curve") == ((1.0, 8.5), (2.0, 4.0))
    assert (section.text("absent", "usual"), section.count("absent", 7), section.value("absent")) == ("usual", 7, None)
    assert section.section("absent").keys == []
    assert section.section("inner").keys == ["rate", "n"]


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (lambda s: s.section("inner", ("rates", "n")), "unknown key outer.inner.rate; did you mean rates?"),
        (lambda s: s.section("inner", ("power",)), "unknown key outer.inner.rate; the keys are power"),
        (lambda s: s.section("rate"), "outer.rate = 3: must be a table"),
        (lambda s: s.section("inner").number("rate"), "outer.inner.rate = nan: must be a finite number above 0"),
        (lambda s: s.section("inner").number("n"), "outer.inner.n = True: must be a finite number above 0"),
        (lambda s: s.section("inner").count("n", 1), "outer.inner.n = True: must be a whole number of at least 1"),
        (lambda s: s.text("rate", ""), "outer.rate = 3: must be a string"),
        (lambda s: s.points("rate"), "outer.rate must be a list of [size, value] pairs of numbers above 0"),
        (lambda s: s.points("absent"), "outer.absent must be a list of [size, value] pairs of numbers above 0"),
    ],
)
def test_what_is_wrong_is_named(read: Callable[[TomlTable], object], line: str) -> None:
    with pytest.raises(HardwareFileError) as caught:
        read(TomlTable(DATA, "outer"))
    assert str(caught.value) == line
