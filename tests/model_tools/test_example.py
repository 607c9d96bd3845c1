"""The example of a training script runs, and goes on where it stopped at another number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "train_with_torchrun.py"


def _run(ranks: int, directory: Path) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launch, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(SCRIPT)],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_trains_and_goes_on(tmp_path: Path) -> None:
    first = _run(2, tmp_path)
    assert first[0] == "from step 0"
    assert any(line.startswith("param_shards") for line in first)
    losses = [float(line.split()[3].rstrip(",")) for line in first if line.startswith("step ")]
    assert len(losses) == 6
    assert losses[-1] < 0.1 < losses[0]
    (tmp_path / "runs/torchrun-example/step-000060").rename(tmp_path / "elsewhere")
    again = _run(3, tmp_path)
    assert again[0] == "from step 40"
    assert [line.split(":")[0] for line in again if line.startswith("step ")] == ["step 50", "step 60"]
    assert any(line.startswith("optimizer") for line in again), "what was loaded is held"
