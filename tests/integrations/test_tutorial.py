"""Steps 5 and 7 of docs/tutorial.md, on the checkpoint of step 4: the model answers, and so does its exported graph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import blocks
from tests.examples.rig import assert_runs_as_shown
from tools.run_examples import environment, furnish, write_files_of_the_tutorial

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
    assert assert_runs_as_shown(room, "7. Export")[-1].startswith("verified")
    script = blocks("docs/tutorial.md", "python")[-1].text
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=room, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "Oslo.", done.stderr
