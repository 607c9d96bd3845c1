from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.train.data.documents import Document
from shardwise.train.data.rows import document_of_row, kind_of

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


def document(**row: Any) -> Document:
    found = document_of_row("t.jsonl:7", row)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": TALK}, TALK),
        ({"messages": TALK, "text": "ignored", "conversations": None}, TALK),
        ({"conversations": SHAREGPT}, TALK),
        ({"conversations": TALK}, TALK),
        ({"conversations": SHAREGPT, "system": "s"}, [{"role": "system", "content": "s"}, *TALK]),
        ({"conversations": [{"from": "system", "value": "t"}, *SHAREGPT], "system": "s"},
         [{"role": "system", "content": "t"}, *TALK]),
        ({"instruction": "q", "output": "a"}, TALK),
        ({"instruction": "q", "input": "", "output": "a"}, TALK),
        ({"instruction": "q", "context": None, "response": "a"}, TALK),
        ({"instruction": "q", "input": "more", "output": "a", "system": "s"},
         [{"role": "system", "content": "s"}, {"role": "user", "content": "q\n\nmore"}, TALK[1]]),
    ],
)  # fmt: skip
def test_conversations(row: dict[str, Any], messages: list[dict[str, str]]) -> None:
    found = document(**row)
    assert list(found.messages) == messages
    assert found.whole
    assert not found.segments


def test_prompts_and_texts() -> None:
    pair = document(prompt="q", completion="a", text="ignored")
    assert [(segment.text, segment.is_target) for segment in pair.segments] == [("q", False), ("a", True)]
    assert pair.whole
    assert document(text="one", id=3).segments[0].text == "one"
    assert document_of_row("t", {"text": ""}) is None


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"messages": TALK}, "messages"),
        ({"conversations": SHAREGPT}, "conversations"),
        ({"instruction": "q", "output": "a"}, "instruction"),
        ({"prompt": "q", "completion": "a"}, "prompt and completion"),
        ({"text": "one"}, "text"),
    ],
)
def test_kinds(row: dict[str, Any], kind: str) -> None:
    assert kind_of("t", row) == kind


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"content": "x", "messages": None}, r"a row needs text, messages, .*; this one has content$"),
        ({}, r"this one has nothing$"),
        ({"text": 3}, r"text must be text, not 3"),
        ({"instruction": "q", "input": "x"}, r"this one has instruction, input$"),
        ({"instruction": ["q"], "output": "a"}, r'instruction must be text, not \["q"\]'),
        ({"messages": TALK[:1]}, "has no assistant message"),
        ({"messages": [*TALK, {"role": "assistant"}]}, r"messages, turn 3: needs role and content, both text"),
        ({"messages": [1]}, r"messages, turn 1: needs role and content, both text, and is 1"),
        ({"messages": "hello"}, r'messages must be a list, not "hello"'),
        ({"conversations": [{"from": "human"}]}, r"conversations, turn 1: needs from and value, both text"),
        ({"conversations": [{"from": "tool", "value": "x"}]}, r"turn 1 is from 'tool'; known are human, user"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, r"is a preference \(chosen, rejected\).*TRL's trainers"),
        ({"prompt": "q", "completion": "a", "label": True}, r"is a judged answer .*TRL's trainers"),
    ],
)
def test_rows_that_are_not_documents(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^t\.jsonl:7: .*{message}"):
        document(**row)
