"""A run in Weights & Biases, without a server: what is stored there, and that a resumed run goes on in it."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.train.run.directory import RunDirectory
from shardwise.train.run.metric_loggers import open_loggers
from tests.train.rig import configured

wandb = pytest.importorskip("wandb")


_BLOCK_BYTES = 2**15
_HEAD = struct.Struct("<IHB")
"""Of a part of a record: checksum, length, and whether it is whole, the first, a middle or the last one."""
_WHOLE, _LAST = 1, 4


def records(path: Path) -> Iterator[bytes]:
    """The records of wandb's file, which is a log of LevelDB's format behind seven bytes."""
    data, at, record = path.read_bytes(), 7, b""
    while at + _HEAD.size <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEAD.size:
            at += left
            continue
        _, length, kind = _HEAD.unpack_from(data, at)
        record += data[at + _HEAD.size : at + _HEAD.size + length]
        at += _HEAD.size + length
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""


def stored(directory: RunDirectory) -> list[dict[str, float]]:
    """The numbers of all parts of the run, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(directory.path.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in records(path):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                numbers = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                found.append({name: value for name, value in numbers.items() if not name.startswith("_")})
    return found


def test_a_run_and_its_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config, directory = configured(tmp_path, 'log.wandb = "sevens"'), RunDirectory(tmp_path / "run")
    directory.begin(config)
    ids = []
    for step in (1, 2):
        (logger,) = open_loggers(directory, config)
        logger.add({"train/loss": 2.5 / step}, step)
        ids.append(directory.wandb_id.read_text())
        assert (wandb.run.id, wandb.run.project, wandb.run.name) == (ids[0], "sevens", "tiny")
        assert wandb.run.config["train"]["steps"] == 10
        logger.close()
        time.sleep(1.1)  # wandb names the folder of each part by the second in which it begins
    assert stored(directory) == [{"train/loss": 2.5, "step": 1}, {"train/loss": 1.25, "step": 2}]
    directory.begin(config)  # anew
    assert not directory.wandb_id.exists()
