"""The site is built without a warning, its links lead somewhere, and a browser finds nothing to ask other hosts for."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import shardwise as sw

pytest.importorskip("mkdocs", reason="the extra docs is not installed")
pytest.importorskip("material", reason="the extra docs is not installed")

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src")}
"""Attributes whose address a browser asks for by itself."""
pytestmark = pytest.mark.slow


class Links(HTMLParser):
    """What a page links, what it loads, and where it can be linked to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.linked: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        for name, value in given.items():
            if not value or value.startswith("data:"):
                continue
            if (tag, name) in LOADED and given.get("rel") != "canonical":
                self.loaded.append(value)
            elif (tag, name) == ("a", "href"):
                self.linked.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(place)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search("WARNING|ERROR", done.stdout + done.stderr), done.stderr
    return place


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    found = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(found) > 50
    return found


def test_every_link_and_anchor_is_in_the_site(site: Path, pages: dict[Path, Links]) -> None:
    dead = []
    for page, links in pages.items():
        for link in links.linked + links.loaded:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            known = target.is_relative_to(site) and target.exists()
            if known and parts.fragment and target in pages:
                known = unquote(parts.fragment) in pages[target].anchors
            if not known:
                dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Links]) -> None:
    assert {link for links in pages.values() for link in links.loaded if urlsplit(link).netloc} == set()


def test_every_public_name_has_its_place_in_the_reference(pages: dict[Path, Links], site: Path) -> None:
    anchors = pages[site / "api" / "index.html"].anchors
    packages = {"shardwise": sw, **{f"shardwise.{name}": getattr(sw, name) for name in ("checkpoint", "optim", "plan")}}
    modules = {"__version__", "checkpoint", "optim", "plan"}
    names = {
        f"{place}.{name}" for place, package in packages.items() for name in package.__all__ if name not in modules
    }
    again = {"shardwise.optim.GradScaler", "shardwise.optim.clip_grad_norm_"}  # under their short names
    assert names - again - anchors == set()


def test_llms_txt_lists_the_pages_and_their_markdown(site: Path) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# shardwise\n\n> ")
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", text, re.MULTILINE)
    assert {"tutorial.md", "compare.md", "design/engine.md", "skill/SKILL.md"} <= {*listed}
    assert [name for name in listed if not (site / name).read_text(encoding="utf-8")] == []


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *said: object) -> None:
        """Say nothing."""


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine; .ci/run installs it where it can")
@pytest.mark.parametrize("page", ["", "tutorial/", "compare/", "api/", "?q=offload"])
def test_a_browser_reports_no_error_and_asks_no_other_host(page: str, address: str, tmp_path: Path) -> None:
    """The last one is a search, for which a worker loads its index."""
    log = tmp_path / "net.json"
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            f"--log-net-log={log}",
            "--virtual-time-budget=5000",
            "--dump-dom",
            f"{address}/{page}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "md-content" in done.stdout
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    lines = log.read_text(encoding="utf-8").splitlines()
    requests = [json.loads(line.rstrip(","))["params"] for line in lines if line.startswith('{"params":{"initiator":')]
    by_the_page = [request for request in requests if request["initiator"] == address]  # the browser asks its maker too
    asked = {urlsplit(request["url"]) for request in by_the_page}
    assert any(url.path.endswith(".css") for url in asked), "the log names what was loaded"
    assert {url.netloc for url in asked} == {urlsplit(address).netloc}
    if page.startswith("?q"):
        assert "search_index.json" in {Path(url.path).name for url in asked}


def test_the_index_of_the_search_has_the_guide_and_not_the_sources(site: Path) -> None:
    places = {entry["location"] for entry in json.loads((site / "search" / "search_index.json").read_text())["docs"]}
    assert any(place.startswith("memory/#offload") for place in places)
    assert not any(place.startswith("source/") for place in places)
