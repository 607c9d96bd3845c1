"""Write the table in docs/reading-time.md: what to read for each job, its words, and minutes at 220 words a minute.

python tools/reading_time.py

Code, tables and output count like other words; comments of Markdown and addresses of links do not.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "reading-time.md"
MARKED = re.compile(r"(?<=<!-- jobs: tools/reading_time.py -->\n).*?(?=<!-- end of jobs -->)", re.DOTALL)
"""The table in the page."""
WORDS_A_MINUTE = 220
JOBS = {
    "train the quickstart, and see how it went": ("../README.md", "reports.md"),
    "learn what shardwise does, by running it": ("tutorial.md",),
    "shard a script of your own": ("scripts.md", "checkpoints.md"),
    "fit a larger model": ("memory.md", "precision.md"),
    "fine-tune on rows of your own": ("configs.md", "data.md"),
    "train a classifier, a tagger, a model of pictures": ("configs.md", "tasks.md"),
    "plan a model before you rent": ("planning.md",),
    "train on several machines": ("hosts.md", "reliability.md"),
    "move from FSDP2": ("fsdp2.md",),
    "keep transformers' Trainer, Accelerate or Lightning": ("integrations.md",),
    "let a model answer, and serve it": ("generate.md", "serving.md"),
    "export to ONNX": ("export.md",),
    "train in JAX": ("jax.md",),
    "understand an error": ("failures.md", "doctor.md"),
    "decide whether it is for you": ("../README.md", "compare.md", "figures.md"),
    "understand the engine": ("read-the-engine.md", "glossary.md", "design/engine.md"),
}
"""Pages of each job, in the order in which to read them."""


def words_of(page: Path) -> int:
    """Count the words of a page."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return len(re.findall(r"\S*\w\S*", re.sub(r"\]\([^)\s]*\)", "]", text)))


def table() -> str:
    """Return the table as Markdown, a row for each job."""
    lines = ["| to | read | words | minutes |\n|---|---|---|---|\n"]  # minutes are rounded up
    for job, pages in JOBS.items():
        words = sum(words_of(DOCS / page) for page in pages)
        links = ", ".join(f"[{Path(page).stem}]({page})" for page in pages)
        lines.append(f"| {job} | {links} | {words:,} | {-(-words // WORDS_A_MINUTE)} |\n")
    return "".join(lines)


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(MARKED.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
