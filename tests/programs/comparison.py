"""What differs between the two sides of a program after an action, and how much may.

Bits are equal where the arithmetic is the same operation by operation. It is not where a rank adds its gradients up in
another order than autograd does (a unit that is reduced in parts, because it was called for two forwards of one
backward or because a reentrant checkpoint brings gradients in portions), where a norm is taken over slices, where
the factor 1 / world_size is rounded (3 ranks) and a sum is scaled in one case and its terms in the other, and where an
activation has three users or more: a unit sums the gradients of those inside it before the others'. A fused optimizer
rounds otherwise at the end of a piece (a scalar tail) than inside it, and pieces end elsewhere than parameters. A
matrix product that a tensor axis cuts is summed over its ranks, at the latest in its backward. An adapter makes a third
user of what its layer is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardwise.engine.extensions.tensor_parallel import TensorPlacement
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.sharded.extensions.waiting import WaitingGradient
from tests.programs.parts import EXPERTS
from tests.programs.program import Node, Program, Raise, Train
from tests.programs.sides import Plain, Seen, Sharded

TOLERANCES = {"fp64": 1e-9, "fp32": 2e-4, "bf16": 1.2e-1}
"""Relative to the largest entry of the tensor, or a tenth of the largest of its kind. A few units in the last place,
over a few steps; what is wrong is wrong by per cents. bf16 has 8 bits: one of its roundings is 0.4 %, and AdamW's
first step is the sign of a gradient; what this lets pass there, the programs in fp32 and fp64 find."""


SEEN_FLOOR = 0.05
"""Losses and what else is seen are of the order of 1, but for what cancels out in a mean."""


@dataclass(frozen=True)
class Difference:
    """One tensor that is not what it should be."""

    what: str
    by: float
    """Largest absolute difference; NaN and None count as infinite."""
    size: float
    """Largest magnitude of what is expected."""
    said: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.said or f'off by {self.by:.2e} where the largest is {self.size:.2e}'}"


def tolerance(program: Program) -> float:
    """0 where bits have to be equal."""
    narrowest = _narrowest(program)
    if narrowest != "bf16" and _is_exact(program):
        return 0.0
    if program.optimizer == "muon":  # iterates in bf16, whatever the weights are
        return max(TOLERANCES["fp32"], TOLERANCES[narrowest])
    return TOLERANCES[narrowest]


def _narrowest(program: Program) -> str:
    held = {program.dtype, *(node.option for node in program.model.walk() if node.kind == "dense")}
    if program.sharding.param:
        held.add(program.sharding.param)
    return next(name for name in ("bf16", "fp32", "fp64") if name in held)


def _is_exact(program: Program) -> bool:
    nodes = list(program.model.walk())
    trained = [action for action in program.actions if isinstance(action, Train)]
    in_portions = any(action.shape == "two_forwards" for action in trained)
    in_portions |= any(node.kind == "checkpoint" and node.option == "reentrant" for node in nodes)
    in_portions |= any(action.recompute == "reentrant" for action in trained)
    waits = any(not all(action.synced) for action in trained)
    waits |= any(isinstance(action, Raise) and not action.synced for action in program.actions)
    clips = any(action.clip for action in trained)
    thirds = program.world_size == 3
    sums = program.tp > 1 and any(node.cut not in {"", "whole"} for node in nodes)
    fused = program.optimizer == "adamw-fused"
    return not (
        in_portions or clips or fused or sums or program.lora or (waits and thirds) or _users([program.model])[1] > 2
    )


_BRANCHES = {"residual": 1, "cut": 1}
"""Users of a node's input beside its first child."""
_ALONE = {"method": 2, "stash": 2, "experts": 2, "bump": 1}
"""Users of its input, of nodes that have no child there; others have one."""


def _users(nodes: Sequence[Node], before: int = 0) -> tuple[int, int]:
    """How many operations use what nodes in a row are given, `before` included, and the most of any activation."""
    first = most = 0
    beside = before
    for number, node in enumerate(nodes):
        inner, within = _users_of(node)
        most = max(most, within, inner + beside)
        first = inner + beside if number == 0 else first
        beside = int(node.kind == "aux")  # its head uses what it returns
    return first, most


def _users_of(node: Node) -> tuple[int, int]:
    if not node.children or node.kind == "bump" or node.option == "no_grad":
        count = EXPERTS + 1 if node.option == "all-list" else _ALONE.get(node.kind, 1)
        return count, max(count, _users(node.children)[1])
    count, most = _users(node.children, _BRANCHES.get(node.kind, 0))
    return count, most


def differences(program: Program, plain: Plain, sharded: Sharded) -> list[Difference]:
    """By what was seen, gradients, weights and buffers of this rank; also forgets what was seen. Local."""
    allowed = tolerance(program)
    found = _of_seen(plain.seen, sharded.seen, allowed)
    ours, theirs = plain.parameters, sharded.parameters
    if list(ours) != list(theirs):
        return [Difference("parameters", float("inf"), 0.0, f"named {list(theirs)} instead of {list(ours)}")]
    reduced = [name for name, p in theirs.items() if not isinstance(p.grad, WaitingGradient)]
    found += _of_pieces(
        "gradient of", {n: ours[n].grad for n in reduced}, {n: theirs[n].grad for n in reduced}, allowed
    )
    found += _of_pieces("weight", ours, theirs, allowed)
    found += _of_pieces("buffer", plain.buffers, sharded.buffers, allowed)
    plain.seen, sharded.seen = [], []
    return found


def _of_seen(plain: Seen, sharded: Seen, allowed: float) -> list[Difference]:
    names, ours = [name for name, _ in plain], [name for name, _ in sharded]
    if names != ours:
        return [Difference("what was seen", float("inf"), 0.0, f"{ours} instead of {names}")]
    found = []
    for number, ((name, expected), (_, actual)) in enumerate(zip(plain, sharded, strict=True)):
        found += _difference(f"{name} ({number})", expected, actual, allowed, SEEN_FLOOR)
    return found


def _of_pieces(
    what: str, plain: Mapping[str, Tensor | None], sharded: Mapping[str, Tensor | None], allowed: float
) -> list[Difference]:
    largest = max((magnitude(t) for t in plain.values() if t is not None), default=0.0)
    found = []
    for name, expected in plain.items():
        actual = sharded[name]
        if (expected is None) != (actual is None):
            said = "None instead of a gradient" if actual is None else "a gradient instead of None"
            found.append(
                Difference(f"{what} {name}", float("inf"), 0.0 if expected is None else magnitude(expected), said)
            )
        elif expected is not None and actual is not None:
            found += _difference(f"{what} {name}", *_same_piece(expected, actual), allowed, largest / 10)
    return found


def _same_piece(expected: Tensor, actual: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's piece of both."""
    expected, piece = expected.detach(), actual.detach()
    if isinstance(actual, ShardedParameter):
        fragment = actual.fragment
        if isinstance(actual.placement, TensorPlacement):
            expected = _local_part(expected, actual.placement.spec)
        return expected.reshape(-1)[fragment.start : fragment.stop], actual.local.detach()
    return expected, piece


def _local_part(full: Tensor, spec: DTensorSpec) -> Tensor:
    """What this rank of a tensor axis has of it, as DTensors are documented to be cut."""
    (placement,), ranks, rank = spec.placements, spec.mesh.size(), spec.mesh.get_local_rank()
    if not isinstance(placement, Shard):
        return full
    chunks = full.chunk(ranks, placement.dim)
    return chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)


def _difference(what: str, expected: Tensor, actual: Tensor, allowed: float, floor: float) -> list[Difference]:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        said = f"{actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
        return [Difference(what, float("inf"), 0.0, said)]
    if torch.equal(expected, actual):
        return []
    by, size = magnitude(actual.double() - expected.double()), magnitude(expected)
    if by <= allowed * max(size, floor):
        return []
    return [Difference(what, by, size)]


def magnitude(tensor: Tensor) -> float:
    """The largest absolute entry; NaN if there is one."""
    return float(tensor.detach().double().abs().max()) if tensor.numel() else 0.0
