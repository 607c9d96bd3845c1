"""Processes that answer messages, with two pipes to each.

A process is a new program, not a fork of the caller, which may have threads and process groups. If several start at
once, they are forks of one such program (Linux only), which only does the imports for all of them.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, NoReturn

_FORKS = sys.platform == "linux"
"""Whether processes may be forks. Not on other platforms, where system libraries do not survive a fork."""


_ENDS_S = 5.0
"""Seconds after which a process that was told to end is killed."""


@dataclass(frozen=True, slots=True)
class PipePair:
    """The caller's end of the two pipes to a process."""

    process: subprocess.Popen[bytes]
    """The process that answers, or the one that it was forked from, which ends with the same status if a fork fails."""
    messages: IO[bytes]
    answers: IO[bytes]

    def ask(self, message: Any) -> Any:
        """Send a message and return the answer, both picklable. Raises EOFError if the process is gone."""
        send(self.messages, message)
        return pickle.load(self.answers)

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self.process.terminate()
        for end in (self.messages, self.answers):
            with suppress(BrokenPipeError):
                end.close()
        try:
            self.process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:  # user code may handle the signal
            self.process.kill()
            self.process.wait()


def send(end: IO[bytes], message: Any) -> None:
    """Write a message. Does not raise if nobody reads it any more: reading the answer does."""
    with suppress(BrokenPipeError):
        pickle.dump(message, end)
        end.flush()


def start(program: str, first: Any, count: int) -> list[PipePair]:
    """Start processes.

    Args:
        program: the module that they import; its function `main` calls `serve`.
        first: the first message, picklable, which `serve` passes to its `prepare`.
        count: the number of processes.
    """
    if count > 1 and not _FORKS:
        return [pair for _ in range(count) for pair in start(program, first, 1)]
    pipes = [(os.pipe(), os.pipe()) for _ in range(count)]
    theirs = [(messages[0], answers[1]) for messages, answers in pipes]
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {program} import main; main({theirs})"],
        stdin=subprocess.PIPE,
        pass_fds=[number for pair in theirs for number in pair],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for number in (number for pair in theirs for number in pair):
        os.close(number)
    assert process.stdin is not None
    send(process.stdin, first)
    with suppress(BrokenPipeError):
        process.stdin.close()
    return [PipePair(process, os.fdopen(messages[1], "wb"), os.fdopen(answers[0], "rb")) for messages, answers in pipes]


def serve(
    ends: Sequence[tuple[int, int]], prepare: Callable[[Any], None], answering: Callable[[Any], Callable[[Any], Any]]
) -> NoReturn:
    """Run in the started program: answer the messages of each pair of pipes, in a process for each, until it closes.

    Args:
        ends: file descriptors of each pair: of messages, of answers.
        prepare: called once with the caller's first message.
        answering: called in each process with the same message; returns the function that answers messages. If that
            raises, the exception is the answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on Ctrl-C: the caller reports it
    os.dup2(2, 1)  # imported code may print: keep the caller's stdout clean
    first = pickle.load(sys.stdin.buffer)
    prepare(first)
    if len(ends) == 1:
        _answer(*ends[0], answering(first))
    forks: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: _leave(forks, 0))
    for mine in ends:
        fork = os.fork()
        if not fork:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _close(pair for pair in ends if pair != mine)
            _answer(*mine, answering(first))
        forks.append(fork)
    _close(ends)
    while forks:
        ended, status = os.wait()
        forks.remove(ended)
        if status:
            _leave(forks, os.waitstatus_to_exitcode(status))
    os._exit(0)


def _close(ends: Any) -> None:
    for pair in ends:
        for number in pair:
            os.close(number)


def _leave(forks: Sequence[int], status: int) -> NoReturn:
    """Kill all forks and end this process with the given status; with the same signal if it is negative."""
    for fork in forks:
        with suppress(ProcessLookupError):
            os.kill(fork, signal.SIGKILL)
    for fork in forks:
        with suppress(ChildProcessError):
            os.waitpid(fork, 0)
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler to set
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(max(status, 0))


def _answer(messages: int, answers: int, answer: Callable[[Any], Any]) -> NoReturn:
    with os.fdopen(messages, "rb") as source, os.fdopen(answers, "wb") as target:
        while True:
            try:
                message = pickle.load(source)
            except EOFError:
                os._exit(0)
            try:
                found = answer(message)
            except Exception as error:
                found = error
            try:
                pickle.dump(found, target)
                target.flush()
            except BrokenPipeError:  # nobody waits for the answer
                os._exit(1)
