"""The console script: runs the commands where the `train` extra is installed, else says how to install it."""

import sys

from shardwise.cli.exit import Exit, missing_extra


def main() -> None:
    """Run the command line and exit with its status."""
    try:
        from shardwise.cli.app import run
    except ModuleNotFoundError as error:
        line = missing_extra(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        sys.exit(Exit.USER_MISTAKE)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
