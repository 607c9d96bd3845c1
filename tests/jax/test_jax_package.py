"""The package imports no torch, and says what to install where JAX is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layers import MODULES

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib, sys

sys.modules["torch"] = None
for missing in ("flax", "jax", "optax"):
    before = dict(sys.modules)
    sys.modules[missing] = None
    try:
        import shardwise.jax
    except ModuleNotFoundError as error:
        print(error)
    del sys.modules[missing]
    for name in set(sys.modules) - set(before):
        if name.startswith(("flax", "shardwise")):
            del sys.modules[name]
for name in sys.argv[1:]:
    importlib.import_module(name)
print("all")
"""


def test_without_torch_and_without_a_library() -> None:
    """In one process, since each has to import JAX anew."""
    pytest.importorskip("flax")
    names = [name.removesuffix(".__init__") for name in MODULES if name.startswith("shardwise.jax.")]
    assert names
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *(
            f"shardwise.jax needs {missing}, which is not installed: pip install 'shardwise[jax]'"
            for missing in ("flax", "jax", "optax")
        ),
        "all",
    ]
