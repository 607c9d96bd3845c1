"""Drawing programs: the same one from the same numbers, on every rank and machine.

What `sw.shard` documents as refused is not drawn; this is all of it:
- `optimizer.step()`, or a change of `requires_grad`, while gradients of a `sw.no_sync` wait to be reduced;
- fewer slots than the nesting of units needs;
- a unit's method other than forward (helpers with methods are no units);
- units that run on some ranks only: heads that are chosen by rank lie inside a unit, unless ranks are `joined`;
- weights written between a forward and its backward;
- `sw.release`, and copies, while gradients of a `sw.no_sync` wait;
- ties between a module that is sharded first and the rest of the model;
- copies of a model with DTensors, or of an optimizer of whole matrices;
- one shared parameter that is cut in two ways;
- checkpoints of which a rank recomputes something and another, whose experts are idle or frozen, nothing;
- losses that leave a unit out of a checkpoint inside it by a way that nobody can look into: their backward may come
  before that of the unit's outputs, and recompute while nobody has told of the unit.
Beside that, what ranks skip inside a unit differs only where `uneven` is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random
from typing import TypeVar

from tests.programs.cutting import CUTS
from tests.programs.parts import PACKS
from tests.programs.program import (
    EDITS,
    GRADS,
    HELD,
    MODES,
    OPTIMIZERS,
    SHAPES,
    Action,
    Copy,
    Edit,
    Evaluate,
    Freeze,
    Load,
    Node,
    Program,
    Raise,
    Release,
    Save,
    Sharding,
    Train,
    Units,
)

T = TypeVar("T")

DEEPEST = 3
"""Nodes around a node."""
MOST_NODES = 14


UNITS: dict[Units, int] = {"marked": 5, None: 2, 10: 1, 40: 1, "classes": 2}


def program_of(
    seed: int,
    uneven: bool = False,
    tensor: bool = False,
    joined: bool = False,
    muon: bool = False,
    lora: bool = False,
) -> Program:
    """The program of a seed. `uneven`: ranks may skip parts of units that others run. `tensor`: its mesh has a tensor
    axis too. `joined`: ranks may skip units that others run. `muon`, `lora`: with that optimizer, with adapters."""
    program = draw(Random(seed), uneven, tensor, joined)
    return _with_adapters(program) if lora else _with_muon(program) if muon else program


def _with_muon(program: Program) -> Program:
    return dataclasses.replace(program, optimizer="muon", actions=_without_copies(program.actions))


def _with_adapters(program: Program) -> Program:
    """The same program with adapters. A plan cuts it as a whole, so no part is sharded first."""
    sharding = dataclasses.replace(program.sharding, first=False)
    return dataclasses.replace(program, lora=True, sharding=sharding)


def _without_copies(actions: Sequence[Action]) -> tuple[Action, ...]:
    return tuple(Release() if isinstance(action, Copy) else action for action in actions)


def draw(random: Random, uneven: bool = False, tensor: bool = False, joined: bool = False) -> Program:
    """A program by the numbers that come."""
    program = _Drawing(random, uneven or joined).program()
    program = _with_units_by_rank(program, random) if joined else program
    return _beside_tensor_axis(program, random) if tensor else program


def _with_units_by_rank(program: Program, random: Random) -> Program:
    """The same program, with units in what only some ranks run."""

    def marked(node: Node, skipped: bool) -> Node:
        below = skipped or node.kind == "depth"
        children = tuple(marked(child, below) for child in node.children)
        return dataclasses.replace(node, children=children, unit=node.unit or (skipped and random.random() < 0.5))

    actions = _without_copies(program.actions)
    return dataclasses.replace(program, model=marked(program.model, False), actions=actions, joined=True)


MOST_RANKS = 8


def _beside_tensor_axis(program: Program, random: Random) -> Program:
    """The same program on a mesh with a tensor axis that cuts some of its nodes; without one if it has none to cut."""
    tp = random.choice((2, 2, 3))
    data = program.world_size
    if data > 2 and not program.sharding.strategy.startswith("hybrid"):
        data = random.choice((1, 2, 2, 3) if program.sharding.reshard in (None, True, False) else (2,))
    tied = random.choice(("", *CUTS["dense"]))  # tied parameters are cut alike

    def cut(node: Node) -> Node:
        choices = CUTS.get(node.kind, ())
        how = tied if node.tie else random.choice(choices) if choices and random.random() < 0.7 else ""
        return dataclasses.replace(node, children=tuple(map(cut, node.children)), cut=how)

    actions = _without_copies(program.actions)
    model = cut(program.model)
    if not any(node.cut for node in model.walk()):
        return program
    return dataclasses.replace(program, world_size=data, tp=min(tp, MOST_RANKS // data), model=model, actions=actions)


class _Drawing:
    def __init__(self, random: Random, uneven: bool) -> None:
        self._random = random
        self._uneven = uneven
        self._left = MOST_NODES
        self._waiting = False
        """Whether gradients of a `no_sync` may wait."""
        self._recomputable = True
        """Whether the whole model may be checkpointed."""

    def program(self) -> Program:
        world_size = self._weighted({1: 1, 2: 5, 3: 2, 4: 3})
        dtype = self._weighted({"fp32": 3, "fp64": 1})
        sharding = self._sharding(world_size, dtype)
        model = _legal(self._model(), sharding)
        self._recomputable = _is_recomputable(model)
        drawn = Program(
            seed=self._random.randrange(1000),
            world_size=world_size,
            width=self._random.choice((4, 5, 6, 8)),
            dtype=dtype,
            model=model,
            output=self._random.choice(PACKS) if self._chance(0.2) else "",
            sharding=_fitting(sharding, model),
            optimizer=self._random.choice(OPTIMIZERS),
            actions=self._actions(),
        )
        drawn = dataclasses.replace(drawn, model=_recomputed_alike(drawn))
        return dataclasses.replace(drawn, actions=self._with_more(drawn.actions))

    def _with_more(self, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        """What came to be drawn later, so that seeds go on giving the models and actions that they gave before."""
        held = [
            dataclasses.replace(action, hold=self._random.choice(HELD))
            if isinstance(action, Train) and self._chance(0.1)
            else action
            for action in actions
        ]
        if self._chance(0.4):
            choices: tuple[Action, ...] = (Copy(), Release())
            places = [place for place in range(len(actions)) if not _waits_before(place, actions)]
            held.insert(self._random.choice(places), self._random.choice(choices))
        return tuple(held)

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _weighted(self, choices: dict[T, int]) -> T:
        return self._random.choices(list(choices), list(choices.values()))[0]

    # How it is sharded ------------------------------------------------------------------------------------------------

    def _sharding(self, world_size: int, dtype: str) -> Sharding:
        strategies = ["full_shard", "full_shard", "shard_grad_op", "shard_optimizer", "no_shard"]
        if world_size == 4:
            strategies += ["hybrid_shard", "hybrid_shard", "hybrid_shard_zero2"]
        strategy = self._random.choice(strategies)
        choices: list[bool | int | None] = [None, None, None]
        if strategy == "full_shard":
            choices += [True, False] + [2] * (world_size == 4)
        elif strategy == "shard_grad_op":
            choices += [True, False]
        low = dtype == "fp32" and self._chance(0.15)
        return Sharding(
            strategy=strategy,
            reshard=self._random.choice(choices),
            units="marked" if self._uneven else self._weighted(UNITS),
            extra_slots=self._random.choice((0, 0, 1, 3)),
            first=self._chance(0.1),
            collectives=self._weighted({"shm": 2, "gloo": 1}),
            param="bf16" if low else None,
            reduce=self._random.choice((None, "fp32")) if low else None,
        )

    # The model --------------------------------------------------------------------------------------------------------

    def _model(self) -> Node:
        ties = self._chance(0.25)
        tops = tuple(self._node(0, frozenset()) for _ in range(self._random.randint(1, 4)))
        model = Node("chain", tops)
        return self._tied(model) if ties else model

    def _node(self, depth: int, around: frozenset[str]) -> Node:
        self._left -= 1
        kind = self._weighted(self._kinds(depth, around))
        children: tuple[Node, ...] = ()
        if kind in INNER:
            count = 1 if kind == "twice" else self._random.randint(1, 3)
            children = tuple(self._node(depth + 1, around | {kind}) for _ in range(count))
        return Node(
            kind, children, self._option(kind), unit=self._chance(0.35), frozen=kind != "chain" and self._chance(0.08)
        )

    def _kinds(self, depth: int, around: frozenset[str]) -> dict[str, int]:
        kinds = dict(LEAVES)
        if depth < DEEPEST and self._left > 0:
            kinds |= {**INNER, "depth": 8} if self._uneven else INNER
        # Recomputed code must not change anything but its output.
        if "checkpoint" in around:
            for kind in CHANGING:
                kinds.pop(kind, None)
        if "cut" in around:
            kinds.pop("cut", None)
        return kinds

    def _option(self, kind: str) -> str:
        options: dict[str, Sequence[str]] = {
            "dense": ("", "", "", "bf16", "fp64"),
            "experts": ("rank-raw", "rank-raw", "rank-list", "rank-list", "step-list", "all-list"),
            "depth": ("rank",) if self._uneven else ("step",),
            "checkpoint": ("non-reentrant", "non-reentrant", "reentrant"),
            "pack": PACKS,
            "cut": ("detach", "no_grad"),
        }
        return self._random.choice(options[kind]) if kind in options else ""

    def _tied(self, model: Node) -> Node:
        """Two or three dense nodes share a weight, if there are as many."""
        dense = [node for node in model.walk() if node.kind == "dense" and not node.option]
        number = min(len(dense), self._random.choice((2, 2, 3)))
        chosen = set(map(id, self._random.sample(dense, number))) if number > 1 else set()

        def tied(node: Node) -> Node:
            children = tuple(map(tied, node.children))
            return dataclasses.replace(node, children=children, tie=int(id(node) in chosen))

        return tied(model)

    # What is done -----------------------------------------------------------------------------------------------------

    def _actions(self) -> tuple[Action, ...]:
        actions: list[Action] = []
        stepped = saved = False
        for _ in range(self._random.randint(2, 4)):
            kind = self._weighted({Train: 10, Evaluate: 2, Raise: 2, Freeze: 1, Edit: 1, Save: 1, Load: 2})
            if (kind is Freeze and self._waiting) or (kind is Save and not stepped) or (kind is Load and not saved):
                kind = Train
            if kind is Raise and self._uneven:  # is counted in modules: it would be raised on some ranks alone
                kind = Train
            action = self._action(kind)
            stepped |= isinstance(action, Train) and action.step
            saved |= kind is Save
            actions.append(action)
        last = actions[-1]
        if not isinstance(last, Train) or not last.step:
            actions.append(self._train(must_step=True))
        return tuple(actions)

    def _action(self, kind: type) -> Action:
        if kind is Train:
            return self._train()
        if kind is Evaluate:
            return Evaluate(self._random.choice(MODES), self._chance(0.7))
        if kind is Raise:
            where = self._random.choice(("forward", "backward"))
            synced = self._chance(0.8)
            if where == "backward":
                self._waiting = False
            return Raise(where, self._random.randrange(10), synced)
        if kind is Freeze:
            return Freeze(self._random.randrange(3))
        if kind is Edit:
            return Edit(self._random.choice(EDITS))
        return Save() if kind is Save else Load()

    def _train(self, must_step: bool = False) -> Train:
        step = must_step or self._chance(0.8)
        synced = tuple(self._chance(0.5) for _ in range(self._weighted({0: 6, 1: 3, 2: 1})))
        synced = (*synced, step or self._chance(0.7))
        self._waiting = not synced[-1]
        zero = self._weighted({"none": 6, "zeros": 2, "model": 1, "keep": 2})
        if zero != "keep":
            self._waiting = False
        return Train(
            shape=self._random.choice(SHAPES) if self._chance(0.5) else "plain",
            synced=synced,
            input_grad=self._chance(0.15),
            recompute=self._random.choice(("reentrant", "non-reentrant"))
            if self._recomputable and self._chance(0.1)
            else "",
            grads=self._random.choice(GRADS) if self._chance(0.2) else "",
            clip=self._random.choice(("torch", "sw")) if synced[-1] and self._chance(0.15) else "",
            step=step,
            zero=zero,
        )


LEAVES = {
    "dense": 8, "wide": 3, "norm": 2, "lookup": 2, "odd": 2, "stat": 1, "dropout": 1, "experts": 3, "method": 1,
    "stash": 1,
}  # fmt: skip
INNER = {
    "residual": 4, "chain": 2, "checkpoint": 3, "twice": 1, "depth": 1, "pack": 2, "aux": 2, "bump": 1, "cut": 1,
    "hooked": 1,
}  # fmt: skip
"""How often each kind is drawn."""
CHANGING = ("stat", "bump")
WITHOUT_PARAMETERS = ("dropout", *(kind for kind in INNER if kind != "aux"))


def is_legal(program: Program) -> bool:
    """Whether a program that somebody made smaller is none of what is refused."""
    first = program.model.children[:1]
    recomputed = any(isinstance(action, Train) and action.recompute for action in program.actions)
    return (
        (program.joined or _is_divided_legally(program.sharding.units, program.model))
        and (not program.sharding.first or (any(map(_has_own_parameters, first)) and not program.lora))
        and (not recomputed or _is_recomputable(program.model))
        and _waits_legally(program.actions)
        and _is_cut_legally(program)
    )


def _is_cut_legally(program: Program) -> bool:
    if any(isinstance(action, Copy) for action in program.actions) and (program.tp > 1 or program.optimizer == "muon"):
        return False
    if program.tp > 1 and not any(node.cut for node in program.model.walk()):  # nothing tells the engine of the axis
        return False
    return len({node.cut for node in program.model.walk() if node.tie}) < 2


def _is_divided_legally(units: Units, model: Node) -> bool:
    nodes = list(model.walk())
    skipping = [node for node in nodes if node.kind == "depth" and node.option == "rank"]
    skipped = [node for top in skipping for child in top.children for node in child.walk()]
    if skipping and (units != "marked" or any(node.unit for node in skipped)):
        return False
    if any(node.option == "rank-list" for node in nodes):
        return units == "marked" or (isinstance(units, tuple) and "Linear" not in units)
    return not (isinstance(units, int) and any(node.kind == "method" for node in nodes))


def _waits_legally(actions: Sequence[Action]) -> bool:
    for place, action in enumerate(actions):
        if isinstance(action, (Freeze, Copy, Release)) and _waits_before(place, actions):
            return False
        if isinstance(action, Train) and not action.synced[-1] and action.step:
            return False
    return True


def _waits_before(place: int, actions: Sequence[Action]) -> bool:
    """Whether gradients of a `no_sync` wait when the action at `place` begins."""
    waiting = False
    for action in actions[:place]:
        if isinstance(action, Train):
            waiting = not action.synced[-1] and action.zero == "keep"
        elif isinstance(action, Raise):
            waiting = waiting and action.where != "backward"
    return waiting


def _is_recomputable(model: Node) -> bool:
    """Recomputed code must not change anything but its output."""
    return not any(node.kind in CHANGING for node in model.walk())


def _legal(model: Node, sharding: Sharding) -> Node:
    """Heads that are chosen by rank where they cannot become units, and no units where ranks skip what others run."""

    def legal(node: Node, skipped: bool) -> Node:
        option = node.option
        if option == "rank-list" and sharding.units not in ("marked", "classes"):
            option = "rank-raw"
        if node.kind == "depth" and sharding.units != "marked":
            option = "step"
        skipping = skipped or (node.kind == "depth" and option == "rank")
        children = tuple(legal(child, skipping) for child in node.children)
        return dataclasses.replace(node, children=children, option=option, unit=node.unit and not skipped)

    return legal(model, False)


def _recomputed_alike(program: Program) -> Node:
    """The model without what checkpoints cannot recompute on all ranks alike, or not before their unit is told of."""
    freezes = any(isinstance(action, Freeze) for action in program.actions)
    around = any(isinstance(action, Train) and action.recompute for action in program.actions)

    def alike(node: Node, inside: bool, in_unit: bool) -> Node:
        kind, option = node.kind, node.option
        if inside and freezes and option.startswith("rank"):
            option = {"experts": "all-list"}.get(kind, "step")
        if inside and in_unit and kind == "aux":
            kind = "chain"
        inside, in_unit = inside or kind == "checkpoint", in_unit or node.unit or program.sharding.units != "marked"
        children = tuple(alike(child, inside, in_unit) for child in node.children)
        return dataclasses.replace(node, kind=kind, option=option, children=children)

    return alike(program.model, around, in_unit=False)


def _fitting(sharding: Sharding, model: Node) -> Sharding:
    """With units that the model has, and no unit whose methods are called."""
    units = sharding.units
    kinds = sorted({node.kind for node in model.walk()} - {"chain"})
    if units == "classes":
        units = _classes(kinds, sharding.extra_slots, any(node.option == "rank-list" for node in model.walk()))
    if isinstance(units, int) and "method" in kinds:
        units = None
    tied = any(node.tie for node in model.walk())
    first = sharding.first and not tied and not isinstance(units, tuple) and _has_own_parameters(model.children[0])
    return dataclasses.replace(sharding, units=units, first=first)


def _classes(kinds: list[str], number: int, by_rank: bool) -> tuple[str, ...]:
    names = [kind.capitalize() for kind in kinds]
    chosen = tuple(name for position, name in enumerate(names) if (position + number) % 2) or tuple(names[:1])
    return (*chosen, "Linear") if number == 1 and not by_rank else chosen or ("Linear",)


def _has_own_parameters(node: Node) -> bool:
    """Whether a part of that node has parameters, below it included."""
    return any(inner.kind not in WITHOUT_PARAMETERS for inner in node.walk())
