"""Result files: a dated JSON file and the same as a markdown table."""

import datetime
import json
from pathlib import Path
from typing import Any

from benchmarks import HERE

RESULTS = HERE / "results"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a markdown table whose columns line up as plain text too."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    rule = ["-" * width for width in widths]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, rule, *rows]
    ]
    return "\n".join(f"| {line} |" for line in lines)


def facts_line(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


def write(out: str, result: dict[str, Any], markdown: str) -> Path:
    """Write `DATE-NAME.json` and `DATE-NAME.md`; a bare name goes to `benchmarks/results/`.

    Returns:
        The path of the JSON file.
    """
    target = Path(out)
    directory = RESULTS if target.parent == Path() else target.parent
    directory.mkdir(parents=True, exist_ok=True)
    today = datetime.date.today().isoformat()
    path = directory / f"{today}-{target.stem}.json"
    path.write_text(json.dumps({"date": today, **result}, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown.rstrip() + "\n")
    return path
