"""What the thread that trains does in this process, seen from another thread: its stack, and whether it moves."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATE, _USER, _SYSTEM = 0, 11, 12
"""Positions in /proc/.../stat after the name, which may hold spaces: fields 3, 14 and 15 of proc(5)."""
_BUSY = 0.02
"""A thread that uses this share of a processor is at work."""
_INNERMOST = 3
"""Among so many of a thread's innermost frames is the one that waits, if it waits for other ranks."""
_SHOWN = 10

_PACKAGE = f"{Path(__file__).parent.parent}/"
_WAITS = ("comm/", "together.py", "fsdp/torch_collectives.py")
_TORCH = "/torch/"
_TORCH_WAITS = "/torch/distributed/"
_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
_NOT_WAITS = ("/torch/distributed/checkpoint/", "/torch/distributed/elastic/", "/torch/distributed/run.py")
_MODULES = "/torch/nn/modules/"


def working_thread() -> FrameType | None:
    """Return the innermost frame of the main thread, or of the thread in which autograd runs hooks of the engine for
    it, as it does on devices."""
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident or 0, None)
    frames.pop(threading.get_ident(), None)
    if main is not None and main.f_code.co_name == "_engine_run_backward":
        known = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
        for ident, frame in frames.items():
            if ident not in known and any(_is_ours(one) for one in _outwards(frame)):
                return frame
    return main


def waits_for_ranks(frame: FrameType | None) -> bool:
    """Whether a thread waits for other ranks: in collectives of ours or of torch."""
    for one, _ in zip(_outwards(frame), range(_INNERMOST), strict=False):
        path = one.f_code.co_filename
        if path.startswith(_PACKAGE) and path[len(_PACKAGE) :].startswith(_WAITS):
            return True
        if _TORCH_WAITS in path and not any(part in path for part in _NOT_WAITS):
            return True
    return False


def call_site(frame: FrameType | None) -> str:
    """Return the innermost place that is neither ours nor torch's, as "path:line in function"; "" if there is none."""
    return next((_place(one) for one in _outwards(frame) if not _is_ours(one) and not _is_torchs(one)), "")


def own_collective(frame: FrameType | None) -> str:
    """Return the collective of torch's that a script has called itself, in words; "" if it waits in one of ours."""
    name = ""
    for one in _outwards(frame):
        if _is_ours(one):
            return ""
        if not _is_torchs(one):
            break
        if one.f_code.co_filename.endswith(_COLLECTIVES):
            name = one.f_code.co_name
    return name and f"torch.distributed.{name}"


def stack(frame: FrameType | None) -> list[str]:
    """Return a thread's stack in lines, outermost first: the innermost frames, without those in which torch calls
    modules."""
    shown = [
        one for one in _outwards(frame) if _TORCH + "nn" + os.sep + "modules" + os.sep not in one.f_code.co_filename
    ]
    lines = []
    for one in reversed(shown[:_SHOWN]):
        code = linecache.getline(one.f_code.co_filename, one.f_lineno).strip()
        lines.append(_place(one) + (f": {code}" if code else ""))
    return lines


class Activity:
    """Since when this process has stood still: the stack of the thread that trains is the same, and neither a thread of
    the process (one that saves) nor a process that it has started (a data loader's worker) does work. A thread that
    waits for storage is at work. The thread that looks does not count."""

    def __init__(self) -> None:
        self._stack: tuple[tuple[int, int], ...] = ()
        self._used_s = 0.0
        self._looked = self._moved = time.monotonic()

    def look(self) -> None:
        """Look again. To be called regularly, by one thread."""
        now = time.monotonic()
        lines = tuple((id(one.f_code), one.f_lasti) for one in _outwards(working_thread()))
        used_s = _used_s()
        is_busy = used_s - self._used_s > _BUSY * (now - self._looked)
        if is_busy or lines != self._stack or _waits_for_storage():
            self._moved = now
        self._stack, self._used_s, self._looked = lines, used_s, now

    @property
    def still_s(self) -> float:
        """Seconds for which the process has stood still."""
        return time.monotonic() - self._moved


def _used_s() -> float:
    """Return the processor time of this process without this thread, and of the processes that its main thread has
    started."""
    others = sum(_processor_s(_stat(f"/proc/{child}")) for child in _children(f"/proc/self/task/{os.getpid()}"))
    return others + time.process_time() - time.thread_time()


def _waits_for_storage() -> bool:
    return any(_stat(str(task))[_STATE : _STATE + 1] == [b"D"] for task in Path("/proc/self/task").iterdir())


def _stat(path: str) -> list[bytes]:
    """Return the fields of a thread's or process's status after its name; none where there is no such file."""
    try:
        return Path(path, "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def _processor_s(fields: list[bytes]) -> float:
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_PER_S if fields else 0.0


def _children(task: str) -> list[str]:
    try:
        return Path(task, "children").read_text(encoding="ascii").split()
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Whether a process on this machine is stopped, as by SIGSTOP or a debugger."""
    return _stat(f"/proc/{pid}")[_STATE : _STATE + 1] in ([b"T"], [b"t"])


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def _is_torchs(frame: FrameType) -> bool:
    return _TORCH in frame.f_code.co_filename


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
