"""Initialising a model that was built on the meta device, with little more than one unit's full weights in memory.

First a tape records, without memory, how the model would have been built on a real device: by calling constructors
again where their arguments are known, and `reset_parameters` on all other modules, children first, as constructors do.
Then parts of the tape are replayed on real tensors. By default each unit is replayed on the CPU, in the order of draws.
This gives the values of an unsharded build with the same seed at any world size, or a warning if it does not. Inside
`init_on_device` each tensor is replayed on the device, in any order: other values, from the same distributions. See
docs/design/materialize.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from shardwise.errors import LayoutError
from shardwise.fsdp.parameter_group import Values, inherit
from shardwise.fsdp.shard import UnitPlan
from shardwise.modules.deferred_init.builder import all_sites_of, record, sites_of
from shardwise.modules.deferred_init.constructors import is_torchs
from shardwise.modules.deferred_init.progress import DrawingProgress
from shardwise.modules.deferred_init.seeds import Seeds
from shardwise.modules.deferred_init.tape import Dependencies, Tape

Shard = Callable[[UnitPlan, Values], None]


_blank: ContextVar[frozenset[str]] = ContextVar("blank", default=frozenset())
_on_device: ContextVar[bool] = ContextVar("on_device", default=False)


@contextmanager
def skip_init(fqns: Iterable[str]) -> Iterator[None]:
    """A context in which `materialize` does not initialise these parameters, because the caller writes them later.

    If no other tensor is random, nothing is drawn and the random state does not change.
    """
    token = _blank.set(frozenset(fqns))
    try:
        yield
    finally:
        _blank.reset(token)


@contextmanager
def init_on_device() -> Iterator[None]:
    """A context in which `sw.shard` draws the initial values of models on the meta device on each rank's own device.
    Does not communicate. Either every rank must call `sw.shard` inside it, or none.

        with torch.device("meta"):
            model = build()
        with sw.init_on_device():
            sw.shard(model)

    Each rank draws every tensor of which it keeps a part, whole, one at a time. It runs the operations of the original
    build, so the distributions are the same. The values depend only on `torch.manual_seed`, the model and the kind of
    device, not on the number of ranks, the strategy or the units. Random values differ from those of an unsharded
    build, unless the build draws them from a seed or a generator of its own; all other values are equal.

    All random values derive from one number that rank 0 takes from its CPU generator. If anything was drawn, that
    generator advances by this one number, so the next model gets other values. The device's generator does not change.
    """
    token = _on_device.set(True)
    try:
        yield
    finally:
        _on_device.reset(token)


def draws_on_device() -> bool:
    """Whether the caller is inside `init_on_device`."""
    return _on_device.get()


def on_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def materialize(
    model: nn.Module, plans: list[UnitPlan], device: torch.device, shard: Shard, tells: bool = False
) -> None:
    """Call `shard` for every unit, with a function that returns its parameters' full tensors: on the CPU, or on
    `device` inside `init_on_device`. Parameters that belong to no unit are created on `device`.

    On the CPU the full weights of one unit exist at a time, plus one tensor while draws that no tensor keeps are
    skipped; on the device one full tensor at a time. Does not communicate. All ranks must start with the same random
    state and end with the same one: on the CPU that of the unsharded build, on the device that of
    `init_on_device`. Under a FakeTensorMode nothing is computed.

    Args:
        tells: whether this rank reports the progress of drawing on the CPU.

    Raises LayoutError for a tensor that nothing initialises. Warns if values are not those of an unsharded build.
    """
    if detect_fake_mode() is not None:
        _allocate(model, plans, device, shard)
        return
    tape = Tape(Seeds(device) if draws_on_device() else None)
    recorded = record(model, tape)
    blank = _blank.get()
    ours = {id(parameter) for plan in plans for _, parameter, _ in plan.parameters}
    blanks = {id(parameter) for plan in plans for fqn, parameter, _ in plan.parameters if fqn in blank}
    _check_written(model, blanks, tape, recorded)
    _warn_of_lost(model, blanks, recorded)
    sites = [
        site
        for site in sites_of(model)
        if site.tensor.is_meta and id(site.tensor) not in ours and id(site.tensor) in recorded
    ]
    wanted = [
        {fqn: _Wanted(recorded[id(p)], p.dtype) for fqn, p, _ in plan.parameters if p.is_meta and id(p) not in blanks}
        for plan in plans
    ]
    others = {id(site.tensor): _Wanted(recorded[id(site.tensor)], site.tensor.dtype) for site in sites}
    if draws_on_device():
        made = _one_by_one(tape, plans, wanted, others, shard)
    else:
        _warn_of_drawn(model, plans, tape, recorded)
        made = _in_order(tape, plans, wanted, others, shard, tells)
    for site in sites:
        made[id(site.tensor)] = real = _real(site.tensor, made[id(site.tensor)], device)
        site.put(real)
    everything = (*(entry for tensors in wanted for entry in tensors.values()), *others.values())
    if not blank or any(tape.is_drawn(tensor) for tensor, _ in everything):
        tape.finish()


class _Wanted(NamedTuple):
    """A recorded tensor, and its dtype in the model, which may have been cast after it was built."""

    tensor: Tensor
    dtype: torch.dtype


def _in_order(
    tape: Tape,
    plans: Sequence[UnitPlan],
    wanted: Sequence[Mapping[str, _Wanted]],
    others: Mapping[int, _Wanted],
    shard: Shard,
    tells: bool,
) -> dict[int, Tensor]:
    """Replay each unit whole and shard it, in the order of the units' last draws. Returns the tensors in `others`."""
    lists = [list(tensors.values()) for tensors in wanted]
    *parts, last = tape.cut([[tensor for tensor, _ in entries] for entries in (*lists, others.values())])
    if tells:
        tape.watch_draws(lambda total_bytes: DrawingProgress(total_bytes).drew)

    def played(part: Dependencies, tensors: Mapping[Any, _Wanted]) -> dict[Any, Tensor]:
        return {key: real.to(dtype) for (key, (_, dtype)), real in zip(tensors.items(), tape.play(part), strict=True)}

    for plan, part, tensors in sorted(zip(plans, parts, wanted, strict=True), key=lambda entry: entry[1].last_draw):
        if plan.parameters:
            shard(plan, _values(plan, played(part, tensors).get))
    return played(last, others)


def _one_by_one(
    tape: Tape,
    plans: Sequence[UnitPlan],
    wanted: Sequence[Mapping[str, _Wanted]],
    others: Mapping[int, _Wanted],
    shard: Shard,
) -> dict[int, Tensor]:
    """Shard the units, replaying each tensor when `shard` asks for it. Returns the tensors in `others`, on the CPU."""

    def played(entry: _Wanted) -> Tensor:
        [part] = tape.cut([[entry.tensor]])
        [real] = tape.play(part)
        return real.to(entry.dtype)

    def played_of(tensors: Mapping[str, _Wanted]) -> Values:
        return lambda fqn: played(tensors[fqn]) if fqn in tensors else None

    for plan, tensors in zip(plans, wanted, strict=True):
        if plan.parameters:
            shard(plan, _values(plan, played_of(tensors)))
    return {key: played(other).cpu() for key, other in others.items()}


def _values(plan: UnitPlan, drawn: Values) -> Values:
    """Return the values of all parameters of a unit: its own for a parameter on a real device, else `drawn`."""
    real = {fqn: parameter for fqn, parameter, _ in plan.parameters if not parameter.is_meta}
    return lambda fqn: real[fqn] if fqn in real else drawn(fqn)


def _real(blank: Tensor, value: Tensor, device: torch.device) -> Any:
    """Return the replacement for a meta tensor: a parameter on `device`, or for a buffer the value as it is, since all
    buffers are moved later. A value that is a parameter already, because it is tied, is returned as it is."""
    if not isinstance(blank, nn.Parameter) or isinstance(value, nn.Parameter):
        return value
    return inherit(nn.Parameter(value.to(device), requires_grad=blank.requires_grad), blank)


def _allocate(model: nn.Module, plans: list[UnitPlan], device: torch.device, shard: Shard) -> None:
    """Shard every unit without values, and replace meta tensors by fake ones on `device`."""
    for plan in plans:
        if plan.parameters:
            shard(plan, _values(plan, lambda fqn: None))
    for site in list(sites_of(model)):
        if site.tensor.is_meta:
            empty = torch.empty(site.tensor.shape, dtype=site.tensor.dtype, device=device)
            site.put(_real(site.tensor, empty, device))


# Errors and warnings about values ----------------------------------------------------------------------------------


_WAY_OUT = (
    "give the module a reset_parameters() that initialises it, keep its constructor's arguments as attributes of the "
    "same names so that it can be constructed again, or build the model on a real device"
)


def _check_written(model: nn.Module, blanks: set[int], tape: Tape, recorded: dict[int, Tensor]) -> None:
    sites = [
        (f"{prefix}.{site.name}".lstrip("."), module, site.name, site.tensor)
        for prefix, module in model.named_modules()
        for site in all_sites_of(module)
        if site.kind and id(site.tensor) not in blanks
    ]
    for fqn, module, name, tensor in sites:
        if tensor.is_meta and tensor.numel() and not (id(tensor) in recorded and tape.is_written(recorded[id(tensor)])):
            raise LayoutError(
                f"{type(module).__name__}.{name} ({fqn}) was built on the meta device and nothing initialised it: "
                f"{_WAY_OUT}"
            )


def _warn_of_lost(model: nn.Module, blanks: set[int], recorded: dict[int, Tensor]) -> None:
    """Warn of parameters that were written more often than the tape recorded. `_version` counts writes in place on the
    meta device too, but not writes through `.data`."""
    lost = [
        fqn
        for fqn, parameter in model.named_parameters()
        if parameter.is_meta and id(parameter) not in blanks and parameter._version > recorded[id(parameter)]._version
    ]
    if lost:
        whose = ", ".join(dict.fromkeys(_builder_of(model, fqn).__name__ for fqn in lost))
        warnings.warn(
            f"{whose} was built on the meta device, and what was written to {', '.join(lost[:3])} afterwards is lost: "
            "the values there are seeded and the same at any world size, but differ from those of an unsharded build. "
            f"To get those, {_WAY_OUT}",
            stacklevel=2,
        )


def _builder_of(model: nn.Module, fqn: str) -> type[nn.Module]:
    """Return the class of the innermost module around a parameter that is not torch's own; it may have written it."""
    around = [model]
    for name in fqn.split(".")[:-1]:
        around.append(around[-1].get_submodule(name))
    return next((type(module) for module in reversed(around) if not is_torchs(type(module))), type(model))


def _warn_of_drawn(model: nn.Module, plans: list[UnitPlan], tape: Tape, recorded: dict[int, Tensor]) -> None:
    """Warn of parameters on a real device that the build drew. (`torch.Tensor(n)` is on the CPU in any device context.)
    Their draws advanced the random state, so it is no longer the one that the build started from."""
    for plan in plans:
        for fqn, parameter, _ in plan.parameters:
            if not parameter.is_meta and id(parameter) in recorded and tape.is_drawn(recorded[id(parameter)]):
                warnings.warn(
                    f"{type(model).__name__} was built on the meta device, but {fqn} was drawn on a real device: all "
                    "other values are seeded and the same at any world size, but differ from those of an unsharded "
                    "build",
                    stacklevel=2,
                )
                return
