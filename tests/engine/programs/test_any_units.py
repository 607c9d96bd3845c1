"""Ranks whose forwards use different units, inside `sw.join(any_units=True)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import MismatchError
from shardwise.model_tools.activation_checkpointing import checkpoint_units
from tests.engine.cases import MIXED, Case, collectives
from tests.engine.rig import Block, Twins, batch, count, on_ranks, recording, seeded, squares

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
@pytest.mark.parametrize(
    ("strategy", "transport"),
    [
        ("full_shard", "shm"),
        ("full_shard", "gloo"),
        ("full_shard", "torch"),
        ("shard_grad_op", "shm"),
        ("shard_optimizer", "shm"),
        ("no_shard", "shm"),
    ],
)
@on_ranks(2)
def test_every_strategy_and_transport(strategy: str, transport: str) -> None:
    _every_path([*PATHS], 3, transport, strategy=strategy)


@on_ranks(2)
def test_units_that_no_rank_uses_are_left_alone() -> None:
    with recording():
        twins = ByPath(Parts, units=is_unit, slots=4)
    rank = dist.get_rank()

    def counts() -> list[int]:
        return [count(twins.engine, op) for op in ("all_gather", "reduce_scatter")]

    with any_units(twins.sharded):
        before = counts()
        squares(lambda x: twins.sharded(x, ["ab"[rank]]), batch(0)).backward()
        gathers, reductions = (now - then for now, then in zip(counts(), before, strict=True))
    assert gathers == 2 * 2 + 1  # the root stays gathered until its backward
    assert reductions == 3
    used = {
        name.split(".")[1] for name, p in twins.sharded.named_parameters() if p.grad is not None and "parts" in name
    }
    assert used == {"a", "b"}


@on_ranks(2)
def test_blocks_that_are_checkpointed_and_mixed_precision() -> None:
    """Batches of both kinds, of which each rank has others, as one model that is checkpointed by the library."""
    rank, plain, model = (
        dist.get_rank(),
        seeded(Parts),
        sw.shard(seeded(Parts), units=is_unit, slots=4, precision=MIXED),
    )
    checkpoint_units(model, "full")
    kinds: list[Path] = [["a", ("nest", [0, 1])], ["b"], [("nest", [2]), "d"]]
    own = [[kinds[0], kinds[1], kinds[2]], [kinds[1]]]
    batches = sw.join(model, own[rank], any_units=True)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    for step, path in enumerate(batches):
        for other in range(2):
            if step < len(own[other]):
                share = 1.0 if step else 0.5
                (squares(lambda x, p=own[other][step]: plain(x, p), batch(step, other)) * share).backward()  # type: ignore[misc]
        (squares(lambda x, p=path: model(x, p), batch(step)) * batches.weight(5)).backward()  # type: ignore[misc]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        whole = model.get_parameter(name).full_tensor()  # type: ignore[operator]
        torch.testing.assert_close(whole, parameter.detach(), rtol=0.05, atol=0.02, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(2, timeout_s=30)
def test_different_modules_called_by_the_script_are_refused() -> None:
    model, rank = sw.shard(seeded(Parts), units=is_unit, slots=4), dist.get_rank()
    with any_units(model), pytest.raises(MismatchError, match=r"calls unit 'parts\.[ab]'.*choose inside its forward"):
        model.get_submodule(f"parts.{'ab'[rank]}")(torch.ones(2, 6))


@on_ranks(2, timeout_s=30)
def test_one_more_forward_on_a_rank_is_refused() -> None:
    model, rank = sw.shard(seeded(Parts), units=is_unit, slots=4), dist.get_rank()
    with any_units(model):
        losses = [squares(lambda x: model(x, ["a"]), batch(0))]
        with pytest.raises(
            MismatchError, match=r"calls the root unit.*runs a backward|runs a backward.*calls the root"
        ):
            losses += [squares(lambda x: model(x, ["a"]), batch(0))] if rank else [losses[0].backward()]


@on_ranks(2, timeout_s=30)
def test_outside_of_it_ranks_that_use_different_units_are_told() -> None:
    model, rank = sw.shard(seeded(Parts), units=is_unit, slots=4), dist.get_rank()
    with any_units(model):
        model(batch(0), ["a" if rank else "b"])
    with torch.no_grad(), pytest.raises(MismatchError, match=r"'parts\.[ab]'"):
        model(batch(0), ["a" if rank else "b"])


# Random paths ---------------------------------------------------------------------------------------------------------


def _drawn(random: Random, forwards: int) -> list[Path]:
    """Return a random path for each forward of a micro-batch. A unit that is called inside a checkpoint is not called
    outside: the engine would not know which of its calls it recomputes."""
    parts = [*"abcd", "nest", "tied", "table"]
    random.shuffle(parts)
    inside = parts[: random.randrange(5)]
    outside = parts[len(inside) :]

    def path(among: Sequence[str], ways: Sequence[str]) -> Path:
        return [step(among, ways) for _ in range(random.randrange(4))]

    def step(among: Sequence[str], ways: Sequence[str]) -> Any:
        if ways and random.random() < 0.4:
            how = random.choice(ways)
            return (how, path(inside if how in {"checkpoint", "reentrant"} else among, ()))
        part = random.choice(among) if among else ""
        if part == "nest":
            return (part, [random.randrange(3) for _ in range(random.randrange(4))])
        if part == "table":
            return (random.choice(("read", "call")), ())
        return part if part in {*"abcd"} else (part or "aside", ())

    return [path(outside, ("checkpoint", "reentrant", "no_grad", "aside")) for _ in range(forwards)]


def _by_chance(case: Case, seed: int, transport: str) -> None:
    """Train on random paths, all ranks the same ones or each another, in the ways that loops have."""
    with collectives(transport):
        model = case.shard(seeded(Parts), units=is_unit, slots=4)
    plain, random, ranks = seeded(Parts), Random(seed), range(case.world_size)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (plain, model)]
    said = [f"{case}, seed {seed}, {transport}"]
    with any_units(model):
        for step in range(6):
            micro_batches = random.choice((1, 1, 2))
            for micro in range(micro_batches):
                forwards = random.choice((1, 1, 2))
                paths = [_drawn(random, forwards) for _ in ranks]
                said.append(str(paths))

                def loss(one: nn.Module, rank: int, of: Any = (step, micro, paths)) -> Tensor:
                    x = batch(10 * of[0] + of[1], rank)
                    return sum(squares(lambda y, p=p: one(y, p), x) for p in of[2][rank])  # type: ignore[arg-type, return-value, misc]

                for rank in ranks:
                    (loss(plain, rank) / case.world_size).backward()  # type: ignore[no-untyped-call]
                waits = micro < micro_batches - 1 and random.random() < 0.5
                try:
                    with sw.no_sync(model) if waits else nullcontext():
                        loss(model, dist.get_rank()).backward()  # type: ignore[no-untyped-call]
                except Exception as error:
                    error.add_note("; ".join(said))
                    raise
            norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.5) for one in (plain, model)]
            torch.testing.assert_close(norms[1], norms[0], rtol=1e-4, atol=1e-6, msg=lambda m: f"{said}: {m}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        whole = model.get_parameter(name).full_tensor()  # type: ignore[operator]
        torch.testing.assert_close(whole, parameter, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{said}: {n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case("full_shard", 2), Case("no_shard", 2), Case("hybrid_shard", 4), Case("full_shard", 4, 2)], ids=str
)
def test_random_paths_train_as_in_one_process(ranks: Any, case: Case) -> None:
    for seed in range(2):
        ranks(case.world_size).run(_by_chance, case, seed, ("shm", "gloo")[seed % 2], timeout_s=60)
