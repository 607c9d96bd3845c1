"""A training step: one compiled program from a state and a batch to the next state and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from shardwise.errors import ConfigError, PeerError, UsageError
from shardwise.fsdp.strategy import dtype_name
from shardwise.jax.batches import check_batch, micro_batches, put_batch
from shardwise.jax.checkpoint.processes import Processes
from shardwise.jax.devices import check_axes, replicated
from shardwise.jax.gradients import Gradients, Loss, LossFn, of_batch, of_micro_batches, scaled
from shardwise.jax.recomputation import Policy, policy_of
from shardwise.jax.state import TrainState, check_owned, state_of
from shardwise.jax.trees import Parts, leaves_by_path

_PATIENCE_S = 600.0
"""How long a process with a batch of new shapes waits for the others."""
_ALIKE = "give all of them batches of the same shapes and dtypes at each step, and drop leftover rows"
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
    """Create a training step that maps a sharded state and a batch to the next sharded state.

    Args:
        loss_fn: `loss_fn(params, batch, rng) -> (loss_sum, weight)`; an nnx module takes the place of params. The
            step's loss is the sum of loss_sum over the whole batch, divided by the sum of weight. Let the weight count
            the terms of loss_sum, such as target tokens.
        tx: an optax optimizer. Its state is sharded like the parameters. Transforms that take a `value` get the step's
            loss; line searches, which evaluate the loss at other points, are not supported.
        mesh: from `shardwise.jax.mesh`.
        accumulation: micro-batches a step, one after another.
        clip: the largest norm of all gradients together. None: they are not clipped, except by tx.
        compute_dtype: floating-point parameters are cast to it for the loss, such as "bf16"; stored parameters and the
            optimizer keep their dtypes. None: no cast.
        remat: what blocks compute again in backward: "none", "full", "dots" (all but matrix products),
            "dots_no_batch", "offload" (matrix products go to host memory), or a policy of `jax.checkpoint_policies`.
            Blocks are the modules in `nnx.List`s, unless the module has its own method `recompute(policy)`; without
            either, the policy applies to the loss as a whole.
        seed: of the keys that loss_fn gets, one for each micro-batch.

    Raises:
        ConfigError, UsageError: an invalid setting.
    """
    check_axes(mesh)
    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        raise UsageError(f"tx={tx!r} is not an optax optimizer: pass the result of a call such as optax.adamw(3e-4)")
    if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
        raise ConfigError(f"accumulation={accumulation!r}: must be a whole number of micro-batches, at least 1")
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
        raise ConfigError(f"clip={clip!r}: must be a norm above 0, or None to clip nothing")
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**31) <= seed < 2**32:
        raise ConfigError(f"seed={seed!r}: must be a whole number of 32 bits, because JAX keeps no more of it")
    if compute_dtype is not None and not isinstance(compute_dtype, str):
        compute_dtype = getattr(compute_dtype, "__name__", str(compute_dtype))
    dtype = dtype_name(compute_dtype, "compute_dtype")
    return TrainStep(loss_fn, tx, mesh, accumulation, clip, dtype, policy_of(remat, mesh), seed)


@dataclass(frozen=True, eq=False)
class TrainStep:
    """The step that `train_step` returns. Every process must call its methods, with equal arguments."""

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
    """Structures, shapes and dtypes of batches that the processes have agreed on."""

    def init(self, model: Any) -> TrainState:
        """Create the state before the first step.

        Args:
            model: from `init` or `shard`. The state takes its arrays, and the first step donates their memory. An
                abstract model gives an abstract state, to compile for or to load a checkpoint into.

        Raises:
            UsageError: a parameter that is not on the mesh, has no gradient (integers), or was donated to a step.
        """
        return state_of(model, self.tx, self.mesh)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return the next state, and "loss", "grad_norm" (before clipping) and "weight": float32, on every device.

        Args:
            state: its memory is donated. Do not use it again.
            batch: a tree of arrays whose first dim is rows; numpy arrays hold the rows of this process.

        Raises:
            UsageError: rows that do not divide evenly among devices and micro-batches; a state that is abstract, of
                another mesh, or has arrays that were donated to an earlier step or that occur twice.
            MismatchError: processes were given batches of different shapes. In every process.
            PeerError: another process did not come with a batch within ten minutes.
        """
        self._check(state)
        check_owned(state)
        check_batch(batch, self.mesh, self.accumulation)
        self._agree(batch)
        with jax.set_mesh(self.mesh):
            return self._program(state)(state, put_batch(batch, self.mesh))

    def lower(self, state: TrainState, batch: Any) -> Any:
        """Return the lowered program, for `.compile()`. State and batch may be abstract. Raises as a call does."""
        self._check(state)
        check_batch(batch, self.mesh, self.accumulation)
        with jax.set_mesh(self.mesh):
            return self._program(state).lower(state, put_batch(batch, self.mesh))

    def lower_gradients(self, state: TrainState, batch: Any) -> Any:
        """Return the lowered program of the mean gradients alone, sharded like the parameters, to inspect or debug."""
        check_batch(batch, self.mesh, self.accumulation)
        shardings = shardings_of(state.params)
        program = jax.jit(lambda state, batch: self._gradients(shardings, state, batch).mean(), out_shardings=shardings)
        with jax.set_mesh(self.mesh):
            return program.lower(state, put_batch(batch, self.mesh))

    def _check(self, state: TrainState) -> None:
        """Raises UsageError unless `state` is a state on this step's mesh that was not donated to a step."""
        if not isinstance(state, TrainState):
            raise UsageError(f"a {type(state).__name__} is not a state: make one with step.init(model)")
        if isinstance(state.step, jax.core.Tracer):
            raise UsageError(
                "a step is a compiled program of its own: call it outside jax.jit, grad, scan and the like"
            )
        if isinstance(state.step, jax.Array) and state.step.is_deleted():
            raise UsageError(
                "this state was given to an earlier step, which took over its memory: use the state that the "
                "step returned"
            )
        if getattr(state.step.sharding, "mesh", None) != self.mesh:
            raise UsageError("this state is not placed on the step's mesh: make state and step with the same mesh")

    def _agree(self, batch: Any) -> None:
        """Compare a batch of new shapes or dtypes between processes, which would run different programs if it differed.
        Raises MismatchError in every process."""
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
                f"this process has a batch of a new kind ({shapes}), but another process had none within "
                f"{_PATIENCE_S:.0f} s: {_ALIKE}"
            ) from error
        self._agreed.add(kind)

    def _program(self, state: TrainState) -> Any:
        """Return the jitted step for states of this structure and these shardings, made once for each."""
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
    """Return the tree with each array replaced by its sharding."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _in_its_dtype(leaf: Any, before: Any) -> Any:
    """Cast an array of the optimizer state back to the dtype that `tx.init` gave it, if arithmetic has widened it. Else
    the second step would be another program, with more memory, and loading a checkpoint would round the state."""
    return leaf if leaf.dtype == before.dtype else leaf.astype(before.dtype)


def norm_of(tree: Any) -> jax.Array:
    """Return the norm of all arrays together, in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))
