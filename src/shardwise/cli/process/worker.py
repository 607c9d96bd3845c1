"""The program of one rank: `python -m shardwise.cli.process.worker TASK PATH`, started by `cli.process.launch`."""

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from shardwise.cli.process import report
from shardwise.cli.process.exit import Exit
from shardwise.cli.process.standard_streams import outlive_readers
from shardwise.train.process.interruption import ENDING_SIGNALS, ending_signals

_PR_SET_PDEATHSIG = 1
"""PR_SET_PDEATHSIG of <sys/prctl.h>."""

STUCK_S = 20.0
"""How long a rank that was asked to end may make no progress: less than the 30 s after which torchrun kills it."""


def main() -> None:
    """Train or calibrate as this rank, then end the process at once; on any error write a report first.

    It ends with `os._exit`, because a rank whose peers are gone can hang in the destructors of its communicators, and
    because Python takes a second to unload torch. An interrupted rank ends with status 0: other ranks may still be
    saving, and at the first non-zero status torchrun ends all of them.
    """
    directory, rank = Path(os.environ[report.ENVIRONMENT]), int(os.environ["RANK"])
    _end_with(int(os.environ[report.LAUNCHER]))
    outlive_readers()
    for number in ending_signals():
        signal.signal(number, _AtOnce(directory, rank))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's SIGTERM must end even a rank in native code
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)  # the launcher started this rank with them blocked
    faulthandler.enable()  # print a traceback on a crash in native code
    try:
        _TASKS[sys.argv[1]](Path(sys.argv[2]))
    except BaseException as error:
        ending = report.describe(error, rank)
        report.write(directory, ending)
        if ending.consequence:
            report.await_cause(directory)
        _leave(Exit.DONE if ending.kind == "interrupted" else Exit.FAILED)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # an asynchronous save that failed ends the rank with its own status
    _leave(Exit.DONE)


class _AtOnce:
    """Signal handler that ends this rank at once, while there is nothing to save. A KeyboardInterrupt instead could be
    raised in the middle of an import, which might turn it into another error."""

    until_heard = True
    """Marks the handler for `Interruption.heard`, which replaces it during the training loop."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        report.write(self._directory, report.describe(KeyboardInterrupt(), self._rank))
        _leave(Exit.DONE)


def run_under_torchrun(path: Path, overrides: Sequence[str], debug: bool) -> Exit:
    """Train as one rank of a torchrun that the user started.

    On any error the process prints it and ends at once, whatever its peers do, because at a normal exit the interpreter
    would destroy communicators, which waits for the peers.

    Args:
        path: the configuration; every rank reads it.
        overrides: `section.key=value` strings.
        debug: print the traceback of a user's mistake too.

    Returns:
        DONE. A user's mistake ends the process with status 2, an interrupt with 130, any other error with 1.
    """
    outlive_readers()
    for number in ending_signals():  # torchrun passes these on when it is interrupted
        signal.signal(number, signal.default_int_handler)  # replaced during the training loop, so that it can save
    _leave_if_stuck()
    try:
        _train(path, overrides)
    except BaseException as error:
        ending = report.describe(error, int(os.environ["RANK"]))
        if ending.kind == "interrupted":
            _leave(Exit.INTERRUPTED)
        print(report.told(ending, debug), file=sys.stderr)
        _leave(Exit.USER_MISTAKE if ending.kind == "mistake" else Exit.FAILED)
    return Exit.DONE


def _leave_if_stuck() -> None:
    """Start a thread that ends this rank if it makes no progress after it was asked to end.

    When one rank has failed, torchrun sends SIGTERM to the others. A rank that waits for the failed one in native code,
    as GPU ranks do, never runs its Python signal handler, and torchrun would wait half a minute for it. Python's
    C-level handler, which runs at once, writes to a wakeup pipe; this wakes a thread that watches the main thread.
    """
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(waking, STUCK_S), name="shardwise-stuck", daemon=True).start()


def _watch(waking: int, stuck_s: float) -> None:
    while os.read(waking, 1)[0] not in ENDING_SIGNALS:  # other handled signals are written to the pipe too
        pass
    place, since_s = _place(), time.monotonic()
    while time.monotonic() - since_s < stuck_s:
        time.sleep(0.1)
        if _place() != place:
            place, since_s = _place(), time.monotonic()
    rank = os.environ["RANK"]
    print(f"error: rank {rank} was asked to end, made no progress for {stuck_s:g} s, and was stopped", file=sys.stderr)
    _leave(Exit.FAILED)


def _place() -> tuple[int, int]:
    """Return where the main thread is: its frame, and the last instruction in it."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return id(frame), frame.f_lasti


def _train(path: Path, overrides: Sequence[str] = ()) -> None:
    from shardwise import accelerators
    from shardwise.train import trainer
    from shardwise.train.config.files import load
    from shardwise.train.run.preflight import check_devices_of_rank

    check_devices_of_rank(int(os.environ["LOCAL_WORLD_SIZE"]), accelerators.count())
    trainer.run(load(path, overrides).for_ranks(int(os.environ["WORLD_SIZE"])))


def calibrate(path: Path, quick: bool = False) -> None:
    """Measure this machine as one of its ranks; the first rank writes the hardware file. Every rank must call this.

    Raises:
        PlanError: the file cannot be written.
    """
    from shardwise.errors import PlanError
    from shardwise.plan.hardware import calibration, devices
    from shardwise.train.process.ranks import started

    with started() as ranks:
        measured = calibration.calibrate(ranks.device, calibration.QUICK if quick else calibration.THOROUGH)
        if ranks.is_first:
            try:
                devices.write_device(measured, path)
            except OSError as error:
                raise PlanError(f"cannot write {path}: {error.strerror}") from None


_TASKS: dict[str, Callable[[Path], None]] = {
    "train": _train,
    "calibrate": calibrate,
    "calibrate-quick": partial(calibrate, quick=True),
}


def _end_with(launcher: int) -> None:
    """Make the kernel kill this rank when its launcher is gone, for example killed.

    Ranks that continued alone would save and remove checkpoints in the same directory as the run that is started next.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # the launcher was gone before the call above
        os._exit(Exit.FAILED)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
