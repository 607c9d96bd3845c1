"""Steps 5, 7 and 8 of docs/tutorial.md, on step 4's checkpoint: the model answers, and so does its exported graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.rig import assert_runs_as_shown
from tools.run_examples import furnish, write_files_of_the_tutorial

pytest.importorskip("onnxruntime")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the steps run, one after another: each test needs those before it."""
    place = tmp_path_factory.mktemp("tutorial")
    furnish(place)
    write_files_of_the_tutorial(place)
    return place


def test_the_model_of_step_4_is_saved(room: Path) -> None:
    assert_runs_as_shown(room, "4. Resume elsewhere")
    assert (room / "runs/tutorial/step-000060/model.safetensors").exists()


def test_it_learns_to_answer(room: Path) -> None:
    assert assert_runs_as_shown(room, "5. Fine-tune")[-1] == "Nairobi."


def test_the_exported_model_answers(room: Path) -> None:
    assert assert_runs_as_shown(room, "7. Export")[-1] == "Oslo."


def test_an_adapter_learns_to_answer_what_no_row_asks_and_so_does_its_graph(room: Path) -> None:
    pytest.importorskip("peft")
    lines = assert_runs_as_shown(room, "8. Your own rows", guessed="shardwise generate runs/capitals ")
    assert lines.count("Tokyo.") == 2  # of the adapter, and of the graph; the model without it said something else
    assert lines[-1] == "Tokyo."
    assert "Please name the capital of Japan" not in (room / "asked.jsonl").read_text(encoding="utf-8")
