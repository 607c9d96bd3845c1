"""Tables of hardware files, read as dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from shardwise.plan.hardware.reading import HardwareFileError, by, read


@dataclass(frozen=True)
class Inner:
    rate: float
    count: int = 7


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["gpu", "cpu"]
    curve: tuple[tuple[float, float], ...] = ()
    inner: Inner | None = None
    rates: Mapping[str, float] = field(default_factory=dict, metadata=by(("bf16", "fp32")))


RIGHT: dict[str, Any] = {
    "kind": "gpu", "curve": [[2, 4], [1, 8.5]], "inner": {"rate": 3}, "rates": {"bf16": 2},
}  # fmt: skip


def test_what_is_right_is_read() -> None:
    found = read(Outer, RIGHT, "", given={"name": "x"})
    assert found == Outer("x", "gpu", ((1.0, 8.5), (2.0, 4.0)), Inner(3.0), {"bf16": 2.0})
    assert isinstance(found.inner.rate, float)
    assert read(Outer, {"kind": "cpu"}, "", given={"name": "x"}) == Outer("x", "cpu")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"inner": {"rates": 3}}, "unknown key outer.inner.rates; did you mean rate?"),
        ({"name": "y"}, "unknown key outer.name; the keys are kind, curve, inner, rates"),
        ({"inner": {}}, "outer.inner.rate is missing"),
        ({"inner": 3}, "outer.inner = 3: must be a table"),
        ({"inner": {"rate": float("nan")}}, "outer.inner.rate = nan: must be a finite number above 0"),
        ({"inner": {"rate": True}}, "outer.inner.rate = True: must be a finite number above 0"),
        ({"inner": {"rate": 1, "count": True}}, "outer.inner.count = True: must be a whole number of at least 1"),
        ({"inner": {"rate": 1, "count": 1.5}}, "outer.inner.count = 1.5: must be a whole number of at least 1"),
        ({"kind": 3}, "outer.kind = 3: must be 'gpu' or 'cpu'"),
        ({"rates": {"fp31": 3}}, "unknown key outer.rates.fp31; did you mean fp32?"),
        ({"curve": 3}, "outer.curve must be a list of [size, value] pairs of numbers above 0"),
        ({"curve": []}, "outer.curve must be a list of [size, value] pairs of numbers above 0"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], line: str) -> None:
    with pytest.raises(HardwareFileError) as caught:
        read(Outer, {**RIGHT, **change}, "outer", given={"name": "x"})
    assert str(caught.value) == line
