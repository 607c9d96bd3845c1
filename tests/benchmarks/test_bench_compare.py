"""What peers do: how a cell's answer follows from how its ranks ended, and two cells as they are run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import program
from benchmarks.compare.compare import CELLS, Ended, after_a_fault, last_error, verdict
from benchmarks.compare.peers import PEERS
from benchmarks.compare.trials import TRIALS

DONE = (True, "29 of 29 tensors equal")


def test_every_cell_has_a_trial_and_an_engine() -> None:
    assert CELLS.keys() - {"killed_save"} == TRIALS.keys() - {"save", "resume"}
    assert {peer for peers in CELLS.values() for peer in peers} == PEERS.keys()
    assert all(trial.__doc__ for trial in TRIALS.values())


@pytest.mark.parametrize(
    ("ended", "right", "words"),
    [
        (Ended([DONE, DONE], ["", ""], [], 0.0), True, "29 of 29 tensors equal"),
        (Ended([DONE, (False, "")], ["", ""], [], 0.0), False, "29 of 29 tensors equal"),
        (Ended([DONE, None], ["", "ValueError: no"], [], 0.0), False, "ValueError: no"),
        (Ended([None, None], ["nothing", "nothing"], [0, 1], 0.0), False, "rank 0 had not ended after 240 s"),
    ],
)
def test_a_cell_is_right_if_it_is_so_on_every_rank(ended: Ended, right: bool, words: str) -> None:
    assert verdict(ended) == (right, words)


def test_after_a_fault_ranks_end_wait_or_notice_nothing() -> None:
    assert after_a_fault(Ended([None, None], ["RuntimeError: closed", ""], [], 1.04)) == (
        True,
        "all ended after 1.0 s; rank 0: RuntimeError: closed",
    )
    assert after_a_fault(Ended([None, None], ["", ""], [0], 30.0)) == (False, "rank 0 still waited after 30 s")
    assert not after_a_fault(Ended([DONE, DONE], ["", ""], [], 0.0))[0]


def test_the_last_error_is_told_without_the_rank() -> None:
    said = "[rank0]: Traceback\n[rank0]: torch.OutOfMemoryError: too much\n[rank0]:   frame\n\n"
    assert last_error(said) == "torch.OutOfMemoryError: too much"
    assert last_error("warning\n") == "warning"
    assert last_error("") == "nothing"


@pytest.mark.slow
def test_weights_of_two_engines_beside_an_unsharded_model(tmp_path: Path) -> None:
    ask = ["--only", "weights", "--peers", "shardwise", "fsdp2", "--out", str(tmp_path / "compare")]
    done = subprocess.run([sys.executable, *program("compare"), *ask], capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.glob("*.json")
    rows = {row["peer"]: (row["right"], row["seen"]) for row in json.loads(path.read_text())["rows"]}
    assert rows == dict.fromkeys(("shardwise", "fsdp2"), (True, "29 of 29 tensors equal to the bit after 5 steps"))
