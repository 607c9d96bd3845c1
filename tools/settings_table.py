"""Write the table of settings in docs/settings.md, from their description in `shardwise.policy.settings`.

python tools/settings_table.py
"""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.policy.settings import ARGUMENTS, RUN

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
MARKED = re.compile(r"(?<=<!-- settings: tools/settings_table.py -->\n).*?(?=<!-- end of settings -->)", re.DOTALL)
"""The table in the page."""
_HEAD = ("setting", "what it is", "if left out", "`sw.shard`", "in a configuration", "`shardwise plan`")


def table() -> str:
    """Return the table as Markdown, a row for each setting; an empty cell where a setting cannot be given."""
    described = {**ARGUMENTS, **RUN}
    rows = [
        (
            f"`{name}`",
            one.help,
            one.otherwise,
            f"`{name}=`" * (name in ARGUMENTS),
            f"`{one.key}`" if one.key else _SECTIONS.get(name, ""),
            f"`{one.option}`" if name in RUN else "",
        )
        for name, one in described.items()
    ]
    lines = [_HEAD, ("---",) * len(_HEAD), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


_SECTIONS = {
    "precision": "`parallel.param_dtype`, `parallel.reduce_dtype`, `model.dtype`",
    "offload": "`[offload]`",
    "lora": "`[lora]`",
    "accumulation": "`train.global_batch`",
}
"""Keys that have a part of a setting's value, or one that it follows from."""


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(MARKED.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
