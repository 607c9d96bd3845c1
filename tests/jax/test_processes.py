"""Two processes with two devices each train as one process with four."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("shardwise.jax", reason="the extra jax is not installed")
pytest.importorskip("rich")

from tests.jax import small
from tests.jax.conftest import FLAGS
from tests.jax.runs import losses_of, prepare, train

ROOT = Path(__file__).parents[2]
STEPS = 5
PATIENCE_S = 250


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The directory that two processes worked in, and what they said."""
    folder = tmp_path_factory.mktemp("pair")
    prepare(folder)
    with socket.socket() as held:  # until the end, so that nobody else gets the port; the coordinator shares it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        env = {
            **os.environ,
            "XLA_FLAGS": " ".join(FLAGS),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{held.getsockname()[1]}",
            "JAX_NUM_PROCESSES": "2",
        }
        processes = [_started(number, env, folder) for number in range(2)]
        try:
            statuses = _ended(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    said = {path.name: path.read_text() for path in sorted(folder.glob("process-*"))}
    if statuses != [0, 0]:
        texts = (f"--- {name}\n{text[-8000:]}" for name, text in said.items())
        pytest.fail("\n".join([f"processes ended with {statuses}", *texts]))
    return folder, [json.loads(said[f"process-{number}.out"].splitlines()[-1]) for number in range(2)]


def _started(number: int, env: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"process-{number}.out").open("wb") as out, (folder / f"process-{number}.err").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.jax.process", str(STEPS)],
            env={**env, "JAX_PROCESS_ID": str(number)},
            cwd=folder,
            stdout=out,
            stderr=err,
        )


def _ended(processes: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Their statuses once all have ended, or one has failed, or patience has."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        statuses = [process.poll() for process in processes]
        if None not in statuses or any(statuses) or time.monotonic() > deadline:
            return statuses
        time.sleep(0.1)


@pytest.mark.slow
def test_two_processes_train_as_one(pair: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = pair[1]
    assert first["losses"] == second["losses"]
    assert (first["devices"], first["local"]) == (4, 2)
    np.testing.assert_allclose(first["losses"], small.losses(4, 50)[:STEPS], rtol=1e-5)


def test_batches_of_other_shapes_are_told_in_every_process(pair: tuple[Path, list[dict[str, Any]]]) -> None:
    """gloo ended one of them, and XLA told the other of a closed connection."""
    assert all(said["uneven"].startswith("processes have different batches (here {'t") for said in pair[1])


def test_two_processes_save_and_one_goes_on(
    pair: tuple[Path, list[dict[str, Any]]], whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pair[0])
    assert [path.name for path in sorted(Path("runs/tiny/checkpoints").iterdir())] == ["step-000002", "step-000004"]
    train("parallel.ranks=2", "train.micro_batch=2")
    np.testing.assert_allclose(losses_of("tiny"), losses_of(whole), rtol=1e-5)
