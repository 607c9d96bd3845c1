import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.train.config.schema import DataConfig
from shardwise.train.data.batches import Batches, EvaluationBatches, Share, load_datasets
from shardwise.train.data.micro_batch import IGNORED
from shardwise.train.data.order import Position
from shardwise.train.data.packing import PackedRows, joined

SEQ_LEN = 4


def packed(rows: int, first: int = 0) -> PackedRows:
    """Return rows from number `first` on: row i holds the tokens i * SEQ_LEN + 0, 1, 2, 3, and its second token is
    masked."""
    ids = np.arange(first * SEQ_LEN, (first + rows) * SEQ_LEN, dtype=np.int32).reshape(rows, SEQ_LEN)
    is_target = np.ones_like(ids, dtype=np.bool_)
    is_target[:, 1] = False
    return PackedRows(ids, is_target)


def drawn(batches: list[Batches], step: int) -> list[int]:
    """Return the rows of a step, put together from the ranks' shares."""
    world_size = len(batches)
    by_rank = [
        [int(row[0]) // SEQ_LEN for micro in rank.batch(step) for row in micro.inputs["input_ids"]] for rank in batches
    ]
    return [by_rank[i % world_size][i // world_size] for i in range(sum(map(len, by_rank)))]


def on_ranks(
    rows: PackedRows,
    world_size: int,
    micro_batch: int,
    global_batch: int,
    seed: int,
    start: Position | None = None,
) -> list[Batches]:
    ranks = range(world_size)
    return [Batches(rows, Share(rank, world_size, micro_batch), global_batch, seed, start) for rank in ranks]


@given(
    rows=st.integers(1, 40),
    seed=st.integers(0, 100),
    step=st.integers(0, 20),
    layouts=st.sampled_from([[(1, 1), (2, 3), (12, 1)], [(1, 12), (3, 4), (4, 1)], [(6, 2), (2, 6), (1, 4)]]),
)
def test_global_batches_are_the_same_at_every_world_size(
    rows: int, seed: int, step: int, layouts: list[tuple[int, int]]
) -> None:
    data = packed(rows)
    seen = [drawn(on_ranks(data, world, micro, 12, seed), step) for world, micro in layouts]
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 12


@given(rows=st.integers(1, 30), steps=st.integers(0, 10), world_size=st.sampled_from([1, 2, 3]))
def test_a_run_goes_on_where_it_was_at_another_world_size_and_batch(rows: int, steps: int, world_size: int) -> None:
    data = packed(rows)
    before = Batches(data, Share(0, 1, 1), 4, seed=5)
    after = on_ranks(data, world_size, 1, 6, 5, before.position(steps))
    whole = [row for step in range(steps + 6) for row in drawn([before], step)]
    assert drawn(after, 0) + drawn(after, 1) == whole[steps * 4 : steps * 4 + 12]


def test_each_epoch_is_every_row_once_even_when_batches_straddle_epochs() -> None:
    batches = Batches(packed(10), Share(0, 1, 2), 4, seed=0)
    rows = [row for step in range(5) for row in drawn([batches], step)]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert batches.position(3).epoch == 1
    assert batches.position(3).sample == 2


def test_a_micro_batch_has_labels_where_tokens_are_targets() -> None:
    (micro,) = Batches(packed(1), Share(0, 1, 1), 1, seed=0).batch(0)
    assert micro.inputs["input_ids"].tolist() == [[0, 1, 2, 3]]
    assert micro.labels.tolist() == [[0, IGNORED, 2, 3]]
    assert micro.inputs["input_ids"].dtype == micro.labels.dtype == np.int64
    assert micro.targets == 2  # nothing predicts the first token


def test_a_global_batch_that_ranks_cannot_share() -> None:
    with pytest.raises(ConfigError, match="global_batch=6 is not a multiple"):
        Batches(packed(8), Share(0, 2, 2), 6, seed=0)


@given(rows=st.integers(0, 20), world_size=st.integers(1, 5), micro_batch=st.integers(1, 4))
def test_evaluation_counts_every_row_once_in_equally_many_forwards(
    rows: int, world_size: int, micro_batch: int
) -> None:
    data = packed(rows)
    ranks = [EvaluationBatches(data, Share(rank, world_size, micro_batch)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(micro.inputs["input_ids"]) == micro_batch for batches in ranks for micro in batches)
    judged = [label for batches in ranks for micro in batches for label in micro.labels.flatten().tolist()]
    assert sorted(label for label in judged if label != IGNORED) == sorted(data.ids[data.is_target].tolist())


def test_a_source_becomes_rows(tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(f"{i}" * 20)
    data = load_datasets(DataConfig(source=str(tmp_path), seq_len=21, eval_fraction=0.1))
    assert isinstance(data.train, PackedRows)
    assert len(data.train) + len(data.held_out) == 10
    assert len(data.held_out) >= 1
    assert (data.train.ids[:, -1] == 256).all()
    assert data.train.is_target.sum() == 20 * len(data.train)


@given(steps=st.integers(0, 10), world_size=st.sampled_from([1, 2, 3]))
def test_a_run_on_several_sources_goes_on_at_another_world_size(steps: int, world_size: int) -> None:
    data = joined([packed(7), packed(20, first=7)], [3, 1])
    before = Batches(data, Share(0, 1, 1), 4, seed=5)
    after = on_ranks(data, world_size, 1, 6, 5, before.position(steps))
    whole = [row for step in range(steps + 6) for row in drawn([before], step)]
    assert drawn(after, 0) + drawn(after, 1) == whole[steps * 4 : steps * 4 + 12]


def test_several_sources_become_rows_drawn_by_weight(tmp_path: Path) -> None:
    for name, letter in (("a", "x"), ("b", "y")):
        rows = [{"text": letter * 15} for _ in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sources = [{"source": str(tmp_path / "a.jsonl"), "weight": 3.0}, {"source": str(tmp_path / "b.jsonl")}]
    config = DataConfig.model_validate({"sources": sources, "seq_len": 16, "eval_fraction": 0.1})
    data = load_datasets(config)
    assert isinstance(data.train, PackedRows)
    assert {part.weight for part in data.train.parts} == {3.0, 1.0}
    assert {chr(row[1]) for row in data.held_out.ids} == {"x", "y"}
    batches = Batches(data.train, Share(0, 1, 4), 40, seed=0)
    ids = np.concatenate([micro.inputs["input_ids"] for micro in batches.batch(0)])
    assert abs((ids[:, 1] == ord("x")).sum() - 30) <= 2
    other = load_datasets(config.model_copy(update={"sources": [*reversed(config.each_source)]}))
    assert other.train.digest != data.train.digest


def test_a_source_with_nothing_to_learn(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a very long question", "completion": "yes"}\n')
    with pytest.raises(ConfigError, match="no token to learn in rows of seq_len=8"):
        load_datasets(DataConfig(source=str(tmp_path / "a.jsonl"), seq_len=8, eval_fraction=0))


@pytest.mark.parametrize(
    ("row", "template"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, True),
        ({"text": "a"}, False),
    ],
)
def test_conversations_bring_the_template_in_which_they_were_trained(
    row: dict[str, object], template: bool, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    data = load_datasets(DataConfig(source=str(tmp_path / "rows.jsonl"), seq_len=64, eval_fraction=0))
    assert isinstance(data.train, PackedRows)
    data.tokenizer.save(tmp_path / "saved")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    if not template:
        assert saved.chat_template is None
        return
    prompt = saved.apply_chat_template(row["messages"][:1], add_generation_prompt=True)["input_ids"]
    assert data.train.ids[0, : len(prompt)].tolist() == prompt
