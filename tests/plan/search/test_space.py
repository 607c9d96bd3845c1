"""Which configurations a search looks at."""

from typing import Any

import pytest

from shardwise.errors import ConfigError, PlanError
from shardwise.fsdp.strategy import Precision, Strategy
from shardwise.plan.search.space import search_space
from shardwise.plan.search.sweeps import by_setting
from shardwise.policy.precision import precision_of


def shardings(**arguments: Any) -> list[tuple[str, int | None]]:
    return [(sweep.base.strategy.value, sweep.base.shard_group) for sweep in search_space(arguments).sweeps]


def batches(global_batch: int | None = None, **arguments: Any) -> tuple[tuple[int, int], ...]:
    (found,) = {sweep.batches for sweep in search_space({"strategy": "full_shard", **arguments}, global_batch).sweeps}
    return found


def test_all_fixed_is_one_configuration() -> None:
    found = search_space(
        {"strategy": "full_shard", "micro_batch": 2, "accumulation": 3, "activation_checkpointing": "full", "nodes": 2}
    ).sweeps
    assert [sweep.size for sweep in found] == [1]
    job = found[0].job("full", *found[0].batches[0])
    assert (job.micro_batch, job.accumulation, job.activation_checkpointing, job.nodes) == (2, 3, "full", 2)


def test_nothing_fixed_is_everything_that_makes_a_difference() -> None:
    one_node = shardings(gpus_per_node=8)
    assert [name for name, group in one_node if group is None] == [
        "no_shard", "shard_optimizer", "shard_grad_op", "full_shard",
    ]  # fmt: skip
    assert [pair for pair in one_node if pair[0] == "hybrid_shard"] == [("hybrid_shard", 2), ("hybrid_shard", 4)]
    assert {group for _, group in shardings(gpus_per_node=8, nodes=8)} == {None, 8, 16, 32}
    assert shardings(gpus_per_node=1) == [("no_shard", None)]
    assert search_space({}).sweeps[0].modes == ("none", "selective-ops", "every-2", "full")
    assert batches() == tuple((2**k, 1) for k in range(7))


def test_a_shard_group_is_for_strategies_that_take_one() -> None:
    assert shardings(shard_group=4) == [("hybrid_shard", 4), ("hybrid_shard_zero2", 4)]
    assert shardings(shard_group=[2, 4], strategy=["full_shard", "hybrid_shard"]) == [
        ("full_shard", None), ("hybrid_shard", 2), ("hybrid_shard", 4),
    ]  # fmt: skip
    assert shardings(strategy="hybrid_shard", gpus_per_node=2) == [("hybrid_shard", None)]
    with pytest.raises(ConfigError, match="shard_group=4 needs strategy='hybrid_shard'"):
        shardings(shard_group=4, strategy="full_shard")


def test_strategies_that_cannot_reshard_so_are_left_out_and_why() -> None:
    found = search_space({"reshard_after_forward": 4, "micro_batch": 1})
    assert {(f.base.strategy.value, f.base.shard_group) for f in found.sweeps} == {
        ("shard_optimizer", None), ("shard_grad_op", None), ("full_shard", None),
        ("hybrid_shard", 4), ("hybrid_shard_zero2", 4),
    }  # fmt: skip
    assert {sweep.base.reshard_after_forward for sweep in found.sweeps} == {4}
    why = "reshard_after_forward=4 does not divide the shard group of"
    assert [(job.strategy.value, job.shard_group, why) for job, why in found.left_out] == [
        ("no_shard", None, f"{why} 1 rank; leave it out"),
        ("hybrid_shard", 2, f"{why} 2 ranks; use one of 1, 2"),
        ("hybrid_shard_zero2", 2, f"{why} 2 ranks; use one of 1, 2"),
    ]
    with pytest.raises(ConfigError, match="reshard_after_forward=4 does not divide the shard group of 1 rank; leave"):
        search_space({"reshard_after_forward": 4, "strategy": "no_shard"})


def test_lists_are_choices_for_any_argument() -> None:
    found = search_space({"strategy": "full_shard", "seq_len": [1024, 2048], "nodes": (1, 2)}).sweeps
    assert [(sweep.base.seq_len, sweep.base.nodes) for sweep in found] == [
        (1024, 1),
        (1024, 2),
        (2048, 1),
        (2048, 2),
    ]


def test_accumulation_follows_from_the_global_batch() -> None:
    assert batches(96, gpus_per_node=8) == ((1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1))
    assert batches(96, gpus_per_node=8, micro_batch=4) == ((4, 3),)
    assert batches(96, gpus_per_node=8, micro_batch=[4, 5]) == ((4, 3),)
    assert batches(96, gpus_per_node=8, accumulation=[3, 6]) == ((2, 6), (4, 3))
    assert batches(micro_batch=[1, 2], accumulation=[2, 1]) == ((1, 2), (1, 1), (2, 2), (2, 1))


@pytest.mark.parametrize(
    ("global_batch", "arguments", "line"),
    [
        (100, {}, "a global batch of 100 is not a multiple of 8 ranks; use 96 or 104"),
        (-3, {}, "a global batch of -3: must be a whole number of at least 1"),
        (0, {"micro_batch": 1}, "a global batch of 0: must be a whole number of at least 1"),
        (4, {}, "4 is not a multiple of 8 ranks; use 8"),
        (96, {"micro_batch": 5}, r"not a multiple of micro-batch x ranks = 5 x 8 = 40; use 80 or 120"),
        (96, {"accumulation": [7]}, "makes a global batch of 96 on 8 ranks in 7 micro-batches; leave"),
    ],
)
def test_a_batch_that_cannot_be_divided(global_batch: int, arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(PlanError, match=line):
        search_space({"gpus_per_node": 8, **arguments}, global_batch)


def test_two_names_of_one_strategy_are_searched_once() -> None:
    assert shardings(strategy=["zero3", "full_shard", "ddp"]) == [("full_shard", None), ("no_shard", None)]


def test_a_value_that_no_job_can_have() -> None:
    with pytest.raises(ConfigError, match="unknown strategy 'fullshard'; did you mean 'full_shard'"):
        search_space({"strategy": "fullshard"})
    with pytest.raises(ConfigError, match="activation_checkpointing='half': must be one of"):
        search_space({"activation_checkpointing": ["half"]})
    with pytest.raises(ConfigError, match=r"optimizer=\[\] leaves nothing to search: give at least one value"):
        search_space({"optimizer": []})


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("bf16", Precision("bf16", "fp32", "fp32")),
        ("fp16", Precision("fp16", "fp32", "fp32")),
        ("fp32", Precision("fp32", "fp32", "fp32")),
        ("bf16-true", Precision("bf16", "bf16", "bf16")),
        ("bf16/bf16/fp32", Precision("bf16", "bf16", "fp32")),
    ],
)
def test_precision_in_words(words: str, precision: Precision) -> None:
    assert precision_of(words) == precision


def test_precision_that_is_none() -> None:
    with pytest.raises(ConfigError, match="did you mean 'bf16'"):
        precision_of("bf61")
    with pytest.raises(PlanError, match="param/reduce/master"):
        precision_of("bf16/fp32")


def test_an_axis_of_experts_leaves_out_what_shards_nothing() -> None:
    """Strategies that shard over too few ranks are left out with the reason, and the others are searched."""
    space = search_space({"gpus_per_node": 8, "ep": 4})
    assert {sweep.base.ep for sweep in space.sweeps} == {4}
    [alike] = by_setting(space.sweeps)
    assert Strategy.FULL_SHARD in {sweep.base.strategy for sweep in alike}
    why = "ep=4 does not divide the number of ranks that no_shard shards over, 1; use one of 1"
    assert [(job.strategy, reason) for job, reason in space.left_out] == [(Strategy.NO_SHARD, why)]
