"""The wheel and the sdist: the same bytes from the same tree, and a wheel that works without the tree."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import shardwise

ROOT = Path(__file__).parents[2]
EPOCH = "1700000000"
# Lines are written whole: under torchrun, `print` writes the end of a line for itself, and ranks come in between.
TWO_RANKS = """
import sys, torch, torch.distributed as dist, shardwise as sw
dist.init_process_group("gloo")
torch.manual_seed(0)
model = sw.shard(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)), "full_shard")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for _ in range(3):
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[0] > losses[2], losses
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {sw.__file__}\\n")
dist.destroy_process_group()
"""


def built(tree: Path, out: Path) -> dict[str, Path]:
    """Build both from a tree, without any network; return them by suffix."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(out)]
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)
    return {path.suffix: path for path in out.iterdir()}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return built(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def sources(packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree that the sdist unpacks to."""
    place = tmp_path_factory.mktemp("sources")
    with tarfile.open(packages[".gz"]) as archive:
        archive.extractall(place, filter="data")
    [tree] = place.iterdir()
    return tree


def test_two_builds_are_equal_to_the_byte(packages: dict[str, Path], sources: Path, tmp_path: Path) -> None:
    """From the tree of git's, and from that of the sdist, which has another place and other times."""
    again = built(sources, tmp_path)
    assert packages.keys() == again.keys() == {".whl", ".gz"}
    for suffix, path in packages.items():
        assert path.name == again[suffix].name
        assert _digest(path) == _digest(again[suffix]), path.name


def test_the_wheel_has_all_that_the_package_reads(packages: dict[str, Path]) -> None:
    assert f"-{shardwise.__version__}-" in packages[".whl"].name
    package = Path(shardwise.__file__).parent
    files = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    files = {file for file in files if "__pycache__" not in file}
    with zipfile.ZipFile(packages[".whl"]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == files
    assert {"shardwise/py.typed", "shardwise/recipes/quickstart.toml"} <= names


def test_the_sdist_has_what_its_tests_need(sources: Path) -> None:
    there = {path.name for path in sources.iterdir()}
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert {*named["include"], "README.md", "LICENSE", "pyproject.toml"} <= there


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_alone_in_an_empty_environment(packages: dict[str, Path], tmp_path: Path) -> None:
    """Its dependencies are links to those of this environment, in which shardwise is left out."""
    place = tmp_path / "environment"
    venv.create(place, with_pip=False, symlinks=True)
    [site] = place.glob("lib/python*/site-packages")
    others = Path(sysconfig.get_path("purelib"))
    for found in others.iterdir():  # an editable install of shardwise is left out
        if not found.name.startswith(("_shardwise", "shardwise", "__editable__")):
            (site / found.name).symlink_to(found)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", "--no-deps", "--no-index"]
    ours = ("PYTHON", "RANK", "WORLD_", "MASTER_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    clean |= {"PATH": str(place / "bin"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # no git
    subprocess.run([*pip, str(packages[".whl"])], env=clean, check=True, capture_output=True)
    room = tmp_path / "room"
    room.mkdir()

    def run(*words: str) -> str:
        ended = subprocess.run(words, cwd=room, env=clean, capture_output=True, text=True, timeout=240, check=False)
        assert ended.returncode == 0, f"{words}\n{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"
        return ended.stdout

    python = str(place / "bin" / "python")
    where = run(python, "-c", "import shardwise; print(shardwise.__version__, shardwise.__file__)")
    assert where.split() == [shardwise.__version__, str(site / "shardwise" / "__init__.py")]
    (room / "two.py").write_text(TWO_RANKS)
    said = run(python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "two.py")
    assert sorted(line.split(":")[0] for line in said.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2",
        "rank 1 of 2",
    ]
    assert str(site) in said
    assert run(str(place / "bin" / "shardwise"), "--version") == f"shardwise {shardwise.__version__}\n"
    planned = run(python, "-m", "shardwise", "plan", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100-sxm-80gb")
    assert "full_shard" in planned
    assert "1536 x 192" in run(python, "-m", "shardwise", "inspect", "quickstart")  # its tokenizer says how many ids
    assert not shutil.which("git", path=clean["PATH"])


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
