"""Models are created in their pieces, with the numbers of one device."""

from __future__ import annotations

import pytest

swj = pytest.importorskip("shardwise.jax", reason="the extra jax is not installed")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from shardwise.errors import LayoutError, UsageError  # noqa: E402
from shardwise.jax.report.hlo import parse  # noqa: E402
from tests.jax import small  # noqa: E402


def test_every_device_holds_an_eighth_of_the_same_numbers() -> None:
    params = swj.init(small.create, swj.mesh())(jax.random.key(0))
    whole = jax.jit(small.create)(jax.random.key(0))
    for leaf, reference in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
        assert [shard.data.size for shard in leaf.addressable_shards] == [reference.size // 8] * 8
        np.testing.assert_array_equal(leaf, reference)


def test_no_device_has_a_whole_copy_while_it_creates() -> None:
    key = jax.eval_shape(lambda: jax.random.key(0))
    big = swj.init(lambda key: {"w": jax.random.normal(key, (1024, 1024))}, swj.mesh())
    compiled = big.lower(key).compile()
    assert swj.memory(compiled).output_bytes == 4 * 1024 * 1024 / 8
    computations = parse(compiled.as_text()).computations.values()
    shapes = [shape for one in computations for line in one.values() for shape in line.shapes]
    assert max(shape.numel for shape in shapes) == 1024 * 1024 / 8


def test_an_nnx_module() -> None:
    model = swj.init(lambda key: small.Net(nnx.Rngs(key)), swj.mesh())(jax.random.key(0))
    assert isinstance(model, small.Net)
    assert model.head is model.embed  # still one
    assert model.blocks[0].up.kernel.get_value().sharding.spec == P(None, "dp_shard")
    assert model.blocks[0].down.kernel.get_value().sharding.spec == P("dp_shard", None)
    assert model.norm.mean.get_value().sharding.spec == P()
    assert model(jnp.zeros((8, 4), jnp.int32)).shape == (8, 4, small.VOCAB)


def test_an_abstract_model_takes_no_memory() -> None:
    before = len(jax.live_arrays())
    model = swj.init(lambda key: small.Net(nnx.Rngs(key)), swj.mesh()).abstract()
    assert len(jax.live_arrays()) == before
    assert model.embed.embedding.get_value().sharding.spec == P("dp_shard", None)


def test_what_init_and_shard_cannot_take() -> None:
    mesh = swj.mesh()
    with pytest.raises(UsageError, match=r"key=0: must be a key; pass jax\.random\.key\(0\)"):
        swj.init(small.create, mesh)(0)
    with pytest.raises(UsageError, match=r"init\(dict\): must be a function of a key"):
        swj.init({"w": 1}, mesh)
    with pytest.raises(LayoutError, match="'a' is a str; it must be an array or a number"):
        swj.init(lambda key: {"a": "x"}, mesh)(jax.random.key(0))
    with pytest.raises(LayoutError, match="'a' is a str"):
        swj.shard({"a": "x"}, mesh)


def test_shard_takes_arrays_of_numpy_and_modules() -> None:
    mesh = swj.mesh()
    array = np.arange(2048, dtype=np.float32).reshape(32, 64)
    placed = swj.shard({"w": array}, mesh)["w"]
    assert placed.sharding.spec == P(None, "dp_shard")
    np.testing.assert_array_equal(placed, array)
    module = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    sharded = swj.shard(module, mesh)
    assert isinstance(sharded, nnx.Linear)
    assert sharded.kernel.get_value().sharding.spec == P("dp_shard", None)
    np.testing.assert_array_equal(sharded.kernel, module.kernel)
