import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.train.data.encoding import EncodedDocument
from shardwise.train.data.micro_batch import Draw
from shardwise.train.data.packing import pack

PAD = 256


def encoded(ids: list[int], is_target: list[bool] | None = None, whole: bool = False) -> EncodedDocument:
    marks = [False] + [True] * (len(ids) - 1) if is_target is None else is_target
    return EncodedDocument(np.array(ids, dtype=np.int32), np.array(marks, dtype=np.bool_), whole)


texts = st.lists(st.lists(st.integers(0, 255), min_size=2, max_size=30), min_size=1, max_size=12)


@given(texts, st.integers(2, 16))
def test_plain_text_is_one_stream_cut_into_rows(documents: list[list[int]], seq_len: int) -> None:
    rows = pack([encoded(ids, [True] * len(ids)) for ids in documents], seq_len, PAD)
    stream = [token for ids in documents for token in ids]
    packed = rows.ids.flatten().tolist()
    # Only a last row that holds a single token, which nothing can predict, is left out.
    lost = len(stream) - len(packed)
    assert lost <= 1
    assert packed[: len(stream)] == stream[: len(stream) - max(lost, 0)]
    assert set(packed[len(stream) :]) <= {PAD}
    assert not rows.is_target.flatten()[len(stream) :].any()


@given(texts, st.integers(2, 40))
def test_an_example_that_fits_is_never_cut(documents: list[list[int]], seq_len: int) -> None:
    rows = pack([encoded(ids, whole=True) for ids in documents], seq_len, PAD)
    text = [",".join(map(str, row)) for row in rows.ids.tolist()]
    for ids in documents:
        assert any(",".join(map(str, ids[:seq_len])) in row for row in text)
    assert rows.truncated == sum(len(ids) > seq_len for ids in documents)


def test_the_policy_by_example() -> None:
    first = encoded([1, 2, 3], [False, False, True], whole=True)
    second = encoded([4, 5, 6], [False, True, True], whole=True)
    rows = pack([first, second], 5, PAD)
    assert rows.ids.tolist() == [[1, 2, 3, PAD, PAD], [4, 5, 6, PAD, PAD]]
    assert rows.is_target.tolist() == [[False, False, True, False, False], [False, True, True, False, False]]
    assert rows.target_tokens == 3


def test_rows_without_a_target_are_left_out() -> None:
    prompt = encoded([1, 2, 3, 4], [False] * 4, whole=True)
    assert len(pack([prompt, encoded([5, 6, 7, 8], whole=True)], 4, PAD)) == 1
    # A target in the first column cannot be predicted, so it does not save its row.
    assert len(pack([encoded([1, 2], [True, False])], 2, PAD)) == 0


def test_a_row_of_one_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="seq_len=1"):
        pack([], 1, PAD)


def test_positions_begin_anew_with_each_document_and_each_row() -> None:
    documents = [encoded([1, 2, 3]), encoded([4, 5, 6, 7]), encoded([8, 9], whole=True)]
    rows = pack(documents, 4, PAD, keeps_apart=True)
    assert rows.ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, PAD], [8, 9, PAD, PAD]]
    positions = rows.micro_batch([Draw(row, row) for row in (2, 0, 1)]).inputs["position_ids"]
    assert positions.tolist() == [[0, 1, 0, 1], [0, 1, 2, 0], [0, 1, 2, 0]]
    without = pack(documents, 4, PAD)
    assert without.micro_batch([Draw(0, 0)]).inputs.keys() == {"input_ids"}
    assert without.digest == rows.digest
