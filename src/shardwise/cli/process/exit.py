"""How a command ends: exit statuses, and the text that is printed for an error."""

import atexit
import enum
import importlib.util
import os
import sys
import traceback
from typing import NoReturn

from shardwise.errors import UserError

_EXTRAS = {
    "train": ("datasets", "jinja2", "pydantic", "rich", "tokenizers", "transformers", "typer"),
    "onnx": ("onnx", "onnx_ir", "onnxruntime", "onnxscript"),
    "jax": ("flax", "jax", "optax"),
    "peft": ("peft",),
}


class Exit(enum.IntEnum):
    """Exit statuses of every command."""

    DONE = 0
    FAILED = 1
    USER_MISTAKE = 2
    INTERRUPTED = 130


def end(status: int) -> NoReturn:
    """End the process like `sys.exit`, exit hooks included, but without freeing its memory. Python would free it object
    by object, which takes a second after torch and transformers were imported."""
    atexit._run_exitfuncs()
    try:
        leave(status)
    except OSError:  # nobody reads the stream: `sys.exit` prints a message and sets a status for that
        sys.exit(status)


def leave(status: int) -> NoReturn:
    """End the process at once, after all that it has printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Return the line that names the extras to install for a missing module, and whatever else of them is missing, so
    that nobody installs one after another; None for modules of no extra."""
    module = (error.name or "").partition(".")[0]
    extras = [extra for extra, modules in _EXTRAS.items() if module in modules]
    if extras and sys.argv[1:2] == ["init"] and any(word.partition("=")[0] == "--lora" for word in sys.argv):
        extras.append("peft")
    missing = {
        name: extra
        for extra in extras
        for name in _EXTRAS[extra]
        if name == module or importlib.util.find_spec(name) is None
    }
    if not missing:
        return None
    one = len(missing) == 1
    named = f"the module {module!r} is" if one else f"the modules {', '.join(missing)} are"
    wanted = ",".join(dict.fromkeys(missing.values()))
    return f"{named} missing; install {'it' if one else 'them'} with: pip install 'shardwise[{wanted}]'"


def mistake(error: BaseException) -> str | None:
    """Return the one-line message if the error is a user's mistake; else None."""
    if isinstance(error, ModuleNotFoundError):
        return missing_extra(error)
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    return None


def full_traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it."""
    return "".join(traceback.format_exception(error)).rstrip()
