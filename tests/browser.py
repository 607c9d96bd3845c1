"""Pages in a headless chromium, where there is one: what a script in the page finds, and what the console says."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine; .ci/run installs it where it can"
)


def opened(page: str, script: str, folder: Path, width: int = 1280, dark: bool = False) -> dict[str, Any]:
    """Open a page, and return what `script` finds there: the body of an async function, run when the page has loaded.
    The result also has "console", the lines that the browser logged.

    The page is in a frame, because a headless window is never narrower than 500 pixels.
    """
    assert CHROMIUM is not None
    finder = f"<script>addEventListener('load', async () => {{ window.found = await (async () => {{{script}}})(); }});"
    (folder / "inner.html").write_text(page.replace("</body>", finder + "</script></body>"), encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(
        f'<iframe id="f" src="inner.html" width="{width}" height="3000" style="border:0"></iframe><script>'
        'const f = document.getElementById("f"); const wait = () => { const found = f.contentWindow.found;'
        "if (!found) return setTimeout(wait, 50); const p = document.createElement('pre'); p.id = 'found';"
        "p.textContent = JSON.stringify(found); document.body.append(p); };"
        'addEventListener("load", wait);</script>'
    )
    ended = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
            f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", frame.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    match = re.search(r'<pre id="found">(.*?)</pre>', ended.stdout, re.DOTALL)
    assert match is not None, ended.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(match[1]))
    return {**found, "console": [line for line in ended.stderr.splitlines() if "CONSOLE" in line]}
