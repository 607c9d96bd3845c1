"""`parallel.strategy = "auto"`, and what a step says that runs out of memory."""

import contextlib
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.cli import report
from shardwise.errors import OutOfMemory, PlanError
from shardwise.plan.hardware.devices import Figure, find_device, write_device
from shardwise.train import trainer
from shardwise.train.config import auto
from shardwise.train.config.models import TextShape
from shardwise.train.config.schema import load
from shardwise.train.ranks import Ranks
from tests.ranks import RankPools

TINY = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2

[data]
source = "texts/*.txt"
seq_len = 32
eval_fraction = 0.0

[train]
steps = 2
micro_batch = 4
global_batch = 8

[parallel]
strategy = "auto"
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(8):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"the {i} quick brown foxes jump over {i} lazy dogs. " * 3)
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)


def run_here(folder: str, overrides: tuple[str, ...]) -> str:
    """What a rank prints while it runs in a folder, or its error."""
    printed = io.StringIO()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            trainer.run(load("tiny.toml", overrides))
    except PlanError as error:
        return f"PlanError: {error}"
    finally:
        os.chdir(before)
    return printed.getvalue()


def small_device(path: str, usable_bytes: float) -> str:
    """A hardware file of a CPU with so much memory."""
    little = Figure(usable_bytes, "made for a test")
    write_device(replace(find_device("cpu"), usable_bytes=little, memory_bytes=little), Path(path))
    return path


def test_ranks_train_what_the_first_one_planned(ranks: RankPools) -> None:
    printed, other = ranks(2).run(run_here, str(Path.cwd()), (), timeout_s=120)
    assert other == ""
    assert re.search(r"planned: \w+, micro-batch 4, recompute none; [\d.,]+ GiB of a device's", printed)
    resolved = load("runs/tiny/config.toml")
    assert resolved.parallel.strategy in {"no_shard", "shard_optimizer", "shard_grad_op", "full_shard"}
    assert f"planned: {resolved.parallel.strategy}," in printed
    table = printed[printed.index("rank 0, planned and measured") :]
    row = re.search(r"param_shards\D+([\d.]+ \w+)\D+?([\d.]+ \w+)", table)
    assert row is not None
    assert row[1] == row[2], "shards are forecast to the byte"
    assert re.search(r"step: [\d.]+ s planned, [\d.]+ s measured \(median, [+-]\d+%\)", table)


def test_a_group_to_reshard_to_leaves_out_strategies_that_have_none() -> None:
    config = load("tiny.toml", ["parallel.reshard_after_forward=2"]).for_ranks(2)
    text, two = TextShape(vocab_size=257, end_id=256, seq_len=32), Ranks(0, 2, torch.device("cpu"))
    assert auto._best(config, text, two, find_device("cpu")).job.shard_ranks == 2


def test_memory_decides_and_too_little_is_said_on_every_rank(ranks: RankPools) -> None:
    folder = str(Path.cwd())
    roomy = small_device("roomy.toml", 2**33)
    none = small_device("none.toml", 2**17)
    chosen = ranks(2).run(run_here, folder, (f"parallel.hardware={roomy}", "log.name=roomy"), timeout_s=120)
    assert "planned: " in chosen[0]
    assert "planned and measured" in chosen[0]
    failures = ranks(2).run(run_here, folder, (f"parallel.hardware={none}", "log.name=none"), timeout_s=120)
    for failure in failures:
        assert failure.startswith('PlanError: parallel.strategy="auto": nothing fits 2 x none.toml: the nearest, ')
        assert "micro-batch" in failure
    assert not Path("runs/none").exists()


def test_a_step_out_of_memory_shows_the_plan_what_is_held_and_two_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    small_device("small.toml", 2**40)
    forward = trainer.LossFunction.__call__

    def exhausted(self: trainer.LossFunction, model: torch.nn.Module, batch: object) -> object:
        if Path("runs/tiny/metrics.jsonl").exists() and calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated")
        calls.append(1)
        return forward(self, model, batch)  # type: ignore[arg-type]

    calls: list[int] = []
    monkeypatch.setattr(trainer.LossFunction, "__call__", exhausted)
    overrides = ["parallel.strategy=no_shard", "parallel.hardware=small.toml"]
    overrides += ["train.micro_batch=16", "train.global_batch=16"]
    with pytest.raises(OutOfMemory) as caught:
        trainer.run(load("tiny.toml", overrides))
    message = str(caught.value)
    lines = message.splitlines()
    assert lines[0] == "step 2 ran out of memory on rank 0: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert lines[1].split() == ["GiB", "planned", "held", "now"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:] if line.startswith("  ")}
    assert rows["param_shards"][0] == rows["param_shards"][1]
    assert rows["optimizer"][0] == rows["optimizer"][1]
    assert rows["activations"][1] == "-", "nobody counts them on a CPU"
    assert "usable; the plan's peak is in" in message
    assert "The cheapest ways out, by forecast:" in lines, message
    ways = lines[lines.index("The cheapest ways out, by forecast:") + 1 :]
    assert len(ways) == 2
    for way in ways:
        assert re.match(r"  (train\.activation_checkpointing|train\.micro_batch)=\S+  \([\d.]+ GiB, .*slower\)", way)
    again = [way.split()[0] for way in ways]
    monkeypatch.setattr(trainer.LossFunction, "__call__", forward)
    trainer.run(load("tiny.toml", [*overrides, again[0], "log.name=again"]))  # a way out is an override that runs
    ending = report.describe(caught.value, 3)
    assert (ending.kind, ending.line, ending.traceback) == ("failed", "", message)


def test_a_model_that_cannot_be_planned_still_says_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("odd.py").write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(320, 320)\n"
        "    def forward(self, input_ids):\n"
        "        if input_ids.sum() >= 0:\n"
        "            raise torch.OutOfMemoryError('out of memory')\n"
    )
    with pytest.raises(OutOfMemory) as caught:
        trainer.run(load("tiny.toml", ["model.config=none", "model.factory=odd:Odd", "parallel.strategy=full_shard"]))
    assert "param_shards" in str(caught.value)
    assert "no plan for this run: the model's code decides by its tensors' values" in str(caught.value)
    assert json.dumps(str(caught.value))
