"""A faster import of transformers, for a process that only plans.

Such a process calls `own_process`; any other imports transformers as usual. What is not imported at first is imported
when it is first called, so a plan's numbers do not change.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

_IS_OURS = False
_MODELS = "models"


def own_process() -> None:
    """Declare that this process only plans: Python's garbage collector runs less often, and transformers is imported
    faster. While torch and transformers are imported the collector would run a thousand times, for a second in all, and
    free nothing."""
    global _IS_OURS  # noqa: PLW0603 - of the process
    _IS_OURS = True
    gc.set_threshold(100_000, 20, 20)


def import_transformers() -> None:
    """In a process that only plans, import what all models of transformers need. A release of transformers without the
    names that are used here is imported as usual."""
    if not _IS_OURS or "transformers" in sys.modules:
        return
    with _without_collection(), suppress(ImportError, AttributeError):
        with _scanned_once():
            import transformers.models
        with _assignment_put_off():
            import transformers.loss.loss_utils
        import transformers.modeling_utils  # noqa: F401


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disable the garbage collector inside; afterwards it treats what was imported as old."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        gc.enable()


@contextmanager
def _scanned_once() -> Iterator[None]:
    """Inside, the package `transformers.models` gets its import structure from that of `transformers`. Otherwise
    transformers reads two thousand files for each of the two."""
    import transformers
    from transformers.utils import import_utils

    utils: Any = import_utils  # untyped
    scan = utils.define_import_structure
    folder = Path(transformers.__file__).parent / _MODELS

    def known(path: str, prefix: str | None = None) -> Any:
        if prefix is None and Path(path) == folder / "__init__.py":
            return _without_prefix(scan(folder, prefix=_MODELS))
        return scan(path, prefix)

    utils.define_import_structure = known
    try:
        yield
    finally:
        utils.define_import_structure = scan


def _without_prefix(structure: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return the part of an import structure inside the package of models, with names relative to it."""
    prefix = f"{_MODELS}."
    return {
        backends: {name.removeprefix(prefix): held for name, held in modules.items() if name.startswith(prefix)}
        for backends, modules in structure.items()
    }


@contextmanager
def _assignment_put_off() -> Iterator[None]:
    """Inside, losses of transformers are imported as if scipy were not installed. They need one function of it, to
    match boxes with objects. Afterwards they get a function that imports scipy when it is first called."""
    from transformers import utils as transformers_utils

    utils: Any = transformers_utils
    is_available = utils.is_scipy_available
    before = set(sys.modules)
    utils.is_scipy_available = lambda: False
    try:
        yield
    finally:
        utils.is_scipy_available = is_available
        for name in set(sys.modules) - before:
            module: Any = sys.modules[name]
            if name.startswith("transformers.") and "is_scipy_available" in vars(module):
                module.is_scipy_available = is_available
                if is_available():
                    module.linear_sum_assignment = _linear_sum_assignment


def _linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
    return import_module("scipy.optimize").linear_sum_assignment(*args, **kwargs)
