"""Which dim of each parameter is cut over which mesh axis: by annotation, else by rule, else by shape."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from shardwise.errors import LayoutError
from shardwise.jax.devices import OTHER_NAMES

Rules = Sequence[tuple[str, PartitionSpec]]
"""Pairs of (regular expression, PartitionSpec). The first expression found in a parameter's dotted path decides."""

MIN_NUMEL = 1024
"""Parameters of fewer elements are replicated: gathering them would cost more than it saves."""

_SPLIT_OUTPUTS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn"),
    *("gate", "gate_proj", "up", "up_proj", "fc1", "c_fc", "w1", "w3", "wi", "wi_0", "wi_1"),
    *("head", "lm_head"),
)
_SPLIT_INPUTS = ("o_proj", "out_proj", "down", "down_proj", "fc2", "c_proj", "w2", "wo")
_TABLES = ("embed", "embed_tokens", "embedding", "tok_embeddings", "wte")
TENSOR_DIMS = (
    {(name, 3): 1 for name in ("query", "key", "value")}  # nnx attention: input, heads, features of a head
    | {("out", 3): 0}  # heads, features of a head, output
    | {(name, 2): 1 for name in _SPLIT_OUTPUTS}
    | {(name, 3): 2 for name in _SPLIT_OUTPUTS}  # layers stacked in front
    | {(name, 2): 0 for name in _SPLIT_INPUTS}
    | {(name, 3): 1 for name in _SPLIT_INPUTS}
    | {(name, 2): 0 for name in _TABLES}
)
"""By (layer name, number of dims of its kernel), the dim that is cut over `tp`. Kernels are (input, output)."""


@dataclass(frozen=True)
class Decision:
    """How one parameter is cut, and why."""

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    why: str
    """"annotation", "rule REGEX", "shape", "small" or "nothing divides"."""


def decide(
    shapes: dict[str, tuple[int, ...]], annotations: dict[str, Any], on: Mesh, rules: Rules | None, min_numel: int
) -> list[Decision]:
    """Decide for each parameter how it is cut.

    Args:
        shapes: global shapes by path.
        annotations: specs from the model's author, by path. They take precedence.
        on: the mesh.
        rules: see `Rules`.
        min_numel: parameters without annotation or rule are replicated if they have fewer elements.

    Raises:
        LayoutError: a rule that matches nothing, or a spec that does not fit a parameter.
    """
    check_rules(rules or (), shapes)
    decisions = []
    for path, shape in shapes.items():
        if path in annotations:
            decision = Decision(path, shape, annotations[path], "annotation")
        elif (rule := next((rule for rule in rules or () if re.search(rule[0], path)), None)) is not None:
            decision = Decision(path, shape, PartitionSpec(*rule[1]), f"rule {rule[0]}")
        else:
            decision = by_shape(path, shape, on, min_numel)
        check_spec(decision, on)
        decisions.append(decision)
    name_the_replicated(decisions, on)
    return decisions


def check_rules(rules: Rules, paths: dict[str, Any]) -> None:
    """Raises LayoutError for a rule that is not a pair of expression and spec, or matches no parameter."""
    for rule in rules:
        try:
            pattern, spec = rule
            found = any(re.search(pattern, path) for path in paths)
        except (TypeError, ValueError, re.error) as error:
            raise LayoutError(
                f"rule {rule!r}: must be a pair of a regular expression and a PartitionSpec ({error})"
            ) from None
        if isinstance(spec, str) or not isinstance(spec, (PartitionSpec, tuple)):
            raise LayoutError(f"rule {pattern!r}: {spec!r} is not a PartitionSpec")
        if not found:
            some = ", ".join(list(paths)[:3])
            raise LayoutError(f"rule {pattern!r} matches none of {len(paths)} parameters; their names are {some}, ...")


def check_spec(decision: Decision, on: Mesh) -> None:
    """Raises LayoutError for a spec with unknown or repeated axes, too many dims, or pieces that are not equal."""
    where = f"{decision.path!r} of shape {decision.shape} ({decision.why}): {decision.spec}"
    if len(decision.spec) > len(decision.shape):
        raise LayoutError(f"{where} has {len(decision.spec)} dims, but the parameter has {len(decision.shape)}")
    used: list[str] = []
    for dim, names in enumerate(decision.spec):
        axes = axes_of(names)
        used += axes
        for axis in axes:
            if axis not in on.shape:
                meant = f"; write {OTHER_NAMES[axis]} for {axis}" if axis in OTHER_NAMES else ""
                raise LayoutError(
                    f"{where} names the axis {axis!r}, but the mesh has {', '.join(on.axis_names)}{meant}"
                )
        pieces = math.prod(on.shape[axis] for axis in axes)
        if decision.shape[dim] % pieces:
            over = " x ".join(f"{axis}={on.shape[axis]}" for axis in axes)
            raise LayoutError(
                f"{where}: dim {dim} of {decision.shape[dim]} cannot be cut into {pieces} equal pieces ({over})"
            )
    if len(set(used)) < len(used):
        raise LayoutError(f"{where} names an axis twice")


def axes_of(names: Any) -> tuple[str, ...]:
    """Return the mesh axes that one entry of a spec names: none, one or several."""
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


def by_shape(path: str, shape: tuple[int, ...], on: Mesh, min_numel: int) -> Decision:
    """Cut the largest dim that dp_shard divides, the first of equal ones, over it; known kernels also over tp."""
    if math.prod(shape) < min_numel:
        return Decision(path, shape, PartitionSpec(), "small")
    names: list[str | None] = [None] * len(shape)
    tensor_dim = tensor_dim_of(path, len(shape)) if on.shape["tp"] > 1 else None
    if tensor_dim is not None and shape[tensor_dim] % on.shape["tp"] == 0:
        names[tensor_dim] = "tp"
    free = [dim for dim in range(len(shape)) if names[dim] is None and shape[dim] % on.shape["dp_shard"] == 0]
    if free and on.shape["dp_shard"] > 1:
        names[max(free, key=lambda dim: (shape[dim], -dim))] = "dp_shard"
    cut = any(names) or on.shape["dp_shard"] == 1
    return Decision(
        path, shape, PartitionSpec(*names) if any(names) else PartitionSpec(), "shape" if cut else "nothing divides"
    )


def tensor_dim_of(path: str, dims: int) -> int | None:
    """Return the dim of an attention or MLP kernel, head or embedding that is cut over tp; None for others."""
    names = path.split(".")
    if names[-1] == "bias":
        return None
    layer = names[-2] if len(names) > 1 and names[-1] in ("kernel", "embedding", "weight") else names[-1]
    return TENSOR_DIMS.get((layer, dims))


def name_the_replicated(decisions: Sequence[Decision], on: Mesh) -> None:
    """Warns about parameters that every device holds whole because no dim divides."""
    whole = [f"{decision.path} {decision.shape}" for decision in decisions if decision.why == "nothing divides"]
    if whole:
        more = f" and {len(whole) - 5} more" if len(whole) > 5 else ""
        warnings.warn(
            f"no dim divides by dp_shard={on.shape['dp_shard']}: every device keeps the whole of "
            f"{', '.join(whole[:5])}{more}; pad them, or give a rule (PartitionSpec() if that is intended)",
            stacklevel=5,
        )
