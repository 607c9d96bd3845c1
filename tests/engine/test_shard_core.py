"""The core of `sw.shard` alone: a package of nothing but the files that it imports trains as torch's DDP."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.closure import SOURCE, closure

CORE = SOURCE / "shardwise" / "fsdp" / "shard.py"
WORLD_SIZE = 2
BELOW = {"shardwise.accelerators", "shardwise.errors", "shardwise.registry"}
"""All that the engine imports of shardwise besides itself."""

TRAIN = """
    import sys, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 13), nn.Linear(13, 6)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 6), nn.Linear(6, 50, bias=False)
            self.head.weight = self.embed.weight
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.blocks[1].requires_grad_(False)

        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def losses(engine):
        torch.manual_seed(0)
        model = engine(Net())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        found = []
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            tokens = torch.randint(50, (3, 5))
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    from shardwise.fsdp.shard import Precision, Strategy, shard

    def sharded(strategy, precision=None):
        def engine(model):
            shard(model, strategy, precision=precision)
            return model
        return engine

    expected = losses(DistributedDataParallel)
    for strategy in (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD):
        assert losses(sharded(strategy)) == expected, strategy
    low = losses(sharded(Strategy.FULL_SHARD, Precision(param="bf16", reduce="fp32")))
    assert low != expected
    torch.testing.assert_close(low, expected, rtol=0.05, atol=0)
    import shardwise
    print(shardwise.__file__)
    print(*sorted(name for name in sys.modules if name.startswith("shardwise.")))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package `shardwise` of the core's files alone, to which nothing is attached."""
    folder = tmp_path_factory.mktemp("core")
    for path in closure([CORE]):
        copy = folder / path.relative_to(SOURCE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (folder / "shardwise" / "__init__.py").write_text("")
    return folder


def test_the_core_alone_trains(package: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n".join(line.removeprefix("    ") for line in TRAIN.splitlines()))
    environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD_SIZE), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        outputs = [rank.communicate(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * WORLD_SIZE, "\n".join(errors for _, errors in outputs)
    where, names = outputs[0][0].splitlines()
    assert Path(where).parent.parent == package
    loaded = set(names.split())
    print(*sorted(loaded), sep="\n")
    assert "shardwise.fsdp.shard" in loaded
    assert {name for name in loaded if not f"{name}.".startswith("shardwise.fsdp.")} == BELOW
