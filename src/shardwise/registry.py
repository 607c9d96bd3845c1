"""What attaches to the engine: functions by the name of the seam that asks for them.

A module of the engine that offers a seam calls `registered`; what attaches is named in the package's `__init__`, so it
is there however the engine is imported. The functions' modules are imported when a seam first asks.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_names: dict[str, list[str]] = {}
"""By seam: "module:function", in the order in which they are asked."""


def register(seam: str, name: str) -> None:
    """Attach a function, named "module:function", to a seam. Imports nothing."""
    _names.setdefault(seam, []).append(name)


def registered(seam: str) -> list[Any]:
    """Return the functions that are attached to a seam, in the order of their registration."""
    return [getattr(import_module(module), function) for module, function in _parts(seam)]


def first_answer(seam: str, *given: Any) -> Any:
    """Return what the first function attached to a seam answers that answers anything; None if none does."""
    answers = (function(*given) for function in registered(seam))
    return next((answer for answer in answers if answer is not None), None)


def _parts(seam: str) -> list[tuple[str, str]]:
    return [(module, function) for module, _, function in (name.partition(":") for name in _names.get(seam, ()))]
