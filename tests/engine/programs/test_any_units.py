"""Ranks whose forwards use different units, inside `sw.join(any_units=True)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.engine.cases import collectives
from tests.engine.rig import Block, Twins, batch, on_ranks

Path = Sequence[Any]
"""What a forward does, one thing after another: a part's name; or (how, path), a path done in another way."""


class Nest(nn.Module):
    """Blocks of which a forward uses some, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for number in order:
            x = self.blocks[number](x)
        return self.mix(x)  # type: ignore[no-any-return]


class Parts(nn.Module):
    """A model that goes any path through its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 6), nn.Linear(6, 3)
        self.parts = nn.ModuleDict({name: Block() for name in "abcd"})
        self.table = nn.Linear(6, 6, bias=False)
        self.nest = Nest()
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.parts["d"].aside = nn.Parameter(torch.randn(6, 6))  # type: ignore[union-attr, assignment]

    def forward(self, x: Tensor, path: Path) -> Tensor:
        return self.leave(self.go(self.enter(x), path))  # type: ignore[no-any-return]

    def go(self, x: Tensor, path: Path) -> Tensor:
        for part in path:
            x = self.parts[part](x) if isinstance(part, str) else self.another_way(x, *part)
        return x

    def another_way(self, x: Tensor, how: str, path: Path) -> Tensor:
        if how == "no_grad":
            with torch.no_grad():
                return self.go(x, path)
        ways: dict[str, Callable[[], Any]] = {
            "nest": lambda: self.nest(x, path),
            "tied": lambda: self.tied(x),
            "read": lambda: F.linear(x, self.table.weight),
            "call": lambda: self.table(x),
            "checkpoint": lambda: checkpoint(self.go, x, path, use_reentrant=False),
            "reentrant": lambda: checkpoint(self.go, x, path, use_reentrant=True),
            "aside": lambda: x + self.go(x.detach(), path),
        }
        return ways[how]()  # type: ignore[no-any-return]


def is_unit(fqn: str, module: nn.Module) -> bool:
    return isinstance(module, (Block, Nest)) or fqn in {"table", "tied"}


@contextmanager
def any_units(model: nn.Module) -> Iterator[None]:
    """What a loop over `sw.join` has around its body."""
    loop = iter(sw.join(model, [0], any_units=True))
    next(loop)
    try:
        yield
    finally:
        loop.close()  # type: ignore[attr-defined]


class ByPath(Twins):
    """Twins whose ranks go different paths."""

    def go(self, paths: Sequence[Path], forwards: int = 1) -> None:
        """Run forwards and one backward with both, and compare gradients. `paths`: by rank."""

        def loss(model: nn.Module, rank: int) -> Tensor:
            shapes = [(5, 4), (2, 4)][:forwards]
            outputs = [model(batch(self.steps, rank, *shape), paths[rank]) for shape in shapes]
            return sum(output.square().mean() for output in outputs)  # type: ignore[return-value]

        self.plain_backward([lambda model, r=rank: loss(model, r) for rank in self.every_rank])  # type: ignore[misc]
        loss(self.sharded, dist.get_rank()).backward()  # type: ignore[no-untyped-call]
        self.steps += 1


PATHS: dict[str, tuple[Path, Path]] = {
    "a head for each rank": (["a", "b"], ["a", "c"]),
    "nothing on one rank": (["a", "b", "c"], []),
    "another order": (["a", "b", "c"], ["c", "a", "b"]),
    "one unit twice": (["a", "a", "b"], ["b", "a"]),
    "units in units": ([("nest", [0, 2])], [("nest", [1]), "a"]),
    "units around units on one rank": ([("nest", [0, 1, 2]), "a"], ["a"]),
    "tied weights": (["a", ("tied", ())], ["d"]),
    "a weight that is read": ([("read", ()), "a"], ["a", ("call", ())]),
    "reads on one rank": ([("read", ()), "a", ("read", ())], ["b"]),
    "not in grad mode": ([("no_grad", ["a", ("nest", [1])]), "b"], ["b", "a"]),
    "beside the graph": ([("aside", ["a", "b"]), "c"], ["c"]),
    "a checkpoint around a unit": ([("checkpoint", ["a"]), "b"], ["b", ("checkpoint", ["c"])]),
    "a checkpoint around several": ([("checkpoint", ["a", "b", ("nest", [0, 1])]), "c"], ["c"]),
    "checkpoints around other units": ([("checkpoint", ["a", "b"])], ["d", ("checkpoint", ["b", "c"])]),
    "a reentrant checkpoint": ([("reentrant", ["a", "b"]), "c"], ["c", "b"]),
    "a read in a checkpoint": ([("checkpoint", ["a", ("read", ()), "b"])], ["b"]),
}


FEW = ("another order", "a weight that is read", "a checkpoint around several", "not in grad mode")


def _go_paths(twins: ByPath, paths: tuple[Path, Path], steps: int) -> None:
    with any_units(twins.sharded):
        for step in range(steps):
            twins.go(paths[::-1] if step % 2 else paths)
            twins.same_gradients()
            twins.step()
    twins.same_parameters()


def _every_path(names: Sequence[str], steps: int, transport: str = "shm", **options: Any) -> None:
    for name in names:
        try:
            with collectives(transport):
                twins = ByPath(Parts, units=is_unit, slots=4, **options)
            _go_paths(twins, PATHS[name], steps)
        except Exception as error:
            error.add_note(name)
            raise


@on_ranks(2)
def test_ranks_that_use_different_units_train_as_in_plain_torch() -> None:
    _every_path(FEW, 2)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo", "torch"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"])
@on_ranks(2)
def test_every_strategy_and_transport(strategy: str, transport: str) -> None:
    _every_path([*PATHS], 3, transport, strategy=strategy)
