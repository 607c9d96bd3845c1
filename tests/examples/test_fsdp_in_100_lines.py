"""The teaching engine: its size, what it imports, and that it trains as DDP does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.rig import EXAMPLES, assert_shown, lines_of_code, torchrun

FILE = EXAMPLES / "fsdp_in_100_lines.py"


def test_it_is_as_short_as_its_name_and_needs_torch_alone() -> None:
    source = FILE.read_text(encoding="utf-8")
    assert lines_of_code(FILE) <= 100
    imported = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import", "from"))}
    assert imported == {"copy", "torch"}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_trains_as_ddp_does(ranks: int, tmp_path: Path) -> None:
    """To the bit where a sum of two has one order only."""
    lines = torchrun(ranks, "examples/fsdp_in_100_lines.py", tmp_path)
    assert_shown("FSDP in 100 lines", lines)
    for line in lines[:6]:
        mine, theirs = (float(word) for word in (line.split()[3].rstrip(","), line.split()[-1]))
        assert mine == pytest.approx(theirs, abs=1e-4 if ranks > 2 else 0)
    held, whole = (int(word.replace(",", "")) for word in (lines[6].split()[-4][:-1], lines[6].split()[-1]))
    assert held == pytest.approx(whole / ranks, abs=100)
    assert float(lines[7].split()[-1]) <= (1e-3 if ranks > 2 else 0)
