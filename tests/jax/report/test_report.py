"""What the tables say, against XLA's own account and against programs whose collectives are known."""

from __future__ import annotations

import pytest

swj = pytest.importorskip("shardwise.jax", reason="the extra jax is not installed")

import json  # noqa: E402
from functools import partial  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from shardwise.errors import UsageError  # noqa: E402
from shardwise.jax.report.products import product_flops  # noqa: E402
from tests.jax import small  # noqa: E402

ROWS = 512  # enough that the compiler would rather move weights than activations


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Steps of the functional model: sharded over eight devices, replicated on eight, hybrid."""
    meshes = {"sharded": swj.mesh(), "replicated": swj.mesh(1, dp_replicate=8), "hybrid": swj.mesh(4, dp_replicate=2)}
    found = {}
    for name, mesh in meshes.items():
        step = swj.train_step(small.loss_fn, optax.adamw(1e-2), mesh)
        state = step.init(swj.init(small.create, mesh).abstract())
        found[name] = step.lower(state, small.abstract_batch(ROWS)).compile()
        if name != "hybrid":
            found[f"{name} gradients"] = step.lower_gradients(state, small.abstract_batch(ROWS)).compile()
    return found


def test_a_device_has_an_eighth_of_parameters_gradients_and_optimizer_state(compiled: dict[str, Any]) -> None:
    sharded, replicated = (swj.memory(compiled[name]) for name in ("sharded", "replicated"))
    batch_bytes = 2 * ROWS * small.LENGTH * 4 / 8
    state_bytes = [found.argument_bytes - batch_bytes for found in (sharded, replicated)]
    assert state_bytes[0] == pytest.approx(state_bytes[1] / 8, rel=0.02)
    gradients = [swj.memory(compiled[f"{name} gradients"]).output_bytes for name in ("sharded", "replicated")]
    assert gradients[0] == pytest.approx(gradients[1] / 8, rel=0.02)
    assert gradients[0] == pytest.approx(sharded.gradients.device_bytes, rel=0.02)
    for kind in ("parameters", "optimizer state"):
        (mine,) = (each for each in sharded.kinds if each.name == kind)
        assert mine.device_bytes == pytest.approx(mine.nbytes / 8, rel=0.02)


def test_kinds_add_up_to_what_xla_says(compiled: dict[str, Any]) -> None:
    for name in ("sharded", "replicated", "hybrid"):
        found = swj.memory(compiled[name])
        assert sum(kind.device_bytes for kind in found.kinds) == found.argument_bytes
        assert found.peak_bytes > found.argument_bytes
        assert json.loads(json.dumps(found.to_dict()))["peak_bytes"] == found.peak_bytes


def test_the_table_of_a_billion_parameters() -> None:
    """Nothing is allocated: the model, its state and the batch are abstract."""
    mesh = swj.mesh()

    def create(key: Any) -> Any:
        return {"layers": jax.random.normal(key, (60, 4096, 4096), jnp.float32)}  # 1.007e9

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, layer: (jax.nn.relu(x @ layer), None), batch, params["layers"])
        return x.sum(), x.size

    step = swj.train_step(loss_fn, optax.adamw(1e-3), mesh)
    state = step.init(swj.init(create, mesh).abstract())
    batch = jax.ShapeDtypeStruct((8, 4096), jnp.float32)
    table = str(swj.memory(step.lower(state, batch).compile())).splitlines()
    rows = [" ".join(line.split()) for line in table]
    assert rows[1:5] == [
        "parameters 4.03 GB 503 MB",
        "gradients 4.03 GB 503 MB",
        "optimizer state 8.05 GB 1.01 GB",
        "these together 16.1 GB 2.01 GB",
    ]


def test_every_collective_has_its_parameter(compiled: dict[str, Any]) -> None:
    """Of one shape, a transposed one included, are up and down."""
    found = swj.collectives(compiled["sharded"])
    gathered = {part.what: part for part in found.parts if part.operation == "all-gather"}
    assert set(gathered) == {"embed", "layers.down, layers.up"}
    assert all(part.parameter and part.axes == "dp_shard" for part in gathered.values())
    reduced = {part.what for part in found.parts if part.operation in ("all-reduce", "reduce-scatter")}
    assert reduced == {"embed", "layers.down, layers.up"}
    assert all(part.is_cut for part in found.parts if part.operation == "all-reduce")


def test_collectives_in_a_loop_count_as_often_as_it_goes_round(compiled: dict[str, Any]) -> None:
    found = swj.collectives(compiled["sharded"])
    one_layer = small.WIDTH * 4 * small.WIDTH * 4
    layers = [part for part in found.parts if part.operation == "all-gather" and "layers" in part.what]
    assert sum(part.total_bytes for part in layers) in (4 * one_layer, 8 * one_layer)  # each pass, or once for both
    assert all(part.times == 2 and part.nbytes == one_layer for part in layers)
    assert found.bytes()["all-gather"] == sum(p.total_bytes for p in found.parts if p.operation == "all-gather")


def test_replicas_reduce_over_their_axis_alone(compiled: dict[str, Any]) -> None:
    parts = swj.collectives(compiled["hybrid"]).parts
    assert {part.axes for part in parts if part.operation == "all-gather"} == {"dp_shard"}
    assert any(part.axes == "dp_replicate" and part.parameter for part in parts)
    reduced = [part for part in parts if part.operation == "all-reduce"]
    assert all(part.is_cut == ("dp_shard" in part.axes) for part in reduced)  # replicas add up what is cut already
    assert swj.collectives(compiled["replicated"]).counts().keys() == {"all-reduce"}


def test_what_is_printed(compiled: dict[str, Any]) -> None:
    text = str(swj.collectives(compiled["sharded"]))
    assert text.splitlines()[0].split() == ["operation", "axes", "of", "dtype", "times", "bytes", "a", "device"]
    assert "all-reduce, cut" in text
    assert "runs a reduce-scatter as an all-reduce" in text
    assert json.loads(json.dumps(swj.collectives(compiled["sharded"]).to_dict()))["platform"] == "cpu"


def test_a_sound_program_has_nothing_to_say(compiled: dict[str, Any]) -> None:
    assert swj.check(compiled["sharded"]) == []
    assert swj.check(compiled["replicated"]) == []


def test_check_names_parameters_left_whole_and_activations_that_are_gathered() -> None:
    mesh = swj.mesh()
    params = swj.init(small.create, mesh, rules=[("embed", P())]).abstract()
    step = swj.train_step(partial(small.loss_fn, rows=False), optax.sgd(1e-2), mesh)
    found = swj.check(step.lower(step.init(params), small.abstract_batch(8)).compile())
    assert found[0] == "parameters that every device holds whole: embed (64, 32)"
    assert any(
        "values other than parameters gathered over dp_shard" in line and "dot_general" in line for line in found[1:]
    )


def test_check_blames_all_reduces_where_the_platform_has_reduce_scatters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large gradients whose parameters are cut; not of those that every device needs."""
    mesh = swj.mesh()

    def create(key: Any) -> Any:
        return {"large": jnp.ones((1024, 512)), "small": jnp.ones((64, 512)), "bias": jnp.ones(512)}

    def loss_fn(params: Any, x: Any, rng: Any) -> Any:
        hidden = swj.keep_rows(x @ params["large"] + params["bias"])
        return jnp.sum(jnp.sin(hidden) @ params["small"].T), x.size

    step = swj.train_step(loss_fn, optax.sgd(0.1), mesh)
    batch = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    program = step.lower(step.init(swj.init(create, mesh).abstract()), batch).compile()
    parts = [part for part in swj.collectives(program).parts if part.operation == "all-reduce"]
    assert {part.what: part.is_cut for part in parts} == {"large": True, "small": True, "bias": False}
    assert swj.check(program) == []
    monkeypatch.setattr("shardwise.jax.report.checks.MAKE_REDUCE_SCATTERS", frozenset({"cpu"}))
    (line,) = swj.check(program)
    assert line == "gradients all-reduced over dp_shard instead of reduce-scattered: large"


def test_programs_of_others() -> None:
    """A hand-written program: names come from its first argument."""
    mesh = swj.mesh()
    rows, columns = NamedSharding(mesh, P("dp_shard")), NamedSharding(mesh, P(None, "dp_shard"))

    def product(weights: Any, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(weights["w"], NamedSharding(mesh, P())) @ x

    weights = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows)}
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=columns)
    program = jax.jit(product, out_shardings=columns).lower(weights, x).compile()
    (part,) = swj.collectives(program).parts
    assert (part.operation, part.axes, part.what, part.times, part.nbytes) == (
        "all-gather",
        "dp_shard",
        "w",
        1,
        64 * 64 * 4,
    )
    assert [kind.name for kind in swj.memory(program).kinds] == ["argument 0", "argument 1"]
    assert product_flops(program) == 2 * 64 * 64 * 64 / 8
    by_flax = nnx.jit(product, out_shardings=columns).lower(weights, x).compile()
    assert swj.memory(by_flax) == swj.memory(program)
    assert [part.what for part in swj.collectives(by_flax).parts] == ["w"]


def test_products_in_loops_and_what_a_cpu_sends() -> None:
    mesh = swj.mesh()
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("dp_shard"))
    x = jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16, sharding=cut)

    def narrow(weights: Any, x: Any) -> Any:
        return x @ weights.astype(jnp.bfloat16)

    weights = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=cut)
    (part,) = swj.collectives(jax.jit(narrow, out_shardings=cut).lower(weights, x).compile()).parts
    assert (part.operation, part.dtype, part.nbytes) == ("all-gather", "f32", 4 * 64 * 64)

    def products(weights: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, layer: (x @ layer, None), x, weights)[0]

    stacked = jax.ShapeDtypeStruct((3, 64, 64), jnp.bfloat16, sharding=whole)
    program = jax.jit(products, out_shardings=cut).lower(stacked, x).compile()
    assert product_flops(program) == 3 * 2 * (4096 / 8) * 64 * 64


def test_programs_that_cannot_be_read() -> None:
    with pytest.raises(UsageError, match=r"a Lowered is not a compiled program: pass step\.lower"):
        swj.memory(jax.jit(lambda x: x + 1).lower(1.0))
    with pytest.raises(UsageError, match="are not on a mesh"):
        swj.collectives(jax.jit(lambda x: x + 1).lower(1.0).compile())


def test_describe() -> None:
    mesh = swj.mesh(4, dp_replicate=2)
    step = swj.train_step(small.loss_fn, optax.adamw(1e-2), mesh)
    found = swj.describe(step.init(swj.init(small.create, mesh, rules=[("embed", P())]).abstract()))
    arrays = {array.path: array for array in found.arrays}
    up = arrays["params.layers.up"]
    assert (up.shape, up.dtype, up.spec, up.pieces) == ((2, 32, 128), "float32", "(-, -, dp_shard)", 4)
    assert (up.nbytes, up.device_bytes) == (4 * 2 * 32 * 128, 2 * 32 * 128)
    assert arrays["opt_state.0.mu.layers.up"].spec == up.spec
    assert [array.path for array in found.replicated] == [
        "params.embed",
        "opt_state.0.mu.embed",
        "opt_state.0.nu.embed",
    ]
    assert "whole on every device: params.embed (64, 32)" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["device_bytes"] == found.device_bytes


def test_describe_what_is_not_sharded() -> None:
    arrays = swj.describe({"host": np.zeros(3), "one": jnp.zeros(3)}).arrays
    assert [array.spec for array in arrays] == ["host", "one device"]


def test_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    found = swj.describe(swj.init(small.create, swj.mesh(2, tp=2, dp_replicate=2)).abstract())
    found.picture("layers.up")  # three dims
    printed = capsys.readouterr().out
    assert all(f"{device}" in printed for device in range(8))
    with pytest.raises(UsageError, match=r"no array is called 'layers.upp'; did you mean layers.up"):
        found.picture("layers.upp")
