"""Files of prompts, and the file of answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.generation.rows import AnswerFile, Row, check_writable, read_rows


def test_lines_of_text(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\n two \u2028 lines\n")
    assert [row.prompt for row in read_rows(path)] == ["one", " two \u2028 lines"]
    system = {"role": "system", "content": "s"}
    assert read_rows(path, as_messages=True, system="s")[0].prompt == [system, {"role": "user", "content": "one"}]


def test_json_lines(tmp_path: Path) -> None:
    user, reply = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
    rows: list[Any] = [
        {"prompt": "a", "id": 3},
        {"prompt": "b", "completion": "c"},
        {"messages": [user, reply]},
        {"messages": [user, reply, user]},
        "d",
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    assert [dict(row.fields) for row in read_rows(path)] == [
        {"prompt": "a", "id": 3},
        {"prompt": "b", "reference": "c"},
        {"messages": [user], "reference": "ho"},
        {"messages": [user, reply, user]},
        {"prompt": "d"},
    ]
    system = {"role": "system", "content": "s"}
    assert read_rows(path, system="s")[2].prompt == [system, user]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.txt", "", "has no prompts"),
        ("p.txt", "a\n\nb\n", "line 2: is an empty prompt"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2: is not JSON"),
        ("p.jsonl", '{"text": "a"}', "line 1: has neither a text prompt nor messages, but text"),
        ("p.jsonl", '{"prompt": ""}', "line 1: is an empty prompt"),
        ("p.jsonl", "[1]", "line 1: must be an object"),
        ("p.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}', "line 1: the conversation has only"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_rows(tmp_path / name)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_rows(tmp_path / "p.txt")
    with pytest.raises(ConfigError, match=r"q.txt: no such file; did you mean .*p.txt"):
        read_rows(tmp_path / "q.txt")


ROWS = [Row({"prompt": text}) for text in "abcde"]


def line(text: str) -> dict[str, str]:
    return {"prompt": text, "completion": f"{text}!"}


def test_answers_are_continued_after_the_last_whole_batch(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl"
    file = AnswerFile(path, ROWS, 1, 2)
    assert file.begin(resumes=False) == 0
    file.append([line("a"), line("b")])
    whole = path.read_bytes()
    file.append([line("c")])
    with path.open("ab") as torn:
        torn.write(b'{"prompt": "d", "compl')
    assert file.begin(resumes=True) == 2
    assert path.read_bytes() == whole
    file.append([line(text) for text in "cde"])
    assert file.begin(resumes=True) == 5
    assert [json.loads(one)["prompt"] for one in path.read_text().splitlines()] == [*"abcde"]


def test_several_answers_are_continued_together(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "o.jsonl", ROWS, 2, 1)
    file.begin(resumes=False)
    file.append([line("a"), line("a"), line("b")])
    assert file.begin(resumes=True) == 1
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 2


def test_a_file_of_other_answers_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl"
    file = AnswerFile(path, ROWS, 1, 2)
    file.begin(resumes=False)
    file.append([line("a"), line("x")])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"o.jsonl, line 2: answers another prompt"):
        file.begin(resumes=True)
    with pytest.raises(ConfigError, match="exists: add --resume to continue it, or name another file"):
        file.begin(resumes=False)
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        check_writable(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no directory .*none"):
        check_writable(tmp_path / "none" / "o.jsonl")
    with pytest.raises(ConfigError, match="cannot be written"):
        AnswerFile(tmp_path / "none" / "o.jsonl", ROWS, 1, 1).append([line("a")])
    with pytest.raises(ConfigError, match="No space left on device; --resume continues"):
        AnswerFile(Path("/dev/full"), ROWS, 1, 1).append([line("a")])
