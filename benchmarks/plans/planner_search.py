"""Whether the default search of `shardwise plan` finds what the whole grid holds, and how few forecasts it makes.

    python benchmarks planner_search                   # every case: some twenty minutes of one core
    python benchmarks planner_search --cases gpt2-512,deep
    python benchmarks planner_search --out planner-search   # and write results/DATE-planner-search.{json,md}

Each case asks one question twice: the whole grid (`--thorough`), then the default search. PASS: both name a winner of
the same speed. MISSED, and status 1: the default search names a slower one. Small models, because a grid is a hundred
forecasts: there the fixed part of a step weighs most, which is what a bound on larger batches can get wrong.
"""

import argparse
import os
import tempfile
from dataclasses import dataclass, field
from math import inf
from typing import Any

from benchmarks.common import facts, report
from benchmarks.common.target import Target
from shardwise import Precision
from shardwise.plan.report.report import full_name
from shardwise.plan.search.exploration import Exploration
from shardwise.plan.search.search import Effort, Question, explore
from shardwise.plan.simulate.forecast import Forecast

GIB = 2**30
BF16 = Precision("bf16", "fp32", "fp32")


def llama(width: int, layers: int, vocabulary: int = 4096) -> dict[str, Any]:
    """A configuration of a small llama, heads of 64."""
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
    }


@dataclass(frozen=True)
class Case:
    """A question; what it leaves out is searched."""

    model: Any
    arguments: dict[str, Any] = field(default_factory=dict)
    global_batch: int | None = None
    budget_gib: float | None = None

    def answer(self, effort: Effort) -> Exploration:
        """What a search with an effort finds."""
        budget = None if self.budget_gib is None else int(self.budget_gib * GIB)
        return explore(Question(self.model, self.arguments, self.global_batch, budget, effort=effort))


TWO = {"strategy": ["full_shard", "no_shard"], "activation_checkpointing": ["none"]}
CASES = {
    "gpt2-512": Case("gpt2", {"seq_len": 512, "precision": BF16, **TWO}),
    "gpt2-128": Case("gpt2", {"seq_len": 128, **TWO}),
    "gpt2-1024": Case("gpt2", {"seq_len": 1024, "precision": BF16, "strategy": ["full_shard", "shard_grad_op"]}),
    "budget": Case(llama(768, 3), {"seq_len": 1024, "gpus_per_node": 4}, budget_gib=5),
    "short": Case(llama(512, 3), {"seq_len": 128, "precision": BF16}),
    "usual": Case(llama(1024, 4, 32000), {"precision": BF16}),
    "long": Case(llama(1024, 3), {"seq_len": 8192, "precision": BF16}),
    "deep": Case(llama(512, 16), {"seq_len": 2048, "precision": BF16}, budget_gib=12),
    "one-gpu": Case(llama(1024, 4), {"seq_len": 1024, "gpus_per_node": 1, "precision": BF16}, budget_gib=8),
    "two-gpus": Case(llama(256, 4), {"seq_len": 256, "gpus_per_node": 2}, budget_gib=2.2),
    "nodes": Case(llama(1024, 4), {"seq_len": 2048, "nodes": 4, "precision": BF16}, budget_gib=10),
    "slow-network": Case(llama(1024, 3), {"seq_len": 1024, "nodes": 8, "interconnect": "100gbps"}, budget_gib=12),
    "global-batch": Case(llama(768, 4), {"seq_len": 1024, "precision": BF16}, global_batch=256, budget_gib=8),
    "odd-batch": Case(llama(768, 3), {"seq_len": 512, "gpus_per_node": 4}, global_batch=144, budget_gib=6),
    "a100": Case(llama(1024, 4), {"seq_len": 1024, "gpu": "a100-sxm-40gb", "precision": BF16}),
    "sgd-fused": Case(llama(512, 4, 32000), {"seq_len": 1024, "optimizer": "sgd", "loss": "fused"}, budget_gib=10),
    "hybrid": Case(
        llama(768, 4),
        {"seq_len": 1024, "gpus_per_node": 4, "strategy": ["hybrid_shard", "no_shard"], "precision": BF16},
        budget_gib=3,
    ),
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", default=",".join(CASES), help="comma-separated (%(default)s)")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    return p


def compared(name: str) -> tuple[dict[str, Any], Target]:
    """One case: both winners, and the time of a token under the one over that under the other."""
    grid, found = (CASES[name].answer(effort) for effort in (Effort.THOROUGH, Effort.USUAL))
    made = {"search": _forecasts(found), "grid": _forecasts(grid), "configurations": len(grid.candidates)}
    words = f"{_named(found.best)}; {made['search']} forecasts, {made['grid']} of the grid of {made['configurations']}"
    slower = _token_s(found.best) / _token_s(grid.best) if found.best != grid.best else 1.0
    target = Target(name, slower, 1.0, words if slower <= 1 else f"{words}; the grid's: {_named(grid.best)}")
    return {"winner": _named(found.best), "grid": _named(grid.best), "forecasts": made}, target


def _token_s(best: Forecast | None) -> float:
    return inf if best is None else 1 / best.tokens_per_s_per_gpu


def _forecasts(exploration: Exploration) -> int:
    return sum(candidate.forecast is not None for candidate in exploration.candidates)


def _named(best: Forecast | None) -> str:
    return "nothing fits" if best is None else f"{full_name(best.job)}, {best.tokens_per_s_per_gpu:,.0f} tokens/s"


def main() -> int:
    args = parser().parse_args()
    asked = args.cases.split(",")
    if unknown := [name for name in asked if name not in CASES]:
        raise SystemExit(f"unknown case {unknown[0]!r}; known are {', '.join(CASES)}")
    results: dict[str, dict[str, Any]] = {}
    targets: list[Target] = []
    print("seconds of a token, over those of the whole grid's winner")
    with tempfile.TemporaryDirectory(prefix="shardwise-plan-") as kept:
        os.environ["SHARDWISE_PLAN_CACHE"] = kept  # the second search takes the first one's forecasts
        for name in asked:
            results[name], target = compared(name)
            targets.append(target)
            print(target, flush=True)
    if args.out:
        machine = facts.machine()
        heading = f"# The default search beside the whole grid\n\n{report.facts_line(machine)}"
        report.write(
            args.out, {"machine": machine, "cases": results}, f"{heading}\n\n" + "\n".join(map(str, targets)) + "\n"
        )
    return int(not all(target.passed for target in targets))
