"""Whether a rank's error is a cause, or a consequence of another rank's failure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardwise.cli.process import report
from shardwise.errors import CheckpointError, CollectiveTimeout

REMOTE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a "
    "network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from 10.0.0.7<33759> failed"
)
INTERNAL = (
    "NCCL error in: NCCLUtils.hpp:94, internal error\nLast error:\nNet : Connection closed by remote peer node<1>"
)
ABORTED = "NCCL communicator was aborted on rank 2. Original reason: Watchdog caught collective operation timeout"
NO_ID = (
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
    "but store->get('0') got error: wait timeout after 600000ms"
)
NO_MEMORY = (
    "NCCL error in: NCCLUtils.hpp:94, unhandled cuda error, NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA "
    "function failed.\nLast error:\nFailed to CUDA calloc async 608 bytes"
)
TWICE = "NCCL error in: NCCLUtils.hpp:94, invalid usage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0"


def test_torchrun_finds_what_a_rank_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    ending = report.describe(CheckpointError("it does not fit: a"), 1)
    report.tell_torchrun(ending)  # not under torchrun
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    report.tell_torchrun(ending)
    failure = ProcessFailure(1, 7, 2, str(file))
    assert failure.message["message"] == "it does not fit: a"  # what torchrun shows


@pytest.mark.parametrize(
    "error",
    [
        *(dist.DistBackendError(words) for words in (REMOTE, INTERNAL, ABORTED, NO_ID)),
        dist.DistStoreError("wait timeout after 1000ms, keys: /default_pg/0//cuda//0"),
        dist.DistNetworkError("failed to recv, got 0 bytes"),
        CollectiveTimeout("all_gather on rank 1: the process of rank 0 is gone."),
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"),
        ConnectionResetError("reset"),
    ],
    ids=lambda error: str(error)[-40:],
)
def test_a_lost_peer_is_a_consequence(error: Exception) -> None:
    ending = report.describe(error, 1)
    assert ending.consequence
    assert report.format_report(ending).startswith("error: rank 1 failed because another rank failed or exited:\n")


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError(NO_MEMORY),
        dist.DistBackendError(TWICE),
        RuntimeError("the watchdog bit me"),
        ValueError("remote process exited"),
    ],
    ids=lambda error: str(error)[-40:],
)
def test_other_errors_are_causes(error: Exception) -> None:
    ending = report.describe(error, 1)
    assert not ending.consequence
    assert report.format_report(ending).startswith("error: rank 1 failed:\n")


def test_what_followed_from_a_lost_peer_is_a_consequence_too() -> None:
    error = ValueError("no loss")
    error.__cause__ = dist.DistBackendError(REMOTE)
    assert report.describe(error, 0).consequence
