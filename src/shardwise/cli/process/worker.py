"""The program of one rank: `python -m shardwise.cli.process.worker TASK PATH`, started by `cli.process.launch`."""

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from shardwise.cli.process import report
from shardwise.cli.process.exit import Exit, end, leave
from shardwise.cli.process.standard_streams import outlive_readers
from shardwise.train.process.interruption import end_at_once, ending_signals

_PR_SET_PDEATHSIG = 1
"""PR_SET_PDEATHSIG of <sys/prctl.h>."""


def main() -> None:
    """Train or calibrate as this rank, then end the process at once; on any error write a report first.

    It ends with `os._exit`, because a rank whose peers are gone can hang in the destructors of its communicators, and
    because Python takes a second to unload torch. A rank that was interrupted in the training loop ends with status 0:
    other ranks may still be saving, and at the first non-zero status torchrun ends all of them. Elsewhere an interrupt
    ends it with status 130, and so all others, which may be waiting for it.
    """
    directory, rank = Path(os.environ[report.ENVIRONMENT]), int(os.environ["RANK"])
    _end_with(int(os.environ[report.LAUNCHER]))
    outlive_readers()
    signal.signal(signal.SIGINT, end_at_once)  # SIGTERM has no handler, so that it ends even a rank in native code
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher started this rank with it blocked
    faulthandler.enable()  # print a traceback on a crash in native code
    try:
        _TASKS[sys.argv[1]](Path(sys.argv[2]))
    except BaseException as error:
        ending = report.describe(error, rank)
        report.write(directory, ending)
        if ending.consequence:
            report.await_cause(directory)
        leave(Exit.DONE if ending.kind == "interrupted" else Exit.FAILED)
    end(Exit.DONE)


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
    return end_as_rank(lambda: _train(path, overrides), debug)


def end_as_rank(task: Callable[[], object], debug: bool) -> Exit:
    """Run a task as one rank of a torchrun that the user started; returns and ends as `run_under_torchrun`."""
    outlive_readers()
    for number in ending_signals():  # torchrun passes these on when it is interrupted
        signal.signal(number, signal.default_int_handler)  # replaced during the training loop, so that it can save
    try:
        task()
    except BaseException as error:
        ending = report.describe(error, int(os.environ["RANK"]))
        if ending.kind == "interrupted":
            leave(Exit.INTERRUPTED)
        print(report.format_report(ending, debug), file=sys.stderr)
        report.tell_torchrun(ending)
        leave(Exit.USER_MISTAKE if ending.kind == "mistake" else Exit.FAILED)
    return Exit.DONE


def _train(path: Path, overrides: Sequence[str] = ()) -> None:
    from shardwise import device_tools
    from shardwise.train import trainer
    from shardwise.train.config.files import load
    from shardwise.train.run.preflight import check_devices_of_rank

    check_devices_of_rank(int(os.environ["LOCAL_WORLD_SIZE"]), device_tools.count())
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


def _generate(path: Path) -> None:
    from shardwise.cli.process.session import Request, run

    run(Request.read(path))


def _diagnose(path: Path) -> None:
    from shardwise.cli.process.diagnosing import Request, run

    run(Request.read(path))


_TASKS: dict[str, Callable[[Path], None]] = {
    "train": _train,
    "generate": _generate,
    "doctor": _diagnose,
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


if __name__ == "__main__":
    main()
