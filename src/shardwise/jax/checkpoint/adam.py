"""optax's Adam under the names of torch's: a run goes on in the other framework with the state that it had.

Both keep a mean of gradients and one of their squares for every parameter, and count steps; torch counts for each
parameter. In files the means have torch's names, `<name of the parameter>.exp_avg` and `.exp_avg_sq`, and lie as the
parameter does: transposed, or a row a layer. What else an optimizer does with them (weight decay, rates, Nesterov) is
no state of optax, so nothing here tells Adam from AdamW; nor from adamax and yogi, which call other numbers the same.
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
"""That files name. torch's Adam has the same state."""
CLASSES = ("Adam", CLASS)
"""Of torch, whose state is optax's."""
_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_COUNTS = ("count", "step")


def states_in(tree: Any) -> tuple[str, ...]:
    """The paths of Adam's states in a tree, each with the dot that follows if it is not the whole tree."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_state)[0]
    return tuple(f"{dotted(keys)}." if keys else "" for keys, node in found if _is_state(node))


def _is_state(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def parts_of_moments(
    states: Sequence[str], model: Sequence[Leaf], others: Sequence[Leaf], names: NameMap
) -> dict[str, tuple[LeafPlace, ...]]:
    """By path, where the means among the other leaves lie; nothing unless every parameter has both, once.

    states: as `states_in` found them. Below one, the path of a mean is `mu` or `nu` before that of its parameter.
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
    """The kind of mean and the parameter's path; None where it is no mean."""
    for state in states:
        moment, _, parameter = path.removeprefix(state).partition(".")
        if path.startswith(state) and moment in _MOMENTS:
            return moment, parameter
    return None, ""


def document(moments: Mapping[str, Sequence[LeafPlace]], others: Sequence[Leaf]) -> dict[str, Any]:
    """What `training.json` says of the optimizer, as the torch engine writes it for AdamW, without groups: whoever
    loads it keeps the options that it has."""
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
    """Whether it counts the steps of the means beside it."""
    before, _, name = leaf.path.rpartition(".")
    return name == "count" and any(
        path.startswith((f"{before}.mu.", f"{before}.nu.") if before else ("mu.", "nu.")) for path in moments
    )


def counted(training: Mapping[str, Any], others: Sequence[Leaf]) -> dict[str, int]:
    """Of a checkpoint of the torch engine, by path the leaves that count steps, and how many there were."""
    saved = (training["optimizer"] or {}).get("state") or {}
    steps = [own["step"] for own in saved.values() if "step" in own]
    taken = max((one["scalar"] if isinstance(one, Mapping) else one for one in steps), default=training["step"])
    return {
        leaf.path: int(training["step"] if leaf.path == "step" else taken)
        for leaf in others
        if leaf.path.rpartition(".")[2] in _COUNTS and leaf.shape == () and np.issubdtype(leaf.dtype, np.integer)
    }
