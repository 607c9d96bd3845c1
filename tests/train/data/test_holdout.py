import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.train.data.documents import Document
from shardwise.train.data.holdout import hold_out
from shardwise.train.data.micro_batch import Part
from shardwise.train.data.tables import Table

keys = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=40, unique=True)


def documents(names: list[str]) -> list[Document]:
    return [Document.of_text(name, "text") for name in names]


@given(keys, st.floats(0.001, 0.999))
def test_both_sides_have_documents_and_share_none(names: list[str], fraction: float) -> None:
    split = hold_out(documents(names), fraction)
    train = [document.key for document in split.train]
    held_out = [document.key for document in split.held_out]
    assert train
    assert held_out
    assert sorted(train + held_out) == sorted(names)


@given(keys)
def test_the_order_of_the_source_does_not_matter(names: list[str]) -> None:
    forward = hold_out(documents(names), 0.3).held_out
    backward = hold_out(documents(names[::-1]), 0.3).held_out
    assert {document.key for document in forward} == {document.key for document in backward}


def test_the_fraction_is_about_right_and_new_files_move_no_old_ones() -> None:
    names = [f"file{i}.py" for i in range(4000)]
    few = {document.key for document in hold_out(documents(names[:2000]), 0.05).held_out}
    many = {document.key for document in hold_out(documents(names), 0.05).held_out}
    assert 60 < len(few) < 140
    assert few == many & set(names[:2000])


def test_no_evaluation() -> None:
    split = hold_out(documents(["a", "b"]), 0)
    assert len(split.train) == 2
    assert split.held_out == []


def test_a_single_text_gives_its_last_part() -> None:
    (train,), (held_out,) = hold_out([Document.of_text("book.txt", "x" * 90 + "y" * 10)], 0.1)
    assert (train.segments[0].text, held_out.segments[0].text) == ("x" * 90, "y" * 10)


def test_a_single_example_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match="eval_fraction=0"):
        hold_out([Document.of_prompt("rows:1", "question", "answer")], 0.1)


def test_a_table_without_rows_has_none_to_train_on() -> None:
    with pytest.raises(ConfigError, match=r"data.source='rows.jsonl' has no row to train on"):
        Table(None, [], ["rows.jsonl"], [Part(0, 1.0)]).split(0.1)
