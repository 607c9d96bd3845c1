"""Smaller programs that still go wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from tests.programs.drawing import is_legal
from tests.programs.program import Action, Node, Program, Raise, Sharding, Train

T = TypeVar("T")

PLAINER = {
    "world_size": (1, 2, 3),
    "tp": (1, 2),
    "width": (4,),
    "dtype": ("fp32",),
    "output": ("",),
    "optimizer": ("sgd",),
    "lora": (False,),
}
"""Values to try, the plainest first."""


def shrink(program: Program, fails: Callable[[Program], bool], most: int = 300) -> Program:
    """The smallest program found in `most` tries for which `fails` says yes, as it does for `program`."""
    tried: set[Program] = set()
    start = 0
    while len(tried) < most:
        candidates = [smaller for smaller in smaller_ones(program) if is_legal(smaller)]
        order = [*candidates[start:], *candidates[:start]]  # what failed to help a moment ago comes last
        for number, smaller in enumerate(order):
            if smaller in tried or len(tried) == most:
                continue
            tried.add(smaller)
            if fails(smaller):
                program, start = smaller, (start + number) % len(candidates)
                break
        else:
            break
    return program


def smaller_ones(program: Program) -> Iterator[Program]:
    """Programs with one thing less, those with much less first."""
    for actions in _fewer(program.actions):
        yield dataclasses.replace(program, actions=actions)
    for model in _smaller(program.model):
        yield dataclasses.replace(program, model=model)
    for name, values in PLAINER.items():
        for value in values:
            if value == getattr(program, name):
                break
            if name != "world_size" or not program.sharding.strategy.startswith("hybrid"):
                yield dataclasses.replace(program, **{name: value})
    for sharding in _plainer(program.sharding):
        yield dataclasses.replace(program, sharding=sharding)


def _fewer(actions: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
    for number in range(len(actions)):
        yield actions[:number] + actions[number + 1 :]
    for number, action in enumerate(actions):
        for plainer in _by_default(action):
            yield (*actions[:number], plainer, *actions[number + 1 :])
        if isinstance(action, Train):
            for micro_batch in range(len(action.synced) - 1):
                synced = action.synced[:micro_batch] + action.synced[micro_batch + 1 :]
                yield (*actions[:number], dataclasses.replace(action, synced=synced), *actions[number + 1 :])
            if action.step:
                yield (*actions[:number], dataclasses.replace(action, step=False), *actions[number + 1 :])
        if isinstance(action, Raise) and action.at:
            yield (*actions[:number], dataclasses.replace(action, at=action.at - 1), *actions[number + 1 :])


def _smaller(node: Node) -> Iterator[Node]:
    for number, child in enumerate(node.children):
        if len(node.children) > 1 or node.kind in ("chain", "residual"):
            yield node.with_child(number)
        if child.children:
            yield node.with_child(number, *child.children)
    for number, child in enumerate(node.children):
        if child.kind != "dense" and not child.children:
            yield node.with_child(number, dataclasses.replace(child, kind="dense", option=""))
        for smaller in _smaller(child):
            yield node.with_child(number, smaller)
    for name in ("unit", "frozen", "tie", "cut", *(["option"] if node.kind == "dense" else [])):
        if getattr(node, name):
            yield dataclasses.replace(node, **{name: type(getattr(node, name))()})


def _plainer(sharding: Sharding) -> Iterator[Sharding]:
    if sharding.strategy.startswith("hybrid"):
        yield dataclasses.replace(sharding, strategy="full_shard")
    yield from _by_default(sharding)


def _by_default(item: T) -> Iterator[T]:
    """With one field as by default."""
    for field in dataclasses.fields(item):  # type: ignore[arg-type]
        if getattr(item, field.name) != field.default:
            yield dataclasses.replace(item, **{field.name: field.default})  # type: ignore[type-var]
