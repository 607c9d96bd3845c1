"""Start the ranks of a run with torchrun's process manager, and find out how they ended."""

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardwise import device_tools
from shardwise.cli.process import report
from shardwise.cli.process.exit import Exit
from shardwise.cli.process.standard_streams import outlive_readers
from shardwise.liveness import in_words
from shardwise.train.config.files import dump_toml
from shardwise.train.config.schema import Config
from shardwise.train.process.interruption import Interruption, end_at_once, ending_signals

LOOPBACK = "127.0.0.1"
STOPPING = "stopping after the current step; interrupt again to stop at once"
_POLL_S = 0.1


def launch(config: Config, debug: bool = False) -> Exit:
    """Run a configuration on ranks of this machine and wait until they end.

    Args:
        config: fitted to its ranks (`Config.for_ranks`).
        debug: print the traceback of a user's mistake too.

    Returns:
        The exit status. If something went wrong, the error of the rank that failed first has been printed.
    """
    assert config.parallel.ranks != "auto"
    many = "rank" if config.parallel.ranks == 1 else "ranks"
    print(f"starting {config.parallel.ranks} {many}, {config.train.steps} steps: {config.run_directory}", flush=True)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        path = Path(name) / "config.toml"
        path.write_text(dump_toml(config), encoding="utf-8")
        return launch_task("train", path, config.parallel.ranks, debug)


def launch_task(task: str, path: Path, ranks: int, debug: bool = False) -> Exit:
    """Run one of `cli.process.worker`'s tasks on ranks of this machine and wait until they end. Returns as `launch`
    does.

    Args:
        task: "train", "generate", "doctor", "calibrate" or "calibrate-quick".
        path: the file that the task reads or writes.
        ranks: number of ranks.
    """
    outlive_readers()
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)  # where ranks meet; it outlives them
    for number in ending_signals():
        signal.signal(number, end_at_once)  # replaced while the ranks run
    interruption = Interruption()
    failures: Mapping[int, ProcessFailure] = {}
    stopped = False
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name, interruption.heard():
        directory = Path(name)
        try:
            with _started(task, path, ranks, store.port, directory) as processes:
                failures = _wait(processes, interruption, STOPPING if task == "train" else "stopping")
        except (KeyboardInterrupt, SignalException):
            stopped = True
        reports = report.read(directory)
    # A run that finished in spite of an interrupt counts as done.
    interrupted = stopped or (interruption.asked and bool(reports or failures))
    left = set(range(ranks)) - set(failures) - {ending.rank for ending in reports}
    return _conclude(reports, failures, left, interrupted, debug)


@contextmanager
def _started(task: str, path: Path, ranks: int, port: int, directory: Path) -> Iterator[PContext]:
    """Start the ranks as processes; at the end of the block, terminate those that still run.

    The ranks start with SIGINT blocked and unblock it once they have a handler, so that an early one waits for it.
    """
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # `Interruption` handles the others
    logging.getLogger(PContext.__module__).setLevel(logging.CRITICAL)  # its lines would bury the error that matters
    shared = _environment(ranks, port, directory)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
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
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher's store, so that no rank starts one
        report.ENVIRONMENT: str(directory),
        report.LAUNCHER: str(os.getpid()),
    }
    if not device_tools.count():
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


def _wait(processes: PContext, interruption: Interruption, words: str) -> Mapping[int, ProcessFailure]:
    """Wait until all ranks have ended; the first failure ends the others. If this process is interrupted, pass that on
    to the ranks, which may save, and print `words`. Returns the failures by rank.

    Ranks run in sessions of their own, so a terminal's Ctrl-C reaches only the launcher.
    """
    while not interruption.asked:
        if (result := processes.wait(timeout=0)) is not None:
            return result.failures
        time.sleep(_POLL_S)
    for pid in processes.pids().values():
        with suppress(ProcessLookupError):  # the rank has ended already
            os.kill(pid, signal.SIGINT)
    with suppress(OSError):  # a full disk under standard error is no reason not to wait
        _say(f"\n{words}" if os.isatty(2) else words)  # a terminal may show a progress bar
    result = processes.wait(period=_POLL_S)
    assert result is not None
    return result.failures


def _conclude(
    reports: list[report.Report], failures: Mapping[int, ProcessFailure], left: set[int], interrupted: bool, debug: bool
) -> Exit:
    """Print the first cause of failure, and return the exit status. `left`: ranks that exited with status 0."""
    causes = [ending for ending in reports if ending.kind != "interrupted" and not ending.consequence]
    mistakes = [ending for ending in causes if ending.kind == "mistake"]
    reported = {ending.rank for ending in reports}
    silent = {rank: failure.exitcode for rank, failure in failures.items() if rank not in reported}
    if mistakes:
        _say(f"error: {mistakes[0].line}")
        if debug:
            _say(mistakes[0].traceback)
        return Exit.USER_MISTAKE
    if causes and (interrupted or -signal.SIGKILL not in silent.values()):  # a killed rank is why others fail
        _say(report.format_report(causes[0]))
    elif interrupted or any(ending.kind == "interrupted" for ending in reports):
        _say("interrupted")
        return Exit.INTERRUPTED
    elif not failures:
        return Exit.DONE
    elif set(silent.values()) <= {-signal.SIGTERM} and reports:
        _say(report.format_report(reports[0]))  # every report says that a peer was lost, and none says why
        for rank in sorted(left):
            _say(f"error: rank {rank} exited with status 0 before the others had finished")
    else:
        _say_silent(silent)
    return Exit.FAILED


def _say_silent(silent: Mapping[int, int]) -> None:
    """Print how ranks ended that left no report. torchrun ends ranks by SIGTERM after another failed, so these are
    named only if no rank ended otherwise."""
    others = {rank: status for rank, status in silent.items() if status != -signal.SIGTERM}
    for rank, status in sorted((others or silent).items()):
        _say(f"error: rank {rank} {in_words(status)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
