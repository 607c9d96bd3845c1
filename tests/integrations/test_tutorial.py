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


@pytest.mark.slow
def test_the_walk_ends_with_the_answer_of_the_exported_model(tmp_path: Path) -> None:
    furnish(tmp_path)
    write_files_of_the_tutorial(tmp_path)
    assert_runs_as_shown(tmp_path, "4. Resume elsewhere")
    assert assert_runs_as_shown(tmp_path, "5. Fine-tune")[-1] == "Nairobi."
    assert assert_runs_as_shown(tmp_path, "7. Export")[-1].startswith("verified")
    script = blocks("docs/tutorial.md", "python")[-1].text
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "Oslo.", done.stderr
