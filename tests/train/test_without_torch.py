"""Configuration, data and the run's directory need no torch, so that mistakes in them are found within a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.layers import MODULES

ROOT = Path(__file__).parents[2]
ROOMS = ("shardwise.train.config.", "shardwise.train.data.", "shardwise.train.run.", "shardwise.train.report.")
PROGRAM = """
import importlib, sys
from pathlib import Path

sys.modules["torch"] = None  # an import of it raises
for name in sys.argv[2:]:
    importlib.import_module(name)

from shardwise.train.config.files import load
from shardwise.train.data.batches import Batches, Share, load_datasets
from shardwise.train.run.preflight import check

Path("text.txt").write_text("to be or not to be, " * 200)
overrides = ["data.source=text.txt", "data.seq_len=32", "data.tokenizer=bytes", "train.micro_batch=2"]
config = check(load(sys.argv[1], overrides), 0)
data = load_datasets(config.data)
share = Share(1, config.parallel.ranks, config.train.micro_batch)
(batch,) = Batches(data.train, share, config.train.global_batch, config.data.seed).batch(0)
assert batch.inputs["input_ids"].shape == batch.labels.shape == (2, 32), batch
assert data.tokenizer.decode(batch.inputs["input_ids"][0].tolist()) in "to be or not to be, " * 4
assert batch.targets == 2 * 31
print("done")
"""


def test_rooms_without_torch(tmp_path: Path) -> None:
    names = [name for name in MODULES if name.startswith(ROOMS) and not name.endswith("__init__")]
    assert len(names) >= 15
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT / "src" / "shardwise" / "recipes" / "quickstart.toml"), *names],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
