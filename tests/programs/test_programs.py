"""Random programs give the numbers of plain torch, whatever is called in whatever order.

A failure prints the program and how to see it again; `survey.py` runs as many as one wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import program as language
from tests.programs.cutting import CUTS
from tests.programs.drawing import draw, is_legal, program_of
from tests.programs.features import features
from tests.programs.fleet import Fleet
from tests.programs.program import Node, Program, Sharding, Train
from tests.programs.running import Outcome
from tests.programs.shrinking import smaller_ones

if TYPE_CHECKING:
    from tests.ranks import RankPools

USUAL, GROUPS, OF_GROUP = 3, 8, 25

programs = st.builds(draw, st.randoms(use_true_random=False), tensor=st.booleans())


@pytest.mark.parametrize(
    "group", [*range(USUAL), *(pytest.param(group, marks=pytest.mark.exhaustive) for group in range(USUAL, GROUPS))]
)
def test_random_programs_match(ranks: RankPools, group: int) -> None:
    _match(ranks, range(OF_GROUP * group, OF_GROUP * (group + 1)))


SHARED_UNEVENLY = (430074, 430188)
"""Programs of which units share slots on some ranks of the tensor axis, and not on others."""


@pytest.mark.parametrize(
    "seeds", [range(3), SHARED_UNEVENLY, pytest.param(range(3, 28), marks=pytest.mark.slow)], ids=str
)
def test_random_programs_beside_a_tensor_axis_match(ranks: RankPools, seeds: Sequence[int]) -> None:
    _match(ranks, seeds, tensor=True)


@pytest.mark.slow
def test_random_programs_whose_ranks_use_different_units_match(ranks: RankPools) -> None:
    _match(ranks, range(12), joined=True)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["muon", "lora"])
def test_random_programs_of_whole_matrices_and_adapters_match(ranks: RankPools, more: str) -> None:
    if more == "lora":
        pytest.importorskip("peft")
    _match(ranks, range(12), tensor=True, **{more: True})


def _match(ranks: RankPools, seeds: Sequence[int], **options: bool) -> None:
    failed = []
    with Fleet(ranks) as fleet:
        for seed in seeds:
            result = fleet.run(program_of(seed, **options))
            if result.outcome is not Outcome.OK:
                flags = "".join(f"--{name} " for name, is_on in options.items() if is_on)
                again = f"python tests/programs/survey.py {flags}--replay {seed}"
                failed.append(f"seed {seed} ({again}):\n{result}\n{result.program}")
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize("inside", ["one unit", "nested units"])
def test_a_recomputation_that_one_rank_starts_alone(ranks: RankPools, inside: str) -> None:
    """A checkpoint around units and, after them, a layer of the root that only one rank runs: there the layer's saved
    tensor starts the recomputation, on others the gradient of the last unit's output."""
    leaf = Node("dense", unit=True)
    units = {"one unit": (leaf,), "nested units": (leaf, Node("aux", children=(leaf,), unit=True))}[inside]
    alone = Node("depth", children=(Node("dense"),), option="rank")
    model = Node("chain", children=(Node("checkpoint", children=(*units, alone), option="non-reentrant"),))
    program = Program(965, model=model, sharding=Sharding(units="marked"), actions=(Train(), Train()))
    assert is_legal(program)
    with Fleet(ranks) as fleet:
        result = fleet.run(program)
    assert result.outcome is Outcome.OK, result


@given(programs)
@settings(max_examples=50, deadline=None)
def test_a_program_is_what_its_repr_says(program: Program) -> None:
    assert eval(repr(program), vars(language)) == program


@given(st.integers(0, 10**9))
@settings(max_examples=50, deadline=None)
def test_a_seed_is_always_the_same_program(seed: int) -> None:
    assert program_of(seed) == program_of(seed)
    assert program_of(seed, tensor=True) == program_of(seed, tensor=True)


@given(programs)
@settings(max_examples=50, deadline=None)
def test_what_is_drawn_is_not_refused(program: Program) -> None:
    assert is_legal(program)


def test_programs_of_whole_matrices_and_adapters_are_not_refused() -> None:
    asked: list[dict[str, bool]] = [{"muon": True}, {"lora": True, "tensor": True}]
    assert all(is_legal(program_of(seed, **options)) for seed in range(50) for options in asked)


@given(programs)
@settings(max_examples=20, deadline=None)
def test_smaller_programs_are_others(program: Program) -> None:
    assert program not in list(smaller_ones(program))


def test_everything_is_drawn_before_long() -> None:
    """Nodes of each kind, every shape, strategy and action."""
    found = set().union(*(features(program_of(seed)) for seed in range(400)))
    for what, names in {
        "strategy": (
            "no_shard",
            "shard_optimizer",
            "shard_grad_op",
            "full_shard",
            "hybrid_shard",
            "hybrid_shard_zero2",
        ),
        "shape": language.SHAPES,
        "zero": language.ZEROS,
        "grads": language.GRADS,
        "edit": language.EDITS,
        "evaluate": language.MODES,
        "optimizer": language.OPTIMIZERS,
        "raise": ("forward", "backward"),
        "hold": language.HELD,
        "checkpoint": ("save", "load"),
    }.items():
        assert {f"{what}:{name}" for name in names} <= found


def test_everything_is_cut_before_long() -> None:
    """Each kind of node in each way, by tensor axes of each size."""
    found = set().union(*(features(program_of(seed, tensor=True)) for seed in range(100)))
    assert {f"cut:{kind}/{cut}" for kind, cuts in CUTS.items() for cut in cuts} <= found
    assert {"tp:2", "tp:3"} <= found
