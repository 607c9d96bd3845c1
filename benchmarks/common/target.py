"""A target: a measured value beside the bound it must keep, printed as PASS or MISSED."""

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Target:
    """One claim. `value` must not exceed `bound`; `detail` shows the numbers behind it."""

    name: str
    value: float
    bound: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.value <= self.bound  # a NaN is a miss

    def __str__(self) -> str:
        verdict = "PASS  " if self.passed else "MISSED"
        detail = f"   ({self.detail})" if self.detail else ""
        return f"{verdict} {self.name}: {self.value:.4g} (at most {self.bound:.4g}){detail}"


def paired_ratio(name: str, ours: list[float], theirs: list[float], bound: float) -> Target:
    """Compare two engines round by round: the median of the rounds' ratios against the bound."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    detail = "rounds: " + ", ".join(f"{ratio:.3f}" for ratio in ratios)
    return Target(name, median(ratios), bound, detail)
