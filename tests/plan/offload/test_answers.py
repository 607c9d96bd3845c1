"""Plans of offload: what is answered, and what becomes of a plan that was asked for."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.cli.app import run
from shardwise.errors import ConfigError
from shardwise.fsdp.strategy import Precision, Strategy
from shardwise.plan import planner
from shardwise.plan.dry_run.job import Job
from shardwise.plan.hardware.devices import find_device
from shardwise.plan.models.source import resolve
from shardwise.plan.report.rendering import table_text
from shardwise.plan.search.search import Effort, Question, explore
from shardwise.plan.search.space import search_space
from shardwise.policy.places import Places
from shardwise.train.build.from_plan import training_config
from shardwise.train.build.job import job_of

MIB = 2**20
WIDE = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 32000,
    "num_attention_heads": 4,
}  # fmt: skip
"""17 M parameters, nearly all in two tables."""
DEEP = {**WIDE, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 320}
"""25 M parameters, none larger than a ring's least buffer."""
ASKED = {"gpus_per_node": 1, "seq_len": 16, "micro_batch": [1, 2], "activation_checkpointing": ["none", "full"]}


def test_a_configuration_with_steps_in_backward() -> None:
    job = Job(gpu="cpu", gpus_per_node=1, optimizer_in_backward=True, activation_checkpointing="offload")
    config = training_config(resolve(WIDE), job, "x")
    assert (config.train.optimizer_in_backward, config.train.clip) == (True, 0)
    ranks: Any = SimpleNamespace(world_size=1, per_host=1)
    again = job_of(config.for_ranks(1), ranks, find_device("cpu"))
    assert (again.optimizer_in_backward, again.activation_checkpointing) == (True, "offload")


@pytest.mark.slow
def test_the_winner_with_offload_is_the_grids() -> None:
    """Where copies take most of a step, of a real model."""
    precision = Precision("bf16", "fp32", "fp32")
    given = {"gpus_per_node": 2, "seq_len": 1024, "offload": "cpu", "precision": precision, "strategy": "full_shard"}
    given |= {"micro_batch": [1, 2, 4, 8, 16, 32], "activation_checkpointing": ["none", "full"]}
    found, grid = (
        explore(Question(DEEP, given, budget_bytes=2000 * MIB, effort=e)) for e in (Effort.USUAL, Effort.THOROUGH)
    )
    assert found.best is not None
    assert grid.best is not None
    assert found.best.job == grid.best.job
    assert found.best.job.activation_checkpointing == "full"
    made = [sum(c.forecast is not None for c in one.candidates) for one in (found, grid)]
    assert made[0] <= made[1]


def test_a_plan_that_was_asked_for_says_where_everything_is() -> None:
    answer = planner.plan(Question(WIDE, {**ASKED, "offload": "cpu"}))
    assert answer.best is not None
    assert answer.best.job.strategy is Strategy.FULL_SHARD  # what was gathered does not stay
    shown = " ".join(table_text(answer.report).split())
    assert "offload params=cpu,optimizer=cpu" in shown
    assert "Besides its devices, every node needs 0.2 GiB of its host." in shown
    assert "host and device: " in shown
    assert answer.report.rows[0].limited_by == "host"
    config = training_config(resolve(WIDE), answer.best.job, "x")
    assert (config.offload.params, config.offload.optimizer, config.offload.path) == ("cpu", "cpu", None)


def test_a_configuration_says_what_is_on_disk() -> None:
    config = training_config(resolve(WIDE), Job(gpu="cpu", offload="optimizer=nvme"), "x")  # type: ignore[arg-type]
    assert (config.offload.params, config.offload.optimizer, config.offload.path) == (None, "nvme", "offload")


def test_a_configuration_says_that_gradients_are_on_the_host() -> None:
    config = training_config(resolve(WIDE), Job(gpu="cpu", offload="gradients=cpu"), "x")  # type: ignore[arg-type]
    assert (config.offload.gradients, config.offload.path) == ("cpu", None)
    ranks: Any = SimpleNamespace(world_size=1, per_host=1)
    assert job_of(config, ranks, find_device("cpu")).offload == Places(gradients="cpu")
    stepping = Job(gpu="cpu", offload="optimizer=cpu,gradients=cpu,step=cpu")  # type: ignore[arg-type]
    assert training_config(resolve(WIDE), stepping, "x").offload.step == "cpu"


def test_a_run_with_offload_is_planned_with_it() -> None:
    """By `strategy = "auto"`, and where memory runs out."""
    config = training_config(resolve(WIDE), Job(gpu="cpu", gpus_per_node=1, offload="optimizer=nvme"), "x")  # type: ignore[arg-type]
    ranks: Any = SimpleNamespace(world_size=1, per_host=1)
    assert job_of(config, ranks, find_device("cpu")).offload == Places(None, "nvme")
    ring = config.model_copy(update={"offload": config.offload.model_copy(update={"ring_mib": 3})})
    assert job_of(ring, ranks, find_device("cpu")).offload == Places(None, "nvme", 3 * 2**20)
    assert training_config(resolve(WIDE), job_of(ring, ranks, find_device("cpu")), "x").offload == ring.offload
    muon = config.model_copy(update={"train": config.train.model_copy(update={"optimizer": "muon"})})
    with pytest.raises(ConfigError, match="keeps the state of whole matrices with their owners"):
        job_of(muon, ranks, find_device("cpu"))
    in_memory = muon.model_copy(update={"offload": config.offload.model_copy(update={"optimizer": "cpu"})})
    assert job_of(in_memory, ranks, find_device("cpu")).optimizer == "muon"


def test_places_are_searched_like_anything_else() -> None:
    sweeps = search_space({**ASKED, "offload": ["none", "optimizer=cpu", "cpu"]}).sweeps
    assert [(f.base.offload and f.base.offload.words, f.base.strategy.value) for f in sweeps] == [
        (None, "no_shard"),
        ("optimizer=cpu", "no_shard"),
        ("params=cpu,optimizer=cpu", "full_shard"),
    ]


def test_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    asked = [str(tmp_path / "config.json"), "--gpus", "1", "--seq-len", "16", "--micro-batch", "2"]
    assert run(["plan", *asked, "--activation-checkpointing", "none", "--offload", "cpu", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["job"]["offload"] == {
        "params": "cpu",
        "optimizer": "cpu",
        "ring_bytes": None,
        "gradients": None,
        "step": None,
    }
    assert plain["exposed_offload_s"] > 0
