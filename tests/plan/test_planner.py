"""Questions and answers on real dry runs of small models."""

import json
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.errors import ConfigError, PlanError
from shardwise.plan import planner
from shardwise.plan.report.lanes import lanes
from shardwise.plan.report.rendering import WIDTH, table_text
from shardwise.plan.report.report import amount
from shardwise.plan.search.exploration import nothing_fits
from shardwise.plan.search.processes import Forecasters
from shardwise.plan.search.search import Effort, Question, explore, space_of
from tests.plan.doubles import GIB, formula
from tests.plan.rig import LLAMA

ARGUMENTS = {"gpus_per_node": 2, "seq_len": 64, "micro_batch": [2, 4, 8]}


def test_a_search_gives_forecasts_best_first() -> None:
    found = sw.plan.search(LLAMA, **ARGUMENTS, activation_checkpointing="none")
    speeds = [forecast.tokens_per_s_per_gpu for forecast in found]
    assert speeds == sorted(speeds, reverse=True)
    assert {forecast.job.strategy.value for forecast in found} >= {"full_shard", "no_shard", "shard_grad_op"}
    best = found[0]
    assert best.fits
    again = sw.plan.forecast(LLAMA, **{**ARGUMENTS, "micro_batch": best.job.micro_batch, "strategy": best.job.strategy})
    assert again.to_dict() == best.to_dict()
    assert best.timeline.step_time_s == best.step_time_s
    with pytest.raises(PlanError, match="keeps only the events of its best configuration"):
        found[1].trace("x.json")


@pytest.mark.slow
def test_processes_find_what_one_finds(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    arguments = {**ARGUMENTS, "strategy": ["full_shard", "no_shard"], "activation_checkpointing": ["none", "full"]}

    def verdicts(workers: int) -> list[tuple[Any, ...]]:
        told: list[tuple[int, int]] = []
        question = Question(str(path), arguments, workers=workers)
        found = explore(question, lambda done, total, candidate: told.append((done, total))).candidates
        assert sorted(told) == [(done, len(found)) for done in range(1, len(found) + 1)]
        return [(c.job, c.outcome, c.limited_by, c.forecast and c.forecast.to_dict()) for c in found]

    assert verdicts(2) == verdicts(1)


def test_an_error_in_a_process_is_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "choosy.py").write_text(
        "import torch\n"
        "class Choosy(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 4)\n"
        "    def forward(self, input_ids):\n"
        "        return super().forward(input_ids.float()[..., :4]) if input_ids.sum() > 3 else None\n"
    )
    for workers in (1, 2):
        with pytest.raises(PlanError, match="depends on values of tensors"):
            explore(Question("choosy:Choosy", ARGUMENTS, workers=workers))


@pytest.mark.slow
def test_a_budget_and_the_two_questions() -> None:
    whole = sw.plan.forecast(LLAMA, gpus_per_node=2, seq_len=64, micro_batch=4)
    needs = whole.reserved_memory_bytes + whole.context_bytes + whole.nccl_bytes
    arguments = {**ARGUMENTS, "strategy": "full_shard", "activation_checkpointing": "none"}
    question = Question(LLAMA, arguments, budget_bytes=needs, largest_batch=True, smallest_cluster=True)
    answer = planner.plan(question)
    assert answer.best is not None
    assert answer.best.job.micro_batch >= 4
    largest = answer.extra["largest_micro_batch"]
    assert largest >= 4
    too_many = sw.plan.forecast(LLAMA, gpus_per_node=2, seq_len=64, micro_batch=largest + 1)
    assert too_many.reserved_memory_bytes + too_many.context_bytes + too_many.nccl_bytes > needs
    assert answer.extra["smallest_cluster"] in (1, 2)
    assert f"{largest}." in table_text(answer.report)
    with pytest.raises(
        PlanError,
        match=r"nothing fits 2 x h100-sxm-80gb; the nearest configuration, full_shard .* needs 1\.\d of 0\.5 GiB",
    ):
        planner.plan(Question(LLAMA, arguments, budget_bytes=2**29)).check_fits()


def test_where_nothing_fits_the_leanest_is_what_one_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forecasters, "run", lambda self, tasks: [task(formula) for task in tasks])
    question = Question(LLAMA, {"gpus_per_node": 1, "seq_len": 2048}, budget_bytes=90 * GIB)
    with pytest.raises(
        PlanError, match=r"the nearest configuration, no_shard with micro-batch 1, all blocks recomputed, needs 1"
    ):
        raise nothing_fits(explore(question))


def test_a_quick_search_counts_what_it_looks_at() -> None:
    quick, usual = (space_of(Question(LLAMA, ARGUMENTS, effort=effort)) for effort in (Effort.QUICK, Effort.USUAL))
    assert {sweep.base.strategy.value for sweep in quick.sweeps} == {"full_shard"}
    assert quick.size < usual.size


def unwrapped(shown: str) -> str:
    return " ".join(shown.split())


def test_what_an_answer_shows() -> None:
    arguments = {**ARGUMENTS, "nodes": 2, "micro_batch": 2, "strategy": ["full_shard", "no_shard"]}
    arguments |= {"activation_checkpointing": "none", "price_per_hour": 2.0}
    answer = planner.plan(Question(LLAMA, arguments))
    shown = table_text(answer.report)
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "a llama configuration: " in shown
    plain = json.loads(json.dumps(answer.to_dict()))
    cost = plain["cost"]
    assert f"At 2 per GPU and hour, a step costs {amount(cost['per_step'])}, a million tokens" in unwrapped(shown)
    assert f"a day of all 4 GPUs {amount(2 * 4 * 24)}." in unwrapped(shown)
    assert plain["peak_memory_bytes"] == sum(plain["memory"].values())
    assert len(plain["search"]["candidates"]) == len(answer.report.exploration.candidates)
    best = plain["search"]["candidates"][0]
    assert (best["verdict"], best["step_time_s"]) == ("fits", plain["step_time_s"])
    low, high = best["tokens_per_s_range"]
    assert best["tokens_per_s_range"] == plain["tokens_per_s_range"]
    assert low < plain["tokens_per_s_per_gpu"] < high
    assumed = {one.what: one.value for one in answer.report.assumptions}
    assert {"usable memory", "context", "NCCL", "MFU", "large products", "fused attention"} <= set(assumed)
    assert "(assumed: " in assumed["context"]
    assert "https://" in assumed["NCCL"]
    assert any(name.startswith("between nodes") for name in assumed)
    assert lanes(answer.best_whole().timeline)["compute"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"gpu": "h100-sxm-80"}, "unknown device 'h100-sxm-80'; did you mean h100-sxm-80gb"),
        ({"gpsu_per_node": 2}, "unknown argument 'gpsu_per_node'; .*did you mean gpus_per_node"),
        ({"global_batch": 3, "gpus_per_node": 2}, "a global batch of 3 is not a multiple of 2 ranks; use 2 or 4"),
        ({"objective": "speed"}, "objective='speed'"),
        ({"strategy": "full_shrad"}, "did you mean 'full_shard'"),
    ],
)
def test_mistakes_are_told_before_anything_is_run(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises((PlanError, ConfigError), match=line):
        sw.plan.search(lambda: pytest.fail("built"), **arguments)
