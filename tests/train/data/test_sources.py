import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.train.data.sources import read_documents


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.py", "deep/c.md"):
        (folder / name).write_text(name)
    (folder / "empty.txt").touch()
    (folder / ".hidden").write_text("no")
    assert [document.segments[0].text for document in read_documents(str(folder))] == ["a.py", "b.txt", "deep/c.md"]
    assert [document.segments[0].text for document in read_documents(f"{folder}/**/*.md")] == ["deep/c.md"]


def test_line_ends_and_bytes_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x\r\ny\xff")
    (document,) = read_documents(str(tmp_path / "a.txt"))
    assert document.segments[0].text.encode(errors="surrogateescape") == b"x\r\ny\xff"


def test_rows_of_jsonl(tmp_path: Path) -> None:
    texts = read_documents(write_rows(tmp_path / "a.jsonl", {"text": "one"}, {"text": ""}, {"text": "three"}))
    assert [document.segments[0].text for document in texts] == ["one", "three"]
    assert [document.key.rpartition(":")[2] for document in texts] == ["1", "3"]

    (pair,) = read_documents(write_rows(tmp_path / "b.jsonl", {"prompt": "q", "completion": "a"}))
    assert [(segment.text, segment.is_target) for segment in pair.segments] == [("q", False), ("a", True)]
    assert pair.whole

    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (chat,) = read_documents(write_rows(tmp_path / "c.jsonl", {"messages": messages}))
    assert list(chat.messages) == messages
    assert chat.whole


def test_an_empty_table_has_no_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", {"text": "one"})
    (tmp_path / "b.jsonl").touch()
    assert [document.segments[0].text for document in read_documents(str(tmp_path / "*.jsonl"))] == ["one"]
    with pytest.raises(ConfigError, match=r"has no text in its 1 file$"):
        list(read_documents(str(tmp_path / "b.jsonl")))


@pytest.mark.parametrize(("suffix", "between"), [("csv", ","), ("tsv", "\t")])
def test_rows_of_tables_as_text(tmp_path: Path, suffix: str, between: str) -> None:
    lines = [["id", "text"], ["1", '"one, or\n""two"""'], ["2", "three"]]
    (tmp_path / f"a.{suffix}").write_text("\n".join(between.join(line) for line in lines))
    documents = read_documents(str(tmp_path / f"a.{suffix}"))
    assert [document.segments[0].text for document in documents] == ['one, or\n"two"', "three"]


def test_rows_of_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["one", "two"], "id": [1, 2]}), tmp_path / "a.parquet")
    documents = read_documents(str(tmp_path / "a.parquet"))
    assert [document.segments[0].text for document in documents] == ["one", "two"]


def test_the_format_may_be_said(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.data", {"text": "one"})
    assert read_documents(path, "jsonl")[0].segments[0].text == "one"
    assert read_documents(path)[0].segments[0].text == '{"text": "one"}\n'


def test_a_missing_source_is_named_with_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"corups\.txt.*no such files; did you mean .*corpus\.txt"):
        read_documents(str(tmp_path / "corups.txt"))


def test_an_unknown_built_in_corpus() -> None:
    with pytest.raises(ConfigError, match="unknown built-in corpus 'shakespeare'; use builtin:stories or builtin:p"):
        read_documents("builtin:shakespeare")


def test_a_row_that_is_no_document_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: a row needs text, messages, .*; this one has content"):
        read_documents(write_rows(tmp_path / "a.jsonl", {"text": "x"}, {"content": "x"}))


def texts(source: str, *further: str | None) -> list[str]:
    return [document.segments[0].text for document in read_documents(source, *further)]


def test_arrow_files_and_what_save_to_disk_writes(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_dict({"text": ["one", "two"]})
    table.save_to_disk(str(tmp_path / "saved"))
    assert texts(str(tmp_path / "saved")) == ["one", "two"]
    assert texts(str(next((tmp_path / "saved").glob("*.arrow")))) == ["one", "two"]
    datasets.DatasetDict(train=table, test=table.select([1])).save_to_disk(str(tmp_path / "splits"))
    assert texts(str(tmp_path / "splits")) == ["one", "two"]
    assert texts(str(tmp_path / "splits"), None, None, "test") == ["two"]
    with pytest.raises(ConfigError, match=r"has no split 'dev': set data\.split to one of train, test"):
        texts(str(tmp_path / "splits"), None, None, "dev")
    with pytest.raises(ConfigError, match="has no splits; leave it out"):
        texts(str(tmp_path / "saved"), None, None, "test")


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_compressed_tables(tmp_path: Path, suffix: str) -> None:
    compress = {".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(b'{"text": "one"}\n'))
    assert texts(str(path)) == ["one"]


def test_a_file_that_is_not_its_format(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no table")
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read as parquet"):
        read_documents(str(tmp_path / "a.parquet"))


def test_files_without_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(ConfigError, match="has no text"):
        read_documents(str(tmp_path / "a.txt"))
