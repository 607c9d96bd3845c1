"""A rank that does not come ends all, within the time that was asked for, with words that name it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.watchdog.rig import ENVIRONMENT, play, torchrun_command, wait_for

TIMEOUT_S = 6.0
MARGIN_S = 20.0
"""On a busy machine ranks pause, and wait three times as long as the longest pause."""


def test_a_rank_that_stands_still_is_named_with_its_stack(tmp_path: Path) -> None:
    ended = play("shardwise", "data loading hangs", tmp_path, world_size=2)
    assert ended.statuses == [1, 1]
    assert ended.seconds < TIMEOUT_S + MARGIN_S
    assert "rank 1 has kept rank 0 waiting" in ended.words
    assert "threading.Event().wait()" in ended.words
    assert "the last that it shared was the end of a backward" in ended.words
    assert "rank 0 waits at the all_gather of " in ended.words
    assert "model(torch.ones" not in ended.words, "ranks that only wait are told in one line"


NAMED = {
    "native code holds the lock": "rank 1 does not answer: native code holds Python's lock",
    "stopped": "rank 1 is stopped (SIGSTOP, or a debugger)",
    "another collective": "rank 1 waits at torch.distributed.barrier, called at ",
    "breaks early": "rank 1 waits at torch.distributed.barrier, called at ",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", NAMED)
def test_what_keeps_ranks_waiting_is_named(fault: str, tmp_path: Path) -> None:
    ended = play("shardwise", fault, tmp_path)
    assert ended.statuses in ([1, 1, 1], [1, -9, 1])
    assert ended.seconds < TIMEOUT_S + MARGIN_S
    assert NAMED[fault] in ended.words
    assert ended.words.count("All ranks end") == 3 - (ended.statuses[1] == -9)
    assert "ranks 0, 2 wait at the all_gather of " in ended.words


@pytest.mark.slow
def test_a_rank_that_works_is_waited_for_and_named_once(tmp_path: Path) -> None:
    ended = play("shardwise", "works for long", tmp_path)
    assert ended.statuses == [0, 0, 0]
    assert ended.words.count("rank 1 is at work elsewhere. Ranks wait on.") == 1
    assert "sum(range(1000))" in ended.words


@pytest.mark.slow
def test_without_a_time_that_was_asked_for_ranks_are_told_and_wait(tmp_path: Path) -> None:
    ended = play("shardwise", "data loading hangs", tmp_path, timeout_s=None, most_s=50)
    assert ended.seconds == float("inf")
    assert ended.words.count("rank 1 stands still. Ranks wait on.") == 1
    assert "threading.Event().wait()" in ended.words
    assert "SHARDWISE_HANG_TIMEOUT_S=20 would end all ranks in such a case." in ended.words


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["another collective", "breaks early"])
def test_ranks_end_by_themselves_if_none_can_go_on(fault: str, tmp_path: Path) -> None:
    ended = play("shardwise", fault, tmp_path, timeout_s=None)
    assert ended.statuses == [1, 1, 1]
    assert ended.seconds < 60 + MARGIN_S
    assert ended.words.count("None of them can go on: they end if that is so the next time they look.") == 1
    assert ended.words.count("they came to different collectives. All ranks end.") == 3
    assert NAMED[fault] in ended.words


@pytest.mark.slow
def test_a_task_of_one_rank_that_others_wait_for_is_no_hang(tmp_path: Path) -> None:
    ended = play("shardwise", "a task of one rank takes long", tmp_path)
    assert ended.statuses == [0, 0, 0]
    assert ended.words == "\n" * 2


@pytest.mark.slow
def test_ranks_of_a_torchrun_that_was_killed_end(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("wb") as stderr:
        torchrun = subprocess.Popen(torchrun_command(2, "runs on", tmp_path), env=ENVIRONMENT, stderr=stderr)
    wait_for((tmp_path / "begun").exists)
    ranks = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert len(ranks) == 2
    torchrun.kill()
    torchrun.wait()
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    assert "the launcher of this rank is gone, so the rank ends" in (tmp_path / "stderr").read_text()


@pytest.mark.slow
def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    ended = play("shardwise", "slow", tmp_path, timeout_s=20)
    assert ended.statuses == [0, 0, 0]
    assert re.search(r"rank 1 is slow: ranks 0, 2 waited in \d+% of the last 6 s", ended.words)


@pytest.mark.slow
def test_the_watchdog_can_be_turned_off(tmp_path: Path) -> None:
    ended = play("shardwise", "data loading hangs", tmp_path, timeout_s=0, most_s=35)
    assert ended.seconds == float("inf")
    assert "shardwise:" not in ended.words


@pytest.mark.slow
def test_a_run_without_a_fault_says_nothing(tmp_path: Path) -> None:
    ended = play("shardwise", "none", tmp_path)
    assert ended.statuses == [0, 0, 0]
    assert ended.words == "\n" * 2
