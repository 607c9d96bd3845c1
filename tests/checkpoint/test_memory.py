"""A run resumes from the copies in the memory of its hosts: here each rank is a host, with a directory of its own."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import shardwise as sw
from shardwise import device_tools
from shardwise.checkpoint import memory
from shardwise.errors import ConfigError
from shardwise.train import trainer
from shardwise.train.output.checkpoints import Checkpoints
from shardwise.train.run.directory import RunDirectory
from tests.ranks import RankPool, RankPools
from tests.train.rig import furnish, losses, run_here

STEPS, EVERY, LOST_AFTER = 6, 2, 5
SMALL = ("train.eval_every=0", "train.global_batch=4")
COPIES = f"checkpoint.memory_every={EVERY}"


class HostLostError(Exception):
    """Ends a run after so many steps, as a kill does: nothing is saved or tidied up."""


def train(folder: str, hosts: tuple[str, ...], lost_after: int, *overrides: str) -> str:
    """Train on ranks, of which each is on the host with its directory in `hosts`. Returns what a rank prints."""
    rank = int(os.environ.get("RANK", "0"))
    step = trainer.Trainer.step

    def step_or_end(self: trainer.Trainer, number: int) -> None:
        if number == lost_after:
            sw.checkpoint.wait(self.model)  # the copy is made in a thread
            raise HostLostError
        step(self, number)

    with (
        mock.patch.dict(os.environ, {memory.VARIABLE: str(Path(folder, hosts[rank]))}),
        mock.patch.object(trainer.Trainer, "step", step_or_end),
    ):
        try:
            return run_here(folder, overrides)
        except HostLostError:
            return "lost"


def train_on(pool: RankPool, folder: Path, hosts: tuple[str, ...], lost_after: int, *overrides: str) -> list[str]:
    return pool.run(train, str(folder), hosts, lost_after, *SMALL, COPIES, *overrides, timeout_s=240)


@pytest.fixture(scope="module")
def lost(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole run, and the memory of two hosts whose run ended in its sixth step."""
    folder = tmp_path_factory.mktemp("lost")
    furnish(folder)
    for host in ("a", "b"):
        (folder / host).mkdir()
    train_on(ranks(2), folder, ("a", "b"), STEPS, "log.name=whole", "checkpoint.memory_every=0")
    assert not list(folder.glob("[ab]/*")), "a run without copies wrote to memory"
    assert train_on(ranks(2), folder, ("a", "b"), LOST_AFTER) == ["lost", "lost"]
    return folder


@pytest.fixture
def folder(lost: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, to change."""
    for name in lost.iterdir():
        (shutil.copytree if name.is_dir() else shutil.copy)(name, tmp_path / name.name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(host: str) -> list[str]:
    return sorted("/".join(path.parts[-2:]) for path in Path(host).glob("shardwise-*/*/*.bin"))


def test_a_copy_is_on_its_own_host_and_the_next_one(folder: Path) -> None:
    both = [f"step-{step:06d}/rank-{rank:05d}.bin" for step in (2, 4) for rank in (0, 1)]
    assert names("a") == names("b") == both
    assert {path.stat().st_mode & 0o777 for path in folder.glob("[ab]/shardwise-*")} == {0o700}
    assert not (folder / "runs" / "tiny" / "checkpoints").exists()


@pytest.mark.parametrize("wiped", ["a", "b"])
def test_a_host_that_lost_its_memory_reads_the_other_ones(folder: Path, ranks: RankPools, wiped: str) -> None:
    shutil.rmtree(folder / wiped)
    (folder / wiped).mkdir()
    said, _ = train_on(ranks(2), folder, ("a", "b"), STEPS)
    assert "step-000004: step 5 is next" in said
    assert losses("tiny") == losses("whole")
    assert not list(folder.glob("[ab]/*")), "copies are left behind"


@pytest.mark.slow
def test_the_rank_that_is_left_goes_on_alone(folder: Path, ranks: RankPools) -> None:
    (said,) = train_on(ranks(1), folder, ("b",), STEPS)
    assert "step-000004: step 5 is next" in said
    assert losses("tiny")[:4] == losses("whole")[:4]
    assert losses("tiny") == pytest.approx(losses("whole"), rel=1e-5)


def newest(host: Path, name: str) -> Path:
    return next(host.glob(f"shardwise-*/step-000004/{name}"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_file_is_read_from_the_other_host(folder: Path, ranks: RankPools) -> None:
    flip(newest(folder / "a", "rank-00000.bin"))
    flip(newest(folder / "b", "rank-00001.bin"))
    said, _ = train_on(ranks(2), folder, ("a", "b"), STEPS)
    assert "step-000004: step 5 is next" in said
    assert losses("tiny") == losses("whole")


@pytest.mark.slow
def test_the_later_of_memory_and_disk_is_resumed(folder: Path, ranks: RankPools) -> None:
    assert train_on(ranks(2), folder, ("a", "b"), LOST_AFTER, "checkpoint.every=5") == ["lost", "lost"]
    said, _ = train_on(ranks(2), folder, ("a", "b"), STEPS, "checkpoint.every=5")
    assert "resuming from runs/tiny/checkpoints/step-000005: step 6 is next" in said
    assert losses("tiny") == losses("whole")


@pytest.mark.slow
def test_copies_of_another_run_of_that_name_are_not_seen(folder: Path, ranks: RankPools) -> None:
    shutil.rmtree(folder / "runs" / "tiny")
    said, _ = train_on(ranks(2), folder, ("a", "b"), STEPS)
    assert "resuming" not in said
    assert losses("tiny") == losses("whole")


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to train in with one rank, in this process, on a host with the directory `a`."""
    furnish(tmp_path)
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train_alone(folder: Path, lost_after: int, *overrides: str) -> str:
    return train(str(folder), ("a",), lost_after, *SMALL, COPIES, *overrides)


def test_a_damaged_checkpoint_hides_no_older_copy(alone: Path) -> None:
    train_alone(alone, LOST_AFTER, "checkpoint.every=5")
    flip(alone / "runs/tiny/checkpoints/step-000005/model.safetensors")
    said = train_alone(alone, STEPS, "checkpoint.every=5")
    assert "has been set aside: runs/tiny/checkpoints/step-000005.damaged" in said
    assert "step-000004: step 5 is next" in said


def test_a_copy_names_no_best_checkpoint_that_is_not_on_disk(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("train.eval_every=2", "checkpoint.keep_best=true", "checkpoint.every=100")
    save = Checkpoints.save

    def save_or_end(self: Checkpoints, step: int, *state: Any) -> None:
        if step == 4:
            raise HostLostError
        save(self, step, *state)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", save_or_end)
        assert train_alone(alone, STEPS, *options) == "lost"
    assert train_alone(alone, LOST_AFTER, *options) == "lost"
    assert (alone / "runs/tiny/checkpoints/step-000004").exists()


def test_metrics_are_written_before_a_copy(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[int] = []
    copy = Checkpoints.copy

    def copy_and_look(self: Checkpoints, *state: Any) -> None:
        lines.append(len(losses("tiny")))
        copy(self, *state)

    monkeypatch.setattr(Checkpoints, "copy", copy_and_look)
    train_alone(alone, STEPS, "log.every=100")
    assert lines == [2, 4, 6]


def test_a_resumed_run_without_room_for_copies_goes_on(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_alone(alone, LOST_AFTER)
    monkeypatch.setattr(device_tools, "free_host_bytes", lambda: -(2**30))
    said = train_alone(alone, STEPS, "checkpoint.memory_every=1")
    assert "step-000004: step 5 is next" in said
    assert said.count("memory_every = 0; the run goes on without more copies") == 1
    assert len(losses("tiny")) == STEPS


def test_a_run_that_makes_no_more_copies_removes_those_it_made(alone: Path) -> None:
    train_alone(alone, LOST_AFTER)
    assert list(alone.glob("a/*/*"))
    train_alone(alone, 0, "checkpoint.memory_every=0")
    assert not list(alone.glob("a/*"))


def test_a_run_begun_anew_in_its_directory_has_another_id(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert not directory.memory_id
    first = directory.made_memory_id()
    directory.metrics.touch()
    assert directory.made_memory_id() == directory.memory_id == first
    directory.metrics.unlink()
    second = directory.made_memory_id()
    assert second not in {"", first}
    directory.metrics.touch()
    (directory.path / "memory-id").write_text("")
    assert directory.made_memory_id() not in {"", second}


def saved(run: str) -> memory.HostMemory:
    """Copy two steps of a small model's training on one rank."""
    copies, model = memory.HostMemory(run), sw.shard(torch.nn.Linear(40, 50))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2):
        model(torch.ones(40)).sum().backward()
        optimizer.step()
        copies.save(step, model, optimizer, {"said": step})
    sw.checkpoint.wait(model)
    return copies


def found(copies: memory.HostMemory) -> tuple[int | None, list[str]]:
    said: list[str] = []
    copy = copies.find(said.append, lambda extra: extra["said"] < 3)
    return None if copy is None else copy.step, said


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (flip, "is damaged: bytes [0, "),
        (lambda path: os.truncate(path, 100), "is truncated: 100 bytes, not "),
        (Path.unlink, "rank-00000.bin is on none of the hosts that are left"),
    ],
)
def test_a_copy_that_is_damaged_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], object], why: str
) -> None:
    monkeypatch.setenv(memory.VARIABLE, str(tmp_path))
    copies = saved("one")
    assert found(copies) == (2, [])
    assert found(memory.HostMemory("another")) == (None, [])
    harm(copies.path / "step-000002" / "rank-00000.bin")
    step, [said] = found(copies)
    assert step == 1
    assert said.startswith("the copy of step 2 in memory cannot be used: ")
    assert why in said
    harm(copies.path / "step-000001" / "rank-00000.bin")
    step, words = found(copies)
    assert (step, len(words)) == (None, 2)
    copies.forget()
    assert not copies.path.exists()


def test_copies_that_do_not_belong_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory.VARIABLE, str(tmp_path))
    said: list[str] = []
    copy = saved("one").find(said.append, lambda extra: extra["said"] == 1)
    assert copy is not None
    assert (copy.step, said) == (1, [])


def test_copies_that_are_dropped_leave_no_memory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory.VARIABLE, str(tmp_path))
    copies = saved("one")
    gc.disable()  # else it might find what refers to itself
    try:
        assert str(tmp_path) in Path("/proc/self/maps").read_text()
        copies.keep(None)
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def test_a_limit_counts_no_cached_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = "anon 5\nactive_file 100\ninactive_file 800\nshmem 50\n"
    for name, text in (("max", "1000\n"), ("current", "990\n"), ("stat", stat)):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(device_tools, "_GROUP", str(tmp_path))
    assert device_tools.free_host_bytes() == 910
    (tmp_path / "memory.max").write_text("max\n")
    assert device_tools.free_host_bytes() > 910


def test_memory_that_is_too_small_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory.VARIABLE, str(tmp_path))
    monkeypatch.setattr(device_tools, "free_host_bytes", lambda: 2**10)
    with pytest.raises(ConfigError) as refused:
        saved("one")
    said = str(refused.value)
    assert said.startswith("checkpoint.memory_every: 2 copies of the state of 1 rank")
    assert f"in {tmp_path}, where 0.0 MiB are free: enlarge it" in said
    assert "\n" not in said


@pytest.mark.parametrize("place", ["absent/place", "file"])
def test_a_place_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(memory.VARIABLE, str(tmp_path / place))
    with pytest.raises(ConfigError, match=f"{place}/shardwise-one cannot be made: .*name one with {memory.VARIABLE}"):
        memory.HostMemory("one")
