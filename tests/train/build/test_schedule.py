import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.train.build.schedule import Schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    steps = draw(st.integers(2, 300))
    return Schedule(
        lr=draw(st.floats(1e-6, 1)),
        steps=steps,
        warmup_steps=draw(st.integers(0, steps - 1)),
        shape=draw(st.sampled_from(["cosine", "linear", "constant"])),
        min_lr_ratio=draw(st.floats(0, 1)),
    )


@given(schedules())
def test_it_rises_to_lr_and_falls_to_the_ratio(schedule: Schedule) -> None:
    rates = [schedule(step) for step in range(schedule.steps)]
    peak = max(schedule.warmup_steps - 1, 0)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak] == pytest.approx(schedule.lr)
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    if peak < schedule.steps - 1:
        floor = 1.0 if schedule.shape == "constant" else schedule.min_lr_ratio
        assert rates[-1] == pytest.approx(schedule.lr * floor, abs=1e-12)
    assert schedule(schedule.steps + 10) == pytest.approx(rates[-1], abs=1e-12)


def test_by_hand() -> None:
    linear = Schedule(lr=1.0, steps=7, warmup_steps=2, shape="linear", min_lr_ratio=0.5)
    assert [linear(step) for step in range(7)] == pytest.approx([0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    cosine = Schedule(lr=1.0, steps=5, min_lr_ratio=0.0)
    assert cosine(2) == pytest.approx(0.5)
