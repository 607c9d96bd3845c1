from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.train.data.documents import TEXT_ERRORS
from shardwise.train.data.tokenizer import END_OF_DOCUMENT, ByteTokenizer, load_tokenizer


@given(st.binary(max_size=200))
def test_bytes_come_back_exactly(data: bytes) -> None:
    assert bytes(ByteTokenizer().encode(data.decode(errors=TEXT_ERRORS))) == data


def test_the_vocabulary_is_padded() -> None:
    assert (ByteTokenizer.end_id, ByteTokenizer.vocab_size) == (256, 320)


def test_ids_that_are_no_text_decode_to_something() -> None:
    assert ByteTokenizer().decode([72, 105, 256, 319, 255]) == "Hi\N{REPLACEMENT CHARACTER}"


@given(st.text(max_size=60).filter(lambda text: END_OF_DOCUMENT not in text))
def test_saved_bytes_are_the_same_tokenizer_in_transformers(saved: Path, text: str) -> None:
    """Except the token that ends a document: like any special token, transformers also finds it in text."""
    tokenizer = load_tokenizer(str(saved))
    assert tokenizer.encode(text) == ByteTokenizer().encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.end_id == ByteTokenizer.end_id


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    ByteTokenizer().save(directory)
    return directory


def test_text_that_is_not_unicode_reaches_a_tokenizer_of_transformers(saved: Path) -> None:
    tokenizer = load_tokenizer(str(saved))
    assert tokenizer.decode(tokenizer.encode(b"caf\xe9".decode(errors=TEXT_ERRORS))) == "caf\N{REPLACEMENT CHARACTER}"


def test_a_missing_directory_is_named_with_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(ConfigError, match=r"tokeniser.*no such directory.*did you mean .*tokenizer\?"):
        load_tokenizer(str(tmp_path / "tokeniser"))


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="finds no tokenizer"):
        load_tokenizer(str(tmp_path))
