"""A step that runs out of memory."""

import json
from pathlib import Path

import pytest
import torch

from shardwise.cli.process import report
from shardwise.errors import OutOfMemory
from shardwise.plan.search.advice import Change
from shardwise.train import trainer
from shardwise.train.config.files import load
from shardwise.train.output import out_of_memory
from tests.train.rig import _folder, small_device

__all__ = ["_folder"]  # a fixture


def test_a_step_out_of_memory_shows_the_plan_what_is_held_and_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    small_device("small.toml", 2**40)
    forward = trainer.LossFunction.__call__

    def exhausted(self: trainer.LossFunction, model: torch.nn.Module, batch: object) -> object:
        if Path("runs/tiny/metrics.jsonl").exists() and calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated")
        calls.append(1)
        return forward(self, model, batch)  # type: ignore[arg-type]

    calls: list[int] = []
    monkeypatch.setattr(out_of_memory, "_LOOKS_FOR_S", 1e3)  # however busy this machine is
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
    ways = "train.activation_checkpointing=full, train.micro_batch=8 with train.global_batch=16, "
    assert lines[-1].startswith(f"To use less memory: {ways}parallel.strategy=full_shard, more ranks"), message
    [smaller] = [line for line in lines if line.startswith("The next smaller configuration")]
    keys = smaller.split(": ")[1]
    assert keys == "train.micro_batch=8 train.global_batch=16"
    monkeypatch.setattr(out_of_memory, "_LOOKS_FOR_S", -1.0)
    with pytest.raises(OutOfMemory, match=r"`shardwise plan --from runs/tiny/config\.toml` looks for a configuration"):
        trainer.run(load("tiny.toml", overrides))
    monkeypatch.setattr(trainer.LossFunction, "__call__", forward)
    ways_out = ["train.activation_checkpointing=full", "train.micro_batch=8", "parallel.strategy=full_shard"]
    trainer.run(load("tiny.toml", [*overrides, *ways_out, "log.name=again"]))
    ending = report.describe(caught.value, 3)
    assert (ending.kind, ending.line, ending.traceback) == ("failed", "", message)


@pytest.mark.parametrize(
    ("keys", "usable"),
    [
        ("train.micro_batch=1 train.global_batch=4", True),
        ("", False),
        ("parallel.ranks=8 torchrun --nnodes=2", False),
        ("offload.optimizer=nvme offload.path=...", False),
    ],
)
def test_only_changes_that_the_run_can_be_given_are_looked_at(keys: str, usable: bool) -> None:
    assert out_of_memory._is_a_setting(Change({}, "--flags", keys)) is usable


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
    assert "no plan for this run: the model's code depends on values of tensors" in str(caught.value)
    assert json.dumps(str(caught.value))
