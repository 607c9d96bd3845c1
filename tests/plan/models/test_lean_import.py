"""transformers in a process that only plans: what is put off, and that it comes when it is called."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardwise.plan.models.lean_import import import_transformers

LEAN = """
import gc, sys
from pathlib import Path
from shardwise.plan.models import lean_import
lean_import.own_process()
lean_import.import_transformers()
assert gc.isenabled() and not gc.get_freeze_count()

import transformers
from transformers import utils
from transformers.loss import loss_for_object_detection as losses
from transformers.utils import import_utils
"""


def run(program: str) -> None:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_models_are_found_as_transformers_finds_them() -> None:
    run(
        LEAN
        + """
models = sys.modules["transformers.models"]
scan = import_utils.define_import_structure
above = scan(Path(models.__file__).parent, prefix="models")
assert lean_import._without_prefix(above) == scan(models.__file__)
assert transformers.models.llama.LlamaConfig is transformers.LlamaConfig
assert import_utils.define_import_structure.__module__ == "transformers.utils.import_utils"
"""
    )


def test_scipy_comes_when_a_loss_calls_it() -> None:
    pytest.importorskip("scipy")
    run(
        LEAN
        + """
assert "scipy" not in sys.modules
assert losses.is_scipy_available is utils.is_scipy_available is import_utils.is_scipy_available
assert utils.is_scipy_available()
rows, columns = losses.linear_sum_assignment([[1.0, 0.0], [0.0, 1.0]])
assert columns.tolist() == [1, 0] and "scipy.optimize" in sys.modules
"""
    )


def test_any_other_process_imports_transformers_as_it_is() -> None:
    run(
        """
import sys
from shardwise.plan.models.lean_import import import_transformers
import_transformers()
assert "transformers" not in sys.modules
"""
    )
    before = set(sys.modules)
    import_transformers()
    assert set(sys.modules) == before
