"""optax's Adam state under torch's names, so that a run can continue in the other framework with its Adam state.

Both frameworks keep a mean of the gradients and a mean of their squares for every parameter, and count steps; torch
counts them for each parameter. In files the means have torch's names, `<name of the parameter>.exp_avg` and
`.exp_avg_sq`, and are laid out like the parameter: transposed, or one row a layer. Whatever else an optimizer does with
them (weight decay, learning rates, Nesterov) is not part of optax's state, so nothing here tells Adam from AdamW, nor
from adamax and yogi, which keep other numbers under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

from shardwise.jax.checkpoint.leaves import Leaf, dotted
from shardwise.jax.checkpoint.name_map import LeafPlace, NameMap

CLASS = "AdamW"
"""The optimizer class that `training.json` names. torch's Adam has the same state."""
CLASSES = ("Adam", CLASS)
"""torch's optimizer classes that have the same state as optax's Adam."""
_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_COUNTS = ("count", "step")


def states_in(tree: Any) -> tuple[str, ...]:
    """Return the paths of the Adam states in a tree, each with a dot at its end; "" if the tree itself is one."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_state)[0]
    return tuple(f"{dotted(keys)}." if keys else "" for keys, node in found if _is_state(node))


def _is_state(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def parts_of_moments(
    states: Sequence[str], model: Sequence[Leaf], others: Sequence[Leaf], names: NameMap
) -> dict[str, tuple[LeafPlace, ...]]:
    """Return, by path, where the means among the `others` are stored; empty unless each parameter has both, once.

    states: from `states_in`. The path of a mean is that of its state, then `mu` or `nu`, then that of its parameter.
    """
    shapes = {leaf.path: leaf.shape for leaf in model}
    found: dict[str, tuple[LeafPlace, ...]] = {}
    seen: list[tuple[str, str]] = []
    for leaf in others:
        moment, parameter = _split(leaf.path, states)
        if moment is not None and shapes.get(parameter) == leaf.shape:
            seen.append((moment, parameter))
            own = names.parts(parameter, leaf.shape)
            found[leaf.path] = tuple(replace(part, name=f"{part.name}.{_MOMENTS[moment]}") for part in own)
    return found if sorted(seen) == sorted((moment, path) for moment in _MOMENTS for path in shapes) else {}


def _split(path: str, states: Sequence[str]) -> tuple[str | None, str]:
    """Return the kind of mean ("mu" or "nu") and the parameter's path; None and "" if the leaf is not a mean."""
    for state in states:
        moment, _, parameter = path.removeprefix(state).partition(".")
        if path.startswith(state) and moment in _MOMENTS:
            return moment, parameter
    return None, ""


def document(moments: Mapping[str, Sequence[LeafPlace]], others: Sequence[Leaf]) -> dict[str, Any]:
    """Return the optimizer section of `training.json` as the torch engine writes it for AdamW, but without parameter
    groups: an optimizer that loads it keeps its own options."""
    count = next((leaf for leaf in others if _counts_beside(leaf, moments)), None)
    state: dict[str, dict[str, Any]] = {}
    for part in (part for own in moments.values() for part in own):
        fqn, _, name = part.name.rpartition(".")
        state.setdefault(fqn, {})[name] = {"tensor": part.name}
    if count is None or not state:
        return {"class": "optax", "groups": [], "dtypes": {}, "state": {}}
    step = {"scalar": float(np.asarray(count.value)), "dtype": "F32", "shape": []}
    return {
        "class": CLASS,
        "groups": [],
        "dtypes": {},
        "state": {fqn: {"step": step, **own} for fqn, own in state.items()},
    }


def _counts_beside(leaf: Leaf, moments: Mapping[str, Any]) -> bool:
    """Whether the leaf is the step count of an Adam state whose means are among `moments`."""
    before, _, name = leaf.path.rpartition(".")
    return name == "count" and any(
        path.startswith((f"{before}.mu.", f"{before}.nu.") if before else ("mu.", "nu.")) for path in moments
    )


def counted(training: Mapping[str, Any], others: Sequence[Leaf]) -> dict[str, int]:
    """Return, by path, the number of steps for each leaf that counts steps, from a checkpoint of the torch engine."""
    saved = (training["optimizer"] or {}).get("state") or {}
    steps = [own["step"] for own in saved.values() if "step" in own]
    taken = max((one["scalar"] if isinstance(one, Mapping) else one for one in steps), default=training["step"])
    return {
        leaf.path: int(training["step"] if leaf.path == "step" else taken)
        for leaf in others
        if leaf.path.rpartition(".")[2] in _COUNTS and leaf.shape == () and np.issubdtype(leaf.dtype, np.integer)
    }
