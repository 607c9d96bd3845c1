"""Eight devices on the host, asked for before anything initialises JAX; programs that tests share."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

FLAGS = (  # programs stay the same HLO but for a few fusions, and compile in a quarter of the time
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    # XLA ends the process where a device is 40 s late for a collective; other work may hold the processors so long.
    "--xla_cpu_collective_call_terminate_timeout_seconds=240",
    "--xla_cpu_collective_timeout_seconds=240",
)
COUNT = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), COUNT, *FLAGS]).strip()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: texts and a configuration to train with."""
    from tests.jax.runs import prepare

    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run of that configuration; not to be changed."""
    from tests.jax.runs import prepare, train

    place = tmp_path_factory.mktemp("whole")
    prepare(place)
    with contextlib.chdir(place):
        train("log.name=whole")
    return place / "runs" / "whole"
