"""A job: one engine trained once by a set of fresh processes, and what each rank reports of it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.gpt import GPTShape

LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Job:
    """What one set of processes shall do."""

    engine: str
    shape: GPTShape = field(default_factory=GPTShape)
    ranks: int = 2
    batch: int = 2
    steps: int = 10
    warmup: int = 2
    strategy: str = "full_shard"
    count_bytes: bool = False
    """Count bytes instead of taking times; one job does one or the other."""
    threads: int = 1
    seed: int = 0
    checkout: str | None = None
    """Another checkout of this repository, whose shardwise is imported in place of this one's."""

    def __post_init__(self) -> None:
        if self.warmup < 1 or self.steps < 1:
            raise ValueError(f"steps ({self.steps}) and warmup ({self.warmup}) must be at least 1")

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Job":
        fields = json.loads(path.read_text())
        return cls(**{**fields, "shape": GPTShape(**fields["shape"])})


@dataclass
class RankReport:
    """What one rank measured; the first `warmup` steps are in `losses` and nowhere else."""

    rank: int
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0
    sent_bytes: list[float] = field(default_factory=list)
    sent_calls: dict[str, int] = field(default_factory=dict)
    loopback_bytes: list[int] = field(default_factory=list)
    """Bytes that all ranks together put on the loopback interface, by step; rank 0 only."""
    settings: dict[str, Any] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        (directory / f"rank-{self.rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, directory: Path, rank: int) -> "RankReport":
        return cls(**json.loads((directory / f"rank-{rank}.json").read_text()))


def error_path(directory: Path, rank: int) -> Path:
    """Where a rank that fails leaves its traceback."""
    return directory / f"rank-{rank}.error"
