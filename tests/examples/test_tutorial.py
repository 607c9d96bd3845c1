"""Steps 1 to 4 and 6 of docs/tutorial.md print what it shows: the others need packages of the integrations' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import ROOT, blocks
from tests.examples.rig import EXAMPLES, assert_runs_as_shown, losses
from tools.run_examples import TUTORIAL, examples, furnish


def test_the_page_shows_the_scripts() -> None:
    plain, bigger = (block.text for block in blocks("docs/tutorial.md", "python")[:2])
    assert (EXAMPLES / "tutorial/plain.py").read_text(encoding="utf-8").endswith(f'"""\n\n{plain}')
    assert bigger in (EXAMPLES / "tutorial/bigger.py").read_text(encoding="utf-8")
    answer = blocks("docs/tutorial.md", "python")[-1].text
    assert (EXAMPLES / "tutorial/answer.py").read_text(encoding="utf-8").endswith(f'"""\n\n{answer}')


@pytest.mark.slow
def test_losses_of_sharded_ranks_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    furnish(tmp_path)
    plain = losses(assert_runs_as_shown(tmp_path, "1. A plain loop"))
    assert list(plain) == ["step 20", "step 40", "step 60"]
    assert losses(assert_runs_as_shown(tmp_path, "2. Sharded")) == pytest.approx(plain, abs=2e-3)


@pytest.mark.slow
def test_a_run_that_went_on_elsewhere_has_the_losses_that_the_page_shows_of_the_plain_loop(tmp_path: Path) -> None:
    furnish(tmp_path)
    [shown] = [losses(example.output.splitlines()) for example in examples(TUTORIAL)["1. A plain loop"]]
    assert losses(assert_runs_as_shown(tmp_path, "4. Resume elsewhere")) == pytest.approx(shown, abs=0.05)


@pytest.mark.slow
def test_a_rank_keeps_a_part_of_what_a_whole_model_takes(tmp_path: Path) -> None:
    furnish(tmp_path)
    lines = assert_runs_as_shown(tmp_path, "3. Bigger than memory")
    whole = float(lines[0].split(" MiB")[0].split()[-1])
    assert float(lines[-1].split()[1]) < 0.25 * whole


@pytest.mark.slow
def test_the_plan(tmp_path: Path) -> None:
    assert any(line.startswith("full_shard") for line in assert_runs_as_shown(tmp_path, "6. Plan"))


def test_this_file_and_that_of_the_integrations_run_every_step() -> None:
    run = Path(__file__).read_text(encoding="utf-8")
    run += (ROOT / "tests/integrations/test_tutorial.py").read_text(encoding="utf-8")
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    headings = [line[3:] for line in page.splitlines() if line.startswith("## ")]
    assert len(headings) == 8
    assert [heading for heading in headings if f'"{heading}"' not in run] == []
