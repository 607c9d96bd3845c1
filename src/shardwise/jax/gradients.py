"""The gradients of a step: of the user's loss, summed over micro-batches and divided by their total weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwise.errors import UsageError
from shardwise.jax.recomputation import Policy, has_blocks, recompute_blocks
from shardwise.jax.trees import Parts, leaves_by_path, parts_of

LossFn = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(params or module, batch, rng) -> (loss_sum, weight)"""


class Gradients(NamedTuple):
    """The sums over the micro-batches of a step."""

    summed: Any
    """Gradients of the sum of all losses: a tree like the parameters, with their shardings and dtypes."""
    loss_sum: jax.Array
    weight: jax.Array
    variables: Any
    """The module's other variables after the last micro-batch."""

    def mean(self) -> Any:
        """Return the gradients of the mean loss; zeros if the total weight is 0."""
        return scaled(self.summed, jnp.where(self.weight == 0, 0.0, 1 / self.weight))


def scaled(gradients: Any, factor: jax.Array) -> Any:
    """Multiply gradients by a float32 factor, which is not rounded to their dtypes first. Keeps their dtypes."""
    return jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), gradients)


@dataclass(frozen=True)
class Loss:
    """The user's loss as a pure function of plain trees."""

    loss_fn: LossFn
    compute_dtype: str | None
    policy: Policy | None

    def __call__(self, params: Any, variables: Any, graph: Any, batch: Any, rng: Any) -> tuple[Any, tuple[Any, Any]]:
        """Return (loss_sum, (weight, variables)) for a model in parts; the two numbers are float32."""

        def compute(params: Any, variables: Any, batch: Any, rng: Any) -> tuple[Any, tuple[Any, Any]]:
            model = Parts(self._cast(params), variables, graph).model()
            if self.policy is not None:
                recompute_blocks(model, self.policy)
            loss_sum, weight = _two_numbers(self.loss_fn(model, batch, rng))
            variables = variables if graph is None else _checked(variables, parts_of(model).variables)
            return jnp.asarray(loss_sum, jnp.float32), (jnp.asarray(weight, jnp.float32), variables)

        if self.policy is not None and not has_blocks(Parts(params, variables, graph).model()):
            compute = jax.checkpoint(compute, policy=self.policy)
        return compute(params, variables, batch, rng)

    def _cast(self, params: Any) -> Any:
        def cast(leaf: Any) -> Any:
            return leaf.astype(self.compute_dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        return params if self.compute_dtype is None else jax.tree.map(cast, params)


def _two_numbers(found: Any) -> tuple[Any, Any]:
    """Return `found` if it is a pair of numbers, as a loss_fn must return. Raises UsageError otherwise."""
    if not isinstance(found, tuple) or len(found) != 2 or any(jnp.shape(number) for number in found):
        shapes = str(jax.tree.map(jnp.shape, found))
        raise UsageError(
            f"loss_fn returned a {type(found).__name__} of shapes {shapes}: it must return two numbers, "
            "(loss_sum, weight), such as losses.sum(), losses.size"
        )
    return found


def _checked(before: Any, after: Any) -> Any:
    """Return a module's other variables after a loss. Raises UsageError if paths, shapes or dtypes have changed."""
    had, has = leaves_by_path(before), leaves_by_path(after)
    if new := [path for path in has if path not in had]:
        raise UsageError(
            f"loss_fn left {', '.join(map(repr, new[:3]))} in the module, but the state has no place for it: "
            "remove sown values before it returns, with nnx.pop(model, nnx.Intermediate), or create variables "
            "in the constructor"
        )
    for path, leaf in had.items():
        now = has.get(path)
        if now is None or (now.shape, now.dtype) != (leaf.shape, leaf.dtype):
            found = "is gone" if now is None else f"is {now.dtype}{list(now.shape)}"
            raise UsageError(
                f"the variable {path!r} was {leaf.dtype}{list(leaf.shape)} and {found} after loss_fn, but a "
                "state keeps shapes and dtypes: cast what is assigned to it"
            )
    return after


def of_batch(loss: Loss, parts: Parts, batch: Any, rng: Any, shardings: Any) -> Gradients:
    """Compute the gradients of one micro-batch.

    Args:
        loss: the sum of the losses, not their mean.
        parts: the model.
        batch: arrays with rows sharded over the data axes.
        rng: the micro-batch's key.
        shardings: a tree of the parameters' shardings, which the gradients get.
    """
    value, summed = jax.value_and_grad(loss, has_aux=True)(parts.params, parts.variables, parts.graph, batch, rng)
    loss_sum, (weight, variables) = value
    return Gradients(jax.lax.with_sharding_constraint(summed, shardings), loss_sum, weight, variables)


def of_micro_batches(loss: Loss, parts: Parts, batches: Any, rng: Any, shardings: Any) -> Gradients:
    """Add up the gradients of micro-batches, the first dim of each array of `batches`, in one compiled loop body."""

    def add(sums: Gradients, numbered: tuple[Any, Any]) -> tuple[Gradients, None]:
        index, batch = numbered
        now = Parts(parts.params, sums.variables, parts.graph)
        found = of_batch(loss, now, batch, jax.random.fold_in(rng, index), shardings)
        summed = jax.tree.map(jnp.add, sums.summed, found.summed)
        return Gradients(summed, sums.loss_sum + found.loss_sum, sums.weight + found.weight, found.variables), None

    count = jax.tree.leaves(batches)[0].shape[0]
    zeros = jax.lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, parts.params), shardings)
    start = Gradients(zeros, jnp.float32(0), jnp.float32(0), parts.variables)
    sums, _ = jax.lax.scan(add, start, (jnp.arange(count), batches))
    return sums
