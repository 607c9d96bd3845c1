"""The settings of another library's configuration in shardwise's terms, with those that differ or are missing here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ForeignSettings:
    """Settings that are filled in while a file is read. None: the file does not say, or says "auto"."""

    library: str
    """Name of the library whose configuration it is."""
    strategy: str | None = None
    shard_group: int | None = None
    reshard_after_forward: int | None = None
    """Number of ranks of the secondary shards."""
    units: list[str] | int | None = None
    """Names of module classes, or the least number of parameters of a unit."""
    compute: str | None = None
    """The dtype of forward and backward: "fp32", "bf16" or "fp16"; weights are updated in fp32."""
    reduce: str | None = None
    """The dtype in which gradients are summed."""
    offload: dict[str, str] = field(default_factory=dict)
    """Keys and values of the section `[offload]`."""
    ranks: int | None = None
    """Number of ranks on all nodes together."""
    nodes: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    train: dict[str, Any] = field(default_factory=dict)
    """Other keys and values of the section `[train]`."""
    log: dict[str, Any] = field(default_factory=dict)
    """Keys and values of the section `[log]`."""
    changes: list[str] = field(default_factory=list)
    """Sentences about what shardwise does differently."""
    without_equal: list[str] = field(default_factory=list)
    """Settings that shardwise has no counterpart for, and which are omitted."""
    without_effect: list[str] = field(default_factory=list)
    """Names of keys that shardwise does not need, because the engine decides such things itself."""
    open: list[str] = field(default_factory=list)
    """Names of keys that are "auto": the program that uses the file fills them in."""

    def offload_to(self, place: str, part: str, path: str | None = None) -> None:
        """Record that parameters ("params"), reduced gradients ("gradients") or optimizer state ("optimizer") are
        offloaded to a place: "cpu", or "nvme" in the directory `path`."""
        if place == "nvme" and path is None:
            self.without_equal.append(f"offload of {part} to nvme without a path")
            return
        self.offload[part] = place
        if place == "nvme":
            assert path is not None
            self.offload["path"] = path
        if part == "optimizer":
            self.changes.append("optimizer steps run on the device, which loads the optimizer state for the step")

    @property
    def tree(self) -> dict[str, dict[str, Any]]:
        """The keys of a training configuration that the settings determine, by section."""
        parallel = {
            "ranks": self.ranks if self.nodes in {None, 1} else None,
            "strategy": self.strategy,
            "shard_group": self.shard_group,
            "reshard_after_forward": self.reshard_after_forward,
            "units": self.units,
            "param_dtype": self.compute,
            "reduce_dtype": self.reduce,
        }
        train = {**self.train, "micro_batch": self.micro_batch, "global_batch": self.whole_batch}
        return {
            "train": {key: value for key, value in train.items() if value is not None},
            "parallel": {key: value for key, value in parallel.items() if value is not None},
            "offload": self.offload,
            "log": self.log,
        }

    @property
    def whole_batch(self) -> int | None:
        """Sequences of a step over all ranks; None if the settings do not determine it."""
        if self.global_batch is not None or self.micro_batch is None or self.ranks is None:
            return self.global_batch
        return self.micro_batch * (self.accumulation or 1) * self.ranks

    @property
    def steps_accumulated(self) -> int | None:
        """Micro-batches of a step; None if the settings do not determine it."""
        if self.accumulation is not None or None in {self.global_batch, self.micro_batch, self.ranks}:
            return self.accumulation
        assert self.global_batch is not None
        assert self.micro_batch is not None
        assert self.ranks is not None
        return max(1, self.global_batch // (self.micro_batch * self.ranks))
