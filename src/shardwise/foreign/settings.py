"""The settings of another library's configuration in shardwise's terms, with those that differ or are missing here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _sections() -> dict[str, dict[str, Any]]:
    return {"train": {}, "parallel": {}, "offload": {}, "log": {}}


@dataclass
class ForeignSettings:
    """Settings that are filled in while a file is read."""

    library: str
    """Name of the library whose configuration it is."""
    tree: dict[str, dict[str, Any]] = field(default_factory=_sections)
    """Keys of a training configuration with their values, by section; those that the file does not set are missing."""
    ranks: int | None = None
    """Number of ranks on all nodes together."""
    nodes: int | None = None
    accumulation: int | None = None
    changes: list[str] = field(default_factory=list)
    """Sentences about what shardwise does differently."""
    without_equal: list[str] = field(default_factory=list)
    """Settings that shardwise has no counterpart for, and which are omitted."""
    without_effect: list[str] = field(default_factory=list)
    """Names of keys that shardwise does not need, because the engine decides such things itself."""
    open: list[str] = field(default_factory=list)
    """Names of keys that are "auto": the program that uses the file fills them in."""

    def set(self, key: str, value: Any) -> None:
        """Set a key such as "train.lr"; None leaves it as it is."""
        section, name = key.split(".")
        if value is not None:
            self.tree[section][name] = value

    def get(self, key: str) -> Any:
        """Return the value of a key such as "train.lr"; None if it is missing."""
        section, name = key.split(".")
        return self.tree[section].get(name)

    def offload(self, place: str, part: str, path: str | None = None) -> None:
        """Record that parameters ("params"), reduced gradients ("gradients") or optimizer state ("optimizer") are
        offloaded to a place: "cpu", or "nvme" in the directory `path`."""
        if place == "nvme" and path is None:
            self.without_equal.append(f"offload of {part} to nvme without a path")
            return
        self.set(f"offload.{part}", place)
        self.set("offload.path", path if place == "nvme" else None)
        if part == "optimizer":
            self.changes.append("optimizer steps run on the device, which loads the optimizer state for the step")

    @property
    def whole_batch(self) -> int | None:
        """Sequences of a step over all ranks; None if the settings do not determine it."""
        batch, micro_batch = self.get("train.global_batch"), self.get("train.micro_batch")
        if batch is None and micro_batch is not None and self.ranks is not None:
            batch = micro_batch * (self.accumulation or 1) * self.ranks
        return None if batch is None else int(batch)

    @property
    def steps_accumulated(self) -> int | None:
        """Micro-batches of a step; None if the settings do not determine it."""
        batch, micro_batch = self.get("train.global_batch"), self.get("train.micro_batch")
        if self.accumulation is not None or None in {batch, micro_batch, self.ranks}:
            return self.accumulation
        steps: int = batch // (micro_batch * self.ranks)
        return max(1, steps)
