"""A training step: one compiled program from a state and a batch to the next state and its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from shardwise.errors import ConfigError, PeerError, UsageError
from shardwise.jax.batches import check_batch, micro_batches, put_batch
from shardwise.jax.checkpoint.processes import Processes
from shardwise.jax.devices import check_axes, replicated
from shardwise.jax.gradients import Gradients, Loss, LossFn, of_batch, of_micro_batches, scaled
from shardwise.jax.recomputation import Policy, policy_of
from shardwise.jax.state import TrainState, check_owned, state_of
from shardwise.jax.trees import Parts, leaves_by_path
from shardwise.policy.precision import dtype_name

_PATIENCE_S = 600.0
"""For another process with a batch of a new kind."""
_ALIKE = "give all of them batches of the same shapes and dtypes at each step, and drop rows that are left over"
NORM_EPS = 1e-6
"""Added to the norm before clipping divides by it, as torch does."""


def train_step(  # noqa: PLR0913 - the promised signature
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    compute_dtype: Any = None,
    remat: str | Policy = "none",
    seed: int = 0,
) -> TrainStep:
    """A step of training that takes sharded state to sharded state.

    Args:
        loss_fn: `loss_fn(params, batch, rng) -> (loss_sum, weight)`; for an nnx module, with it in place of params.
            The step's loss is the sum of loss_sum over the sum of weight, over the whole batch. Let the weight count
            what the loss adds up, such as target tokens.
        tx: an optax optimizer. Its state is sharded as the parameters are. Transforms that take a `value` get the
            step's loss; line searches, which compute others, are not supported.
        mesh: from `shardwise.jax.mesh`.
        accumulation: micro-batches a step, one after another.
        clip: the largest norm of all gradients together. None: they are not clipped, except by tx.
        compute_dtype: floating-point parameters are cast to it for the loss, such as "bf16"; those stored, and what the
            optimizer does, stay as they are. None: no cast.
        remat: what blocks compute again in the backward pass: "none", "full", "dots" (all but matrix products),
            "dots_no_batch", "offload" (matrix products go to host memory), or a policy of `jax.checkpoint_policies`.
            Blocks are the modules in `nnx.List`s, or what the module's own method `recompute(policy)` makes them; with
            neither, the policy is given to the loss as a whole.
        seed: of the keys that loss_fn gets, one for each micro-batch.

    Raises:
        ConfigError, UsageError: a setting that cannot be.
    """
    check_axes(mesh)
    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        raise UsageError(f"tx={tx!r} is not an optimizer of optax: pass one such as optax.adamw(3e-4), called")
    if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
        raise ConfigError(f"accumulation={accumulation!r}: a step has a whole number of micro-batches, at least one")
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
        raise ConfigError(f"clip={clip!r}: a norm above 0 is needed; None clips nothing")
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**31) <= seed < 2**32:
        raise ConfigError(f"seed={seed!r}: a whole number of 32 bits is needed, which is what JAX keeps of it")
    if compute_dtype is not None and not isinstance(compute_dtype, str):
        compute_dtype = getattr(compute_dtype, "__name__", str(compute_dtype))
    dtype = dtype_name(compute_dtype, "compute_dtype")
    return TrainStep(loss_fn, tx, mesh, accumulation, clip, dtype, policy_of(remat, mesh), seed)


@dataclass(frozen=True, eq=False)
class TrainStep:
    """What `train_step` returns. Every process must call its methods, with equal arguments."""

    loss_fn: LossFn
    tx: optax.GradientTransformation
    mesh: Mesh
    accumulation: int
    clip: float | None
    compute_dtype: str | None
    policy: Policy | None
    seed: int
    _programs: dict[Any, Any] = field(default_factory=dict, repr=False)
    _agreed: set[Any] = field(default_factory=set, repr=False)
    """Kinds of batches that all processes have."""

    def init(self, model: Any) -> TrainState:
        """The state before the first step.

        Args:
            model: from `init` or `shard`; the state takes its arrays over, and the first step their memory. An abstract
                one gives an abstract state, to compile for or to load a checkpoint into.

        Raises:
            UsageError: a parameter that does not lie on the mesh.
        """
        return state_of(model, self.tx, self.mesh)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """The next state, and "loss", "grad_norm" (before clipping) and "weight": float32, on every device.

        Args:
            state: its memory is taken over. Do not use it again.
            batch: a tree of arrays whose first dim is rows; in numpy arrays, those of this process.

        Raises:
            UsageError: rows that devices and micro-batches cannot share evenly; a state that is abstract, of another
                mesh, or has arrays that a step took over before or that are there twice.
            MismatchError: processes were given batches of different shapes. In every process.
        """
        self._check(state)
        check_owned(state)
        check_batch(batch, self.mesh, self.accumulation)
        self._agree(batch)
        with jax.set_mesh(self.mesh):
            return self._program(state)(state, put_batch(batch, self.mesh))

    def lower(self, state: TrainState, batch: Any) -> Any:
        """The lowered program, for `.compile()`; state and batch may be abstract. Raises as a call does."""
        self._check(state)
        check_batch(batch, self.mesh, self.accumulation)
        with jax.set_mesh(self.mesh):
            return self._program(state).lower(state, put_batch(batch, self.mesh))

    def lower_gradients(self, state: TrainState, batch: Any) -> Any:
        """The lowered program of the mean gradients alone, sharded as their parameters; to look at, or to debug."""
        check_batch(batch, self.mesh, self.accumulation)
        shardings = shardings_of(state.params)
        program = jax.jit(lambda state, batch: self._gradients(shardings, state, batch).mean(), out_shardings=shardings)
        with jax.set_mesh(self.mesh):
            return program.lower(state, put_batch(batch, self.mesh))

    def _check(self, state: TrainState) -> None:
        """Raises UsageError for what is no state of this step's mesh, or was taken over by a step."""
        if not isinstance(state, TrainState):
            raise UsageError(f"a {type(state).__name__} is not a state: make one with step.init(model)")
        if isinstance(state.step, jax.core.Tracer):
            raise UsageError(
                "a step is a compiled program of its own: call it outside jax.jit, grad, scan and the like"
            )
        if isinstance(state.step, jax.Array) and state.step.is_deleted():
            raise UsageError(
                "this state was given to a step before, which took its memory over: use the one it returned"
            )
        if getattr(state.step.sharding, "mesh", None) != self.mesh:
            raise UsageError("this state is not placed on the step's mesh: make both with the same one")

    def _agree(self, batch: Any) -> None:
        """Have processes compare their batches, where they are of a new kind: with other rows on one of them each would
        run a program of its own. Raises MismatchError in every process."""
        processes = jax.process_count()
        if processes == 1 or len({device.process_index for device in self.mesh.devices.flat}) < processes:
            return
        leaves, structure = jax.tree.flatten(batch)
        kind = structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        if kind in self._agreed:
            return
        shapes = {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves_by_path(batch).items()}
        try:
            Processes(_PATIENCE_S).agree(str(shapes), f"processes have different batches (here {shapes}): {_ALIKE}")
        except jax.errors.JaxRuntimeError as error:
            raise PeerError(
                f"this process has a batch of a new kind ({shapes}), and for {_PATIENCE_S:.0f} s another has come with "
                f"none: {_ALIKE}"
            ) from error
        self._agreed.add(kind)

    def _program(self, state: TrainState) -> Any:
        """The jitted step for states of that structure that are sharded like that; made once."""
        shardings = shardings_of(state)
        leaves, structure = jax.tree.flatten(shardings)
        kind = structure, tuple(leaves)
        if kind not in self._programs:
            step = partial(self._step, shardings.params)
            outputs = (shardings, replicated(self.mesh))
            self._programs[kind] = jax.jit(step, donate_argnums=0, out_shardings=outputs)
        return self._programs[kind]

    def _step(self, shardings: Any, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        found = self._gradients(shardings, state, batch)
        gradients = found.mean()
        norm = norm_of(gradients)
        if self.clip is not None:
            gradients = scaled(gradients, jnp.minimum(1.0, self.clip / (norm + NORM_EPS)))
        loss = found.loss_sum / found.weight
        update = optax.with_extra_args_support(self.tx).update
        updates, opt_state = update(gradients, state.opt_state, state.params, value=loss)
        opt_state = jax.tree.map(_in_its_dtype, opt_state, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": norm, "weight": found.weight}
        return TrainState(state.step + 1, params, opt_state, found.variables, state.graph), metrics

    def _gradients(self, shardings: Any, state: TrainState, batch: Any) -> Gradients:
        loss = Loss(self.loss_fn, self.compute_dtype, self.policy)
        parts = Parts(state.params, state.variables, state.graph)
        rng = jax.random.fold_in(jax.random.key(self.seed), state.step)
        if self.accumulation == 1:
            return of_batch(loss, parts, batch, jax.random.fold_in(rng, 0), shardings)
        return of_micro_batches(loss, parts, micro_batches(batch, self.accumulation, self.mesh), rng, shardings)


def shardings_of(tree: Any) -> Any:
    """The tree with each array's sharding in its place."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _in_its_dtype(leaf: Any, before: Any) -> Any:
    """A part of an optimizer's state in the dtype that `tx.init` gave it, where arithmetic has widened it: else the
    second step would be another program, with more memory, and what a checkpoint holds would be rounded at its load."""
    return leaf if leaf.dtype == before.dtype else leaf.astype(before.dtype)


def norm_of(tree: Any) -> jax.Array:
    """The norm of all arrays together, in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))
