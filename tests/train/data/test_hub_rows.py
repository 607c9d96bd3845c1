"""`data.source` as a data set on a hub, against the mock hub, in a process with a cache of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.train.config.schema import DataConfig
from shardwise.train.data.sources import check_keys
from tests.hub import mock

CODE = """
import json, sys
from shardwise.errors import UserError
from shardwise.train.config.schema import DataConfig
from shardwise.train.data.batches import Batches, Share, load_datasets
from shardwise.train.data.sources import read_documents
for source, subset, split in json.loads(sys.argv[1]):
    try:
        found = read_documents(source, None, subset, split)
        config = DataConfig(source=source, subset=subset, split=split, seq_len=2, eval_fraction=0)
        kept, streamed = (load_datasets(config.model_copy(update={"streaming": on})) for on in (False, True))
        drawn = [Batches(data.train, Share(0, 1, 3), 3, 0).batch(0)[0].labels.tolist() for data in (kept, streamed)]
        assert drawn[0] == drawn[1], drawn
        print(len(found), found[0].key, found[-1].segments[0].text)
    except UserError as error:
        print(f"{type(error).__name__}: {error}")
"""
CARD = b"""---
configs:
- config_name: english
  data_files:
  - {split: train, path: en.jsonl}
- config_name: french
  data_files:
  - {split: train, path: fr.jsonl}
---
"""


def jsonl(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.mark.slow
def test_rows_are_fetched_once_and_mistakes_are_one_line(tmp_path: Path) -> None:
    def read(*asked: tuple[str, str | None, str | None], **more: str) -> list[str]:
        environment = {**os.environ, **hub.environment(tmp_path / "home"), **more}
        command = [sys.executable, "-c", CODE, json.dumps(asked)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    with mock.running() as hub:
        plain = hub.add("org/plain", {"train.jsonl": jsonl("a", "b", "c"), "test.jsonl": jsonl("t")}, kind="dataset")
        hub.add("org/two", {"en.jsonl": jsonl("yes"), "fr.jsonl": jsonl("oui"), "README.md": CARD}, kind="dataset")
        hub.add("org/gated", {"train.jsonl": jsonl("a")}, kind="dataset", gated=True)
        pinned = {name: f"{name}@{hub.repositories['dataset', name].refs['main']}" for _, name in hub.repositories}
        good: list[tuple[str, str | None, str | None]] = [
            (pinned["org/plain"], None, None),
            (pinned["org/plain"], None, "test"),
            (pinned["org/two"], "french", None),
        ]
        said = ["3 org/plain/train:1 c", "1 org/plain/test:1 t", "1 org/two/french/train:1 oui"]
        assert read(*good) == said
        asked = len(hub.requests)
        assert read(*good) == said
        assert read(*good, HF_HUB_OFFLINE="1") == said
        assert len(hub.requests) == asked  # a commit whose rows are in the cache costs no request
        part = (pinned["org/plain"], None, "train[:2]")
        assert read(part, part) == ["2 org/plain/train[:2]:1 b"] * 2
        plain.commit({"train.jsonl": jsonl("z")})
        newer = f"org/plain@{plain.refs['main']}"
        assert read((newer, None, None), good[0]) == ["1 org/plain/train:1 z", said[0]]
        split, subset, missing, gated = read(
            (pinned["org/plain"], None, "trian"),
            (pinned["org/two"], None, None),
            ("org/none@" + "0" * 40, None, None),
            (pinned["org/gated"], None, None),
        )
    assert split.startswith("ConfigError: data.source='org/plain@")
    assert "data.split='trian': `datasets` cannot read it: Unknown split \"trian\". Should be one of" in split
    assert "Config name is missing" in subset
    assert "['english', 'french']" in subset
    assert missing.startswith("HubError: data.source='org/none@00000000'")
    assert "no data set org/none on" in missing
    assert "org/gated is gated: ask for access at http://127.0.0.1" in gated
    assert "/datasets/org/gated, then log in" in gated


def test_keys_of_another_kind_of_source_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.split='test' has no effect, because data\.source='a\.txt' is no data set"
    ):
        check_keys(DataConfig(source="a.txt", split="test"))
    with pytest.raises(ConfigError, match=r"data\.format='csv' has no effect, because .* is a data set of a hub"):
        check_keys(DataConfig(source="org/rows", format="csv"))
