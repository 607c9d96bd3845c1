"""Self-contained HTML pages with one look: of plans, of runs, of what XLA compiled. Imports no torch.

A page asks the network for nothing, is readable on a phone, and is dark where its reader's system is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from shardwise.errors import UserError

COLOURS = {
    "param_shards": "#1f5a9e",
    "gathered_slots": "#6ba4dc",
    "grad_shards": "#b3541e",
    "reduce_slots": "#f0a060",
    "optimizer": "#5b8c3a",
    "buffers": "#9a7fc0",
    "activations": "#d4b106",
    "temporaries": "#c26a8d",
    "other": "#8c8c8c",
    "fragmentation": "#c9c9c9",
    "context": "#6a6a6a",
    "nccl": "#707a86",
}
"""Colours by kind of memory, the same on every page."""
WAITING = "waiting"
PHASES = {
    "forward": "#3b7dd8",
    "backward": "#d9772b",
    "recompute": "#e3b341",
    "optimizer": "#4b9c5a",
    WAITING: "#d64545",
}
"""Colours of a timeline by phase of the step."""
OTHER = "#8a8f98"
"""Colour of whatever is in no phase."""


def filled(template: str, filters: Mapping[str, Callable[..., object]] | None = None, **contents: object) -> str:
    """Return a page: a template of `templates` with its contents filled in.

    Args:
        template: the file's name.
        filters: functions for the template, by name.
        contents: values for the template, by name. They are escaped.

    Raises:
        UserError: jinja2, of the extra `train`, is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise UserError("writing the page needs jinja2, which is not installed: pip install 'shardwise[cli]'") from None
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("shardwise.pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters.update(filters or {})
    return environment.get_template(template).render(contents)


def write_page(html: str, path: Path) -> None:
    """Write a page. Raises UserError if the file cannot be written."""
    try:
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
