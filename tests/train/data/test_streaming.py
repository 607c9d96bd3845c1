import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.train.config.schema import DataConfig
from shardwise.train.data.batches import Batches, Share, load_datasets
from shardwise.train.data.order import Position
from shardwise.train.data.packing import PackedRows, joined
from shardwise.train.data.streaming import Source, Stream

SEQ_LEN = 4


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def packed(first: int, count: int) -> PackedRows:
    """Return rows, all of whose tokens are the row's number."""
    ids = np.repeat(np.arange(first, first + count, dtype=np.int32)[:, None], SEQ_LEN, axis=1)
    return PackedRows(ids, np.ones_like(ids, dtype=np.bool_))


def source(sizes: Sequence[int], first: int = 0, weight: float = 1.0) -> Source[PackedRows]:
    """Return a source whose blocks have these numbers of rows, which are numbered from `first` on."""
    begins = [first + sum(sizes[:block]) for block in range(len(sizes))]

    def load(block: int) -> PackedRows:
        return packed(begins[block], sizes[block])

    return Source(len(sizes), str(sizes), weight, load, [load(0)])


def drawn(
    stream: Stream[PackedRows] | PackedRows,
    steps: int,
    layout: tuple[int, int],
    global_batch: int,
    start: Position | None = None,
    seed: int = 3,
) -> tuple[list[int], Position]:
    """Return the rows of some steps, put together from the ranks' shares, and the position after them.

    layout: (ranks, micro-batch).
    """
    world_size, micro_batch = layout
    ranks = [
        Batches(stream, Share(rank, world_size, micro_batch), global_batch, seed, start) for rank in range(world_size)
    ]
    rows: list[int] = []
    for step in range(steps):
        by_rank = [
            [int(ids[0]) for micro in batches.batch(step) for ids in micro.inputs["input_ids"]] for batches in ranks
        ]
        rows += [by_rank[at % world_size][at // world_size] for at in range(global_batch)]
    positions = [batches.position(steps) for batches in ranks]
    assert all(position == positions[0] for position in positions)
    return rows, positions[0]


blocks = st.builds(lambda first, more: [first, *more], st.integers(1, 9), st.lists(st.integers(0, 9), max_size=6))


@given(blocks, st.integers(0, 12), st.sampled_from([(1, 1), (2, 3), (12, 1), (3, 2)]))
@settings(deadline=None)
def test_global_batches_are_the_same_on_all_ranks_and_each_epoch_is_every_row_once(
    sizes: list[int], steps: int, layout: tuple[int, int]
) -> None:
    rows, _ = drawn(Stream.of([source(sizes)]), steps, layout, 12)
    assert rows == drawn(Stream.of([source(sizes)]), steps, (1, 12), 12)[0]
    total = sum(sizes)
    for first in range(0, len(rows) - total + 1, total):
        assert sorted(rows[first : first + total]) == list(range(total))


@given(
    st.lists(st.tuples(blocks, st.floats(0.1, 10)), min_size=1, max_size=3),
    st.integers(0, 8),
    st.sampled_from([(1, 1), (2, 3), (3, 2)]),
)
@settings(deadline=None)
def test_a_run_goes_on_at_another_number_of_ranks_and_batch(
    parts: list[tuple[list[int], float]], steps: int, layout: tuple[int, int]
) -> None:
    def stream() -> Stream[PackedRows]:
        firsts = [sum(sum(sizes) for sizes, _ in parts[:at]) for at in range(len(parts))]
        return Stream.of([source(sizes, first, weight) for (sizes, weight), first in zip(parts, firsts, strict=True)])

    whole, _ = drawn(stream(), 2 * steps + 9, (1, 2), 4)
    before, position = drawn(stream(), steps, (2, 1), 4)
    stored = Position(**json.loads(json.dumps({name: getattr(position, name) for name in Position.__slots__})))
    after, _ = drawn(stream(), 3, layout, 12, stored)
    assert before + after == whole[: 4 * steps + 36]


@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0.1, 10)), min_size=1, max_size=3), st.integers(1, 5))
@settings(deadline=None)
def test_sources_of_one_block_are_drawn_from_as_rows_in_memory(parts: list[tuple[int, float]], steps: int) -> None:
    firsts = [sum(count for count, _ in parts[:at]) for at in range(len(parts))]
    sources = [source([count], first, weight) for (count, weight), first in zip(parts, firsts, strict=True)]
    rows = [packed(first, count) for (count, _), first in zip(parts, firsts, strict=True)]
    in_memory = joined(rows, [weight for _, weight in parts])
    assert drawn(Stream.of(sources), steps, (1, 1), 7)[0] == drawn(in_memory, steps, (1, 1), 7)[0]


def test_going_on_loads_no_block_that_is_behind() -> None:
    def stream(loaded: list[int]) -> Stream[PackedRows]:
        def load(block: int) -> PackedRows:
            loaded.append(block)
            return packed(block * 5, 5)

        return Stream.of([Source(40, "40", 1.0, load, [packed(0, 5)])])

    _, position = drawn(stream([]), 31, (1, 1), 4)  # 124 rows: the 25th block is the one that is drawn from
    loaded: list[int] = []  # not also the first stream's, whose thread may still make a block
    drawn(stream(loaded), 1, (1, 1), 2, position)
    assert len(loaded) <= 3  # that block, the next one, and perhaps the one after it


def test_the_error_of_a_block_is_raised_at_the_step_that_needs_it() -> None:
    def load(block: int) -> PackedRows:
        raise ConfigError("rows.jsonl:7: text must be text, not 3")

    stream = Stream.of([Source(2, "", 1.0, load, [packed(0, 5)])])
    batches = Batches(stream, Share(0, 1, 1), 4, 0)
    batches.batch(0)
    with pytest.raises(ConfigError, match=r"rows\.jsonl:7"):
        batches.batch(1)


def test_a_position_in_other_data_is_refused() -> None:
    _, position = drawn(Stream.of([source([5, 5])]), 1, (1, 1), 4)
    with pytest.raises(ConfigError, match=r"cut into blocks of data\.block_mib, had the digest"):
        drawn(Stream.of([source([5, 6])]), 1, (1, 1), 4, position)
    with pytest.raises(ConfigError, match=r"data\.seed was 3 and is now 4"):
        drawn(Stream.of([source([5, 5])]), 1, (1, 1), 4, position, seed=4)
    with pytest.raises(ConfigError, match=r"data\.streaming was true and is now false"):
        drawn(packed(0, 10), 1, (1, 1), 4, position)
    with pytest.raises(ConfigError, match=r"data\.streaming was false and is now true"):
        drawn(Stream.of([source([5, 5])]), 1, (1, 1), 4, Position(3, 0, 4))


def config(path: Path, **keys: Any) -> DataConfig:
    return DataConfig(source=str(path), seq_len=64, block_mib=1, streaming=True, **keys)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "saved", "txt", "folder"])
def test_every_document_of_a_source_is_in_one_epoch(kind: str, tmp_path: Path) -> None:
    import datasets

    texts = [f"<{number:06d}>{'x' * (number * 7919 % 180)}\n" for number in range(25_000)]
    table = datasets.Dataset.from_dict({"text": texts})
    path = tmp_path / f"a.{kind}"
    match kind:
        case "jsonl":
            table.to_json(path)
        case "parquet":
            table.to_parquet(path)
        case "arrow":
            with datasets.arrow_writer.ArrowWriter(path=str(path)) as writer:
                for text in texts:
                    writer.write({"text": text})
                writer.finalize()
        case "saved":
            table.save_to_disk(path)
        case "txt":
            path.write_text("".join(texts))
        case "folder":
            path.mkdir()
            table.select(range(9_000)).to_json(path / "a.jsonl")
            (path / "b.txt").write_text("".join(texts[9_000:24_000]))
            (path / "c.txt").touch()
            table.select(range(24_000, 25_000)).to_parquet(path / "d.parquet")
    fraction = 0 if kind == "txt" else 0.05  # of a single text, the last part is held out
    data = load_datasets(config(path, eval_fraction=fraction))
    assert isinstance(data.train, Stream)
    (one,) = data.train.sources
    assert one.blocks >= 3
    train = [one.load(block) for block in range(one.blocks)]
    assert max(map(len, train)) < 2 * np.mean(list(map(len, train)))

    def texts_in(rows: PackedRows) -> list[str]:
        stream = bytes(token for token in rows.ids.flatten().tolist() if token < 256).decode()
        return [f"<{line}" for line in stream.split("<")[1:]]

    found = [text for rows in train for text in texts_in(rows)]
    held_out = texts_in(data.held_out)
    assert (len(held_out) > 10) == (fraction > 0)
    assert sorted(found + held_out) == texts
    assert load_datasets(config(path, eval_fraction=fraction)).train.digest == data.train.digest


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("character", ["\N{SNOWMAN}", "\N{GRINNING FACE}"])
def test_text_without_lines_is_cut_between_characters(character: str, before: int, tmp_path: Path) -> None:
    count = 3_000_000 // len(character.encode())
    (tmp_path / "a.txt").write_text("a" * before + character * count, encoding="utf-8")
    data = load_datasets(config(tmp_path / "a.txt", eval_fraction=0))
    assert isinstance(data.train, Stream)
    (one,) = data.train.sources
    assert one.blocks == 3
    for block in range(3):
        ids = one.load(block).ids.flatten()
        assert set(bytes(ids[ids < 256].astype(np.uint8)).decode()) - {"a"} == {character}


def test_a_source_without_a_token_to_learn_in_its_first_block(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "q" * 100, "completion": "a"}))
    with pytest.raises(ConfigError, match="seq_len=64 in the first block of its stream"):
        load_datasets(config(tmp_path / "a.jsonl", eval_fraction=0))
    (tmp_path / "b.txt").touch()
    with pytest.raises(ConfigError, match=r"b\.txt' is empty"):
        load_datasets(config(tmp_path / "b.txt"))


def test_a_block_size_without_streaming() -> None:
    with pytest.raises(ValueError, match="block_mib = 2 has no effect without streaming"):
        DataConfig(block_mib=2)
