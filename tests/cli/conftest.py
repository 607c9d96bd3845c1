"""Fixtures that run the real command line with a stand-in for the trainer: each rank does what the test says."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CONFIG = """
[model.config]
model_type = "llama"

[train]
steps = 1
"""

STAND_IN = """
import os, signal, sys, time, types

def run(config):
    from shardwise.errors import ConfigError, CollectiveTimeout
    rank = int(os.environ["RANK"])
    if rank == 0:
        print("strategy", config.parallel.strategy, "batch", config.train.global_batch, flush=True)
    exec(os.environ["SCENARIO"], {**globals(), **locals()})

module = types.ModuleType("shardwise.train.trainer")
module.run = run
sys.modules["shardwise.train.trainer"] = module
"""


HEARS_HANGUPS = ("env", "--default-signal=HUP")
"""Put before a command: it hears SIGHUP, also if the tests themselves run under `nohup`, which children inherit."""


@dataclass
class Started:
    """A command that is running."""

    process: subprocess.Popen[str]
    began_s: float

    def interrupt(self) -> None:
        """Send Ctrl-C's signal to the launcher alone."""
        self.process.send_signal(signal.SIGINT)

    def end(self, timeout_s: float = 60) -> "Ended":
        """Wait until the command ends."""
        out, err = self.process.communicate(timeout=timeout_s)
        return Ended(self.process.returncode, out, err, time.monotonic() - self.began_s)


@dataclass
class Ended:
    """A command that has ended."""

    status: int
    out: str
    err: str
    took_s: float


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts `shardwise` with arguments.

    Each rank runs `scenario`; the launcher runs `setup` first; `environment` is added to both.
    """
    (tmp_path / "run.toml").write_text(CONFIG)
    stand_in = tmp_path / "stand_in"
    stand_in.mkdir()
    (stand_in / "sitecustomize.py").write_text(STAND_IN)
    started: list[Started] = []

    def start_(*arguments: str, scenario: str = "", setup: str = "", **environment: str) -> Started:
        path = os.pathsep.join([str(stand_in), os.environ.get("PYTHONPATH", "")])
        clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
        process = subprocess.Popen(
            [*HEARS_HANGUPS, sys.executable, "-c", f"{setup}\nfrom shardwise.cli.main import main\nmain()", *arguments],
            cwd=tmp_path,
            env={**clean, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "SCENARIO": scenario, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Started(process, time.monotonic()))
        return started[-1]

    yield start_
    for command in started:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait()
