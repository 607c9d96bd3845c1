"""Run the commands in docs/examples.md, or in docs/tutorial.md, and write their output below them.

python tools/run_examples.py [HEADING ...]
python tools/run_examples.py tutorial

Without headings it runs every section of docs/examples.md, which takes half an hour on two CPU cores. Commands run in
an empty directory that has a link to examples/; those of the tutorial all in one, with its files.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, TUTORIAL = ROOT / "docs" / "examples.md", ROOT / "docs" / "tutorial.md"
_HEADING = re.compile(r"^## ([^\n]*)\n", re.MULTILINE)
_SHOWN = re.compile(r"^```\n([^`]*?)^```\n\n^```(text|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""Commands, and their output below them."""


@dataclass(frozen=True, slots=True)
class Example:
    """Commands of the page."""

    commands: str
    output: str
    is_diff: bool
    """Whether they compare files, instead of running them."""


def examples(page: Path = PAGE) -> dict[str, list[Example]]:
    """Return a page's commands with what it shows of their output, by the heading above them."""
    _, *parts = _HEADING.split(page.read_text(encoding="utf-8"))
    sections = zip(parts[::2], parts[1::2], strict=True)
    return {
        heading: [Example(commands, output, kind == "diff") for commands, kind, output in _SHOWN.findall(section)]
        for heading, section in sections
    }


def environment() -> dict[str, str]:
    """Return the variables that commands run with: the sources of this tree, this Python's commands, one thread."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def furnish(directory: Path) -> None:
    """Link what commands name into a directory."""
    (directory / "examples").symlink_to(ROOT / "examples")


def write_files_of_the_tutorial(directory: Path) -> None:
    """Write the data and the configuration that the tutorial shows."""
    text = TUTORIAL.read_text(encoding="utf-8")
    for name, language in (("capitals.jsonl", "json"), ("capitals.toml", "toml")):
        [shown] = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        (directory / name).write_text(shown, encoding="utf-8")


def output_of(commands: str, directory: Path | None = None) -> str:
    """Run commands, in an empty directory unless one is given, and return what they print.

    Raises CalledProcessError if one fails.
    """
    with tempfile.TemporaryDirectory() as empty:
        if directory is None:
            furnish(directory := Path(empty))
        script = ["bash", "-euc", commands]
        done = subprocess.run(script, cwd=directory, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    printed = done.stdout.replace(f"{directory}/", "")
    return "".join(f"{line.rstrip()}\n" for line in printed.splitlines())


def main() -> None:
    """Write the output of the sections that the command line names, or of all, into the page."""
    if sys.argv[1:] == ["tutorial"]:
        with tempfile.TemporaryDirectory() as name:
            furnish(directory := Path(name))
            write_files_of_the_tutorial(directory)
            for section in examples(TUTORIAL).values():
                for example in section:
                    _replace(TUTORIAL, example, output_of(example.commands, directory))
        return
    for heading in sys.argv[1:] or examples():
        for example in examples()[heading]:
            _replace(PAGE, example, output_of(example.commands))


def _replace(page: Path, example: Example, output: str) -> None:
    """Write another output below commands of a page."""
    kind = "diff" if example.is_diff else "text"
    old, new = (f"{example.commands}```\n\n```{kind}\n{shown}```" for shown in (example.output, output))
    text = page.read_text(encoding="utf-8")
    assert text.count(old) == 1
    page.write_text(text.replace(old, new), encoding="utf-8")


if __name__ == "__main__":
    main()
