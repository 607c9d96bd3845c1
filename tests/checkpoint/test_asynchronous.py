"""Saves that go on in a thread: what they write is of the moment of the call, and no error is lost."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import accelerators
from shardwise.checkpoint import latest, verify
from shardwise.checkpoint.format.local_tensor import piece_of
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.checkpoint.ranks import save_thread
from shardwise.checkpoint.ranks.file_barrier import FileBarrier
from shardwise.checkpoint.staging import StagingBuffer
from shardwise.engine.lookup import require_engine
from shardwise.errors import CheckpointError
from shardwise.files.direct import PAGE_BYTES
from tests.checkpoint.rig import fail_in_thread, held, join_save_threads, save_threads
from tests.checkpoint.states import build, everything, same, step
from tests.engine.cases import Case
from tests.engine.rig import events, on_ranks, recording
from tests.ranks import RankPools, RanksHung

CASE = Case("full_shard", 2)


def save(path: Path, model: Any, optimizer: Any, number: int = 0) -> None:
    sw.checkpoint.save(path, model, optimizer, step=number, extra={"n": number}, asynchronous=True)


@pytest.mark.parametrize("case", [CASE, Case("hybrid_shard", 4), Case("no_shard", 3)], ids=str)
def test_what_is_written_is_of_the_moment_of_the_call(case: Case, ranks: RankPools, tmp_path: Path) -> None:
    ranks(case.world_size).run(_changed_after, case, tmp_path)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "then" / name).read_bytes() == (tmp_path / "now" / name).read_bytes()


@torch.no_grad()
def _changed_after(case: Case, tmp_path: Path) -> None:
    model, optimizer = build(case)
    with torch.enable_grad():
        step(model, optimizer, 0)
    sw.checkpoint.save(tmp_path / "now", model, optimizer, step=3)
    before = everything(model, optimizer)
    extra: dict[str, Any] = {"list": [1, 2]}
    torch.manual_seed(5)
    random.seed(6)
    with held():
        sw.checkpoint.save(tmp_path / "then", model, optimizer, step=3, extra=extra, asynchronous=True)
        drawn = torch.rand(3), random.random()
        extra["list"].append(3)
        optimizer.param_groups[0]["lr"] = 77.0
        optimizer.param_groups[0]["betas"] = (0.1, 0.2)
        for parameter in model.parameters():
            parameter.fill_(9)
        for buffer in model.buffers():
            buffer.fill_(9)
        for state in optimizer.state.values():
            for value in state.values():
                value.fill_(9)
        assert not (tmp_path / "then").exists()
    sw.checkpoint.wait(model)
    verify(tmp_path / "then")
    loaded = sw.checkpoint.load(tmp_path / "then", model, optimizer)
    assert loaded == {"list": [1, 2]}
    assert loaded.step == 3
    same(everything(model, optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert torch.equal(torch.rand(3), drawn[0])
    assert random.random() == drawn[1]


@on_ranks(2)
def test_training_goes_on_and_the_next_save_waits(tmp_path: Path) -> None:
    model, optimizer = build(CASE)
    for number in range(1, 4):
        step(model, optimizer, number)
        save(tmp_path / f"step-{number:06d}", model, optimizer, number)
        assert len(save_threads()) <= 1
        if number > 1:  # the last one has been waited for
            verify_now(tmp_path / f"step-{number - 1:06d}")
    assert latest(tmp_path) == tmp_path / "step-000003"  # waits too
    verify(tmp_path / "step-000003")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{n:06d}" for n in (1, 2, 3)]


def verify_now(path: Path) -> None:
    """Without waiting for anything."""
    from shardwise.checkpoint.format import manifest

    assert manifest.is_there(LocalDirectory(path))


@on_ranks(2)
def test_the_thread_uses_no_collective(tmp_path: Path) -> None:
    with recording():
        model, optimizer = build(CASE)
    step(model, optimizer, 0)
    engine = require_engine(model)
    with held() as opened:
        save(tmp_path / "c", model, optimizer)
        before = len(events(engine))
        opened.set()
        join_save_threads()
        assert len(events(engine)) == before
        verify(tmp_path / "c")


MOMENTS = [(0, "posix_fallocate", 0), (0, "pwrite", 0), (1, "pwrite", 5), (1, "fsync", 0), (0, "rename", 0)]


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
@pytest.mark.parametrize("way", ["save", "load", "wait"])
def test_an_error_is_raised_by_the_next_call_of_every_rank(
    moment: tuple[int, str, int], way: str, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(2).run(_failing, tmp_path, moment, way)


def _failing(run: Path, moment: tuple[int, str, int], way: str) -> None:
    rank, function, call = moment
    model, optimizer = build(CASE)
    step(model, optimizer, 0)
    sw.checkpoint.save(run / "step-000001", model, optimizer, step=1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            fail_in_thread(patch, function, call)
        save(run / "step-000002", model, optimizer, 2)
        step(model, optimizer, 1)
        with pytest.raises(CheckpointError, match=r"asynchronous save of .*step-000002 failed: .*No space left"):
            again(way, run, model, optimizer)
    dist.barrier()
    assert [path.name for path in run.iterdir()] == ["step-000001"]
    again("save", run, model, optimizer)  # told once, and then all is well
    sw.checkpoint.wait(model)
    verify(run / "step-000003")
    dist.barrier()


def again(way: str, run: Path, model: Any, optimizer: Any) -> None:
    if way == "save":
        save(run / "step-000003", model, optimizer, 3)
    elif way == "load":
        sw.checkpoint.load(run / "step-000001", model, optimizer)
    else:
        sw.checkpoint.wait(model)


@on_ranks(2)
def test_a_thread_that_cannot_be_started_is_everybodys_error(tmp_path: Path) -> None:
    model, optimizer = build(CASE)
    threads = threading.active_count()
    for rank in (0, 1):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == rank:
                patch.setattr(threading.Thread, "start", cannot_start)
            with pytest.raises((RuntimeError, CheckpointError), match="can't start new thread") as caught:
                save(tmp_path / "step-000001", model, optimizer)
        assert isinstance(caught.value, RuntimeError) == (dist.get_rank() == rank)
        assert threading.active_count() == threads
        dist.barrier()  # rank 0 clears up
        assert list(tmp_path.iterdir()) == []
    step(model, optimizer, 0)  # nothing is being copied
    save(tmp_path / "step-000001", model, optimizer)
    sw.checkpoint.wait(model)
    verify(tmp_path / "step-000001")


def cannot_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("look", [latest, lambda run: verify(run / "step-000001")])
def test_looking_raises_it_too(look: Callable[[Path], object], tmp_path: Path) -> None:
    model, optimizer = build(Case("full_shard", 1))
    sw.checkpoint.save(tmp_path / "step-000001", model, optimizer, step=1)
    with pytest.MonkeyPatch.context() as patch:
        fail_in_thread(patch, "fsync", 0)
        save(tmp_path / "step-000002", model, optimizer, 2)
        with pytest.raises(CheckpointError, match=r"step-000002 failed: .*No space left"):
            look(tmp_path)
    assert latest(tmp_path) == tmp_path / "step-000001"
    assert (tmp_path / "step-000002.partial").is_dir()  # other ranks might be at work in it
    sw.checkpoint.wait(model)
    assert not (tmp_path / "step-000002.partial").exists()


SCRIPT = """
import os, sys, threading, time
import torch
import shardwise as sw
import logging, atexit
atexit.register(lambda: print("others are heard", flush=True))
model = sw.shard(torch.nn.Linear(300, 300))
original = os.fsync
def slow(fd):
    time.sleep(0.5)
    {}
    original(fd)
os.fsync = slow
sw.checkpoint.save(sys.argv[1], model, asynchronous=True)
print("done", flush=True)
{}
"""


def run_script(body: str, path: Path, last: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT.format(body, last), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_end_of_the_program_waits(tmp_path: Path) -> None:
    ended = run_script("pass", tmp_path / "c")
    assert (ended.returncode, ended.stderr) == (0, "")
    verify(tmp_path / "c")


def test_the_end_of_the_program_reports_a_failure_and_keeps_its_status(tmp_path: Path) -> None:
    ended = run_script("raise OSError(28, 'No space left on device')", tmp_path / "c")
    assert ended.returncode == 0
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: the asynchronous save of {tmp_path}/c failed")
    assert "No space left" in line
    assert ended.stdout == "done\nothers are heard\n"
    assert not (tmp_path / "c").exists()


def test_a_program_that_waits_ends_with_the_failure(tmp_path: Path) -> None:
    fault = "raise OSError(28, 'No space left on device')"
    ended = run_script(fault, tmp_path / "c", "sw.checkpoint.wait(model)")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("shardwise.errors.CheckpointError: the asynchronous save of")


def test_a_rank_that_is_killed_ends_the_others_wait(ranks: RankPools, tmp_path: Path) -> None:
    with pytest.raises(RanksHung, match="rank 1 is gone"):
        ranks(2).run(_die, tmp_path, timeout_s=30)
    heard = (tmp_path / "heard").read_text()
    assert re.search(r"failed: the process of rank 1 (is gone|was killed by SIGKILL; the machine may.*)$", heard)
    assert latest(tmp_path) is None


def _die(run: Path) -> None:
    model, optimizer = build(CASE)
    with held() as opened:
        save(run / "step-000001", model, optimizer, 1)
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        opened.set()
        try:
            latest(run)
        except CheckpointError as error:
            (run / "heard").write_text(str(error))


def test_a_silent_rank_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_TIMEOUT_S", "0.2")
    barrier = FileBarrier(LocalDirectory(tmp_path), 0, 2)
    with (
        pytest.raises(CheckpointError, match=r"did not finish within 0\.2 s"),
        barrier.together("x", seen=lambda: False),
    ):
        pass


def test_the_second_copy_goes_into_the_same_pages() -> None:
    tensors = [torch.randn(1000), torch.arange(7), torch.ones(3, dtype=torch.bfloat16), torch.randn(300_000)]
    memory = StagingBuffer()
    pieces = [piece_of((str(i),), tensor) for i, tensor in enumerate(tensors)]
    first = memory.copy(pieces)
    addresses = [piece.tensor.data_ptr() for piece in first]
    for tensor in tensors:
        tensor.mul_(2)
    faults = _faults()
    second = memory.copy(pieces)
    assert _faults() - faults < 50  # 1.2 MB would be 294 pages
    assert [piece.tensor.data_ptr() for piece in second] == addresses
    for piece, tensor in zip(second, tensors, strict=True):
        assert torch.equal(piece.tensor, tensor)
        assert piece.tensor.data_ptr() % 64 == 0
    assert memory.nbytes < sum(tensor.nbytes for tensor in tensors) + 64 * len(tensors) + PAGE_BYTES


class Runtime:
    """A device's: what is registered, by address."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0

    def cudart(self) -> Runtime:
        return self

    def check_error(self, status: int) -> None:
        assert status == 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.calls += 1
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


def pieces_on_a_device(*numels: int) -> list[Any]:
    """Pieces that say they are on an accelerator; their elements can be copied."""
    tensors = [torch.arange(numel, dtype=torch.float32).as_subclass(OnDevice) for numel in numels]
    return [piece_of((str(i),), tensor) for i, tensor in enumerate(tensors)]


class OnDevice(torch.Tensor):
    device = torch.device("xpu", 0)  # type: ignore[assignment]


@contextmanager
def runtime(module: object) -> Iterator[None]:
    with (
        mock.patch.object(torch, "get_device_module", return_value=module),
        mock.patch.object(accelerators, "current_stream"),
    ):
        yield


def test_as_many_bytes_are_pinned_as_are_copied() -> None:
    device = Runtime()
    with runtime(device):
        memory = StagingBuffer()
        for numel in (300, 1_300_000, 5, 1_300_000, 2_000_000):  # the third and fourth fit where the second was
            copies = memory.copy(pieces_on_a_device(numel))
            assert torch.equal(copies[0].tensor, torch.arange(numel, dtype=torch.float32))
            assert device.registered == {copies[0].tensor.data_ptr(): memory.nbytes}
            assert memory.nbytes % PAGE_BYTES == 0
        assert device.calls == 3
        assert 8_000_000 <= memory.nbytes < 8_000_000 + PAGE_BYTES
        del memory
        assert device.registered == {}
        copies[0].tensor.fill_(1)  # a thread that still writes them has them


def test_memory_that_cannot_be_pinned_is_plain() -> None:
    with runtime(object()):
        memory = StagingBuffer()
        for numel in (300, 1_300_000):
            assert torch.equal(memory.copy(pieces_on_a_device(numel))[0].tensor, torch.arange(numel).float())


@on_ranks(2)
def test_writes_through_aliases_after_the_call_change_nothing(tmp_path: Path) -> None:
    model, optimizer = build(CASE)
    step(model, optimizer, 0)
    sw.checkpoint.save(tmp_path / "now", model, optimizer, step=0)
    kept = [state["exp_avg"].local for state in optimizer.state.values()]
    arrays = [state["exp_avg_sq"].local.numpy() for state in optimizer.state.values()]
    with held():
        save(tmp_path / "then", model, optimizer)
        for piece, array in zip(kept, arrays, strict=True):
            piece.data.fill_(9)
            array.fill(9)
    sw.checkpoint.wait(model)
    dist.barrier()
    then, now = (tmp_path / name / "optimizer.safetensors" for name in ("then", "now"))
    assert then.read_bytes() == now.read_bytes()


@on_ranks(1)
def test_an_interrupted_start_leaves_no_thread(tmp_path: Path) -> None:
    """Wherever in it an interrupt comes: training goes on, and so does the next save."""
    model, optimizer = build(Case("full_shard", 1))
    step(model, optimizer, 0)
    lines = interrupted_at = 0
    interrupted: set[str] = set()

    def tracer(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        code = frame.f_code
        if event == "line" and code.co_filename == save_thread.__file__:
            lines += 1
            if lines == interrupted_at:
                interrupted.add(code.co_name)
                raise KeyboardInterrupt
        return tracer

    while True:
        lines, interrupted_at = 0, interrupted_at + 1
        path = tmp_path / f"c{interrupted_at}"
        sys.settrace(tracer)
        try:
            save(path, model, optimizer)
        except KeyboardInterrupt:
            caught = True
        else:
            caught = False
        finally:
            sys.settrace(None)
        stepping = threading.Thread(target=optimizer.step, daemon=True)
        stepping.start()
        stepping.join(20)
        assert not stepping.is_alive()
        sw.checkpoint.wait(model)
        assert not save_threads()
        if not caught:
            break
    assert {"start", "want", "decide"} <= interrupted
    verify(path)


def _faults() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@on_ranks(2)
def test_process_groups_may_be_gone_before_it_is_written(tmp_path: Path) -> None:
    model, optimizer = build(CASE)
    dist.barrier()
    with held() as opened:
        save(tmp_path / "c", model, optimizer)
        dist.barrier()
        dist.destroy_process_group()
        opened.set()
        verify(tmp_path / "c")
