"""Two processes and one run's directory."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.train.run.run_lock import NAME, claimed

RUN = Path("runs/tiny")
HOLD = """
import sys
from pathlib import Path
from shardwise.train.run.run_lock import claimed
with claimed(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def take() -> list[str]:
    """Claim the directory and release it. Returns the warnings."""
    warnings: list[str] = []
    with claimed(RUN, warnings.append):
        assert (RUN / NAME).read_text().startswith(f"process {os.getpid()} on ")
    return warnings


def test_a_living_process_is_named_and_a_killed_one_does_not_block() -> None:
    command = [sys.executable, "-c", HOLD, str(RUN)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=rf"runs/tiny is being written by process {process.pid} on .*set log\.name"):
        take()
    process.kill()
    process.communicate()
    assert (RUN / NAME).exists()
    assert take() == []


def test_a_holder_that_has_not_written_yet_is_another_process() -> None:
    RUN.mkdir(parents=True)
    with (RUN / NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="written by another process: wait for it"):
            take()
    assert take() == []


def test_reading_the_file_does_not_drop_the_lock() -> None:
    with claimed(RUN, print):
        (RUN / NAME).read_text()
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
            take()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_storage_without_locks_is_a_warning(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert take() == ["runs/tiny is on storage without locks: a second run that writes there would not be noticed"]


def test_a_directory_that_cannot_be_made_is_named() -> None:
    Path("runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot write the run directory runs/tiny: .*(Not a directory|File exists)"):
        take()


def test_what_a_link_leads_to_is_left_alone() -> None:
    RUN.mkdir(parents=True)
    Path("thesis").write_text("of years")
    (RUN / NAME).symlink_to(Path("thesis").absolute())
    with pytest.raises(ConfigError, match=r"Too many levels of symbolic links .runs/tiny/\.lock"):
        take()
    assert Path("thesis").read_text() == "of years"
