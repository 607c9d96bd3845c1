from contextlib import suppress
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.train.config.files import load
from shardwise.train.run.directory import RunDirectory


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text('[model]\nconfig = {model_type = "llama"}\n[train]\nsteps = 3\n')
    return path


def test_the_configuration_is_written_and_gives_the_same_run(tmp_path: Path, config_file: Path) -> None:
    config = load(config_file).for_ranks(2)
    directory = RunDirectory(tmp_path / "run")
    assert directory.begin(config) is False
    assert load(directory.config) == config


def test_what_an_unfinished_run_left_is_dropped(tmp_path: Path, config_file: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.begin(load(config_file))
    directory.metrics.write_text("{}\n")
    assert directory.begin(load(config_file)) is True
    assert not directory.metrics.exists()


@pytest.mark.parametrize("damaged", [b"\0\0\0\0", b"[1]", b'{"loss": 1}', b"\xff{}", b'{"step": 2'])
def test_a_damaged_log_is_named_with_its_line(tmp_path: Path, config_file: Path, damaged: bytes) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.begin(load(config_file))
    directory.metrics.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n{"st')
    before = directory.metrics.read_bytes()
    with pytest.raises(
        ConfigError, match=r"run/metrics\.jsonl, line 2: is not a JSON object with a step .*remove the line"
    ):
        directory.begin(load(config_file), steps=2)
    assert directory.metrics.read_bytes() == before
    directory.metrics.write_bytes(before.replace(damaged, b'{"step": 2}'))
    directory.begin(load(config_file), steps=2)
    assert directory.metrics.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_final_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with suppress(OSError), directory.writing_final() as partial:
        (partial / "half").touch()
        raise OSError("disk full")
    assert not directory.is_finished
    with directory.writing_final() as partial:
        assert not (partial / "half").exists()
        (partial / "model").touch()
        assert not directory.is_finished
    assert directory.is_finished
    assert (directory.final / "model").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path, config_file: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write the run directory"):
        RunDirectory(tmp_path / "file" / "run").begin(load(config_file))
