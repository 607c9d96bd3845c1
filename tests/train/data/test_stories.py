import hashlib
import re
from collections import Counter

import pytest

from shardwise.train.data.blocks import Blocks
from shardwise.train.data.encoding import encode_document
from shardwise.train.data.sources import read_documents
from shardwise.train.data.stories import Stories, _grammar, story
from shardwise.train.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def stories() -> list[str]:
    return [story(number) for number in range(2000)]


def test_a_number_gives_the_same_story_everywhere() -> None:
    """With any version of Python: its generator of random numbers is promised to stay, how it chooses is not."""
    digest = hashlib.sha256("".join(story(number) for number in range(50)).encode()).hexdigest()
    assert digest[:16] == "1b159b8717e5d2c3"


def test_every_story_is_another_one(stories: list[str]) -> None:
    assert len({*stories}) == len(stories)


def test_a_story_has_two_people_at_most_and_keeps_their_names(stories: list[str]) -> None:
    names = {name for people in _grammar()["people"] for name in people["names"]}
    for text in stories:
        found = Counter(word for word in re.findall(r"\w+", text) if word in names)
        assert 1 <= len(found) <= 2, text
        assert max(found.values()) >= 3, text


def test_stories_are_whole_sentences(stories: list[str]) -> None:
    for text in stories:
        assert not re.search(r"[{}]|\b[Aa] [aeiou]|  |[.!?] [a-z]", text), text
        assert text[0].isupper()
        assert text.endswith((".", '."', '!"')), text


def test_all_that_the_grammar_has_is_told(stories: list[str]) -> None:
    """No list of it is forgotten: each plot's last and rarest words are there."""
    told = " ".join(stories)
    for table in [_grammar()["shared"], *_grammar()["plots"].values()]:
        for name, texts in table.items():
            words = [text for text in texts if isinstance(text, str) and "{" not in text]
            assert all(text in told or text.capitalize() in told for text in words if len(text) > 1), name


def test_blocks_have_every_story_once() -> None:
    blocks = Blocks("builtin:stories", [Stories(3500)], 2**20)
    keys = [key for number in range(len(blocks)) for key, _ in blocks.rows(number)]
    assert len(blocks) > 1
    assert keys == [f"story {number}" for number in range(3500)]


def test_the_tokenizer_is_made_for_them() -> None:
    tokenizer = load_tokenizer("builtin:stories")
    documents = read_documents("builtin:stories")
    assert len(documents) == Stories().count
    tokens = words = 0
    for document in documents[:300]:
        _, told = document.segments
        ids = encode_document(document, tokenizer).ids
        assert tokenizer.decode(ids) == told.text
        assert len(ids) <= 240  # the quickstart's seq_len
        tokens += len(ids)
        words += len(re.findall(r"\w+|[^\w\s]+", told.text))
    assert tokenizer.vocab_size == 1536
    assert tokens < 1.1 * words
