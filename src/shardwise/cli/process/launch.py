"""Start the ranks of a run with torchrun's process manager, and find out how they ended."""

import logging
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardwise import accelerators
from shardwise.cli.process import report
from shardwise.cli.process.exit import Exit
from shardwise.cli.process.standard_streams import outlive_readers
from shardwise.errors import UserError
from shardwise.train.config.files import dump_toml
from shardwise.train.config.schema import Config
from shardwise.train.process.interruption import ENDING_SIGNALS, ending_signals
from shardwise.train.run.directory import RunDirectory

LOOPBACK = "127.0.0.1"
STRAGGLER_GRACE_S = 20.0
"""How long other ranks may continue after an interrupt once the first rank has reported its end."""
STOPPING = "stopping after the current step; interrupt again to stop at once"
_POLL_S = 0.1


def launch(config: Config, debug: bool = False) -> Exit:
    """Run a configuration on ranks of this machine and wait until they end.

    Args:
        config: fitted to its ranks (`Config.for_ranks`).
        debug: print the traceback of a user's mistake too.

    Returns:
        The exit status. If something went wrong, the error of the rank that failed first has been printed.

    Raises:
        UserError: MASTER_PORT is set but cannot be used.
    """
    assert config.parallel.ranks != "auto"
    directory = RunDirectory(config.run_directory)
    made = [path for path in (directory.path, *directory.path.parents) if not path.exists()]
    many = "rank" if config.parallel.ranks == 1 else "ranks"
    print(f"starting {config.parallel.ranks} {many}, {config.train.steps} steps: {directory.path}", flush=True)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        path = Path(name) / "config.toml"
        path.write_text(dump_toml(config), encoding="utf-8")
        status = launch_task("train", path, config.parallel.ranks, debug)
    if status == Exit.INTERRUPTED and made:
        directory.drop_unbegun(made)
    return status


def launch_task(task: str, path: Path, ranks: int, debug: bool = False) -> Exit:
    """Run one of `cli.process.worker`'s tasks on ranks of this machine and wait until they end. Returns and raises as
    `launch` does.

    Args:
        task: "train", "calibrate" or "calibrate-quick".
        path: the file that the task reads or writes.
        ranks: number of ranks.
    """
    outlive_readers()
    store = TCPStore(LOOPBACK, _port(), is_master=True, wait_for_workers=False)  # where ranks meet; it outlives them
    interrupt = _Interrupt(STOPPING if task == "train" else "stopping")
    failures: Mapping[int, ProcessFailure] = {}
    stopped = False
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name, interrupt.handled():
        directory = Path(name)
        try:
            with _started(task, path, ranks, store.port, directory) as processes:
                interrupt.send_to(processes.pids().values())
                failures = _wait(processes, directory, interrupt)
        except (KeyboardInterrupt, SignalException):
            stopped = True
        reports = report.read(directory)
    # A run that finished in spite of an interrupt counts as done.
    interrupted = stopped or (interrupt.received and bool(reports or failures))
    return _conclude(reports, failures, interrupted, debug)


def _port() -> int:
    """Return MASTER_PORT if the user has set it, for example for a firewall; else 0, which means any free port. Raises
    UserError if MASTER_PORT cannot be used."""
    given = os.environ.get("MASTER_PORT", "0")
    try:
        port = int(given)
        socket.create_server((LOOPBACK, port)).close()
    except (ValueError, OverflowError, OSError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "ports are 1 to 65535"
        raise UserError(f"MASTER_PORT={given} cannot be used ({reason}); unset it, and a free port is chosen") from None
    return port


@contextmanager
def _started(task: str, path: Path, ranks: int, port: int, directory: Path) -> Iterator[PContext]:
    """Start the ranks as processes; at the end of the block, terminate those that still run.

    The ranks start with the ending signals blocked and unblock them once they have handlers, so that an early signal
    waits instead of being lost.
    """
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # `_Interrupt` handles the others
    logging.getLogger(PContext.__module__).setLevel(logging.CRITICAL)  # its lines would bury the error that matters
    shared = _environment(ranks, port, directory)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        processes = start_processes(
            name="rank",
            entrypoint=sys.executable,
            args={rank: ("-m", "shardwise.cli.process.worker", task, str(path)) for rank in range(ranks)},
            envs={rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)},
            logs_specs=DefaultLogsSpecs(log_dir=str(directory / "torchrun")),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield processes
    finally:
        processes.close()


def _environment(ranks: int, port: int, directory: Path) -> dict[str, str]:
    """Return the environment variables that every rank gets in addition to this process's: those that torchrun sets,
    the directory for reports and, for CPU ranks, settings of threads and malloc."""
    variables = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher's store, so that no rank starts one
        report.ENVIRONMENT: str(directory),
        report.LAUNCHER: str(os.getpid()),
    }
    if not accelerators.count():
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # else each rank has a thread per core
        variables |= malloc_settings(os.environ)
    return variables


def malloc_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return settings of glibc's malloc for the environment of CPU ranks: keep freed memory for later allocations,
    except mappings of 32 MiB and more. Empty if the user's environment configures malloc already.

    A step frees its activations and the next step allocates them again. By default glibc returns memory at the top of
    its heap to the system, which must then clear every page anew (docs/design/engine.md).
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in environment):
        return {}
    return {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def _wait(processes: PContext, directory: Path, interrupt: "_Interrupt") -> Mapping[int, ProcessFailure]:
    """Wait until all ranks have ended; the first failure ends the others. Returns the failures by rank.

    Raises:
        KeyboardInterrupt: `STRAGGLER_GRACE_S` after an interrupted rank has ended, others still run: it was interrupted
            outside the training loop and left its peers waiting.
    """
    deadline_s = inf
    while (result := processes.wait(timeout=0)) is None:
        if interrupt.received and deadline_s == inf and report.read(directory):
            deadline_s = time.monotonic() + STRAGGLER_GRACE_S
        if time.monotonic() > deadline_s:
            raise KeyboardInterrupt
        time.sleep(_POLL_S)
    return result.failures


class _Interrupt:
    """Passes the first ending signal on to the ranks, which may save; a second one ends everything.

    Ranks run in sessions of their own, so a terminal's Ctrl-C reaches only the launcher. When a terminal is closed,
    both the shell and the kernel send SIGHUP, so SIGHUP never counts as the second signal.
    """

    def __init__(self, words: str) -> None:
        """`words`: the line to print at the first interrupt."""
        self.received = False
        self._counted = False
        """Whether a SIGINT or SIGTERM has been received, so that the next one ends everything."""
        self._words = words
        self._pids: tuple[int, ...] = ()

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals inside this context."""
        before = {number: signal.signal(number, self._handle) for number in ending_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def send_to(self, pids: Iterable[int]) -> None:
        """Pass interrupts on to these processes, including one that was received earlier."""
        self._pids = tuple(pids)
        if self.received:
            self._pass_on()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            if self._counted:
                raise KeyboardInterrupt
            self._counted = True
        if self.received:
            return
        self.received = True
        self._pass_on()
        with suppress(OSError, ValueError, AttributeError):  # standard error is gone; ranks save all the same
            below_progress = "\n" if sys.stderr.isatty() else ""
            os.write(sys.stderr.fileno(), f"{below_progress}{self._words}\n".encode())  # `print` may be interrupted

    def _pass_on(self) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):  # the rank has ended already
                os.kill(pid, signal.SIGINT)


def _conclude(
    reports: list[report.Report], failures: Mapping[int, ProcessFailure], interrupted: bool, debug: bool
) -> Exit:
    """Print the first cause of failure, and return the exit status."""
    first = [ending for ending in reports if not ending.consequence]
    causes = [ending for ending in first if ending.kind == "failed"]
    mistakes = [ending for ending in first if ending.kind == "mistake"]
    reported = {ending.rank for ending in reports}
    silent = {rank: failure.exitcode for rank, failure in failures.items() if rank not in reported}
    if mistakes:
        _say(f"error: {mistakes[0].line}")
        if debug:
            _say(mistakes[0].traceback)
        return Exit.USER_MISTAKE
    if -signal.SIGKILL in silent.values() and not interrupted:
        _say_silent(silent)
    elif causes:
        _say(report.told(causes[0]))
    elif interrupted or any(ending.kind == "interrupted" for ending in reports):
        _say("interrupted")
        return Exit.INTERRUPTED
    elif not failures:
        return Exit.DONE
    elif set(silent.values()) <= {-signal.SIGTERM} and reports:
        _say(report.told(reports[0]))  # every report says that a peer was lost, and none says why
    else:
        _say_silent(silent)
    return Exit.FAILED


def _say_silent(silent: Mapping[int, int]) -> None:
    """Print how ranks ended that left no report. torchrun ends ranks by SIGTERM after another failed, so these are
    named only if no rank ended otherwise."""
    others = {rank: status for rank, status in silent.items() if status != -signal.SIGTERM}
    for rank, status in sorted((others or silent).items()):
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        hint = "; the machine may be out of memory" if status == -signal.SIGKILL else ""
        _say(f"error: rank {rank} {how}{hint}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
