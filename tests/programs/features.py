"""What is in a program, by name: for tables, and for leaving out what is known to go wrong."""

from __future__ import annotations

from collections.abc import Iterator

from tests.programs.program import Action, Edit, Evaluate, Load, Program, Raise, Save, Train


def features(program: Program) -> set[str]:
    """Every feature of a program, as "what:which"."""
    sharding = program.sharding
    units = type(sharding.units).__name__ if not isinstance(sharding.units, str) else sharding.units
    found = {
        f"world:{program.world_size}",
        f"tp:{program.tp}",
        f"dtype:{program.dtype}",
        f"optimizer:{program.optimizer}",
        f"strategy:{sharding.strategy}",
        f"reshard:{sharding.reshard}",
        f"units:{units}",
        f"collectives:{sharding.collectives}",
        f"precision:{sharding.param}",
    }
    found |= {
        name
        for name, is_there in (("adopted", sharding.first), ("joined", program.joined), ("lora", program.lora))
        if is_there
    }
    for node in program.model.walk():
        found |= {f"node:{node.kind}", f"node:{node.kind}/{node.option}"} if node.option else {f"node:{node.kind}"}
        found |= {f"node:{name}" for name in ("frozen", "tie") if getattr(node, name)}
        found |= {f"cut:{node.kind}/{node.cut}"} if node.cut else set()
    for action in program.actions:
        found |= set(_of_action(action))
    return found


def _of_action(action: Action) -> Iterator[str]:
    name = type(action).__name__.lower()
    if isinstance(action, Train):
        yield f"shape:{action.shape}"
        yield f"zero:{action.zero}"
        if len(action.synced) > 1:
            yield "accumulation"
        if not all(action.synced):
            yield "no_sync"
        yield from (f"{what}:{getattr(action, what)}" for what in ("grads", "clip", "hold") if getattr(action, what))
        if action.input_grad:
            yield "input_grad"
        if action.recompute:
            yield f"recompute:{action.recompute}"
    elif isinstance(action, Evaluate):
        yield f"{name}:{action.mode}"
    elif isinstance(action, Raise):
        yield f"{name}:{action.where}"
    elif isinstance(action, Edit):
        yield f"{name}:{action.how}"
    elif isinstance(action, (Save, Load)):
        yield f"checkpoint:{name}"
    else:
        yield name
