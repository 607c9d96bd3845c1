"""The memory that a compiled step needs on one device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from shardwise.errors import UsageError
from shardwise.jax.report.compiled import unwrapped
from shardwise.jax.report.tables import amount, columns
from shardwise.jax.state import TrainState

_KINDS = {"params": "parameters", "opt_state": "optimizer state", "variables": "other variables", "step": "step"}


@dataclass(frozen=True)
class ArgumentBytes:
    """Bytes of the arguments of one kind."""

    name: str
    nbytes: int
    """Bytes of whole arrays."""
    device_bytes: int
    """Bytes of the pieces that one device holds."""


@dataclass(frozen=True)
class ProgramMemory:
    """The memory that a compiled program needs. `str()` is a table."""

    kinds: tuple[ArgumentBytes, ...]
    """Arguments by kind, sized by their shardings. Of a training step: "parameters", "optimizer state", "batch" etc."""
    gradients: ArgumentBytes | None
    """Gradients of a training step, if sharded like their parameters; part of the temporaries. None for others."""
    argument_bytes: int
    """Arguments on one device. This and the fields below are XLA's own figures for one device."""
    output_bytes: int
    """Results, of which `alias_bytes` reuse the memory of arguments."""
    alias_bytes: int
    temporary_bytes: int
    """Activations, gathered parameters and gradients: the most that is alive at one time."""

    @property
    def peak_bytes(self) -> int:
        """Sum of arguments, outputs that reuse no argument's memory, and temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and `peak_bytes`, for JSON."""
        return {**asdict(self), "peak_bytes": self.peak_bytes}

    def __str__(self) -> str:
        kinds = {kind.name: kind for kind in self.kinds}
        trained = [kind for kind in (kinds.get("parameters"), self.gradients, kinds.get("optimizer state")) if kind]
        rows: list[tuple[str, str, str]] = []
        if self.gradients is not None:
            rows = [(kind.name, amount(kind.nbytes), amount(kind.device_bytes)) for kind in trained]
            sums = (sum(kind.nbytes for kind in trained), sum(kind.device_bytes for kind in trained))
            rows.append(("these together", amount(sums[0]), amount(sums[1])))
        rest = [kind for kind in self.kinds if kind not in trained or self.gradients is None]
        rows += [(kind.name, amount(kind.nbytes), amount(kind.device_bytes)) for kind in rest]
        head = columns(("", "whole", "a device"), rows, ("whole", "a device"))
        parts = (
            f"arguments {amount(self.argument_bytes)}",
            f"new outputs {amount(self.output_bytes - self.alias_bytes)}",
            f"temporaries {amount(self.temporary_bytes)}{', gradients among them' if self.gradients else ''}",
        )
        return f"{head}\nXLA, a device: {'; '.join(parts)}; together at most {amount(self.peak_bytes)}"


def memory(compiled: Any) -> ProgramMemory:
    """Return the memory that a compiled program needs. Does not communicate.

    Args:
        compiled: `step.lower(state, batch).compile()`, also of abstract arrays, or any other program compiled by JAX.

    Raises:
        UsageError: the platform's compiler does not report memory.
    """
    compiled = unwrapped(compiled)
    stats = compiled.memory_analysis()
    if stats is None:
        raise UsageError("this platform's compiler does not report how much memory a program needs")
    kinds: dict[str, ArgumentBytes] = {}
    gradients = None
    arguments = compiled.args_info[0]
    for index, (argument, shardings) in enumerate(zip(arguments, compiled.input_shardings[0], strict=True)):
        if isinstance(argument, TrainState):
            for field, name in _KINDS.items():
                kinds[name] = _kind(name, getattr(argument, field), getattr(shardings, field))
            gradients = ArgumentBytes("gradients", kinds["parameters"].nbytes, kinds["parameters"].device_bytes)
        else:
            name = "batch" if isinstance(arguments[0], TrainState) else f"argument {index}"
            kinds[name] = _kind(name, argument, shardings)
    return ProgramMemory(
        tuple(kind for kind in kinds.values() if kind.nbytes),
        gradients,
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
    )


def _kind(name: str, arguments: Any, shardings: Any) -> ArgumentBytes:
    cut = jax.tree.leaves(shardings, is_leaf=lambda sharding: sharding is None)
    pairs = [
        pair for pair in zip(jax.tree.leaves(arguments), cut, strict=True) if pair[1] is not None
    ]  # None: the program does not read it
    whole = sum(_nbytes(leaf.shape, leaf.dtype) for leaf, _ in pairs)
    return ArgumentBytes(
        name, whole, sum(_nbytes(sharding.shard_shape(leaf.shape), leaf.dtype) for leaf, sharding in pairs)
    )


def _nbytes(shape: tuple[int, ...], dtype: Any) -> int:
    return int(np.prod(shape)) * int(dtype.itemsize)
