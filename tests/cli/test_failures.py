"""Whatever happens to one rank of `shardwise train`, all ranks end soon and the user reads why.

The ranks use a double of NCCL's process group: its destructor waits for peers, whether or not they are gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tiny import GPT2

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
MOST_S = 30.0
"""Longest time from the failure of one rank to the end of all."""
TORCHRUN_S = 30.0
"""Time after which torchrun kills a rank that it has asked to end."""
CONFIG = f"""{GPT2}
[train]
steps = 4
micro_batch = 2
global_batch = 4
lr = 1e-2

[checkpoint]
every = 0
"""
ON_RANKS = """
import os, sys

if "RANK" in os.environ:
    import json, signal, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from shardwise.train import trainer
    from tests.comm import nccl_double

    init, loss = dist.init_process_group, trainer.LossFunction.__call__
    dist.init_process_group = lambda backend: init(nccl_double.BACKEND)
    double = nccl_double.doubled()
    double.__enter__()
    Path("pid-" + os.environ["RANK"]).write_text(str(os.getpid()))

    def failing(self, *arguments):
        "Between the forward and the backward of step 3, when the other rank goes on to the backward."
        result = loss(self, *arguments)
        failing.calls += 1
        if failing.calls == 3 and os.environ["RANK"] == "1":
            Path("failed_s").write_text(str(time.time()))
            exec(os.environ["FAILURE"])
        return result

    failing.calls = 0
    if "FAILURE" in os.environ:
        trainer.LossFunction.__call__ = failing
"""
OURS = ("-c", "from shardwise.cli.main import main; main()")
TORCHRUN = (
    *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    *("-m", "shardwise.cli.main"),
)
RAISES = "raise ValueError('out of cheese')"
NO_MEMORY = "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@dataclass(frozen=True)
class Ended:
    status: int
    err: str
    took_s: float
    """Seconds from the failure to the end of the command."""


def train(command: tuple[str, ...], failure: str | None = None) -> Ended:
    """Run the command that a user gives, in an environment without the variables of ranks."""
    path = os.pathsep.join(["hook", str(ROOT), os.environ.get("PYTHONPATH", "")])
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    env = {**clean, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "NCCL_DOUBLE_WATCHDOG_S": "60"}
    env |= {"FAILURE": failure} if failure else {}
    done = subprocess.run(
        [sys.executable, *command, "train", "run.toml"], env=env, capture_output=True, text=True, timeout=240
    )
    began_s = float(Path("failed_s").read_text()) if failure else time.time()
    return Ended(done.returncode, done.stderr, time.time() - began_s)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(12):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"the {i} quick brown foxes jump. " * (1 + i % 5))
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(ON_RANKS)
    monkeypatch.chdir(tmp_path)


def nobody_runs() -> bool:
    """Return whether all ranks have ended."""
    for rank in range(2):
        pid = int(Path(f"pid-{rank}").read_text())
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        return False
    return True


@pytest.mark.parametrize("command", [OURS, pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["train", "torchrun"])
def test_a_run_comes_to_its_end(command: tuple[str, ...]) -> None:
    ended = train(command)
    assert ended.status == 0, ended.err
    rows = [json.loads(line) for line in next(Path("runs").glob("*/metrics.jsonl")).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "first", "last"),
    [
        (RAISES, "error: rank 1 failed:", "ValueError: out of cheese"),
        (NO_MEMORY, "error: rank 1 failed:", "GiB usable; the plan's peak is in"),
        (KILLED, "error: rank 1 was killed by SIGKILL; the machine may be out of memory", ""),
    ],
    ids=["raises", "no memory", "killed"],
)
def test_what_happens_to_one_rank_ends_all_and_is_said(failure: str, first: str, last: str) -> None:
    ended = train(OURS, failure)
    assert (ended.status, ended.err.splitlines()[0]) == (1, first), ended.err
    assert last in ended.err
    assert "rank 0" not in ended.err
    assert ended.took_s < MOST_S
    assert nobody_runs()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (RAISES, ("error: rank 1 failed:\n", "ValueError: out of cheese")),
        (NO_MEMORY, ("error: rank 1 failed:\nstep 3 ran out of memory on rank 1", "the plan's peak is in")),
        (KILLED, (f"exitcode  : -{signal.SIGKILL.value}", "rank      : 1", "SIGKILL")),
    ],
    ids=["raises", "no memory", "killed"],
)
def test_so_it_does_under_torchrun(failure: str, words: tuple[str, ...]) -> None:
    ended = train(TORCHRUN, failure)
    assert ended.status == 1
    for expected in words:
        assert expected in ended.err, ended.err
    assert ended.took_s < TORCHRUN_S + MOST_S
    assert nobody_runs()
