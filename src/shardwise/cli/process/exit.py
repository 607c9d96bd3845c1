"""How a command ends: exit statuses, and the words for an error."""

import enum
import traceback

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
