"""Size classes, the choice of a slot for a unit, and slots that are retired because somebody still holds a view."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.fsdp.collectives import BufferKind
from shardwise.fsdp.slots import SAME_CLASS, SLOT_ALIGN_BYTES, Arena, size_classes
from shardwise.fsdp.torch_collectives import DryCollectives
from tests.engine.rig import Block, Net, Twins, batch, on_ranks, seeded


def classes_of(sizes: list[int], slots: int) -> list[tuple[tuple[str, ...], int, int]]:
    named = [(f"u{index}", nbytes) for index, nbytes in enumerate(sizes)]
    return [(c.members, c.slot_bytes, c.slot_count) for c in size_classes(named, lambda _: slots)]


def test_units_of_one_size_share_slots_in_forward_order() -> None:
    assert classes_of([640] * 5, slots=3) == [(("u0", "u1", "u2", "u3", "u4"), 640, 3)]


def test_a_large_embedding_does_not_make_every_slot_large() -> None:
    assert classes_of([6400, 640, 640, 640, 64], slots=2) == [
        (("u0",), 6400, 1),
        (("u1", "u2", "u3"), 640, 2),
        (("u4",), 64, 1),
    ]


def test_units_of_about_the_same_size_share_the_largest_ones_slots() -> None:
    assert classes_of([800, 1000, 900], slots=2) == [(("u0", "u1", "u2"), 1024, 2)]
    assert classes_of([799, 1000, 900], slots=2) == [(("u1", "u2"), 1024, 2), (("u0",), 832, 1)]


def test_units_of_no_bytes_have_no_slot() -> None:
    assert classes_of([0, 64, 0], slots=3) == [(("u1",), 64, 1)]
    assert classes_of([0], slots=3) == []


@given(st.lists(st.integers(0, 5000), max_size=12), st.integers(1, 4))
def test_every_unit_fits_and_fills_its_slot(sizes: list[int], slots: int) -> None:
    found = classes_of(sizes, slots)
    for members, slot_bytes, slot_count in found:
        own = [sizes[int(name[1:])] for name in members]
        assert slot_bytes % SLOT_ALIGN_BYTES == 0
        assert max(own) <= slot_bytes < max(own) + SLOT_ALIGN_BYTES
        assert min(own) >= SAME_CLASS * max(own)
        assert slot_count == min(slots, len(members))
        assert list(members) == sorted(members, key=lambda name: int(name[1:]))
    assert sorted(name for members, _, _ in found for name in members) == sorted(
        f"u{index}" for index, nbytes in enumerate(sizes) if nbytes
    )


def test_unit_i_prefers_slot_i_mod_k_and_takes_another_of_its_class_if_need_be() -> None:
    units = [f"u{index}" for index in range(5)]
    arena = Arena[str](BufferKind.GATHER)
    arena.allocate(DryCollectives(0, 2, "cpu"), size_classes([(u, 640) for u in units], lambda _: 3))
    assert [arena.slots.index(arena.preferred(unit)) for unit in units] == [0, 1, 2, 0, 1]
    assert [arena.slots.index(slot) for slot in arena.choices(units[4])] == [1, 2, 0]
    assert len({slot.key for slot in arena.slots}) == 3  # each its own storage
    assert [slot.buffer.bytes.numel() for slot in arena.slots] == [640] * 3


@on_ranks(2)
def test_addresses_repeat_from_step_to_step() -> None:
    twins = Twins(lambda: Net(5))
    addresses: list[dict[str, int]] = []

    def note(fqn: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            assert isinstance(module, Block)
            addresses[-1][fqn] = module.up.weight.data_ptr()

        return hook

    for index, block in enumerate(twins.sharded.blocks):  # type: ignore[arg-type]
        block.register_forward_pre_hook(note(str(index)))
    for _ in range(4):
        addresses.append({})
        twins.train(1)
    assert addresses[1] == addresses[2] == addresses[3]
    assert len(set(addresses[-1].values())) == 3  # five blocks in three slots
    assert addresses[-1]["0"] == addresses[-1]["3"]


@pytest.mark.parametrize(("nested", "least"), [(False, 2), (True, 3)])
@on_ranks(2)
def test_too_few_slots_for_the_nesting_is_an_error_that_names_the_minimum(nested: bool, least: int) -> None:
    units = {Block, nn.Linear} if nested else {Block}
    with pytest.raises(ConfigError, match=f"slots={least - 1}.* at least {least}"):
        sw.shard(seeded(Net), units=units, slots=least - 1)(batch(0))
    twins = Twins(units=units, slots=least)
    twins.train(2)
