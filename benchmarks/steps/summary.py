"""What the jobs of one engine add up to."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.common.job import RankReport


@dataclass
class EngineSummary:
    """One engine over all rounds."""

    engine: str
    settings: dict[str, Any] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    """By round: the median over steps of the step's slowest rank."""
    steps_s: list[list[float]] = field(default_factory=list)
    """By round and step: the slowest rank's time."""
    peak_rss_bytes: list[int] = field(default_factory=list)
    """By round: the largest rank's."""
    losses: list[float] = field(default_factory=list)
    """By step, warm-up included: the mean over ranks."""
    rounds_agree: bool = True
    """Whether every round gave the same losses to the last bit."""
    sent_bytes: float | None = None
    """Per rank and step, the largest rank's, as counted at c10d."""
    sent_calls: dict[str, int] = field(default_factory=dict)
    loopback_bytes: float | None = None
    """Per rank and step: the step with the fewest on the loopback interface (other programs only add)."""

    def add_timed(self, reports: list[RankReport]) -> None:
        self.settings = reports[0].settings
        self.steps_s.append([max(step) for step in zip(*(report.step_s for report in reports), strict=True)])
        self.step_s.append(median(self.steps_s[-1]))
        self.peak_rss_bytes.append(max(report.peak_rss_bytes for report in reports))
        losses = [sum(step) / len(step) for step in zip(*(report.losses for report in reports), strict=True)]
        self.rounds_agree = self.rounds_agree and self.losses in ([], losses)
        self.losses = losses

    def add_counted(self, reports: list[RankReport]) -> None:
        self.sent_bytes = max(max(report.sent_bytes) for report in reports)
        self.sent_calls = reports[0].sent_calls
        self.loopback_bytes = min(reports[0].loopback_bytes) / len(reports)

    @property
    def loopback_ratio(self) -> float | None:
        """Loopback bytes over c10d's: headers, other traffic, what the count missed."""
        return self.loopback_bytes / self.sent_bytes if self.loopback_bytes and self.sent_bytes else None

    def loss_difference(self, reference: "EngineSummary") -> float:
        """Return the largest relative difference of any step's loss from the reference's."""
        pairs = zip(self.losses, reference.losses, strict=True)
        return max(abs(mine - other) / abs(other) for mine, other in pairs)
