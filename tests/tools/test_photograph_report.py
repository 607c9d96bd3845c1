"""A report is photographed as wide as it was asked for, light or dark, in few bytes."""

from pathlib import Path

import pytest
from PIL import Image

from shardwise.train.report.page import page_html
from shardwise.train.report.run_log import RunLog
from tests.browser import in_browser
from tests.train.report.rig import made_up, rows
from tools.photograph_report import PHOTOGRAPHS, PICTURES, Photograph, photograph

MOST_BYTES = 250_000


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [Photograph("phone", 390, 700), Photograph("dark", 800, 500, dark=True)], ids=lambda how: how.name
)
def test_a_photograph_is_of_the_page_alone(how: Photograph, tmp_path: Path) -> None:
    page = page_html(RunLog.read(made_up(tmp_path / "run", rows(30), ((15, 3.0), (30, 2.5)))))
    photograph(page, how, tmp_path / "shot.png")
    with Image.open(tmp_path / "shot.png") as shot:
        assert shot.size == (how.width, how.height)
        colours = shot.convert("RGB").getcolors(256)
    assert colours is not None
    _, paper = max(colours)
    assert (sum(paper) < 200) == how.dark
    assert any(red > 200 and 90 < green < 150 and blue < 80 for _, (red, green, blue) in colours)  # the held-out loss


@pytest.mark.parametrize("how", PHOTOGRAPHS, ids=lambda how: how.name)
def test_pictures_of_the_page_are_small(how: Photograph) -> None:
    path = PICTURES / f"{how.name}.png"
    assert path.stat().st_size < MOST_BYTES
    with Image.open(path) as picture:
        assert picture.width == how.width
