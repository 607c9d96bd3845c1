"""Rematerialisation: which values of forward are computed again in backward instead of kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from flax import nnx
from jax import checkpoint_policies as policies
from jax.sharding import Mesh

from shardwise.errors import ConfigError, UsageError
from shardwise.suggest import did_you_mean

Policy = Callable[..., Any]

NAMED = {
    "dots": policies.dots_saveable,
    "dots_no_batch": policies.dots_with_no_batch_dims_saveable,
}
"""Policies that keep the outputs of matrix products: of all, or of those without batch dims (attention's scores have
them)."""

MODES = ("none", "full", "offload", *NAMED)


def policy_of(remat: str | Policy, mesh: Mesh) -> Policy | None:
    """Return the policy that says what a block keeps for backward; None: everything.

    Args:
        remat: one of MODES, or a policy of `jax.checkpoint_policies`.
        mesh: its devices must have pinned host memory for "offload".

    Raises:
        ConfigError: an unknown name.
        UsageError: "offload" where devices have no pinned host memory.
    """
    if callable(remat):
        return remat
    if remat not in MODES:
        raise ConfigError(
            f"remat={remat!r}: must be one of {', '.join(MODES)}, or a policy{did_you_mean(str(remat), MODES)}"
        )
    if remat == "none":
        return None
    if remat == "full":
        return policies.nothing_saveable
    if remat == "offload":
        device = mesh.devices.flat[0]
        if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
            raise UsageError(
                f"remat='offload': {device.device_kind} has no pinned host memory; use 'full' or 'dots', which "
                "recompute instead"
            )
        return policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return NAMED[remat]


def stacks_in(module: Any) -> list[nnx.List]:
    """Return the lists of two or more modules of one class that are not inside another such list. A pytree has none."""
    if not isinstance(module, nnx.Module):
        return []
    found: dict[tuple[Any, ...], nnx.List] = {}
    for path, node in sorted(nnx.iter_modules(module), key=lambda found: len(found[0])):
        inside = any(path[: len(outer)] == outer for outer in found)
        if isinstance(node, nnx.List) and len(node) > 1 and len(set(map(type, node))) == 1 and not inside:
            found[path] = node
    return list(found.values())


def has_blocks(module: Any) -> bool:
    """Whether `recompute_blocks` would change the module."""
    return callable(getattr(module, "recompute", None)) or bool(stacks_in(module))


def recompute_blocks(module: Any, policy: Policy) -> None:
    """Make a module's blocks recompute, in place: by its method `recompute(policy)`, else those in its lists.

    Modules that scan over layers have that method, because only they know where a layer begins.
    """
    if callable(getattr(module, "recompute", None)):
        module.recompute(policy)
        return
    for stack in stacks_in(module):
        for block in stack:
            kind: Any = type(block)
            object.__setattr__(block, "__class__", recomputing(kind, policy))  # nnx keeps other attributes in the tree


@lru_cache
def recomputing(kind: Any, policy: Policy) -> Any:
    """Return a subclass of `kind` whose calls keep only what the policy says. Arguments are arrays, or static."""

    class Recomputing(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, nnx.Pytree))
            traced = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, nnx.Pytree))}

            def call(block: Any, traced: dict[int, Any]) -> Any:
                args, kwargs = tree.unflatten([traced.get(index, leaf) for index, leaf in enumerate(leaves)])
                return kind.__call__(block, *args, **kwargs)

            return nnx.remat(call, policy=policy)(self, traced)

    return Recomputing
