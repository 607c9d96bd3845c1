"""Engines side by side: one row for each, its best."""

from typing import Any

import pytest

from shardwise.errors import PlanError
from shardwise.plan import planner
from shardwise.plan.report.rendering import page_html, table_text
from shardwise.plan.search.search import COMPARED, Question
from tests.plan.rig import LLAMA

ARGUMENTS: dict[str, Any] = {"gpus_per_node": 2, "seq_len": 64, "micro_batch": [2, 4]}


def test_one_row_for_each_engine() -> None:
    arguments = {**ARGUMENTS, "activation_checkpointing": "none"}
    answer = planner.plan(Question(LLAMA, arguments, compare=tuple(COMPARED)))
    names = ["ddp", "fsdp2 full_shard", "full_shard"]
    assert sorted(bar.label.split(",")[0] for bar in answer.report.bars) == sorted(names)
    assert len(answer.report.rows) == len(names)
    assert answer.report.rows[0].forecast == answer.best
    by_engine = {row.job.engine: row.forecast for row in answer.report.rows if row.job.strategy.sharded}
    alone = planner.plan(Question(LLAMA, {**arguments, "engine": "fsdp2", "strategy": "full_shard"})).best
    assert by_engine["fsdp2"] == alone
    shown = table_text(answer.report)
    assert all(f"\n{name} " in shown for name in names)
    assert "as fsdp2 would run it" not in shown
    page = page_html(answer.report)
    assert "for each engine" in page
    assert page.count('<div class="bar">') == len(names)


@pytest.mark.parametrize(
    ("compare", "more", "line"),
    [
        (("fsdp3",), {}, "cannot compare 'fsdp3': must be one of ddp, .*did you mean fsdp"),
        (("deepspeed",), {}, "cannot compare 'deepspeed': must be one of ddp, .*; models of fsdp1 .* benchmarks/plans"),
        (("ddp",), {"strategy": "full_shard"}, "strategy cannot be given with a comparison, which chooses it"),
        (("ddp",), {"engine": "fsdp2"}, "engine cannot be given with a comparison, which chooses it"),
    ],
)
def test_mistakes(compare: tuple[str, ...], more: dict[str, Any], line: str) -> None:
    with pytest.raises(PlanError, match=line):
        planner.plan(Question(LLAMA, {**ARGUMENTS, **more}, compare=compare))
