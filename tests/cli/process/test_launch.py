"""How runs end: the exit status, and what the user reads."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.cli.process.launch import STOPPING, malloc_settings
from tests.cli.conftest import Start, Started

ON_RANK_1 = """
if rank == 0:
    time.sleep(600)
{}
"""


def test_ranks_run_the_resolved_configuration(start: Start) -> None:
    ended = start("train", "run.toml", "parallel.strategy=shard_grad_op", "train.micro_batch=3").end()
    assert (ended.status, ended.err) == (0, "")
    assert ended.out == "starting 2 ranks, 1 steps: runs/run\nstrategy shard_grad_op batch 6\n"


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("raise ValueError('out of cheese')", "ValueError: out of cheese"),
        ("sys.exit(0)", "SystemExit: 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed by SIGKILL"),
        ("os._exit(7)", "rank 1 exited with status 7"),
    ],
)
def test_a_failing_rank_ends_all_and_is_shown(start: Start, failure: str, words: str) -> None:
    ended = start("train", "run.toml", scenario=ON_RANK_1.format(failure)).end(timeout_s=90)
    assert ended.status == 1
    assert "rank 1" in ended.err.splitlines()[0]
    assert words in ended.err
    assert "rank 0" not in ended.err


@pytest.mark.slow
def test_no_rank_outlives_a_failure(start: Start, tmp_path: Path) -> None:
    scenario = f"""
open(r"{tmp_path}/rank-" + str(rank), "w").write(str(os.getpid()))
while len([name for name in os.listdir(r"{tmp_path}") if name.startswith("rank-")]) < 2:
    time.sleep(0.01)
if rank == 1:
    raise ValueError
time.sleep(600)
"""
    assert start("train", "run.toml", scenario=scenario).end(timeout_s=90).status == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "rank-0").read_text()), 0)


@pytest.mark.slow
def test_no_rank_outlives_its_launcher(start: Start, tmp_path: Path) -> None:
    """A rank that did would go on saving at the same time as the ranks of the next start."""
    scenario = f"""
open(r"{tmp_path}/rank-" + str(rank), "w").write(str(os.getpid()))
os.write(1, b"training\\n")  # in one piece: both ranks write to one pipe
time.sleep(600)
"""
    command = _start_and_wait(start, scenario)
    pids = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    command.process.kill()
    command.end(timeout_s=90)  # returns when no process has the standard output open any more
    deadline_s = time.monotonic() + 20
    while any(_runs(pid) for pid in pids):  # files are closed a little before a process is gone
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_a_rank_that_leaves_without_an_error_is_named(start: Start) -> None:
    """Its peers only see that it is gone, and only for a moment how."""
    scenario = """
if rank == 1:
    os._exit(0)
time.sleep(1)
raise CollectiveTimeout("barrier on rank 0: the process of rank 1 is gone.")
"""
    ended = start("train", "run.toml", scenario=scenario).end(timeout_s=60)
    assert ended.status == 1
    assert ended.err.startswith("error: rank 0 failed because another rank failed or exited:\nTraceback")
    assert ended.err.endswith("error: rank 1 exited with status 0 before the others had finished\n")


@pytest.mark.slow
def test_the_cause_is_shown_and_not_what_its_peers_say(start: Start) -> None:
    """Rank 0 ends first, because rank 1 has already closed its connections and is slow to end."""
    scenario = """
from shardwise.cli.process import report
directory = report.Path(os.environ[report.ENVIRONMENT])
if rank == 1:
    report.write(directory, report.describe(ValueError("the cause"), 1))
    time.sleep(600)
while not report.read(directory):
    time.sleep(0.01)
raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
"""
    ended = start("train", "run.toml", scenario=scenario).end(timeout_s=90)
    assert ended.status == 1
    assert "ValueError: the cause" in ended.err
    assert "gloo" not in ended.err


@pytest.mark.slow
def test_what_one_rank_fails_at_is_no_mistake_of_its_peers(start: Start) -> None:
    """Rank 1 learns that rank 0 failed and ends first. Its PeerError, a UserError, must not be shown as a mistake."""
    scenario = """
from shardwise.train.process.ranks import started
with started() as ranks:
    try:
        with ranks.together():
            if rank == 0:
                raise ValueError("the cause")
    except ValueError:
        time.sleep(0.5)
        raise
"""
    ended = start("train", "run.toml", scenario=scenario).end(timeout_s=90)
    assert ended.status == 1
    assert ended.err.startswith("error: rank 0 failed:\nTraceback")
    assert ended.err.endswith("ValueError: the cause\n")


def test_a_mistake_that_every_rank_finds_is_one_line(start: Start) -> None:
    ended = start("train", "run.toml", scenario="raise ConfigError('no such\\ntokenizer')").end()
    assert (ended.status, ended.err) == (2, "error: no such tokenizer\n")


@pytest.mark.slow
def test_ranks_with_different_models_are_one_line(start: Start) -> None:
    scenario = "from shardwise import errors\nraise errors.DifferentModelsError(f'as rank {rank} sees it')"
    ended = start("train", "run.toml", scenario=scenario).end()
    assert ended.status == 2
    assert ended.err in {f"error: as rank {rank} sees it\n" for rank in (0, 1)}


@pytest.mark.slow
def test_debug_adds_the_traceback_of_a_mistake(start: Start) -> None:
    ended = start("train", "run.toml", "--debug", scenario="raise ConfigError('no such tokenizer')").end()
    assert ended.status == 2
    assert ended.err.startswith("error: no such tokenizer\nTraceback")
    assert ended.err.count("Traceback") == 1


@pytest.mark.slow
def test_a_missing_extra_is_one_line(start: Start) -> None:
    missing = "raise ModuleNotFoundError('No module', name='transformers.models')"
    ended = start("train", "run.toml", scenario=missing).end()
    line = "error: the module 'transformers' is missing; install it with: pip install 'shardwise[train]'\n"
    assert (ended.status, ended.err) == (2, line)


@pytest.mark.slow
def test_another_missing_module_is_no_mistake(start: Start) -> None:
    ended = start("train", "run.toml", scenario="raise ModuleNotFoundError('No module', name='shardwise.x')").end()
    assert ended.status == 1
    assert "Traceback" in ended.err


SAVES_ON_INTERRUPT = """
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
os.write(1, b"training\\n")  # in one piece: both ranks write to one pipe
while not asked:
    time.sleep(0.01)
time.sleep(0.2 + rank)
open(f"saved-{rank}", "w").close()
raise KeyboardInterrupt
"""


def _start_and_wait(start: Start, scenario: str, setup: str = "") -> Started:
    """Return once both ranks have printed that they train."""
    command = start("train", "run.toml", scenario=scenario, setup=setup)
    assert command.process.stdout is not None
    for _ in range(2):
        while (line := command.process.stdout.readline()) != "training\n":
            assert line, command.end().err
    return command


def test_an_interrupt_lets_every_rank_save(start: Start, tmp_path: Path) -> None:
    command = _start_and_wait(start, SAVES_ON_INTERRUPT)
    command.interrupt()
    ended = command.end(timeout_s=90)
    assert (ended.status, ended.err) == (130, f"{STOPPING}\ninterrupted\n")
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}


@pytest.mark.slow
def test_a_hangup_lets_every_rank_save(start: Start, tmp_path: Path) -> None:
    """Also if the signal is sent several times."""
    command = _start_and_wait(start, SAVES_ON_INTERRUPT)
    for _ in range(3):
        command.process.send_signal(signal.SIGHUP)
        time.sleep(0.05)
    ended = command.end(timeout_s=90)
    assert (ended.status, ended.err) == (130, f"{STOPPING}\ninterrupted\n")
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}


@pytest.mark.slow
def test_a_hangup_that_was_ignored_stays_so(start: Start) -> None:
    """`nohup` starts a program with SIGHUP ignored."""
    waits = "os.write(1, b'training\\n'); time.sleep(1.5); assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN"
    command = _start_and_wait(start, waits, "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    command.process.send_signal(signal.SIGHUP)
    ended = command.end(timeout_s=90)
    assert (ended.status, ended.err) == (0, "")


@pytest.mark.slow
def test_ranks_save_though_nobody_reads_what_is_said(start: Start, tmp_path: Path) -> None:
    """In `shardwise train ... 2>&1 | tee log`, Ctrl-C also ends tee, which reads standard error."""
    command = _start_and_wait(start, SAVES_ON_INTERRUPT)
    assert command.process.stderr is not None
    command.process.stderr.close()
    command.interrupt()
    command.process.wait(timeout=30)
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait(start: Start) -> None:
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN); print('training', flush=True); time.sleep(600)"
    command = _start_and_wait(start, deaf)
    command.interrupt()
    time.sleep(0.5)
    assert command.process.poll() is None
    command.interrupt()
    assert command.end(timeout_s=90).status == 130


@pytest.mark.parametrize("delay_s", [0.0, 2.0])
def test_an_interrupt_before_the_ranks_listen(start: Start, delay_s: float) -> None:
    """The delays: while the launcher imports, and at about the time at which it starts the ranks."""
    begun = "from shardwise.cli import main; main.signal.signal(2, main.end_at_once); print('begun', flush=True)"
    command = start("train", "run.toml", scenario="time.sleep(600)", setup=begun)
    assert command.process.stdout is not None
    assert command.process.stdout.readline() == "begun\n"
    time.sleep(delay_s)
    command.interrupt()
    ended = command.end(timeout_s=90)
    assert ended.status == 130
    assert "Traceback" not in ended.err


def test_an_interrupt_while_ranks_boot_waits_for_their_handlers(start: Start, tmp_path: Path) -> None:
    booting = tmp_path / "stand_in" / "sitecustomize.py"
    slow = 'if "RANK" in os.environ:\n    os.write(1, b"booting\\n")\n    time.sleep(1)\n'
    booting.write_text(booting.read_text() + slow)
    command = start("train", "run.toml", scenario="time.sleep(600)")
    assert command.process.stdout is not None
    assert command.process.stdout.readline().startswith("starting 2 ranks")
    assert [command.process.stdout.readline() for _ in range(2)] == ["booting\n"] * 2
    command.interrupt()
    ended = command.end(timeout_s=90)
    assert (ended.status, ended.err) == (130, f"{STOPPING}\ninterrupted\n")


def test_an_interrupt_while_ranks_import_is_no_failure(start: Start) -> None:
    """If a KeyboardInterrupt breaks off the import of an extension module, its next import raises this ImportError."""
    scenario = """
os.write(1, b"training\\n")  # in one piece: both ranks write to one pipe
try:
    time.sleep(600)
except KeyboardInterrupt:
    raise ImportError("cannot load module more than once per process")
"""
    command = _start_and_wait(start, scenario)
    command.interrupt()
    ended = command.end(timeout_s=90)
    assert (ended.status, ended.err) == (130, f"{STOPPING}\ninterrupted\n")


def test_a_failure_while_saving_is_not_an_interrupt(start: Start) -> None:
    command = _start_and_wait(start, SAVES_ON_INTERRUPT.replace("raise KeyboardInterrupt", "raise OSError('full')"))
    command.interrupt()
    ended = command.end(timeout_s=90)
    assert ended.status == 1
    assert "OSError: full" in ended.err


def test_a_straggler_is_not_waited_for(start: Start) -> None:
    """Rank 1 ends at the interrupt; rank 0 ignores it, like a rank that waits for its peer in native code."""
    scenario = """
if rank == 0:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
os.write(1, b"training\\n")  # in one piece: both ranks write to one pipe
time.sleep(600)
"""
    command = _start_and_wait(start, scenario)
    command.interrupt()
    ended = command.end(timeout_s=15)
    assert (ended.status, ended.err) == (130, f"{STOPPING}\ninterrupted\n")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("train.lrr=1",), "error: run.toml: unknown key train.lrr; did you mean train.lr?\n"),
        (
            ("parallel.strategy=hybrid_shard", "parallel.shard_group=3"),
            "error: parallel.shard_group=3 does not divide the 2 ranks; use one of 1, 2 or another number of ranks\n",
        ),
        (
            ("train.global_batch=3",),
            "error: train.global_batch=3 is not a multiple of train.micro_batch x ranks = 1 x 2 = 2\n",
        ),
        (("data.source=./corpus",), "error: data.source='./corpus': no such files\n"),
        (
            ("data.tokenizer=stand_out",),
            "error: data.tokenizer='stand_out': no such file or directory; did you mean stand_in?\n",
        ),
        (
            ("model.config=none", "model.path=llama"),
            "error: model.path='llama': no such file or directory; a model on a hub is named org/name\n",
        ),
    ],
)
def test_mistakes_found_before_any_rank_starts(start: Start, overrides: tuple[str, ...], line: str) -> None:
    ended = start("train", "run.toml", *overrides, scenario="print('started')").end()
    assert (ended.status, ended.out, ended.err) == (2, "", line)


def test_inside_torchrun_it_is_a_rank(start: Start) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    ended = start("train", "run.toml", **torchrun).end()
    assert (ended.status, ended.out) == (0, "strategy full_shard batch 4\n")
    ended = start("train", "run.toml", scenario="raise ConfigError('no')", **torchrun).end()
    assert (ended.status, ended.err) == (2, "error: rank 0: no\n")


@pytest.mark.parametrize("chosen", [{}, {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=x"}], ids=str)
def test_cpu_ranks_keep_freed_memory(chosen: dict[str, str]) -> None:
    assert malloc_settings(chosen) == {
        "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
    }


@pytest.mark.parametrize(
    "chosen", [{"MALLOC_TRIM_THRESHOLD_": "65536"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=1"}], ids=str
)
def test_malloc_settings_of_the_users_stay(chosen: dict[str, str]) -> None:
    assert malloc_settings(chosen) == {}


# 200 MB in blocks of 10 MB. Freed, they are the top of the heap. The page faults of a third round show whether malloc
# kept them; some of its blocks may still need new pages.
FREES = """
import ctypes, resource
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: one fault would bring 512 pages
import torch
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2_500_000) for _ in range(20)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
pages(), pages()
print(pages())
"""
ALL_PAGES = 200_000_000 // 4096


def test_what_a_rank_freed_is_used_again() -> None:
    others = ("MALLOC", "GLIBC_TUNABLES", "SHARDWISE", "LD_PRELOAD")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    environment = {**inherited, **malloc_settings(inherited)}
    done = subprocess.run([sys.executable, "-c", FREES], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < ALL_PAGES / 10
