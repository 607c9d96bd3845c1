"""A check whose one case fails."""

from __future__ import annotations

from benchmarks.accelerator.bench import Cases
from tests.benchmarks.gpu_checks import wrong

CASES: Cases = {"wrong": wrong}
