"""The thread that watches one rank, and what ranks tell one another when some of them wait.

It looks once a second whether the rank shared something with others since: a collective of the engine, or a comparison.
A rank that has waited in a collective for too long raises an *alarm* in the group's store, where the others look for
one from time to time. Then each rank leaves its *status*, every rank comes to the same diagnosis, and the first on each
host says it. All of them end if that is a hang and the user has set how long ranks wait, or if it is certain, twice,
that none can go on. A rank that works may come yet.

Nothing is said before two steps of an optimizer, and pauses that the run has had before are taken for normal: ranks
wait three times as long as the longest one."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, ClassVar, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from shardwise import liveness
from shardwise.comm.collective_log import CollectiveLog
from shardwise.comm.store_channel import Exchanges
from shardwise.engine.checked import CheckedEngine
from shardwise.errors import ConfigError
from shardwise.watchdog import activity
from shardwise.watchdog.diagnosis import Begun, Diagnosis, State, Status, WaitsIn, diagnose, ranks_in_words

VARIABLE = "SHARDWISE_HANG_TIMEOUT_S"
"""Environment variable: seconds that ranks wait for one that stands still before all end; 0: no watchdog. Where it is
not set, ranks are told after `_DEFAULT_S`, and end only if none can ever go on."""
_DEFAULT_S = 20.0
_LOOKS_PER_S = 1.0
_STEPS_BEFORE = 2
"""Steps of an optimizer before which nothing is said: models load, compile and find their pace."""
_PAUSES = 3.0
"""Ranks wait this many times as long as the longest pause that the run has had."""
_STORE_S = 10.0
"""Seconds that the store may take to answer."""
_LOOKS_FOR_ALARMS = 0.25
"""A rank that makes progress looks for alarms in such parts of the time that ranks wait; others, each second."""
_ANSWERS = 0.3
"""The part of the time that ranks wait in which they answer an alarm, so that all is over in time."""
_LEAST_ANSWER_S = 2.5
_SEEN_S = 1.0
"""Seconds in which ranks on the host of one that has not answered say what they see of it."""
_LAST_S = 0.3
"""Seconds by which rank 0, which may serve the store, ends after the others."""
_WINDOW_S = 30
"""Seconds over which a rank counts how often it waits."""
_WAITS_MUCH = 0.7
"""A rank that waits in this part of the time says so; ranks that do not are those that it waits for."""
_STATUS = 1
"""Exit status of ranks that end."""


def attach(engine: CheckedEngine) -> None:
    """Called with each engine that has its units: watch this rank, if it has others."""
    group = engine.mesh.shard.process_group or engine.mesh.replicate.process_group
    if group is None or engine.mesh.world_size == 1 or not dist.is_initialized():
        return
    seconds = asked_s()
    default = distributed_c10d._get_default_group()
    if not seconds or distributed_c10d._world.pg_map.get(default, ("fake",))[0] == "fake":
        return
    if Watchdog.present is None or not Watchdog.present.is_of(default):
        if Watchdog.present is not None:
            Watchdog.present.stop()
        try:
            Watchdog.present = Watchdog(default, seconds)
        except (RuntimeError, OSError) as error:
            warnings.warn(
                f"shardwise: hangs will not be named, the group's store is not reached: {error}", stacklevel=2
            )
            return
    Watchdog.present.add(engine)


def after_step(optimizer: Any, owners: Collection[Any]) -> None:
    """Called after each optimizer's step."""
    if owners:
        Watchdog.steps += 1
        Watchdog.trains = threading.get_ident()


def asked_s() -> float:
    """Return how long ranks wait for one that stands still, in seconds; 0: there is no watchdog.

    Raises:
        ConfigError: the variable is not a number of seconds.
    """
    asked = os.environ.get(VARIABLE, "")
    seconds = -1.0
    with contextlib.suppress(ValueError):
        seconds = float(asked or _DEFAULT_S)
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{VARIABLE}={asked!r} is not a number of seconds; 0 turns the watchdog off")
    return seconds


class Watchdog:
    """Watches this rank from a thread of its own."""

    present: ClassVar[Watchdog | None] = None
    """That of this process."""
    steps: ClassVar[int] = 0
    """Number of steps of optimizers in this process."""
    trains: ClassVar[int | None] = None
    """The thread that took the last one."""
    made: ClassVar[int] = 0
    """Number of watchdogs that this process has had, the same on every rank."""

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        """`group`: the default process group, whose store the ranks share. `seconds`: how long ranks wait."""
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._group = weakref.ref(group)
        self._seconds, self._ends = seconds, bool(os.environ.get(VARIABLE))
        self._answer_s = max(_LEAST_ANSWER_S, _ANSWERS * seconds)
        store: Any = distributed_c10d._world.pg_map[group][1]
        own = PrefixStore(f"shardwise/watchdog/{Watchdog.made}", store.clone())
        Watchdog.made += 1
        self._line = _line_to(own)
        if self._line is not None:  # else the clone may be the store itself
            own.set_timeout(timedelta(seconds=_STORE_S))
        self._store: Any = _TimelyStore(own)
        self._logs: tuple[weakref.ref[CollectiveLog], ...] = ()
        self._shared: weakref.WeakKeyDictionary[CollectiveLog, int] = weakref.WeakKeyDictionary()
        """By engine's log: how much this rank had shared when it was last looked at."""
        self._last: weakref.ref[CollectiveLog] | None = None
        """That of the engine that shared something last."""
        self._activity = activity.Activity()
        self._met = self._asked = time.monotonic()
        """When this rank last shared something with others, and when it last looked for an alarm."""
        self._exchanges = 0
        """The exchanges over channels that had ended when it was last looked at."""
        self._longest_s, self._has_pace = 0.0, False
        """The longest pause since the run found its pace, and whether it had when the present one began."""
        self._steps_before = self.steps
        self._alarm, self._alarmed = 0, 0.0
        """Number of alarms that are over, and when the last one was."""
        self._told = ""
        """What was last said of the present wait."""
        self._circle: object = None
        """Where ranks were when they last told one another, if none could go on."""
        self._point: Begun | None = None
        """When all ranks last agreed: how often they had, and all that this rank had begun by then."""
        self._window, self._looks, self._waits = _window(), 0, 0
        self._said_waits = ""
        """The key under which this rank last said that it waited much."""
        self._slow: list[int] = []
        """The ranks that others were last told to wait for."""
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._tell_presence()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Whether it watches for this group, in this process."""
        return self._group() is group and self._pid == os.getpid()

    def add(self, engine: CheckedEngine) -> None:
        """Follow one more engine."""
        alive = (one for one in self._logs if one() is not None)
        self._steps_before, self._has_pace = self.steps, False  # it loads and compiles first
        self._point = None
        engine.log.agreed = self._agreed
        self._logs = (*alive, weakref.ref(engine.log))  # a new tuple, since the thread may be reading the old one

    def stop(self) -> None:
        """Watch no more."""
        self._ended.set()
        if self._pid == os.getpid() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=_STORE_S)
            with contextlib.suppress(RuntimeError, OSError):  # one that ended in peace is not missing
                if self._line is not None and not _is_closed(self._line):
                    self._store.delete_key(f"here/{self.rank}")
        if self._line is not None:
            self._line.close()
        atexit.unregister(self.stop)

    def _run(self) -> None:
        while not self._ended.wait(1 / _LOOKS_PER_S):
            if self._group() is None or not dist.is_initialized():
                return
            if self._parent and os.getppid() != self._parent:
                self._end("shardwise: the launcher of this rank is gone, so the rank ends")
            try:
                self._look()
                self._share()
            except (RuntimeError, OSError):
                self._without_store()
            except Exception as error:  # a rank trains without its watchdog, too
                _say([f"shardwise: the watchdog of rank {self.rank} has ended: {type(error).__name__}: {error}"])
                return

    def _share(self) -> None:
        """Look what others have left in the store, when that is due."""
        now = time.monotonic()
        is_due = now - min(self._met, self._asked) > _LOOKS_FOR_ALARMS * self._seconds
        if (is_due or self._window != _window()) and self._line is not None and _is_closed(self._line):
            raise ConnectionError
        if self._window != _window():
            self._end_window()
        if is_due:
            self._asked = now
            self._ask()

    def _look(self) -> None:
        now, has_met, frame = time.monotonic(), False, self._frame()
        self._met += self._activity.look(frame)
        for one in self._logs:
            log = one()
            if log is not None and self._shared.get(log) != log.shared:
                self._shared[log] = log.shared
                self._last, has_met = one, True
        if self._exchanges != Exchanges.ended:
            self._exchanges, has_met = Exchanges.ended, True
        self._looks += 1
        self._waits += activity.waits_for_ranks(frame)
        if has_met:
            if self._has_pace:
                self._longest_s = max(self._longest_s, now - self._met)
            self._met, self._told, self._has_pace = now, "", self._is_steady
            self._circle = None

    def _frame(self) -> FrameType | None:
        return activity.working_thread(self.trains)

    @property
    def _is_steady(self) -> bool:
        return self.steps - self._steps_before >= _STEPS_BEFORE

    @property
    def _most_s(self) -> float:
        return max(self._seconds, _PAUSES * self._longest_s)

    def _ask(self) -> None:
        """Answer an alarm of another rank, or raise one if this rank has waited too long."""
        now = time.monotonic()
        key = f"alarm/{self._alarm}"
        if not self._store.check([key]):
            is_due = now - max(self._met, self._alarmed) > self._most_s - self._answer_s
            if not is_due or not self._is_steady or not activity.waits_for_ranks(self._frame()):
                return
            self._store.set(key, str(self.rank))
        number, self._alarm, self._alarmed = self._alarm, self._alarm + 1, now
        statuses = self._statuses(number)
        diagnosis = diagnose(statuses, self._seconds / 2, self.world_size)
        if diagnosis is None:
            self._circle = None
            return
        before, self._circle = self._circle, _where(statuses) if diagnosis.is_certain else None
        if diagnosis.is_hang and (self._ends or (self._circle is not None and self._circle == before)):
            self._end_all(number, diagnosis, statuses)
        told, self._told = self._told, diagnosis.headline.rpartition(": ")[2]
        if self._speaks(statuses) and told != self._told:
            hint = f"  {VARIABLE}={self._seconds:.0f} would end all ranks in such a case." if diagnosis.is_hang else ""
            if self._circle is not None:
                hint = "  None of them can go on: they end if that is so the next time they look."
            _say([f"shardwise: {diagnosis.headline}. Ranks wait on.", *diagnosis.details, *filter(None, [hint])])

    def _statuses(self, number: int) -> dict[int, Status]:
        """Return the status of every rank that is watched, in one alarm."""
        self._store.set(f"status/{number}/{self.rank}", self._status().message().decode())
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        missing = self._await(number, others, self._answer_s)
        for rank in missing:
            self._tell_of(number, rank)
        silent = set(self._await(number, missing, _SEEN_S))
        found = {}
        for rank in range(self.world_size):
            if rank not in silent:
                found[rank] = Status.read(self._store.get(f"status/{number}/{rank}"))
            elif (presence := self._presence(rank)) is not None:
                host, pid, _ = presence
                found[rank] = Status(State.GONE, time.monotonic() - self._met, host, pid)
        return found

    def _await(self, number: int, ranks: Collection[int], seconds: float) -> list[int]:
        """Return those of `ranks` whose status is not there in time."""
        deadline, missing = time.monotonic() + seconds, list(ranks)
        while missing and time.monotonic() < deadline:
            if self._store.check([f"status/{number}/{rank}" for rank in missing]):
                return []
            time.sleep(0.1)
        return [rank for rank in missing if not self._store.check([f"status/{number}/{rank}"])]

    def _status(self) -> Status:
        frame = self._frame()
        if activity.waits_for_ranks(frame):
            state = State.WAITS
        else:
            is_still = self._activity.still_s > self._seconds / 2 and not activity.works_by_its_place(frame)
            state = State.STILL if is_still else State.WORKS
        log = self._last() if self._last is not None else None
        last = "" if log is None else log.last_in_words
        site = activity.call_site(frame)
        waits_in = WaitsIn.OTHER
        if state is State.WAITS:
            own = activity.own_collective(frame)
            last = own or last
            if not own:
                waits_in = WaitsIn.MODEL
            elif activity.waits_for_world(frame):
                waits_in = WaitsIn.WORLD
        for_s, stack = time.monotonic() - self._met, activity.stack(frame)
        return Status(state, for_s, self._host, self._pid, last, site, stack, waits_in, self._begun())

    def _agreed(self, log: CollectiveLog) -> None:
        """Count from here what this rank begins. Called by the thread that trains."""
        agreements = 1 if self._point is None else self._point.agreements + 1
        self._point = Begun(agreements, log.shared, self._world_begun())

    def _world_begun(self) -> int:
        """How many collectives this rank has begun in the group of all ranks; -1 if torch does not count them."""
        group: Any = self._group()
        with contextlib.suppress(RuntimeError):
            return -1 if group is None else int(group._get_sequence_number_for_group())
        return -1

    def _begun(self) -> Begun | None:
        """Return what this rank has begun since all ranks agreed; None where ranks may differ in what they count: there
        are several models, or one on some of the ranks."""
        log, point, world = self._logs[0]() if len(self._logs) == 1 else None, self._point, self._world_begun()
        if log is None or log.ranks != self.world_size or point is None or min(world, point.of_world) < 0:
            return None
        return Begun(point.agreements, log.shared - point.of_model, world - point.of_world)

    def _end_window(self) -> None:
        """Say so if this rank waited much; the first of those that did names the ranks that did not."""
        number, self._window = self._window, _window()
        looks, waits = self._looks, self._waits
        self._looks = self._waits = 0
        has_met = time.monotonic() - self._met < _LOOKS_FOR_ALARMS * self._seconds  # a rank that hangs is not slow
        if not self._is_steady or not has_met or looks < _WINDOW_S / 2 or waits < _WAITS_MUCH * looks:
            return
        if self._said_waits:
            self._store.delete_key(self._said_waits)
        self._said_waits = f"waits/{number}/{self.rank}"
        self._store.set(self._said_waits, "")
        time.sleep(2 / _LOOKS_PER_S)  # until the others have looked
        waiting = [rank for rank in range(self.world_size) if self._store.check([f"waits/{number}/{rank}"])]
        slow = [rank for rank in range(self.world_size) if rank not in waiting]
        if self.rank == waiting[0] and slow and len(slow) <= len(waiting) and slow != self._slow:
            self._slow = slow
            verb = "is" if len(slow) == 1 else "are"
            _say(
                [
                    f"shardwise: {ranks_in_words(slow)} {verb} slow: {ranks_in_words(waiting)} waited in "
                    f"{waits / looks:.0%} of the last {_WINDOW_S} s."
                ]
            )

    # Ranks that do not answer ---------------------------------------------------------------------------------------

    def _tell_presence(self) -> None:
        words = "\n".join([liveness.machine(), self._host, str(self._pid), str(liveness.birth(self._pid))])
        self._store.set(f"here/{self.rank}", words)

    def _presence(self, rank: int) -> tuple[str, int, int] | None:
        """Return the host, process id and birth of a rank's process, the id being -1 on other machines; None if the
        rank is not watched."""
        if not self._store.check([f"here/{rank}"]):
            return None
        machine, host, pid, born = self._store.get(f"here/{rank}").decode().split("\n")
        return host, int(pid) if machine == liveness.machine() else -1, int(born)

    def _tell_of(self, number: int, rank: int) -> None:
        """Leave the status of a rank that does not answer, if its process is on this machine."""
        presence = self._presence(rank)
        if presence is None or presence[1] < 0:
            return
        host, pid, born = presence
        if liveness.birth(pid) != born:
            state = State.GONE
        else:
            state = State.STOPPED if activity.is_stopped(pid) else State.SILENT
        seen = Status(state, time.monotonic() - self._met, host, pid)
        self._store.compare_set(f"status/{number}/{rank}", "", seen.message().decode())  # it may have just left its own

    # Ends -----------------------------------------------------------------------------------------------------------

    def _speaks(self, statuses: Mapping[int, Status]) -> bool:
        """Whether this rank says it all: the first on its host that can."""
        here = [rank for rank in _able(statuses) if statuses[rank].host == self._host]
        return self.rank == min(here, default=self.rank)

    def _end_all(self, number: int, diagnosis: Diagnosis, statuses: Mapping[int, Status]) -> NoReturn:
        """End this rank when every rank that can has said its part. That peers are gone then is no error beside it."""
        sys.excepthook = lambda *_: os._exit(_STATUS)
        lines = [f"shardwise: {diagnosis.headline}. All ranks end."]
        if self._speaks(statuses):
            way_out = f"give ranks more time: {VARIABLE}={self._most_s * 5:.0f} (seconds; 0: for ever)"
            if not self._ends:
                way_out = f"{VARIABLE}=0 turns the watchdog off; please report it"
            lines += [*diagnosis.details, f"  If this is no hang, {way_out}"]
        _say(lines)
        deadline = time.monotonic() + self._answer_s
        with contextlib.suppress(RuntimeError, OSError):
            ended = self._store.add(f"ended/{number}", 1)
            while ended < len(_able(statuses)) and time.monotonic() < deadline:
                time.sleep(0.02)
                ended = self._store.add(f"ended/{number}", 0)
        for rank, status in statuses.items():
            with contextlib.suppress(OSError, RuntimeError):
                presence = self._presence(rank) if status.state in (State.STOPPED, State.SILENT) else None
                if presence is not None and presence[1] > 0:  # it cannot end itself
                    os.kill(presence[1], signal.SIGKILL)
        if not self.rank:
            time.sleep(_LAST_S)
        os._exit(_STATUS)

    def _without_store(self) -> None:
        """React to a store that does not answer: if this rank waits, the process or host of the store is gone."""
        waited_s = time.monotonic() - self._met
        if self._ends and waited_s > self._most_s and self._is_steady and activity.waits_for_ranks(self._frame()):
            status = self._status()
            self._end(
                f"shardwise: rank {self.rank} has waited for {waited_s:.0f} s at {status.last or 'a collective'}, and "
                "the store of the process group, through which ranks could say why, does not answer: its process or "
                "host is gone or not reached. The rank ends."
            )

    def _end(self, words: str) -> None:
        if self._ended.is_set():
            return
        _say([words])
        os._exit(_STATUS)


class _TimelyStore:
    """A store that takes at most `_STORE_S` to answer, else raises ConnectionError. torch's waits for ever where its
    host is cut off, in most of its methods. One thread at a time may call it."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._asking: threading.Thread | None = None
        """The thread of the last call, which stays behind if there is no answer."""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, getattr(self._store, method))

    def _call(self, method: Callable[..., Any], *arguments: object) -> Any:
        answers: list[Any] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(method(*arguments))
            except BaseException as error:
                errors.append(error)

        if self._asking is None or not self._asking.is_alive():
            asking = threading.Thread(target=ask, name="shardwise watchdog's store", daemon=True)
            try:
                asking.start()
            except RuntimeError:  # Python 3.12 starts no thread while it ends
                return method(*arguments)
            self._asking = asking
            asking.join(_STORE_S)
        if errors:
            raise errors[0]
        if not answers:
            raise ConnectionError
        return answers[0]


def _window() -> int:
    """Return the number of the present window, which is the same on all hosts whose clocks agree."""
    return int(time.time()) // _WINDOW_S


def _where(statuses: Mapping[int, Status]) -> object:
    """Return where ranks are: equal if none has moved."""
    return {rank: (status.waits_in, status.begun, status.last, status.site) for rank, status in statuses.items()}


def _able(statuses: Mapping[int, Status]) -> list[int]:
    """Return the ranks that have left their status themselves."""
    return [rank for rank, status in statuses.items() if status.state in (State.WAITS, State.STILL, State.WORKS)]


def _line_to(store: PrefixStore) -> socket.socket | None:
    """Return a connection to the process that serves a store; None if there is no such process. Nothing is ever sent
    over it: it is closed when that process ends, and a store that is asked then would print pages."""
    base = store._underlying_non_prefix_store  # type: ignore[attr-defined]  # torch's stubs lack it
    if not isinstance(base, TCPStore):
        return None
    line = socket.create_connection((base.host, base.port), timeout=_STORE_S)
    line.setblocking(False)
    return line


def _is_closed(line: socket.socket) -> bool:
    try:
        return not line.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _say(lines: list[str]) -> None:
    """Print lines to standard error, at once and together."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
