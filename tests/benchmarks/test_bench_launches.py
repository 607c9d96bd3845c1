"""The count of operations."""

import pytest

from benchmarks.steps.launches import CLIP_MOST, REDUCE, SHAPES, Row, clip_of, of_sharding


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_sharding_a_block_launches_less_than_fsdp2(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_POISON", "0")  # a fill of each released slot
    for reduce in REDUCE:
        row = Row("", {engine: of_sharding(engine, SHAPES[shape], reduce) for engine in ("shardwise", "fsdp2")})
        assert row.is_met, row.cells()
        for engine in row.counts:
            assert row.total(engine, "collectives") == 3, "two gathers and a reduction"


def test_clipping_takes_a_dozen() -> None:
    row = Row("", {engine: clip_of(engine) for engine in ("shardwise", "fsdp2")}, most=CLIP_MOST)
    assert row.is_met, row.names("shardwise")
    assert not Row("", {"shardwise": {("launches", "mul"): 13.0}, "fsdp2": {}}, most=CLIP_MOST).is_met
