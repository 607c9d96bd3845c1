"""A table of a sharded model's units: who holds what."""

from __future__ import annotations

from torch import nn

from shardwise.engine.shard import require_engine
from shardwise.engine.unit import Unit


def describe(model: nn.Module) -> str:
    """A plain-text table of units: parameters, elements, padding, bytes per rank, dtypes. Local."""
    engine = require_engine(model)
    header = ("unit", "module", "params", "numel", "padding", "shard bytes", "gathered bytes", "dtypes")
    rows = [_row(unit) for unit in engine.units]
    total_numel = sum(group.layout.used_numel for unit in engine.units for group in unit.groups)
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        f"{type(engine.root.module).__name__}: {total_numel:,} parameters in {len(engine.units)} units, "
        f"{engine.strategy.value}, {engine.mesh.describe()}, slots={engine.slots}"
    ]
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if column in (0, 1, 7) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(unit: Unit) -> tuple[str, ...]:
    numel = sum(group.layout.used_numel for group in unit.groups)
    padding = sum(group.layout.numel for group in unit.groups) - numel
    shard_bytes = sum(group.layout.shard_numel * group.dtypes.master.itemsize for group in unit.groups)
    dtypes = {
        f"{_short(group.dtypes.master)}/{_short(group.dtypes.compute)}/{_short(group.dtypes.reduce)}"
        + ("" if group.trainable else " frozen")
        for group in unit.groups
    }
    return (
        unit.fqn or "(root)",
        type(unit.module).__name__,
        str(sum(len(group.sharded) for group in unit.groups)),
        f"{numel:,}",
        f"{padding:,}",
        f"{shard_bytes:,}",
        f"{unit.gather_bytes:,}",
        ", ".join(sorted(dtypes)),
    )


def _short(dtype: object) -> str:
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
    name = str(dtype).removeprefix("torch.")
    return names.get(name, name)
