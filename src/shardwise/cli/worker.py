"""What one rank runs: `python -m shardwise.cli.worker TASK PATH`, started by `cli.launch` through torchrun."""

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from shardwise.cli import report
from shardwise.cli.exit import Exit, mistake

_PR_SET_PDEATHSIG = 1
"""Of <sys/prctl.h>."""


def main() -> None:
    """Train or calibrate as this rank, and end at once; on any error leave a report first.

    `os._exit` because a rank whose peers are gone can hang in the destructors of its communicators, and because Python
    takes a second to unload torch. An interrupted rank ends with status 0: the others may still be saving, and torchrun
    ends all of them at the first other status.
    """
    directory, rank = Path(os.environ[report.ENVIRONMENT]), int(os.environ["RANK"])
    _end_with(int(os.environ[report.LAUNCHER]))
    signal.signal(signal.SIGINT, _AtOnce(directory, rank))
    try:
        report.write_pid(directory, rank)
    except FileNotFoundError:  # the launcher was interrupted and has removed it
        os._exit(Exit.INTERRUPTED)
    faulthandler.enable()  # a crash in native code shows where it was
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's way to end a rank, even one that waits in native code
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
    """Ends an interrupted rank where there is nothing to save. A KeyboardInterrupt would come out of whatever is being
    imported, as something else perhaps."""

    until_heard = True
    """The training loop listens itself (`train.interruption`)."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        report.write(self._directory, report.describe(KeyboardInterrupt(), self._rank))
        _leave(Exit.DONE)


def run_under_torchrun(path: Path, overrides: Sequence[str], debug: bool) -> Exit:
    """Train as one rank of a torchrun that the user started.

    Args:
        path: the configuration; every rank reads it.
        overrides: `section.key=value` strings.
        debug: let a user's mistake end with its traceback.

    Returns:
        The rank's exit status. Unexpected errors are raised.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # what torchrun sends on when it is interrupted
        signal.signal(number, signal.default_int_handler)  # the trainer may save
    try:
        _train(path, overrides)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except Exception as error:
        line = mistake(error)
        if line is None or debug:
            raise
        print(f"error: rank {os.environ['RANK']}: {line}", file=sys.stderr)
        return Exit.USER_MISTAKE
    return Exit.DONE


def _train(path: Path, overrides: Sequence[str] = ()) -> None:
    from shardwise.train import config, preflight, trainer

    preflight.check_devices(int(os.environ["LOCAL_WORLD_SIZE"]))
    trainer.run(config.load(path, overrides).for_ranks(int(os.environ["WORLD_SIZE"])))


def calibrate(path: Path, quick: bool = False) -> None:
    """Measure this machine as one of its ranks; the first writes the hardware file. Every rank must call this.

    Raises:
        PlanError: the file cannot be written.
    """
    from shardwise.errors import PlanError
    from shardwise.plan import calibrate, hardware
    from shardwise.train.ranks import started

    with started() as ranks:
        measured = calibrate.calibrate(ranks.device, calibrate.QUICK if quick else calibrate.THOROUGH)
        if ranks.is_first:
            try:
                hardware.write_device(measured, path)
            except OSError as error:
                raise PlanError(f"cannot write {path}: {error.strerror}") from None


_TASKS: dict[str, Callable[[Path], None]] = {
    "train": _train,
    "calibrate": calibrate,
    "calibrate-quick": partial(calibrate, quick=True),
}


def _end_with(launcher: int) -> None:
    """Have the kernel kill this rank when its launcher is gone, killed perhaps.

    Ranks that went on alone would save, and drop old checkpoints, beside those of the run that is started next.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # gone before that was said
        os._exit(Exit.FAILED)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
