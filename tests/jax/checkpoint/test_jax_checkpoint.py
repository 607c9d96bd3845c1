"""Trees are saved and loaded at any number of devices, each process's bytes at their final place."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

import shardwise.jax as swj  # noqa: E402
from shardwise.errors import CheckpointError, UsageError  # noqa: E402
from shardwise.jax.checkpoint.boxes import Box, to_write  # noqa: E402
from shardwise.jax.checkpoint.leaves import Leaf  # noqa: E402
from shardwise.jax.checkpoint.name_map import NameMap, Rule  # noqa: E402
from shardwise.jax.trees import leaves_by_path, plain  # noqa: E402

MAP = NameMap(
    (
        Rule("embed.embedding", "model.embed.weight"),
        Rule("layers.up.kernel", "model.layers.{}.up.weight", transposed=True),
        Rule("layers.norm.scale", "model.layers.{}.norm.weight"),
    )
)


class State(NamedTuple):
    params: Any
    opt_state: Any
    step: Any
    key: Any


def mesh(devices: int, axes: int = 1) -> Mesh:
    found = np.array(jax.devices()[:devices])
    return Mesh(found.reshape(-1, axes), ("dp_shard", "tp")) if axes > 1 else Mesh(found, ("dp_shard",))


def params(dtype: Any = jnp.float32) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(7), 4))
    return {
        "embed": {"embedding": jax.random.normal(next(keys), (16, 24), dtype)},
        "layers": {
            "up": {"kernel": jax.random.normal(next(keys), (3, 24, 40), dtype)},
            "norm": {"scale": jax.random.normal(next(keys), (3, 24), dtype)},
        },
        "odd": jax.random.normal(next(keys), (5,), dtype),
    }


SPECS = {(16, 24): (None, "dp_shard"), (3, 24, 40): (None, None, "dp_shard"), (3, 24): (None, "dp_shard"), (5,): ()}


def spread(tree: Any, over: Mesh, specs: dict[Any, Any] = SPECS) -> Any:
    """Every array of a tree, sharded by its shape."""

    def put(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        sharding = NamedSharding(over, PartitionSpec(*specs.get(leaf.shape, ())))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(put, tree)


def state(over: Mesh) -> State:
    own = params()
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    found = State(own, transform.init(own), jnp.int32(3), jax.random.key(11))
    _, opt_state = transform.update(jax.tree.map(jnp.sin, own), found.opt_state, own)
    return spread(found._replace(opt_state=opt_state), over)


def numbers(tree: Any) -> list[np.ndarray[Any, Any]]:
    return [
        np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        for leaf in jax.tree.leaves(tree)
    ]


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(numbers(one), numbers(other), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_state_comes_back_at_another_number_of_devices(tmp_path: Path, asynchronous: bool) -> None:
    saved = state(mesh(8))
    expected = jax.tree.map(lambda leaf: leaf, saved)
    swj.checkpoint.save(tmp_path / "a", saved, 7, {"data": [1, 2]}, asynchronous, names=MAP)
    swj.checkpoint.wait()
    swj.checkpoint.verify(tmp_path / "a")
    abstract = jax.eval_shape(lambda: state(mesh(8)))
    loaded, extra = swj.checkpoint.load(tmp_path / "a", like=spread(abstract, mesh(4)))
    assert_same(loaded, expected)
    assert (extra, extra.step) == ({"data": [1, 2]}, 7)
    assert loaded.params["layers"]["up"]["kernel"].sharding.spec == PartitionSpec(None, None, "dp_shard")
    assert len(loaded.params["layers"]["up"]["kernel"].sharding.device_set) == 4
    assert loaded.opt_state[1][0].mu["embed"]["embedding"].addressable_shards[0].data.shape == (16, 6)
    swj.checkpoint.save(tmp_path / "b", loaded, 7, {"data": [1, 2]}, names=MAP)
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_files_hold_what_the_map_says(tmp_path: Path) -> None:
    own = params()
    swj.checkpoint.save(tmp_path / "a", {"params": spread(own, mesh(8)), "n": 2}, names=MAP)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    of_layers = {f"model.layers.{k}.{which}.weight" for k in range(3) for which in ("norm", "up")}
    assert set(stored) == {"model.embed.weight", "odd"} | of_layers
    for k in range(3):
        np.testing.assert_array_equal(stored[f"model.layers.{k}.up.weight"], own["layers"]["up"]["kernel"][k].T)
        np.testing.assert_array_equal(stored[f"model.layers.{k}.norm.weight"], own["layers"]["norm"]["scale"][k])
    assert load_file(tmp_path / "a" / "optimizer.safetensors")["n"] == 2
    assert json.loads((tmp_path / "a" / "training.json").read_text())["step"] == 0


@pytest.mark.parametrize(
    "spec", [("dp_shard",), (None, "tp"), ("tp", "dp_shard"), (None, ("dp_shard", "tp")), ("dp_shard", None, "tp"), ()]
)
def test_every_element_is_written_and_read_whatever_the_sharding(tmp_path: Path, spec: tuple[Any, ...]) -> None:
    array = jnp.arange(8 * 16 * 8, dtype=jnp.float32).reshape(8, 16, 8)
    sharding = NamedSharding(mesh(8, 2), PartitionSpec(*spec))
    swj.checkpoint.save(tmp_path / "a", {"x": jax.device_put(array, sharding)})
    swj.checkpoint.verify(tmp_path / "a")  # each byte in one checksum
    for other in (sharding, NamedSharding(mesh(4, 2), PartitionSpec("tp", None, "dp_shard"))):
        loaded, _ = swj.checkpoint.load(
            tmp_path / "a", like={"x": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=other)}
        )
        np.testing.assert_array_equal(loaded["x"], array)
        assert loaded["x"].sharding == other


@pytest.mark.parametrize(
    ("transform", "is_adam"),
    [
        (optax.adam(1e-3), True),
        (optax.chain(optax.clip(1.0), optax.lamb(1e-3)), True),
        (optax.adabelief(1e-3), False),  # its `nu` is something else
        (optax.amsgrad(1e-3), False),  # keeps one more
        (optax.multi_transform({"a": optax.adam(1e-3), "b": optax.sgd(1e-3)}, {"mu": "a", "w": "b"}), False),
    ],
)
def test_the_state_of_adam_has_torchs_names_and_no_other_has(tmp_path: Path, transform: Any, is_adam: bool) -> None:
    own = {"mu": np.ones((2, 3), np.float32), "w": np.ones(3, np.float32)}  # a parameter may be called so
    swj.checkpoint.save(tmp_path / "a", State(own, transform.init(own), 3, np.ones(2)))
    stored = load_file(tmp_path / "a" / "optimizer.safetensors")
    names = {f"{name}.{moment}" for name in own for moment in ("exp_avg", "exp_avg_sq")}
    assert (names <= stored.keys()) == is_adam
    assert json.loads((tmp_path / "a" / "training.json").read_text())["optimizer"]["class"] == (
        "AdamW" if is_adam else "optax"
    )


def test_pieces_that_are_no_box_together() -> None:
    from shardwise.jax.checkpoint.boxes import around, joined

    left, right, lower = Box((0, 0), (2, 2)), Box((0, 2), (2, 2)), Box((2, 0), (2, 2))
    assert joined([left, right]) == [[left, right]]
    assert joined([left, right, lower]) == [[left], [right], [lower]]
    assert around([left, right]) == Box((0, 0), (2, 4))
    assert lower.runs((4, 4)).tuples() == [(8, 0, 2), (12, 2, 2)]


def test_modules_numbers_and_bfloat16(tmp_path: Path) -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(8, 4, rngs=rngs, param_dtype=jnp.bfloat16)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    module = Net(nnx.Rngs(3))
    module.dropout(jnp.ones((4,)))  # counts
    swj.checkpoint.save(tmp_path / "a", {"params": module, "epoch": 4, "lr": 0.5, "done": True, "seen": np.arange(3)})
    like = {
        "params": nnx.eval_shape(lambda: Net(nnx.Rngs(0))),
        "epoch": 0,
        "lr": 0.0,
        "done": False,
        "seen": np.zeros(3, int),
    }
    loaded, _ = swj.checkpoint.load(tmp_path / "a", like=like)
    assert isinstance(loaded["params"], Net)
    assert_same(nnx.state(loaded["params"]), nnx.state(module))
    assert loaded["params"].linear.kernel[...].dtype == jnp.bfloat16
    assert (loaded["epoch"], loaded["lr"], loaded["done"], loaded["seen"].tolist()) == (4, 0.5, True, [0, 1, 2])
    assert type(loaded["done"]) is bool
    as_state, _ = swj.checkpoint.load(tmp_path / "a", like={**like, "params": nnx.state(module)})
    assert_same(as_state["params"], nnx.state(module))  # the same names with or without the module around


class Trained(nnx.Module):
    """With everything that modules have beside parameters: running means and a random stream."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.norm(self.linear(x)))


def test_a_module_is_read_from_weights_and_from_a_training_state(tmp_path: Path) -> None:
    on = swj.mesh(devices=jax.devices()[:2])
    create = swj.init(lambda key: Trained(nnx.Rngs(key)), on)
    module = create(jax.random.key(1))
    weights = {name: np.asarray(leaf) for name, leaf in leaves_by_path(plain(module)).items() if "dropout" not in name}
    (tmp_path / "weights").mkdir()
    save_file({name: leaf + 1 for name, leaf in weights.items()}, tmp_path / "weights/model.safetensors")
    read = swj.checkpoint.load_pretrained(tmp_path / "weights", like=module)
    assert_same(nnx.state(read, nnx.RngState), nnx.state(module, nnx.RngState))
    np.testing.assert_array_equal(read.norm.mean[...], module.norm.mean[...] + 1)
    with pytest.raises(
        UsageError, match=r"'dropout\.rngs\.count' belongs to a random stream.*give like= a module with numbers"
    ):
        swj.checkpoint.load_pretrained(tmp_path / "weights", like=create.abstract())

    step = swj.train_step(lambda module, batch, rng: (module(batch).sum(), batch.shape[0]), optax.adamw(1e-2), on)
    state = step.init(module)
    for _ in range(2):
        state, _ = step(state, np.arange(8 * 64, dtype=np.float32).reshape(8, 64))
    swj.checkpoint.save(tmp_path / "state", state)
    again = swj.checkpoint.load_pretrained(tmp_path / "state", like=create.abstract())
    assert_same(nnx.state(again), nnx.state(state.model()))
    assert int(again.dropout.rngs.count[...]) == 2


def test_the_parameters_alone(tmp_path: Path) -> None:
    saved = state(mesh(8))
    swj.checkpoint.save(tmp_path / "a", saved, names=MAP)
    loaded, _ = swj.checkpoint.load(tmp_path / "a", like=jax.eval_shape(params))
    assert_same(loaded, saved.params)
    half = jax.eval_shape(lambda: params(jnp.bfloat16))
    read = swj.checkpoint.load_pretrained(tmp_path / "a", like=half, names=MAP)
    assert_same(read, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), saved.params))


def test_rows_of_several_dtypes_and_numbers_without_room(tmp_path: Path) -> None:
    rows = [np.full((8, 4), 1 + 2.0**-20, np.float32), np.ones((8, 4), jnp.bfloat16)]
    for first in (0, 1):
        place = tmp_path / str(first)
        place.mkdir()
        save_file({f"layers.{i}.w": rows[(first + i) % 2] for i in range(2)}, place / "model.safetensors")
        names = NameMap((Rule("w", "layers.{}.w"),))
        like = {"w": jax.ShapeDtypeStruct((2, 8, 4), jnp.float32)}
        read = swj.checkpoint.load_pretrained(place, like=like, names=names)
        assert float(read["w"][first, 0, 0]) == 1 + 2.0**-20  # not rounded to the other row's dtype
    swj.checkpoint.save(tmp_path / "ints", {"a": np.array([1, 2**40]), "b": np.array([1, 2])})
    narrow = {"a": np.zeros(2, np.int64), "b": np.zeros(2, np.int8)}
    assert swj.checkpoint.load(tmp_path / "ints", like=narrow)[0]["b"].tolist() == [1, 2]
    with pytest.raises(
        CheckpointError, match="'a' holds whole numbers from 1 to 1099511627776, which int32 cannot hold"
    ):
        swj.checkpoint.load(tmp_path / "ints", like={**narrow, "a": jax.ShapeDtypeStruct((2,), jnp.int32)})


def test_mistakes_are_named(tmp_path: Path) -> None:
    own = params()
    swj.checkpoint.save(tmp_path / "a", own, names=MAP)
    with pytest.raises(CheckpointError, match=r"exists already"):
        swj.checkpoint.save(tmp_path / "a", own)
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: more$"):
        swj.checkpoint.load(tmp_path / "a", like={**own, "more": jnp.ones(2)})
    with pytest.raises(CheckpointError, match=r"unexpected in the checkpoint: odd$"):
        swj.checkpoint.load(tmp_path / "a", like={key: own[key] for key in ("embed", "layers")})
    with pytest.raises(CheckpointError, match=r"odd \(here \(6,\), stored \(5,\)\)"):
        swj.checkpoint.load(tmp_path / "a", like={**own, "odd": jnp.ones(6)})
    with pytest.raises(CheckpointError, match=r"odd \(here int32, stored as F32\)"):
        swj.checkpoint.load(tmp_path / "a", like={**own, "odd": jnp.ones(5, jnp.int32)})
    two = {**own, "layers": jax.tree.map(lambda leaf: leaf[:2], own["layers"])}
    with pytest.raises(CheckpointError, match=r"layers\.\w+\.\w+ \(here \(2, .*\), stored in 3 rows\)"):
        swj.checkpoint.load(tmp_path / "a", like=two)
    four = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:1]]), own["layers"])
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: .*model\.layers\.3\.norm\.weight"):
        swj.checkpoint.load_pretrained(tmp_path / "a", like={**own, "layers": four}, names=MAP)
    with pytest.raises(UsageError, match=r"'name' is a str; it must be an array or a number"):
        swj.checkpoint.save(tmp_path / "b", {"name": "x"})
    with pytest.raises(UsageError, match=r"two leaves called 'a\.b'"):
        swj.checkpoint.save(tmp_path / "b", {"a": {"b": 1}, "a.b": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_asynchronous_save_is_of_its_moment(tmp_path: Path) -> None:
    array = jax.device_put(jnp.arange(4096.0), NamedSharding(mesh(8), PartitionSpec("dp_shard")))
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    swj.checkpoint.save(tmp_path / "a", {"x": array}, asynchronous=True)
    stepped = step(array)
    loaded, _ = swj.checkpoint.load(tmp_path / "a", like={"x": stepped})
    np.testing.assert_array_equal(loaded["x"], np.arange(4096.0))


def test_a_checkpoint_of_orbax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    saved = {"params": params(), "count": jnp.int32(4), "epoch": 3}
    module = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", saved)
        checkpointer.save(tmp_path / "module", nnx.state(module))
    abstract = jax.eval_shape(lambda: {"params": params(jnp.bfloat16), "count": jnp.int32(0)})
    like = {**spread(abstract, mesh(4)), "epoch": 0}
    found = swj.checkpoint.import_orbax(tmp_path / "tree", like)
    assert_same(found["params"], jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), saved["params"]))
    assert found["params"]["layers"]["up"]["kernel"].sharding == like["params"]["layers"]["up"]["kernel"].sharding
    assert (int(found["count"]), found["epoch"], type(found["epoch"])) == (4, 3, int)
    again = swj.checkpoint.import_orbax(tmp_path / "module", nnx.eval_shape(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(1))))
    assert_same(nnx.state(again), nnx.state(module))
    attention = {"key": jnp.ones(3), "value": jnp.zeros(3)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "attention", attention)
    assert_same(swj.checkpoint.import_orbax(tmp_path / "attention", attention), attention)
    (tmp_path / "manager" / "default").parent.mkdir()
    (tmp_path / "tree").rename(tmp_path / "manager" / "default")
    assert_same(swj.checkpoint.import_orbax(tmp_path / "manager", like)["params"], found["params"])

    with pytest.raises(
        CheckpointError, match=r"missing from the checkpoint: more; unexpected in the checkpoint: epoch"
    ):
        swj.checkpoint.import_orbax(tmp_path / "manager", {"params": params(), "count": jnp.int32(0), "more": 1})
    with pytest.raises(CheckpointError, match=r"with another shape: bias \(here \(6,\), stored \(4,\)\)"):
        swj.checkpoint.import_orbax(tmp_path / "module", {"bias": jnp.ones(6), "kernel": jnp.ones((8, 4))})
    with pytest.raises(CheckpointError, match=r"is not an Orbax checkpoint"):
        swj.checkpoint.import_orbax(tmp_path / "nowhere", like)
    with pytest.raises(CheckpointError, match=r"is an Orbax checkpoint: use swj\.checkpoint\.import_orbax"):
        swj.checkpoint.load(tmp_path / "module", like)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install orbax-checkpoint"):
        swj.checkpoint.import_orbax(tmp_path / "module", like)


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(8, 4, rngs=rngs)
        self.head = self.embed
        self.scale = nnx.Param(jnp.ones(4))


@pytest.mark.parametrize("around", [False, True], ids=["module", "tree"])
def test_what_is_used_twice_is_there_once_before_and_after(tmp_path: Path, around: bool) -> None:
    module, like = Tied(nnx.Rngs(3)), nnx.eval_shape(lambda: Tied(nnx.Rngs(0)))
    swj.checkpoint.save(tmp_path / "a", {"params": module} if around else module)
    loaded, _ = swj.checkpoint.load(tmp_path / "a", like={"params": like} if around else like)
    found = loaded["params"] if around else loaded
    assert found.head is found.embed
    assert_same(nnx.state(found), nnx.state(module))
    assert len(jax.tree.leaves(nnx.state(found))) == 2
    read = swj.checkpoint.load_pretrained(tmp_path / "a", like=nnx.eval_shape(lambda: Tied(nnx.Rngs(0))))
    assert read.head is read.embed


def test_random_keys_come_back_where_they_lay() -> None:
    over = NamedSharding(mesh(4), PartitionSpec())
    keys = jax.device_put(jax.random.split(jax.random.key(3), 4), over)
    leaf = Leaf("key", is_model=False, value=keys)
    again = leaf.restored(jnp.asarray(leaf.stored()))
    assert again.sharding.is_equivalent_to(over, again.ndim)
    assert_same([again], [keys])


def test_numbers_in_place_of_a_leaf() -> None:
    for value in (np.zeros((), np.int32), np.int32(0), jnp.int32(0), 0):
        found = Leaf("step", is_model=False, value=value).number(5)
        assert type(found) is type(value)
        assert found == 5
        assert np.shape(found) == ()


def test_arrays_of_each_process_s_own_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(to_write(jnp.ones(4), is_first=False)) == 1  # it is the only process
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not to_write(jnp.ones(4), is_first=False)
    (held,) = to_write(jnp.ones(4), is_first=True)
    np.testing.assert_array_equal(held.array(None), np.ones(4))
