"""docs/read-the-engine.md gives the sizes as they are and names only what exists. Links of all pages lead somewhere."""

import ast
import re
from pathlib import Path

import pytest

from tools.closure import closure, lines_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "read-the-engine.md"

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
TEXT = PAGE.read_text(encoding="utf-8")
FILES = [(PAGE.parent / link).resolve() for link in re.findall(r"\]\((\.\./src/[^)]+\.py)\)", TEXT)]
NAMES = sorted(set(re.findall(r"`([A-Z]\w*\.\w+)`", TEXT)))


def definitions_in(path: Path) -> set[str]:
    """Return the names of a file's classes, and of their methods as Class.name."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_every_file_is_there_once() -> None:
    assert FILES
    assert [path for path in FILES if not path.is_file()] == []
    assert len(set(FILES)) == len(FILES)


def test_the_files_are_closed_and_as_large_as_the_page_says() -> None:
    """The page links every file that one of them imports, and gives the engine's lines within a fiftieth."""
    assert [path for path in closure(FILES) if path not in FILES and path.name != "__init__.py"] == []
    match = re.search(r"([\d,]+) lines with their docstrings, in (\d+) files", TEXT)
    assert match is not None
    engine = [path for path in FILES if path.parent.name == "fsdp"]
    assert len(engine) == int(match[2])
    assert lines_of(engine) == pytest.approx(int(match[1].replace(",", "")), rel=0.02)


def test_the_closure_follows_lazy_imports_and_leaves_out_those_of_type_checkers(tmp_path: Path) -> None:
    package = tmp_path / "one"
    (package / "inner").mkdir(parents=True)
    texts = {
        "start.py": "import typing\nfrom one.inner import first\n"
        "if typing.TYPE_CHECKING:\n    from one import unread\n",
        "inner/__init__.py": "",
        "inner/first.py": "def late() -> None:\n    import one.second\n",
        "second.py": "from one.inner.first import late\n",
        "unread.py": "",
        "alone.py": "",
        "__init__.py": "from one import alone\n",
    }
    for name, text in texts.items():
        (package / name).write_text(text)
    found = closure([package / "start.py"], tmp_path, "one")
    assert [str(path.relative_to(package)) for path in found] == [
        "inner/__init__.py",
        "inner/first.py",
        "second.py",
        "start.py",
    ]
    assert lines_of(found) == 7


@pytest.mark.parametrize("name", NAMES)
def test_what_it_names_is_in_its_files(name: str) -> None:
    assert name in set().union(*map(definitions_in, FILES))


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors_of(target))):
            dead.append(link)
    assert dead == []
