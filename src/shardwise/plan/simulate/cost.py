"""What training costs, where an hour of a device has a price."""

from __future__ import annotations

from dataclasses import dataclass

_HOUR_S = 3600
_DAY_HOURS = 24


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a job, in the currency of the price. Devices are paid for as long as the job has them, busy or not."""

    per_device_hour: float
    """The price."""
    per_step: float
    """Of all devices."""
    per_million_tokens: float
    per_day: float
    """Of all devices."""


def cost_of(per_device_hour: float, devices: int, step_time_s: float, tokens_per_step: float) -> Cost:
    """The cost of a job.

    Args:
        per_device_hour: the price.
        devices: of the job.
        step_time_s: seconds of a step.
        tokens_per_step: over all devices.
    """
    per_step = per_device_hour * devices * step_time_s / _HOUR_S
    return Cost(
        per_device_hour=per_device_hour,
        per_step=per_step,
        per_million_tokens=per_step / tokens_per_step * 1e6,
        per_day=per_device_hour * devices * _DAY_HOURS,
    )
