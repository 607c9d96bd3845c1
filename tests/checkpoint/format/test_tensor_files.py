"""Files are laid out only where every element of a stored tensor is one tensor's."""

from __future__ import annotations

import pytest
import torch

from shardwise.checkpoint.format.local_tensor import piece_of
from shardwise.checkpoint.format.tensor_files import files_for
from shardwise.checkpoint.names.index_map import IndexMap, Place
from shardwise.errors import UsageError


def half(start: int) -> tuple[Place, ...]:
    return (Place("whole", (4, 2), IndexMap.one(4, there=start)),)


def test_tensors_that_share_a_stored_one() -> None:
    halves = [piece_of(("first",), torch.ones(2, 2), half(0)), piece_of(("last",), torch.ones(2, 2), half(4))]
    assert files_for("model", halves, 2**20).tensors["whole"].shape == (4, 2)
    with pytest.raises(
        UsageError, match=r"'more' is stored as part of 'whole', but 8 of its 8 elements are stored by another"
    ):
        files_for("model", [*halves, piece_of(("more",), torch.ones(2, 2), half(4))], 2**20)


def test_two_tensors_of_one_name_are_refused() -> None:
    twins = [piece_of(("same",), torch.ones(2)), piece_of(("same",), torch.zeros(2))]
    with pytest.raises(UsageError, match=r"'same' is stored as part of 'same', but 2 of its 2 elements"):
        files_for("optimizer", twins, 2**20)
