"""Steps with the kernels between two other events told as one, so that a thousand constants can be tried on them.

The simulated time is that of the whole step wherever the device, not the host, is what holds it up (launches of a
bundle are handed out as one), but for waves of its kernels that collectives wait for.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shardwise.plan.dry_run.recording import Kernel, StepEvent, StepPhase, UnitMark
from shardwise.plan.simulate.roofline import Roofline


@dataclass(frozen=True, slots=True)
class Bundle(Kernel):
    """Kernels, equal ones counted, as if they were one."""

    kernels: tuple[tuple[Kernel, int], ...] = ()


@dataclass(frozen=True)
class BundleRoofline(Roofline):
    """Seconds of bundles."""

    known: dict[Kernel, float] = field(default_factory=dict)

    def seconds(self, kernel: Kernel) -> float:
        if not isinstance(kernel, Bundle):
            return self._one(kernel)
        return sum(count * self._one(part) for part, count in kernel.kernels)

    def _one(self, kernel: Kernel) -> float:
        if kernel not in self.known:
            self.known[kernel] = Roofline(self.hardware, self.efficiency, self.compiled, self.attention).seconds(kernel)
        return self.known[kernel]


def bundled(events: Iterable[StepEvent]) -> tuple[StepEvent, ...]:
    """The events with bundles for kernels."""
    told: list[StepEvent] = []
    waiting: Counter[Kernel] = Counter()
    phase = StepPhase.FORWARD
    for event in events:
        if isinstance(event, Kernel) and not event.stream and event.name != "_foreach_copy_":  # engines move those
            waiting[replace(event, module="")] += 1
            phase = event.phase
        elif not isinstance(event, UnitMark) or event.what == "release":
            told += _told(waiting, phase)
            told.append(event)
    return (*told, *_told(waiting, phase))


def _told(waiting: Counter[Kernel], phase: StepPhase) -> list[StepEvent]:
    if not waiting:
        return []
    kernels = tuple(waiting.items())
    flops = sum(kernel.flops * count for kernel, count in kernels)
    moved = sum(kernel.bytes_moved * count for kernel, count in kernels)
    kind = kernels[0][0].kind
    waiting.clear()
    return [Bundle("bundle", kind, flops, moved, "", None, "", phase, kernels=kernels)]
