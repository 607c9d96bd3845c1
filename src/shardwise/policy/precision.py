"""Precisions in words, as command lines and configurations give them."""

from __future__ import annotations

from shardwise.errors import PlanError
from shardwise.fsdp.strategy import SHORT_NAMES, Precision

_STORED = "stored"


def precision_of(words: str) -> Precision:
    """Return the precision that has this common name.

    Args:
        words: "bf16" or "fp16" (compute in it; gradients, masters and optimizer state in fp32), "fp32", "bf16-true"
            (bf16 throughout), or param/reduce/master such as "bf16/bf16/fp32", where "stored" is each parameter's own.

    Raises:
        PlanError: not one or three parts. ConfigError: an unknown dtype.
    """
    if words == "bf16-true":
        return Precision(param="bf16", reduce="bf16", master="bf16")
    parts = words.split("/")
    if len(parts) == 1:
        return Precision(param=words, reduce="fp32", master="fp32")
    if len(parts) != 3:
        raise PlanError(
            f"precision={words!r}: must be one of bf16, fp16, fp32, bf16-true, or have the form param/reduce/master"
        )
    param, reduce, master = (None if part == _STORED else part for part in parts)
    return Precision(param, reduce, master)


def words_of_precision(precision: Precision) -> str:
    """Return its first three dtypes as `precision_of` takes them."""
    dtypes = (precision.param, precision.reduce, precision.master)
    return "/".join(short_dtype_name(dtype) or _STORED for dtype in dtypes)


def short_dtype_name(dtype: object) -> str | None:
    """Return the short name ("bf16", "fp8") of a torch dtype or its name; None for others, such as integers."""
    name = str(dtype).removeprefix("torch.")
    return "fp8" if name.startswith("float8_") else SHORT_NAMES.get(name)
