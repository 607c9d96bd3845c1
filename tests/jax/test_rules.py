"""Which dim goes over which axis, and which rules and specs are mistakes."""

from __future__ import annotations

import pytest

swj = pytest.importorskip("shardwise.jax", reason="the extra jax is not installed")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from shardwise.errors import LayoutError  # noqa: E402


def specs(shapes: dict[str, tuple[int, ...]], mesh: object, **kwargs: object) -> dict[str, P]:
    tree = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    return {path: leaf.sharding.spec for path, leaf in swj.shard(tree, mesh, **kwargs).items()}


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((64, 256), P(None, "dp_shard")),  # the largest
        ((64, 64), P("dp_shard", None)),  # the first of equal ones
        ((100, 64), P(None, "dp_shard")),  # the largest that divides
        ((3, 8, 5, 40), P(None, None, None, "dp_shard")),
        ((1016,), P()),  # small
        ((1024,), P("dp_shard")),
    ],
)
def test_by_shape(shape: tuple[int, ...], spec: P) -> None:
    assert specs({"w": shape}, swj.mesh())["w"] == spec


def test_replicas_hold_the_same() -> None:
    assert specs({"w": (64, 36)}, swj.mesh(dp_shard=4, dp_replicate=2))["w"] == P("dp_shard", None)


def test_min_numel() -> None:
    assert specs({"w": (64,), "v": (8, 8)}, swj.mesh(), min_numel=0) == {"w": P("dp_shard"), "v": P("dp_shard", None)}


def test_what_does_not_divide_is_named() -> None:
    with pytest.warns(UserWarning, match=r"no dim divides by dp_shard=8: .* w \(33, 35\); pad them") as caught:
        assert specs({"w": (33, 35), "v": (64, 64)}, swj.mesh())["w"] == P()
    assert caught[0].filename.endswith("test_rules.py")


def test_a_rule_may_say_that_it_is_meant() -> None:
    assert specs({"w": (33, 35)}, swj.mesh(), rules=[("w", P())])["w"] == P()  # warnings are errors here


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("layers.0.self_attn.q_proj.kernel", (64, 64), P("dp_shard", "tp")),
        ("layers.0.self_attn.o_proj.kernel", (64, 64), P("tp", "dp_shard")),
        ("layers.0.mlp.up_proj.kernel", (64, 256), P("dp_shard", "tp")),
        ("layers.0.mlp.down_proj.kernel", (256, 64), P("tp", "dp_shard")),
        ("stacked.mlp.down_proj.kernel", (2, 256, 64), P(None, "tp", "dp_shard")),
        ("attention.query.kernel", (64, 4, 16), P("dp_shard", "tp", None)),
        ("attention.out.kernel", (4, 16, 64), P("tp", None, "dp_shard")),
        ("embed_tokens.embedding", (128, 64), P("tp", "dp_shard")),
        ("lm_head.kernel", (64, 128), P("dp_shard", "tp")),
        ("other.kernel", (64, 128), P(None, "dp_shard")),
        ("odd.up_proj.kernel", (64, 129), P("dp_shard", None)),
    ],
)
def test_kernels_go_over_fsdp_and_tensor(path: str, shape: tuple[int, ...], spec: P) -> None:
    assert specs({path: shape}, swj.mesh(dp_shard=4, tp=2))[path] == spec


def test_the_first_rule_decides_and_annotations_go_first() -> None:
    def create(key: object) -> nnx.Module:
        kernel_init = nnx.with_partitioning(nnx.initializers.zeros, ("dp_shard", None))
        annotated = nnx.Linear(64, 128, kernel_init=kernel_init, rngs=nnx.Rngs(0))
        return nnx.Dict(annotated=annotated, plain=nnx.Linear(64, 128, rngs=nnx.Rngs(0)))

    rules = [("plain.*kernel", P(None, "dp_shard")), ("kernel", P())]
    model = swj.init(create, swj.mesh(), rules=rules).abstract()
    assert model["annotated"].kernel.sharding.spec == P("dp_shard", None)
    assert model["plain"].kernel.sharding.spec == P(None, "dp_shard")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("attention", P())], r"rule 'attention' matches none of 1 parameters; their names are w"),
        (
            [("w", P("dp_shard"))],
            r"'w' of shape \(12, 64\) \(rule w\).*dim 0 of 12 cannot be cut into 8 equal.*dp_shard=8",
        ),
        ([("w", P("data"))], r"'w' of shape .* names the axis 'data', but the mesh has dp_replicate, dp_shard, tp"),
        ([("w", P("fsdp"))], r"names the axis .*; write dp_shard for fsdp$"),
        ([("w", P(None, None, "dp_shard"))], "has 3 dims, but the parameter has 2"),
        ([("w", P(None, ("dp_shard", "dp_shard")))], "cannot be cut into 64|names an axis twice"),
        ([("(", P())], r"rule \('\(', .*regular expression"),
        ([("w", "dp_shard")], "'dp_shard' is not a PartitionSpec"),
        (["w"], "rule 'w': must be a pair"),
    ],
)
def test_mistakes(rules: list[object], message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        specs({"w": (12, 64)}, swj.mesh(), rules=rules)
    assert "\n" not in str(caught.value)


def test_an_annotation_that_does_not_divide() -> None:
    def create(key: object) -> nnx.Module:
        kernel_init = nnx.with_partitioning(nnx.initializers.zeros, ("dp_shard", None))
        return nnx.Linear(12, 64, kernel_init=kernel_init, rngs=nnx.Rngs(0))

    with pytest.raises(LayoutError, match=r"'kernel' of shape \(12, 64\) \(annotation\)"):
        swj.init(create, swj.mesh())(jax.random.key(0))


def test_nothing_to_shard() -> None:
    with pytest.raises(LayoutError, match="has no arrays"):
        swj.shard({}, swj.mesh())
