"""How a command ends: exit statuses, and the words for an error."""

import atexit
import enum
import os
import sys
import traceback
from typing import NoReturn

from shardwise.errors import UserError

_EXTRAS = {
    "train": ("datasets", "jinja2", "pydantic", "rich", "tokenizers", "transformers", "typer"),
    "jax": ("flax", "jax", "optax"),
}


class Exit(enum.IntEnum):
    """Exit statuses of every command."""

    DONE = 0
    FAILED = 1
    USER_MISTAKE = 2
    INTERRUPTED = 130


def end(status: int) -> NoReturn:
    """End the process as `sys.exit` does, exit hooks included, but leave its memory to the system. Python would take it
    apart object by object, which takes a second where torch and transformers were imported."""
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads: Python has words and a status of its own for that
        sys.exit(status)
    os._exit(status)


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """The line that names what to install where a module of an extra is missing; None for other modules."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in _EXTRAS.items():
        if module in modules:
            return f"the module {module!r} is missing; install it with: pip install 'shardwise[{extra}]'"
    return None


def mistake(error: BaseException) -> str | None:
    """What to tell the user, on one line, if the error is a mistake of theirs; None if it is not."""
    if isinstance(error, ModuleNotFoundError):
        return missing_extra(error)
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    return None


def full_traceback(error: BaseException) -> str:
    """The traceback as Python prints it."""
    return "".join(traceback.format_exception(error)).rstrip()
