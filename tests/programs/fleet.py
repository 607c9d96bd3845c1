"""Rank processes that run program after program."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from tests.programs.program import Program
from tests.programs.running import Outcome, Report, run
from tests.ranks import RankPools, RanksHung

TIMEOUT_S = 4.0
"""How long a rank waits for a peer."""
LIMIT_S = 12.0
"""How long a program may take, of four ranks; it takes a second or two. Those of more ranks have longer."""

START_S = 90.0
"""How long new ranks may take to be ready."""

Runner = Callable[..., Report]


@dataclass(frozen=True)
class Result:
    """What came of a program on all ranks."""

    program: Program
    reports: tuple[Report, ...]
    took_s: float

    @property
    def outcome(self) -> Outcome:
        return self.worst.outcome

    @property
    def worst(self) -> Report:
        """The report that explains the others."""
        return min(self.reports, key=lambda report: report.worth)

    @property
    def kind(self) -> tuple[Outcome, str]:
        """What makes two results the same, roughly: for errors, how they begin."""
        errs = self.outcome in (Outcome.CRASH, Outcome.REFUSAL, Outcome.INVALID)
        return self.outcome, self.worst.said[:40] if errs else ""

    def __str__(self) -> str:
        lines = [f"{self.outcome.name}: {self.outcome.value}"]
        for rank, report in enumerate(self.reports):
            if report.outcome is not Outcome.OK:
                lines.append(f"  rank {rank}, action {report.action}: {report.outcome.name}: {report.said}")
        return "\n".join(lines)


def warm(lora: bool) -> None:
    """Have everything imported that programs import late."""
    if lora:
        import peft  # noqa: F401
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 1)).sum().backward()
    optimizer.step()


class Fleet:
    """Pools of ranks by world size. A context manager."""

    def __init__(self, pools: RankPools | None = None) -> None:
        self._pools = pools or RankPools()
        self._owned = pools is None
        self._directory = Path(tempfile.mkdtemp(prefix="programs-"))
        self._numbers = itertools.count()
        self._warm: set[tuple[int, bool]] = set()
        """World sizes whose ranks have imported what programs need, without and with adapters."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._owned:
            self._pools.close()

    def run(self, program: Program, runner: Runner = run, *more: object) -> Result:
        """`runner` is called on each rank with the program, a directory and `more`."""
        directory = self._directory / str(next(self._numbers))
        directory.mkdir()
        start, limit_s = time.perf_counter(), LIMIT_S * max(1.0, program.ranks / 4)
        pool = self._pools(program.ranks, SHARDWISE_TIMEOUT_S=str(TIMEOUT_S))
        ranks = program.ranks, program.lora
        if ranks not in self._warm:
            pool.run(warm, program.lora, timeout_s=START_S)
            self._warm.add(ranks)
        try:
            reports = pool.run(runner, program, str(directory), *more, timeout_s=limit_s)
        except RanksHung as error:
            self._warm -= {(program.ranks, False), (program.ranks, True)}
            reports = [Report(Outcome.HANG, said=f"not over in {limit_s:g} s", trace=str(error))]
        except Exception as error:  # a rank's process is gone
            self._warm -= {(program.ranks, False), (program.ranks, True)}
            reports = [Report(Outcome.CRASH, said=f"{type(error).__name__}: {error}", trace=str(error))]
        shutil.rmtree(directory, ignore_errors=True)
        return Result(program, tuple(reports), time.perf_counter() - start)
