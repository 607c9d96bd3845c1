"""The range of a forecast by device, and whose it is."""

from dataclasses import replace

from shardwise.plan.hardware.devices import Measured, device_names, find_device
from shardwise.plan.hardware.spread import OTHERS, spread_of


def test_a_device_with_published_runs_has_a_range_of_its_own() -> None:
    spread = spread_of(find_device("h100-sxm-80gb"))
    assert spread is not None
    assert spread.own
    assert spread.low < 1 < spread.high
    low, high = spread.around(1000.0)
    assert (low, high) == (1000 * spread.low, 1000 * spread.high)


def test_other_gpus_have_that_of_all_and_say_so() -> None:
    spreads = {name: spread_of(find_device(name)) for name in device_names()}
    others = spreads["l40s"]
    assert others is not None
    assert not others.own
    assert spreads["mi300x"] == others, "one run is too few"
    own = {name for name, spread in spreads.items() if spread is not None and spread.own}
    assert own == {"a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm-80gb", "h100-sxm-96gb-500w"}
    assert spread_of(replace(find_device("h100-sxm-80gb"), name="mine.toml")) == others
    assert OTHERS not in device_names()


def test_nothing_was_published_of_cpus_or_of_this_machine() -> None:
    assert spread_of(find_device("cpu")) is None
    assert spread_of(replace(find_device("h100-sxm-80gb"), measured=Measured(memory=((1.0, 1.0),)))) is None
