"""Run the commands in docs/examples.md and write their output below them.

python tools/run_examples.py [HEADING ...]

Without headings it runs every section, which takes half an hour on two CPU cores. Commands run in an empty directory
that has links to examples/ and recipes/.
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
PAGE = ROOT / "docs" / "examples.md"
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


def examples() -> dict[str, list[Example]]:
    """Return the page's commands with what it shows of their output, by the heading above them."""
    _, *parts = _HEADING.split(PAGE.read_text(encoding="utf-8"))
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
    for name in ("examples", "recipes"):
        (directory / name).symlink_to(ROOT / name)


def output_of(commands: str) -> str:
    """Run commands, and return what they print. Raises CalledProcessError if one fails."""
    with tempfile.TemporaryDirectory() as directory:
        furnish(Path(directory))
        script = ["bash", "-euc", commands]
        done = subprocess.run(script, cwd=directory, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def main() -> None:
    """Write the output of the sections that the command line names, or of all, into the page."""
    for heading in sys.argv[1:] or examples():
        for example in examples()[heading]:
            kind = "diff" if example.is_diff else "text"
            new = output_of(example.commands)
            old, new = (f"{example.commands}```\n\n```{kind}\n{output}```" for output in (example.output, new))
            text = PAGE.read_text(encoding="utf-8")
            assert text.count(old) == 1
            PAGE.write_text(text.replace(old, new), encoding="utf-8")


if __name__ == "__main__":
    main()
