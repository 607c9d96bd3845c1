"""From a configuration of another library to one of shardwise."""

from __future__ import annotations

from pathlib import Path

from shardwise.foreign.settings import ForeignSettings
from shardwise.toml_text import toml_text
from shardwise.train.config.files import config_of
from shardwise.train.config.schema import UNSET

STEPS = 1000
"""`train.steps` in a written configuration if the other library's file does not give it."""


def configuration_of(settings: ForeignSettings, source: Path) -> str:
    """Return TOML text for `shardwise train`. It has only the keys that the file decides and those that the user must
    set.

    Args:
        settings: the settings read from the file.
        source: the file, to name it in the text.

    Raises ConfigError: a value is not allowed in a shardwise configuration.
    """
    tree = {"model": {"path": UNSET}, "data": {"source": UNSET}, **settings.tree}
    tree["train"] = {"steps": STEPS, **tree["train"]}
    if settings.whole_batch is not None:
        tree["train"]["global_batch"] = settings.whole_batch
    if settings.ranks is not None and settings.nodes in {None, 1}:
        tree["parallel"] = {"ranks": settings.ranks, **tree["parallel"]}
    tree = {section: keys for section, keys in tree.items() if keys}
    config_of({**tree, "log": {"name": "foreign", **settings.tree["log"]}}, source)
    return "".join(f"# {line}\n" for line in [f"From {source}.", *notes(settings)]) + "\n" + toml_text(tree)


def notes(settings: ForeignSettings) -> list[str]:
    """Return one line for each thing that the user must set, that differs, that has no counterpart, has no effect or
    was "auto"."""
    set_by_user = ["model.path", "data.source"]
    if settings.get("train.steps") is None:
        set_by_user.append("train.steps")
    lines = [f"To set: {', '.join(set_by_user)}."]
    if settings.accumulation is not None and settings.whole_batch is None:
        lines.append(
            f"To set: train.global_batch = {settings.accumulation} (accumulation) x train.micro_batch x ranks."
        )
    if settings.nodes is not None and settings.nodes > 1:
        lines.append(
            f"{settings.ranks} ranks on {settings.nodes} nodes: start `shardwise train` with torchrun on each."
        )
    lines += [f"Different: {change}." for change in settings.changes]
    lines += [f"No counterpart: {name}." for name in settings.without_equal]
    if settings.without_effect:
        lines.append(f"Without effect, because the engine needs no such setting: {', '.join(settings.without_effect)}.")
    if settings.open:
        lines.append(f"Left to the program there (auto), and to our defaults here: {', '.join(settings.open)}.")
    return lines
