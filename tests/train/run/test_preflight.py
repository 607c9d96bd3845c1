"""Files that a configuration names are looked for before any rank is started, also at URLs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint import convert
from shardwise.errors import ConfigError, MeshError, PlanError
from shardwise.train.config.files import load
from shardwise.train.data.sources import find_files, read_documents
from shardwise.train.data.tokenizer import load_tokenizer
from shardwise.train.run import preflight
from shardwise.train.run.directory import RunDirectory
from shardwise.train.run.preflight import check, check_devices, check_devices_of_rank
from shardwise.train.run.run_lock import claimed
from tests.unprivileged import open_directory, unprivileged


@pytest.fixture
def room() -> Iterator[Path]:
    with open_directory() as path:
        (path / "tiny.toml").write_text('[model]\nconfig = {model_type = "llama"}\n[train]\nsteps = 3\n')
        yield path


def test_a_checkpoint_at_a_url_to_go_on_from(room: Path) -> None:
    pytest.importorskip("fsspec")
    torch.save({"w": torch.ones(3)}, room / "w.pt")
    convert(room / "w.pt", room / "step-000002")
    check(load(room / "tiny.toml", [f"checkpoint.resume=file://{room}/step-000002"]), 0)
    with pytest.raises(ConfigError, match=r"checkpoint\.resume='file://.*/step-000003': no such file or directory"):
        check(load(room / "tiny.toml", [f"checkpoint.resume=file://{room}/step-000003"]), 0)
    with pytest.raises(ConfigError, match=r"model\.path='file://.*: no such file or directory"):
        check(load(room / "tiny.toml", ["model.config=none", f"model.path=file://{room}"]), 0)


@pytest.mark.parametrize("key", ["model.path", "model.weights", "data.tokenizer", "checkpoint.resume", "data.source"])
def test_what_may_not_be_looked_at_and_what_cannot_be_a_name(key: str, room: Path) -> None:
    (room / "closed").mkdir()
    for name, why in ((f"{room}/closed/x", "Permission denied"), ("x" * 256, "File name too long")):
        config = load(room / "tiny.toml", [f"{key}={name}", *(["model.config=none"] if key == "model.path" else [])])
        (room / "closed").chmod(0o000)
        with unprivileged(), pytest.raises(ConfigError) as caught:
            check(config, 0)
        assert str(caught.value) == f"{key}={name!r}: cannot be read: {why}"


def test_data_that_may_not_be_read_is_not_left_out(room: Path) -> None:
    texts = room / "texts"
    (texts / "more").mkdir(parents=True)
    for name in ("a.txt", "more/b.txt"):
        (texts / name).write_text(name)
    assert len(read_documents(str(texts))) == 2
    for hidden in ("a.txt", "more"):
        (texts / hidden).chmod(0o000)
        with unprivileged(), pytest.raises(ConfigError) as caught:
            read_documents(str(texts))
        assert str(caught.value) == f"data.source='{texts}': {texts / hidden} cannot be read: Permission denied"
        (texts / hidden).chmod(0o755)
    assert len(find_files(str(texts))) == 2


def test_directories_that_may_not_be_read(room: Path) -> None:
    run = RunDirectory(room / "run")
    run.path.mkdir(mode=0o000)
    with unprivileged():
        with pytest.raises(ConfigError, match=f"cannot read the run directory {run.path}: Permission denied"):
            _ = run.is_finished
        with pytest.raises(ConfigError, match=f"cannot write the run directory {run.path}: Permission denied"):
            run.begin(load(room / "tiny.toml"))
        with pytest.raises(ConfigError, match=f"cannot write the run directory {run.path}: Permission denied"):
            claimed(run.path, print).__enter__()
        with pytest.raises(ConfigError, match=r"data\.tokenizer=.* cannot be read: Permission denied"):
            load_tokenizer(f"{run.path}/tokenizer")


def test_more_ranks_than_memory_has_room_for_are_not_started(room: Path) -> None:
    with pytest.raises(MeshError, match=r"parallel\.ranks=1000000: a CPU rank needs 200 MiB .*; use fewer ranks"):
        check(load(room / "tiny.toml", ["parallel.ranks=1000000"]), 0)


def test_hardware_that_plans_are_to_take_is_looked_for_whatever_the_strategy(room: Path) -> None:
    check(load(room / "tiny.toml", ["parallel.hardware=h100-sxm-80gb"]), 0)
    with pytest.raises(PlanError, match="unknown device 'h101'"):
        check(load(room / "tiny.toml", ["parallel.hardware=h101"]), 0)


def test_names_of_a_hub_have_two_parts(room: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer='gpt2': no such file or directory; a model on a hub is named org/name"
    ):
        check(load(room / "tiny.toml", ["data.tokenizer=gpt2"]), 0)


def test_a_rank_may_see_its_own_gpu_alone() -> None:
    with pytest.raises(MeshError, match=r"parallel\.ranks=4, but this machine has 1 GPU;"):
        check_devices(4, 1)  # a launcher sees all that its ranks will
    check_devices_of_rank(4, 1)
    for gpus in (0, 4, 8):
        check_devices_of_rank(4, gpus)
    with pytest.raises(MeshError, match="this machine has 3 GPUs"):
        check_devices_of_rank(4, 3)


def test_an_adapter_needs_peft(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == "peft" else object())
    check(load(room / "tiny.toml"), 0)
    with pytest.raises(
        ConfigError, match=r"^lora\.r=4 needs PEFT, which is not installed: pip install 'shardwise\[peft\]'$"
    ):
        check(load(room / "tiny.toml", ["lora.r=4"]), 0)
