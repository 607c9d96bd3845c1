"""Training steps against one device, and against the loss and the optimizer applied by hand."""

from __future__ import annotations

import pytest

swj = pytest.importorskip("shardwise.jax", reason="the extra jax is not installed")

import dataclasses  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402

from shardwise.errors import ConfigError, UsageError  # noqa: E402
from shardwise.jax.batches import check_batch  # noqa: E402
from tests.jax import small  # noqa: E402


def by_hand(steps: int, clip: float | None = None) -> list[tuple[float, float]]:
    """Losses and norms of the functional model on one device, in plain JAX and optax."""
    tx = optax.adamw(small.LR)
    tx = optax.chain(optax.clip_by_global_norm(clip), tx) if clip else tx
    params = jax.device_put(small.whole())
    state = tx.init(params)

    def mean(params: Any, batch: Any) -> Any:
        loss_sum, weight = small.loss_fn(params, batch, None)
        return loss_sum / weight

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(mean)(params, batch)
        updates, state = tx.update(gradients, state, params)
        squares = [(leaf**2).sum() for leaf in jax.tree.leaves(gradients)]
        return optax.apply_updates(params, updates), state, loss, jnp.sqrt(sum(squares))

    found = []
    for batch in small.batches(steps):
        params, state, loss, norm = step(params, state, batch)
        found.append((float(loss), float(norm)))
    return found


def run(
    steps: int, mesh: Any, model: Any = None, loss_fn: Any = small.loss_fn, **settings: Any
) -> tuple[Any, list[Any]]:
    step = swj.train_step(loss_fn, settings.pop("tx", optax.adamw(small.LR)), mesh, **settings)
    state = step.init(small.start(mesh) if model is None else model)
    found = []
    for batch in small.batches(steps):
        state, metrics = step(state, batch)
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return state, found


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_losses_of_any_number_of_devices(devices: int) -> None:
    losses = small.losses(devices, 50)
    reference = small.losses(1, 50)
    np.testing.assert_allclose(losses[:10], reference[:10], rtol=1e-5)
    np.testing.assert_allclose(losses, reference, rtol=1e-4)
    assert losses[-1] < 0.5 * losses[0]


def test_one_device_is_jax_and_optax_by_hand() -> None:
    _, found = run(5, small.on(1))
    np.testing.assert_allclose(found, by_hand(5), rtol=1e-6)


@pytest.mark.parametrize(
    ("axes", "settings"),
    [
        ({"dp_shard": 2, "tp": 2, "dp_replicate": 2}, {}),
        ({"dp_shard": 2, "dp_replicate": 2}, {"accumulation": 4}),
        ({"dp_shard": 2}, {"remat": "dots", "accumulation": 2}),
    ],
)
def test_other_meshes_and_micro_batches_are_the_same_training(axes: dict[str, int], settings: dict[str, Any]) -> None:
    """Targets are missing unevenly, so that a mean of means would differ by more."""
    devices = int(np.prod(list(axes.values())))
    losses = small.losses(devices, 10, **axes, **settings)
    np.testing.assert_allclose(losses, small.losses(1, 50)[:10], rtol=1e-5)


def test_clipping() -> None:
    _, found = run(4, small.on(2), clip=0.05)
    reference = by_hand(4, clip=0.05)
    assert reference[0][1] > 0.05  # it bites
    np.testing.assert_allclose(found, reference, rtol=1e-4)


def test_computing_in_bf16_keeps_fp32_masters() -> None:
    dtypes: set[str] = set()

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        dtypes.update(str(leaf.dtype) for leaf in jax.tree.leaves(params))
        return small.loss_fn(params, batch, rng)

    state, found = run(5, small.on(2), loss_fn=loss_fn, compute_dtype="bf16")
    assert dtypes == {"bfloat16"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves((state.params, state.opt_state[0].mu))} == {"float32"}
    np.testing.assert_allclose([loss for loss, _ in found], small.losses(1, 50)[:5], rtol=2e-2)


def test_the_step_is_donated() -> None:
    mesh = small.on(2)
    step = swj.train_step(small.loss_fn, optax.adamw(small.LR), mesh)
    state = step.init(small.start(mesh))
    after, _ = step(state, small.batches(1)[0])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))
    assert int(after.step) == 1


def test_a_batch_without_targets_changes_nothing_but_the_count() -> None:
    mesh = small.on(2)
    step = swj.train_step(small.loss_fn, optax.sgd(1e-2), mesh)
    state = step.init(small.start(mesh))
    before = jax.tree.map(np.asarray, state.params)
    empty = {"tokens": small.batches(1)[0]["tokens"], "targets": np.full((small.ROWS, small.LENGTH), -1, np.int32)}
    state, metrics = step(state, empty)
    assert np.isnan(metrics["loss"])
    assert float(metrics["weight"]) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, before)


def test_state_of_other_optimizers_lies_as_its_parameters() -> None:
    mesh = swj.mesh()
    shapes = swj.init(small.create, mesh).abstract()
    labels = {"embed": "a", "layers": "b"}
    tx = optax.multi_transform({"a": optax.lion(1e-3), "b": optax.adafactor(1e-3, min_dim_size_to_factor=8)}, labels)
    description = swj.describe(swj.train_step(small.loss_fn, tx, mesh).init(shapes))
    moments = {array.path: array for array in description.arrays if array.path.startswith("opt_state")}
    (momentum,) = (place for path, place in moments.items() if path.endswith("mu.embed"))
    assert (momentum.shape, momentum.spec) == ((64, 32), "(dp_shard, -)")
    assert [place.path for place in moments.values() if place.pieces == 1 and np.prod(place.shape) >= 1024] == []


@pytest.fixture(scope="module")
def module_runs() -> dict[str, Any]:
    """Three steps of the nnx module without dropout by what it recomputes, on two devices; and on one."""
    found = {}
    for name, devices, remat in (
        ("one", 1, "none"),
        ("full", 2, "full"),
        ("offload", 2, "offload"),
    ):
        mesh = small.on(devices)
        model = swj.init(lambda key: small.Net(nnx.Rngs(key), dropout=0.0), mesh)(jax.random.key(1))
        found[name] = run(3, mesh, model, small.module_loss_fn, remat=remat, tx=optax.sgd(0.1))
    return found


@pytest.mark.parametrize("name", ["full", "offload"])
def test_a_module_trains_as_on_one_device(module_runs: dict[str, Any], name: str) -> None:
    (state, found), (reference_state, reference) = module_runs[name], module_runs["one"]
    np.testing.assert_allclose(found, reference, rtol=1e-5)
    means = [np.asarray(each.model().norm.mean) for each in (state, reference_state)]
    assert np.abs(means[0]).max() > 1e-3  # running means move
    np.testing.assert_allclose(*means, atol=1e-6)


def test_full_recomputation_runs_blocks_again_and_none_does_not() -> None:
    counts = {}
    for remat in ("none", "full"):
        mesh = small.on(1)
        model = swj.init(lambda key: small.Net(nnx.Rngs(key), dropout=0.0), mesh).abstract()
        step = swj.train_step(small.module_loss_fn, optax.sgd(1e-2), mesh, remat=remat)
        counts[remat] = step.lower(step.init(model), small.abstract_batch()).as_text().count("dot_general")
    assert counts["full"] >= counts["none"] + 2  # the first product of each of two blocks, if no more


def test_dropout_depends_on_the_step_and_on_nothing_else() -> None:
    def noisy(params: Any, batch: Any, rng: Any) -> Any:
        loss_sum, weight = small.loss_fn(params, batch, rng)
        return loss_sum * jax.random.uniform(rng, ()), weight

    mesh = small.on(2)
    step = swj.train_step(noisy, optax.sgd(0.0), mesh)
    batch = small.batches(1)[0]

    def losses() -> list[float]:
        state = step.init(small.start(mesh))
        found = []
        for _ in range(3):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        return found

    first = losses()
    assert losses() == first
    assert len(set(first)) == 3


def test_rows_of_a_micro_batch_stay_on_their_device() -> None:
    mesh = swj.mesh()
    step = swj.train_step(small.loss_fn, optax.sgd(0.1), mesh, accumulation=2)
    state = step.init(swj.init(small.create, mesh).abstract())
    counts = swj.collectives(step.lower(state, small.abstract_batch(64)).compile()).counts()
    assert "all-to-all" not in counts
    assert "collective-permute" not in counts


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"accumulation": 0}, ConfigError, "accumulation=0"),
        ({"clip": 0.0}, ConfigError, r"clip=0\.0"),
        ({"clip": float("nan")}, ConfigError, "clip=nan: must be a norm above 0"),
        ({"clip": True}, ConfigError, "clip=True"),
        ({"accumulation": True}, ConfigError, "accumulation=True"),
        ({"seed": 0.5}, ConfigError, r"seed=0\.5: must be a whole number"),
        (
            {"seed": 2**32},
            ConfigError,
            "seed=4294967296: must be a whole number of 32 bits",
        ),  # JAX would draw as from 0
        ({"remat": "ful"}, ConfigError, "remat='ful': must be one of none, full, offload.*did you mean full"),
        ({"compute_dtype": "bf61"}, ConfigError, "compute_dtype = 'bf61'"),
        ({"compute_dtype": jnp.int32}, ConfigError, "compute_dtype = 'int32'"),
        ({"accumulation": 2.0}, ConfigError, r"accumulation=2\.0: .* whole number"),
        ({"tx": optax.adamw}, UsageError, "is not an optax optimizer: pass the result of a call such as"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        swj.train_step(small.loss_fn, **{"tx": optax.sgd(0.1), "mesh": small.on(2)} | settings)


def test_batches_that_cannot_be() -> None:
    mesh = swj.mesh()
    step = swj.train_step(small.loss_fn, optax.sgd(0.1), mesh, accumulation=4)
    state = step.init(swj.init(small.create, mesh).abstract())
    with pytest.raises(
        UsageError, match="'targets' has 16 rows, which must be a multiple of 8 devices x accumulation=4 = 32"
    ):
        step.lower(state, small.abstract_batch(16))
    with pytest.raises(UsageError, match="'scale' is a single number"):
        step.lower(state, {"scale": np.float32(1)})
    with pytest.raises(UsageError, match=r"'rows\.0' is a int, not an array: pass arrays"):
        step.lower(state, {"rows": [1, 2]})
    with pytest.raises(UsageError, match="batch=None has no arrays"):
        step.lower(state, None)


ROWS_OF_ONES = {"x": np.ones((8, 4), np.float32)}


def square(params: Any, batch: Any, rng: Any) -> Any:
    """A loss of parameters alone: the mean over rows is the sum of their squares."""
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)) * batch["x"].shape[0], batch["x"].shape[0]


def test_states_that_cannot_be() -> None:
    mesh = small.on(2)
    step = swj.train_step(small.loss_fn, optax.adamw(small.LR), mesh)
    batch = small.batches(1)[0]
    state = step.init(small.start(mesh))
    step(state, batch)
    with pytest.raises(UsageError, match="was given to an earlier step, which took over its memory"):
        step(state, batch)
    with pytest.raises(UsageError, match=r"a dict is not a state: make one with step\.init"):
        step.lower({"w": 1}, batch)
    other = swj.mesh()
    elsewhere = step.init(swj.init(small.create, mesh).abstract())
    with pytest.raises(UsageError, match="is not placed on the step's mesh"):
        swj.train_step(small.loss_fn, optax.adamw(small.LR), other).lower(elsewhere, batch)


def test_arrays_that_two_states_or_two_places_share() -> None:
    """XLA ends the process where it is given the same memory to take over twice, or what is gone."""
    mesh = small.on(2)
    step = swj.train_step(square, optax.sgd(0.1), mesh)
    model = swj.shard({"a": jnp.ones((64, 32)), "b": jnp.zeros(3)}, mesh)
    twice = {"a": model["a"], "b": model["a"]}
    state, _ = step(step.init(twice), ROWS_OF_ONES)
    np.testing.assert_array_equal(state.params["a"], state.params["b"])  # each took the step of its own
    with pytest.raises(UsageError, match=r"a step has taken over this model's arrays: use state\.model\(\)"):
        step.init(model)
    model = swj.shard({"a": jnp.ones((64, 32)), "b": jnp.zeros(3)}, mesh)
    one, other = step.init(model), step.init(model)
    step(one, ROWS_OF_ONES)
    with pytest.raises(UsageError, match=r"'params\.a' of this state was taken over by a step of another state"):
        step(other, ROWS_OF_ONES)
    shared = dataclasses.replace(state, params={"a": state.params["a"], "b": state.params["a"]})
    with pytest.raises(UsageError, match=r"'params\.a' and 'params\.b' of this state are the same array"):
        step(shared, ROWS_OF_ONES)
    with pytest.raises(UsageError, match=r"a step is a compiled program of its own: call it outside jax\.jit"):
        jax.jit(step)(shared, ROWS_OF_ONES)
    with pytest.raises(UsageError, match="this state is abstract: make or load one with numbers"):
        step(step.init(swj.init(small.create, mesh).abstract()), ROWS_OF_ONES)


def test_states_keep_their_own_shardings() -> None:
    mesh = small.on(2)
    step = swj.train_step(square, optax.sgd(0.1), mesh)
    specs = []
    for rules in (None, [("a", PartitionSpec(None, "dp_shard"))]):
        state, _ = step(step.init(swj.shard({"a": jnp.ones((64, 32))}, mesh, rules)), ROWS_OF_ONES)
        specs.append(state.params["a"].sharding.spec)
    assert specs == [PartitionSpec("dp_shard", None), PartitionSpec(None, "dp_shard")]


def test_gradients_in_bf16_are_divided_in_fp32() -> None:
    """1 / 1003 in bf16 is off by 0.2 %, and all gradients would be."""
    mesh = small.on(2)
    summed = jax.random.normal(jax.random.key(0), (64, 32), jnp.bfloat16)
    step = swj.train_step(lambda params, batch, rng: ((params["a"] * summed).sum(), 1003), optax.sgd(1.0), mesh)
    state = step.init(swj.shard({"a": jnp.zeros((64, 32), jnp.bfloat16)}, mesh))
    gradients = step.lower_gradients(state, ROWS_OF_ONES).compile()(state, swj.put_batch(ROWS_OF_ONES, mesh))
    exact = (summed.astype(jnp.float32) * np.float32(1 / 1003)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(gradients["a"], exact)


def test_the_state_of_an_optimizer_keeps_its_dtypes() -> None:
    """Options that are arrays of fp32 would make bf16 means fp32 in the first step."""
    mesh = small.on(2)
    step = swj.train_step(square, optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2), mesh)
    state = step.init(swj.shard({"a": jnp.ones((64, 32)), "b": jnp.ones((64, 32), jnp.bfloat16)}, mesh))
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(state)]
    for _ in range(2):
        state, _ = step(state, ROWS_OF_ONES)
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == dtypes
    assert next(iter(step._programs.values()))._cache_size() == 1


def test_transforms_that_want_the_loss_get_it() -> None:
    mesh = small.on(2)
    tx = optax.chain(optax.sgd(1e-3), optax.contrib.reduce_on_plateau())
    step = swj.train_step(square, tx, mesh)
    state, metrics = step(step.init(swj.shard({"a": jnp.ones((64, 32))}, mesh)), ROWS_OF_ONES)
    assert float(state.opt_state[1].best_value) == float(metrics["loss"]) == 64 * 32


def test_whole_numbers_that_jax_would_cut_off() -> None:
    mesh = small.on(2)
    with pytest.raises(UsageError, match=r"numbers from 0 to 1099511627776, but JAX keeps int64 as int32"):
        swj.put_batch({"ids": np.array([0, 2**40])}, mesh)
    assert swj.put_batch({"ids": np.array([0, 2**31 - 1])}, mesh)["ids"].tolist() == [0, 2**31 - 1]


def test_parameters_without_a_gradient() -> None:
    step = swj.train_step(square, optax.sgd(0.1), small.on(2))
    with pytest.raises(UsageError, match="parameter 'n' is int32, but a step takes gradients of all parameters"):
        step.init(swj.shard({"a": jnp.ones((64, 32)), "n": jnp.arange(4)}, small.on(2)))


class Sowing(nnx.Module):
    """Counts its calls, in a dtype of its choice, and may put something aside."""

    def __init__(self, sows: bool, dtype: Any) -> None:
        self.kernel = nnx.Param(jnp.ones((64, 32)))
        self.calls = nnx.Variable(jnp.zeros((), jnp.float32))
        self.sows, self.dtype = sows, dtype

    def __call__(self) -> Any:
        self.calls.set_value((self.calls.get_value() + 1).astype(self.dtype))
        if self.sows:
            self.seen = nnx.Intermediate(jnp.ones(()))
        return jnp.sum(self.kernel.get_value() ** 2)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("sows", "dtype", "said"),
    [
        (True, jnp.float32, r"loss_fn left 'seen' in the module.*nnx\.pop\(model, nnx\.Intermediate\)"),
        (False, jnp.bfloat16, r"the variable 'calls' was float32\[\] and is bfloat16\[\] after loss_fn"),
    ],
)
def test_variables_that_a_loss_may_not_leave(accumulation: int, sows: bool, dtype: Any, said: str) -> None:
    mesh = small.on(1)
    step = swj.train_step(
        lambda model, batch, rng: (model(), batch["x"].shape[0]), optax.sgd(0.1), mesh, accumulation=accumulation
    )
    state = step.init(swj.init(lambda key: Sowing(sows, dtype), mesh).abstract())
    with pytest.raises(UsageError, match=said):
        step.lower(state, ROWS_OF_ONES)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda losses: losses.sum(), r"loss_fn returned a \w+ of shapes \(\): it must return two numbers"),
        (lambda losses: (losses, losses.size), r"of shapes \(\(16,\), \(\)\): it must return two numbers"),
        (lambda losses: (losses.sum(), 1, 2), r"a tuple of shapes \(\(\), \(\), \(\)\): it must return two numbers"),
    ],
)
def test_losses_that_cannot_be(returned: Any, said: str) -> None:
    mesh = small.on(1)
    step = swj.train_step(lambda params, batch, rng: returned(params["w"][:16]), optax.sgd(0.1), mesh)
    with pytest.raises(UsageError, match=said):
        step.lower(step.init(swj.shard({"w": np.ones(32, np.float32)}, mesh)), small.abstract_batch())


def test_parameters_must_lie_on_the_mesh() -> None:
    step = swj.train_step(small.loss_fn, optax.sgd(0.1), swj.mesh())
    with pytest.raises(UsageError, match=r"'w' is not placed on this mesh: make it with init"):
        step.init({"w": jnp.zeros((8, 8))})


def test_a_module_may_say_itself_how_it_recomputes() -> None:
    asked = []

    class Own(small.Net):
        def recompute(self, policy: Any) -> None:
            asked.append(policy)

    mesh = small.on(1)
    step = swj.train_step(small.module_loss_fn, optax.sgd(0.1), mesh, remat="full")
    step.lower(step.init(swj.init(lambda key: Own(nnx.Rngs(key)), mesh).abstract()), small.abstract_batch())
    assert asked == [jax.checkpoint_policies.nothing_saveable] * len(asked)
    assert asked


def test_rows_of_several_processes_are_told_apart() -> None:
    def of(processes: list[int], **shape: int) -> Any:
        devices = np.array([SimpleNamespace(process_index=number) for number in processes], dtype=object)
        return SimpleNamespace(devices=devices.reshape(tuple(shape.values())), shape=shape)

    own = {"ids": np.zeros((8, 4), np.int32)}
    check_batch(own, of([0, 0, 1, 1], dp_replicate=1, dp_shard=2, tp=2), 1)
    check_batch(own, of([0, 0, 1, 1], dp_replicate=1, dp_shard=4, tp=1), 1)
    across = of([0, 0, 1, 1], dp_replicate=1, dp_shard=1, tp=4)
    for refuses in (lambda: check_batch(own, across, 1), lambda: swj.put_batch(own, across)):
        with pytest.raises(UsageError, match="the mesh's tp axis of 4 spans several processes"):
            refuses()
    check_batch({"ids": jnp.zeros((8, 4), jnp.int32)}, across, 1)
