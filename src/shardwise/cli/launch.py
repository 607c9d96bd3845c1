"""Starting the ranks of a run through torchrun's launcher, and finding out how they ended."""

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.cli import report
from shardwise.cli.exit import Exit
from shardwise.errors import UserError
from shardwise.train.config.files import dump_toml
from shardwise.train.config.schema import Config

LOOPBACK = "127.0.0.1"
STRAGGLER_GRACE_S = 20.0
"""After an interrupt: how long ranks may run on once the first of them has ended."""
STOPPING = "stopping when the step under way is done; interrupt again to stop at once"


def launch(config: Config, debug: bool = False) -> Exit:
    """Run a configuration on ranks of this machine and wait for their end.

    Args:
        config: fitted to its ranks (`Config.for_ranks`).
        debug: print the traceback of a user's mistake too.

    Returns:
        The exit status. What went wrong, of the rank where it went wrong first, has been printed.

    Raises:
        UserError: MASTER_PORT is set and taken.
    """
    assert config.parallel.ranks != "auto"
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        path = Path(name) / "config.toml"
        path.write_text(dump_toml(config), encoding="utf-8")
        return launch_task("train", path, config.parallel.ranks, debug)


def launch_task(task: str, path: Path, ranks: int, debug: bool = False) -> Exit:
    """Run one of `cli.worker`'s tasks on ranks of this machine and wait for their end; otherwise as `launch`.

    Args:
        task: "train", "calibrate" or "calibrate-quick".
        path: what the task reads or writes.
        ranks: how many.
    """
    port = _given_port()
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        directory = Path(name)
        _set_environment(name)
        interrupt = _Interrupt(directory, ranks, STOPPING if task == "train" else "stopping")
        failures: Mapping[int, ProcessFailure] = {}
        stopped = False
        try:
            with interrupt.handled(), _quiet_torchrun():
                elastic_launch(_launch_config(port, ranks, directory), sys.executable)(
                    "-m", "shardwise.cli.worker", task, str(path)
                )
        except ChildFailedError as error:
            failures = error.failures
        except (KeyboardInterrupt, SignalException):
            stopped = True
        reports = report.read(directory)
        # A run that came to its end all the same is done.
        interrupted = stopped or (interrupt.received and bool(reports or failures))
        return _conclude(reports, failures, interrupted, debug)


def _set_environment(reports: str) -> None:
    """What the ranks inherit."""
    os.environ[report.ENVIRONMENT] = reports
    os.environ[report.LAUNCHER] = str(os.getpid())
    if not torch.cuda.device_count():
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a rank per core, not a thread pool per rank
        os.environ.update(malloc_settings(os.environ))


def malloc_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings of glibc's malloc, for the environment of CPU ranks: keep freed memory for allocations to come, but for
    mappings of 32 MiB and more. None where the user's environment sets malloc already.

    A step frees its activations and the next one wants them again. By itself glibc gives memory at the top of its heap
    back to the system, which then clears every page anew (docs/design/engine.md).
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in environment):
        return {}
    return {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def _given_port() -> int | None:
    """MASTER_PORT where the user set it, for a firewall's sake perhaps."""
    given = os.environ.get("MASTER_PORT")
    if given is None:
        return None
    port = int(given) if given.isdecimal() else 0
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT={given} is not a port (1 to 65535); unset it to have a free one chosen")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            reason = error.strerror
            raise UserError(
                f"MASTER_PORT={port} cannot be used ({reason}); unset it to have a free one chosen"
            ) from None
    return port


def _launch_config(port: int | None, ranks: int, directory: Path) -> LaunchConfig:
    """One host, no restarts. Only the c10d rendezvous takes a free port, and only the static one takes the given."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d" if port is None else "static",
        rdzv_endpoint=f"{LOOPBACK}:{port or 0}",
        rdzv_configs={} if port is None else {"rank": 0},
        local_addr=LOOPBACK,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(directory / "torchrun")),
        signals_to_handle="SIGHUP,SIGQUIT",  # SIGINT and SIGTERM are _Interrupt's
    )


class _Interrupt:
    """Passes the first SIGINT or SIGTERM on to the ranks, which may save; the second ends everything.

    Ranks live in sessions of their own, so a terminal's Ctrl-C reaches only the launcher.
    """

    def __init__(self, directory: Path, ranks: int, says: str) -> None:
        """`says`: a line for the first interrupt."""
        self.received = False
        self._directory = directory
        self._ranks = ranks
        self._says = says
        self._ended = threading.Event()

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals inside this context."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            self._ended.set()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        pids = report.read_pids(self._directory)
        if self.received:  # the second time
            raise KeyboardInterrupt
        self.received = True
        if len(pids) < self._ranks:
            self._leave(pids)
        for pid in pids:
            with suppress(ProcessLookupError):  # ended by itself: torchrun is about to notice
                os.kill(pid, signal.SIGINT)
        threading.Thread(target=self._end_stragglers, daemon=True).start()
        with suppress(OSError, ValueError, AttributeError):  # nobody reads it any more: ranks save all the same
            below_progress = "\n" if sys.stderr.isatty() else ""
            os.write(sys.stderr.fileno(), f"{below_progress}{self._says}\n".encode())  # `print` may be interrupted

    def _leave(self, pids: list[int]) -> NoReturn:
        """Not all ranks can listen yet, so there is nothing to save: end at once. A KeyboardInterrupt can get lost in
        an import. (Ranks without a process id here end as their launcher does.)"""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._directory, ignore_errors=True)
        os.write(sys.stderr.fileno(), b"interrupted\n")
        os._exit(Exit.INTERRUPTED)

    def _end_stragglers(self) -> None:
        """A rank that was interrupted outside the training loop leaves its peers waiting: do not wait with them."""
        while not report.read(self._directory):
            if self._ended.wait(0.5):
                return
        if not self._ended.wait(STRAGGLER_GRACE_S):
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _quiet_torchrun() -> Iterator[None]:
    """Mute the agent's log lines in this process: they would bury the one message that matters."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _conclude(
    reports: list[report.Report], failures: Mapping[int, ProcessFailure], interrupted: bool, debug: bool
) -> Exit:
    """Print the first cause, and return the status."""
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
        _say(report.told(reports[0]))  # every rank lost a peer that nobody saw end
    else:
        _say_silent(silent)
    return Exit.FAILED


def _say_silent(silent: Mapping[int, int]) -> None:
    """Name the ranks that ended without a report. torchrun ends the others by SIGTERM: no cause where another is."""
    others = {rank: status for rank, status in silent.items() if status != -signal.SIGTERM}
    for rank, status in sorted((others or silent).items()):
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        hint = "; the machine may be out of memory" if status == -signal.SIGKILL else ""
        _say(f"error: rank {rank} {how}{hint}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
