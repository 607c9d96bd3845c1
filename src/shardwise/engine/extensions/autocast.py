"""torch.autocast around units that compute in fp32 is refused: it would keep cast copies of their weights."""

from __future__ import annotations

import torch

from shardwise.engine.checked import CheckedEngine
from shardwise.errors import UsageError
from shardwise.fsdp.unit import Unit


class AutocastCheck:
    """The check of one engine's units, at each forward."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __call__(self, unit: Unit) -> None:
        """Raise UsageError if autocast is enabled for the device and would cast the unit's compute weights."""
        kind = self._device_type
        if not torch.is_autocast_enabled(kind):
            return
        compute = torch.get_autocast_dtype(kind)
        if compute is not torch.float32 and torch.float32 in unit.parameters.compute_dtypes:
            raise UsageError(
                f"torch.autocast({kind!r}) over fp32 units keeps a cast copy of every weight alive until backward; "
                f'give sw.shard precision=sw.Precision(param="{str(compute).removeprefix("torch.")}") instead'
            )


def allow_autocast(engine: CheckedEngine) -> None:
    """Let units run under autocast, as torch's engines do."""
    check = engine.attached(AutocastCheck)
    if check in engine.hooks.begin_forward:
        engine.hooks.begin_forward.remove(check)


def attach(engine: CheckedEngine) -> None:
    """Called with each engine that has its units."""
    engine.hooks.begin_forward.append(engine.attach(AutocastCheck(engine.mesh.device.type)))
