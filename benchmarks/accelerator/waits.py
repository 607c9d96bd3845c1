"""Waits for the device that torch itself sees, with where they came from."""

import contextlib
import traceback
import warnings
from collections.abc import Iterator

import torch

from benchmarks import ROOT

_ROOT = str(ROOT)


@contextlib.contextmanager
def waits(device: torch.device) -> Iterator[list[str]]:
    """Inside, where the host waits for a CUDA device is noted: the innermost line of this source tree, or of torch."""
    found: list[str] = []

    def note(message: Warning | str, *rest: object) -> None:
        if "synchronizing" in str(message):
            found.append(_where())

    if device.type != "cuda":
        yield found
        return
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _where() -> str:
    frames = [f for f in traceback.extract_stack() if not f.filename.endswith(("waits.py", "warnings.py"))]
    source = [f for f in frames if f.filename.startswith(f"{_ROOT}/src")]
    frame = (source or frames)[-1]
    name = frame.filename.replace(f"{_ROOT}/", "").split("site-packages/")[-1]
    return f"{name}:{frame.lineno} {frame.name}"
