"""Which parameters are hidden matrices."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.optim.matrices.hidden_matrices import hidden_matrices, named_groups


class Model(nn.Module):
    """Of everything some."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(9, 4)
        self.position = nn.Embedding(5, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.fc = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4, bias=False)
        self.experts = nn.Parameter(torch.zeros(2, 4, 4))
        self.one = nn.Linear(1, 1)
        self.score = nn.Linear(4, 2)
        self.logits = nn.Linear(4, 9)


HIDDEN = {"fc.weight", "down.weight"}


@pytest.mark.parametrize("is_sharded", [False, True])
def test_embeddings_heads_and_what_is_no_matrix_are_not(is_sharded: bool) -> None:
    model = Model()
    if is_sharded:
        sw.shard(model)
    by_id = {id(p): name for name, p in model.named_parameters()}
    assert {by_id[i] for i in hidden_matrices(model, named_groups(model), None)} == HIDDEN
    if is_sharded:  # parameters know their modules
        assert {by_id[i] for i in hidden_matrices(None, named_groups(model.parameters()), None)} == HIDDEN


def test_names_alone_tell_embeddings_that_are_called_so() -> None:
    named = [(n, p) for n, p in Model().named_parameters() if not n.startswith("position")]
    by_id = {id(p): name for name, p in named}
    assert {by_id[i] for i in hidden_matrices(None, named_groups(named), None)} == HIDDEN


def test_the_caller_has_the_last_word() -> None:
    model = Model()
    chosen = hidden_matrices(model, named_groups(model), lambda fqn, p: fqn == "score.weight")
    assert chosen == {id(model.score.weight)}
