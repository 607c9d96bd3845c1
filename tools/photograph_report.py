"""Photograph the report of a run for docs/reports.md: beside another run, on a phone, in dark mode.

`python tools/photograph_report.py runs/quickstart runs/short` writes report-beside.png, report-phone.png and
report-dark.png into docs/pictures, with chromium and Pillow. The runs are `shardwise train quickstart`, and the same
with `log.name=short train.steps=100`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageChops

from shardwise.train.report.page import page_html
from shardwise.train.report.run_log import RunLog

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
COLOURS = 128
TALLEST = 8000
"""Pixels of the window, which no page fills."""
EMPTY = "#010203"
"""Behind the page, a colour that is not in it."""
FRAME = """<body style="margin:0;background:{empty}"><iframe id="f" src="page.html" width="{width}" height="800"
style="border:0;display:block"></iframe><script>addEventListener("load", () => {{
const f = document.getElementById("f"); f.height = f.contentDocument.documentElement.scrollHeight; }});</script>"""
"""A headless window is never narrower than 500 pixels; a frame in it is."""


@dataclass(frozen=True)
class Photograph:
    """How a page is photographed; sizes in CSS pixels."""

    name: str
    width: int
    height: int
    """Of what is kept, from the top."""
    dark: bool = False
    beside: bool = False
    scale: int = 1
    """Pixels for each CSS pixel."""


PHOTOGRAPHS = (
    Photograph("report-beside", 1180, 1700, beside=True),
    Photograph("report-phone", 390, 1500),
    Photograph("report-dark", 1180, 1300, dark=True),
)


def photograph(page: str, how: Photograph, path: Path) -> None:
    """Write what chromium shows of a page, in few colours.

    Raises:
        FileNotFoundError: there is no chromium.
    """
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise FileNotFoundError("chromium is not installed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "page.html").write_text(page, encoding="utf-8")
        (folder / "frame.html").write_text(FRAME.format(width=how.width, empty=EMPTY), encoding="utf-8")
        subprocess.run(
            [
                chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}",
                f"--force-device-scale-factor={how.scale}", f"--window-size={max(how.width, 500)},{TALLEST}",
                f"--blink-settings=preferredColorScheme={0 if how.dark else 1}", "--virtual-time-budget=20000",
                f"--screenshot={folder / 'shot.png'}", (folder / "frame.html").as_uri(),
            ],
            check=True, capture_output=True, timeout=300, env={**os.environ, "HOME": name},
        )  # fmt: skip
        with Image.open(folder / "shot.png") as shot:
            image = shot.convert("RGB")
    page_at = ImageChops.difference(image, Image.new("RGB", image.size, EMPTY)).getbbox()
    assert page_at is not None
    left, top, right, bottom = page_at
    image = image.crop((left, top, right, min(bottom, top + how.scale * how.height)))
    image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """Write the three pictures of the runs that the command names."""
    run, other = (RunLog.read(Path(name)) for name in sys.argv[1:3])
    for how in PHOTOGRAPHS:
        path = PICTURES / f"{how.name}.png"
        photograph(page_html(run, other if how.beside else None), how, path)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
