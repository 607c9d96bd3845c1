"""The display of progress."""

import sys

import pytest

from shardwise.cli.progress import Progress


@pytest.mark.parametrize(("terminal", "wanted"), [(True, True), (True, False), (False, True)])
def test_it_is_for_terminals_and_leaves_no_trace(
    terminal: bool, wanted: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    progress = Progress("{} of {}".format, wanted)
    progress(1, 2)
    progress(2, 2)  # too soon to draw again
    progress.end()
    assert capsys.readouterr().err == ("\r1 of 2\r      \r" if terminal and wanted else "")
