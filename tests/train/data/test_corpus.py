from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.train.data.corpus import stdlib_files
from shardwise.train.data.sources import read_documents


def test_packages_tests_and_tables_are_left_out(tmp_path: Path) -> None:
    names = ["zip.py", "json/tool.py", "site-packages/torch.py", "test/test_os.py", "lib2to3/tests/a.py"]
    names += ["encodings/cp437.py", "pydoc_data/topics.py"]
    for name in [*names, "idlelib/idle_test/a.py", "notes.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.py").touch()
    assert [file.name for file in stdlib_files(tmp_path)] == ["json/tool.py", "zip.py"]


def test_this_python_has_its_sources() -> None:
    documents = read_documents("builtin:python-stdlib")
    keys = [document.key for document in documents]
    assert keys == sorted(keys)
    assert {"os.py", "json/decoder.py"} <= set(keys)
    assert sum(len(document.segments[0].text) for document in documents) > 5_000_000


def test_a_python_without_sources(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="source code of Python's standard library is not at"):
        stdlib_files(tmp_path)
