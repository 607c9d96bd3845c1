"""The table of bytes, by hand."""

from benchmarks.common.gpt import GPT, GPTShape
from benchmarks.steps import peers
from benchmarks.steps.engines import ALONE
from benchmarks.steps.expected import Unit, gpt_units, sent_bytes
from benchmarks.steps.summary import EngineSummary


def test_parameters_and_slices_are_padded_to_16_bytes() -> None:
    unit = Unit("u", (4, 5, 1))  # 16 + 32 + 16 bytes
    assert unit.padded_bytes(ranks=2) == 64
    assert unit.padded_bytes(ranks=3) == 96


def test_full_shard_sends_three_passes_but_two_for_units_that_stay() -> None:
    units = [Unit("a", (8,)), Unit("b", (8,), stays_gathered=True)]
    assert sent_bytes(units, "full_shard", ranks=2) == 3 * 16 + 2 * 16
    assert sent_bytes(units, "shard_grad_op", ranks=2) == 2 * 16 + 2 * 16
    assert sent_bytes(units, "full_shard", ranks=1) == 0


def test_the_gpt_has_98_million_parameters_in_units_that_hold_them_all() -> None:
    units = gpt_units(GPTShape())
    assert [unit.name for unit in units if unit.stays_gathered] == ["root", "head"]
    assert len(units) == 12 + 3
    assert sum(sum(unit.numels) for unit in units) == 97_835_520


def test_small_embeddings_stay_in_the_root_and_the_last_block_is_last() -> None:
    units = gpt_units(GPTShape(layers=2, width=64, heads=4, vocab=64, seq=8))
    assert [(unit.name, unit.stays_gathered) for unit in units] == [
        ("root", True),
        ("blocks.0", False),
        ("blocks.1", True),
    ]


def test_the_gpt_is_the_same_on_every_rank() -> None:
    shape = GPTShape(layers=1, width=16, heads=2, vocab=32, seq=8)
    first, second = GPT(shape), GPT(shape)
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_engines_are_compared_with_replicas_that_never_talk() -> None:
    steps = {ALONE: [2.0, 1.0, 3.0], "fsdp2": [5.0, 4.0, 4.5], "shardwise": [1.5, 2.5, 1.75]}
    summaries = {name: EngineSummary(name, step_s=step_s) for name, step_s in steps.items()}
    line = "A step beside one of replicas that never talk (2.000 s): fsdp2 +2.500 s, shardwise -0.250 s."
    assert peers.above_alone(summaries) == [line]
    del summaries[ALONE]
    assert peers.above_alone(summaries) == []
