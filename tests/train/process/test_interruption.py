"""Signals that ask a run to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from shardwise.train.process.interruption import ENDING_SIGNALS, Interruption, ending_signals


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Set the handlers that `shardwise train` sets under torchrun."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in ENDING_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_the_first_signal_is_noted(number: signal.Signals) -> None:
    interruption = Interruption()
    with interruption.heard():
        assert not interruption.asked
        send(number)
        assert interruption.asked
    assert signal.getsignal(number) is signal.default_int_handler


def test_the_second_one_ends_the_rank_at_once() -> None:
    with Interruption().heard():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)


@pytest.mark.parametrize("other", [signal.SIGHUP, signal.SIGTERM])
def test_a_hangup_counts_neither_as_the_first_nor_as_the_second(other: signal.Signals) -> None:
    """The shell and the kernel both send it, and torchrun sends SIGTERM after it."""
    interruption = Interruption()
    with interruption.heard():
        send(signal.SIGHUP)
        send(other)
        send(signal.SIGHUP)
        assert interruption.asked


def test_a_hangup_that_is_ignored_stays_so() -> None:
    assert signal.SIGHUP in ending_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert ending_signals() == (signal.SIGINT, signal.SIGTERM)
    interruption = Interruption()
    with interruption.heard():
        send(signal.SIGHUP)
        assert not interruption.asked
