"""What the thread that trains does in this process, seen from another thread: its stack, and whether it moves."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch.distributed as dist

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATE, _TIMES = 0, slice(11, 15)
"""Positions in /proc/.../stat after the name, which may hold spaces: field 3, and 14 to 17, of proc(5)."""
_BUSY = 0.02
"""A thread that uses this share of a processor is at work."""
_PAUSED_S = 5.0
"""Less time is between two looks of a process that was not paused as a whole."""
_INNERMOST = 3
"""Among so many of a thread's innermost frames is the one that waits, if it waits for other ranks."""
_SHOWN = 10

_PACKAGE = f"{Path(__file__).parent.parent}/"
_WAITS = ("comm/", "fsdp/torch_collectives.py")
_WORKS = ("checkpoint/", "together.py", "hub.py")
"""A thread in such a frame saves, loads or transfers files, for as long as storage and networks take."""
_DEBUGGERS = ("/bdb.py", "/pdb.py")
_TORCH = "/torch/"
_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
_TORCH_WAITS = (_COLLECTIVES, "/torch/distributed/_functional_collectives.py")
_OF_ALL = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "reduce_scatter", "reduce_scatter_tensor",
}  # fmt: skip
"""Functions of torch that end on no rank before every rank of the group has begun them."""
_MODULES = "/torch/nn/modules/"


def working_thread(trains: int | None = None) -> FrameType | None:
    """Return the innermost frame of the thread that trains, or of the thread in which autograd runs hooks of the engine
    for it, as it does on devices. `trains`: that thread, by `threading.get_ident`; None: the main thread."""
    frames = sys._current_frames()
    frame = frames.pop(trains or threading.main_thread().ident or 0, None)
    frames.pop(threading.get_ident(), None)
    if frame is not None and frame.f_code.co_name == "_engine_run_backward":
        known = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
        for ident, other in frames.items():
            if ident not in known and any(_is_ours(one) for one in _outwards(other)):
                return other
    return frame


def waits_for_ranks(frame: FrameType | None) -> bool:
    """Whether a thread waits for other ranks: in collectives of ours or of torch."""
    for one, _ in zip(_outwards(frame), range(_INNERMOST), strict=False):
        path = one.f_code.co_filename
        if path.startswith(_PACKAGE) and path[len(_PACKAGE) :].startswith(_WAITS):
            return True
        if path.endswith(_TORCH_WAITS):
            return True
    return False


def works_by_its_place(frame: FrameType | None) -> bool:
    """Whether a thread that does not move is at work all the same: it saves or transfers files, or is in a debugger."""
    for one in _outwards(frame):
        path = one.f_code.co_filename
        if path.endswith(_DEBUGGERS) or (path.startswith(_PACKAGE) and path[len(_PACKAGE) :].startswith(_WORKS)):
            return True
    return False


def call_site(frame: FrameType | None) -> str:
    """Return the innermost place that is neither ours nor torch's, as "path:line in function"; "" if there is none."""
    return next((_place(one) for one in _outwards(frame) if not _is_ours(one) and not _is_torchs(one)), "")


def own_collective(frame: FrameType | None) -> str:
    """Return the collective of torch's that a script has called itself, in words; "" if it waits in one of ours."""
    called = _called_of_torch(frame)
    return "" if called is None else f"torch.distributed.{called.f_code.co_name}"


def waits_for_world(frame: FrameType | None) -> bool:
    """Whether a thread waits in a collective of torch's, called by a script, that ends on no rank before all have begun
    it."""
    called = _called_of_torch(frame)
    if called is None or called.f_code.co_name not in _OF_ALL:
        return False
    group = called.f_locals.get("group")
    return group is None or group is dist.group.WORLD


def _called_of_torch(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the collective of torch's that a script has called; None if there is none."""
    found = None
    for one in _outwards(frame):
        if _is_ours(one):
            return None
        if not _is_torchs(one):
            break
        if one.f_code.co_filename.endswith(_COLLECTIVES):
            found = one
    return found


def stack(frame: FrameType | None) -> list[str]:
    """Return a thread's stack in lines, outermost first: the innermost frames, without those in which torch calls
    modules."""
    shown = [one for one in _outwards(frame) if _MODULES not in one.f_code.co_filename]
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

    def look(self, frame: FrameType | None) -> float:
        """Look again, with the frame of the thread that trains. To be called each second, by one thread.

        Returns:
            Seconds for which the whole process was paused, as by SIGSTOP or with its virtual machine; 0 if it was not.
        """
        now = time.monotonic()
        lines = tuple((id(one.f_code), one.f_lasti) for one in _outwards(frame))
        used_s = _used_s()
        passed_s = now - self._looked
        paused_s = passed_s if passed_s > _PAUSED_S else 0.0
        if paused_s or used_s - self._used_s > _BUSY * passed_s or lines != self._stack or _waits_for_storage():
            self._moved = now
        self._stack, self._used_s, self._looked = lines, used_s, now
        return paused_s

    @property
    def still_s(self) -> float:
        """Seconds for which the process has stood still."""
        return time.monotonic() - self._moved


def _used_s() -> float:
    """Return the processor time of this process without this thread, and of all processes below it."""
    return sum(map(_of_child, _children("self"))) + time.process_time() - time.thread_time()


def _of_child(process: str) -> float:
    return _processor_s(_stat(f"/proc/{process}")) + sum(map(_of_child, _children(process)))


def _waits_for_storage() -> bool:
    return any(_stat(str(task))[_STATE : _STATE + 1] == [b"D"] for task in Path("/proc/self/task").iterdir())


def _stat(path: str) -> list[bytes]:
    """Return the fields of a thread's or process's status after its name; none where there is no such file."""
    try:
        return Path(path, "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def _processor_s(fields: list[bytes]) -> float:
    return sum(map(int, fields[_TIMES])) / _TICKS_PER_S


def _children(process: str) -> list[str]:
    found: list[str] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):
                found += (task / "children").read_text(encoding="ascii").split()
    return found


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
