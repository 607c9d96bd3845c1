"""The console script: runs the commands if the `train` extra is installed, else prints how to install it."""

import signal
import sys
from typing import NoReturn

from shardwise.cli.process.exit import Exit, end, missing_extra
from shardwise.train.process.interruption import end_at_once

_LEAVE_MEMORY = frozenset({"init", "plan"})
"""Commands that hold only memory when they end, so that the process may exit without releasing it."""


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    signal.signal(signal.SIGINT, end_at_once)
    try:
        from shardwise.cli.app import run

        status = run(sys.argv[1:])
    except ModuleNotFoundError as error:
        line = missing_extra(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        status = Exit.USER_MISTAKE
    if sys.argv[1:2] and sys.argv[1] in _LEAVE_MEMORY:
        end(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
