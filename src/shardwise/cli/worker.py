"""What one rank runs: `python -m shardwise.cli.worker CONFIG.toml`, started by `shardwise train` through torchrun."""

import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shardwise.cli import report
from shardwise.cli.exit import Exit, mistake


def main() -> None:
    """Train as this rank; on any error leave a report and end at once.

    `os._exit` because a rank whose peers are gone can hang in the destructors of its communicators. An interrupted
    rank ends with status 0: the others may still be saving, and torchrun ends all of them at the first other status.
    """
    directory, rank = Path(os.environ[report.ENVIRONMENT]), int(os.environ["RANK"])
    report.write_pid(directory, rank)
    faulthandler.enable()  # a crash in native code shows where it was
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's way to end a rank, even one that waits in native code
    try:
        _train(Path(sys.argv[1]))
    except BaseException as error:
        ending = report.describe(error, rank)
        report.write(directory, ending)
        _leave(Exit.DONE if ending.kind == "interrupted" else Exit.FAILED)


def run_under_torchrun(path: Path, overrides: Sequence[str], debug: bool) -> Exit:
    """Train as one rank of a torchrun that the user started.

    Args:
        path: the configuration; every rank reads it.
        overrides: `section.key=value` strings.
        debug: let a user's mistake end with its traceback.

    Returns:
        The rank's exit status. Unexpected errors are raised.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the trainer may save
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


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
