"""Seams ask what is attached to them, and the engine's own is what remains without."""

from unittest import mock

from shardwise import registry
from shardwise.fsdp.torch_collectives import collectives_for
from tests.ranks import RankPools


def test_functions_come_in_the_order_of_their_registration() -> None:
    with mock.patch.object(registry, "_names", {}):
        assert registry.registered("a seam") == []
        registry.register("a seam", "os.path:join")
        registry.register("another", "no.such.module:function")
        registry.register("a seam", "math:sqrt")
        assert [function.__name__ for function in registry.registered("a seam")] == ["join", "sqrt"]


def with_nothing_attached() -> str:
    with mock.patch.object(registry, "_names", {}):
        return collectives_for(None, "cpu").name


def test_groups_get_the_collectives_of_torch_where_nothing_is_attached(ranks: RankPools) -> None:
    assert ranks(2).run(with_nothing_attached) == ["torch", "torch"]
    assert with_nothing_attached() == "dry"
