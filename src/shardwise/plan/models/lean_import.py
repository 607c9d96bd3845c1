"""transformers, imported in less time in a process whose only work is a plan.

Such a process says so by `own_process`; any other imports transformers as it is. What is put off comes when it is first
called, so a plan's numbers do not depend on it.
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
    """Say that this process does nothing but plan: Python's collector comes by less often, and transformers is imported
    leanly. Importing torch and transformers alone brings the collector a thousand times, for a second in all, and it
    finds nothing."""
    global _IS_OURS  # noqa: PLW0603 - of the process
    _IS_OURS = True
    gc.set_threshold(100_000, 20, 20)


def import_transformers() -> None:
    """In a process of ours, import what all of transformers' models need. Another release of transformers than the one
    that this was written for is imported in its own way where it has other names."""
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
    """The collector is off, and afterwards takes what was imported for old."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        gc.enable()


@contextmanager
def _scanned_once() -> Iterator[None]:
    """Inside, the package of models takes what it holds from the package above, where transformers reads its two
    thousand files for each of the two."""
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
    """Of the modules below the package of models, their names below it."""
    prefix = f"{_MODELS}."
    return {
        backends: {name.removeprefix(prefix): held for name, held in modules.items() if name.startswith(prefix)}
        for backends, modules in structure.items()
    }


@contextmanager
def _assignment_put_off() -> Iterator[None]:
    """Inside, losses of transformers are imported as if there were no scipy, of which they need one function, to match
    boxes with objects. Then they get it, as one that imports scipy when it is first called."""
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
