"""The whole model on each rank, as the user's step trains it: what the sharded one must match.

Each rank computes with its own batches. At the end of each backward the ranks average what it added to gradients, as
they do for a sharded model, so a whole training step runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.diagnosis.result import CONSEQUENCES
from shardwise.diagnosis.subject import Subject, Taken, floats_in, take, tracing
from shardwise.errors import one_line
from shardwise.fsdp.collectives import Collectives

_PRESENT = 1
"""Label of the exchange about which gradients there are: another rank that has left the backward is told apart."""
Trace = list[tuple[str, float]]
"""Names of modules in the order in which their forwards ended, with the sum of magnitudes of what they returned."""


class Whole:
    """A model that is not sharded, and the gradients of its last backward."""

    def __init__(self, model: nn.Module, collectives: Collectives, averages: bool = True) -> None:
        """averages: whether ranks average gradients."""
        self.model = model
        self.averages = averages
        self.gradients: dict[str, Tensor | None] = {}
        """By fqn, after the last backward: accumulated over the backwards of a step, before the step changes them."""
        self._collectives = collectives
        self._trained = {fqn: p for fqn, p in model.named_parameters() if p.requires_grad}
        self._before: dict[str, Tensor | None] = {}
        self._values = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
        hooks = (p.register_hook(partial(self._note, fqn, p)) for fqn, p in self._trained.items())
        self._own_hooks = {handle.id for handle in hooks}
        self._first_hooks = {key for held in self._hooks() for key in held}

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """A context in which no gradient hook of the user's runs."""
        removed = [(held, key, held.pop(key)) for held in self._hooks() for key in set(held) - self._own_hooks]
        try:
            yield
        finally:
            for held, key, hook in removed:
                held[key] = hook

    def _hooks(self) -> list[dict[int, Any]]:
        """Return the hooks on gradients of all parameters and modules, as torch keeps them."""
        parts: list[Any] = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in self._trained.values()]
        parts += [(module._backward_hooks, module._backward_pre_hooks) for module in self.model.modules()]
        return [held for both in parts for held in both if held]

    def reset(self) -> None:
        """Go back to the values and hooks that the model began with."""
        for held in self._hooks():
            for key in set(held) - self._first_hooks:
                del held[key]
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)
        for parameter in self.model.parameters():
            parameter.grad = None
        self.gradients = {}

    def _note(self, fqn: str, parameter: nn.Parameter, grad: Tensor) -> None:
        if not self._before:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end)
        self._before[fqn] = None if parameter.grad is None else parameter.grad.detach().clone()

    def _end(self) -> None:
        """Average what a backward has added, over ranks."""
        before, self._before = self._before, {}
        if self.averages and self._collectives.world_size > 1:
            own = bytes(fqn in before for fqn in self._trained)
            some = self._collectives.exchange(own, _either, _PRESENT)
            for (fqn, parameter), is_there in zip(self._trained.items(), some, strict=True):
                if is_there:
                    self._average(parameter, before.get(fqn), fqn in before)
        self.gradients = {fqn: None if p.grad is None else p.grad.detach().clone() for fqn, p in self._trained.items()}

    def _average(self, parameter: nn.Parameter, before: Tensor | None, was_reached: bool) -> None:
        with torch.no_grad():
            old = parameter.grad if before is None and not was_reached else before
            added = torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
            if was_reached and parameter.grad is not None:
                added += parameter.grad
                if before is not None:
                    added -= before
            self._collectives.all_reduce(added).wait()
            added /= self._collectives.world_size
            parameter.grad = (added if old is None else old + added).to(parameter.dtype)


def _either(left: bytes, right: bytes) -> bytes:
    return bytes(a | b for a, b in zip(left, right, strict=True))


@dataclass(slots=True)
class Reference:
    """What the whole model does in the first steps, on this rank's batches."""

    steps: list[Taken] = field(default_factory=list)
    """As far as the user's step runs with a model that is not sharded."""
    failed: str = ""
    """Why it does not; empty if it does."""
    repeats: bool = True
    """Whether a step taken twice is the same."""
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """Averaged over ranks, of the first step, before the step changed them."""
    reached: set[str] = field(default_factory=set)
    """Names of the parameters that some step has a gradient for that is not zero."""
    trace: Trace = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""
    ties: list[list[str]] = field(default_factory=list)
    """Names that share a parameter."""


def refer(whole: Whole, subject: Subject) -> Reference:
    """Take the first steps with the whole model. Every rank must call this."""
    whole.reset()
    found = Reference(ties=ties_of(whole.model))
    optimizer = subject.build_optimizer(whole.model)
    for number in range(subject.steps):
        with nullcontext() if number else tracing(whole.model, tracer(found.trace)):
            taken, failed = attempted(subject, whole.model, optimizer, subject.batch(number), seed_of(subject, number))
        if number == 0:
            found.gradients = whole.gradients
        found.reached |= {fqn for fqn, grad in whole.gradients.items() if grad is not None and bool(grad.any())}
        if failed:
            found.failed = failed
            break
        found.steps.append(taken)
    found.buffers = {fqn: buffer.detach().clone() for fqn, buffer in whole.model.named_buffers()}
    return found


def attempted(subject: Subject, model: nn.Module, optimizer: Optimizer, batch: Any, seed: int) -> tuple[Taken, str]:
    """Take a step with the whole model; return also why it failed after its backward, or nothing."""
    try:
        return take(subject.step, model, optimizer, batch, seed), ""
    except CONSEQUENCES:
        raise
    except (AttributeError, TypeError, RuntimeError) as error:
        if not any(p.grad is not None for p in model.parameters()):
            raise
        return Taken(), one_line(error, with_type=True)  # it did something that needs a sharded model


def seed_of(subject: Subject, number: int) -> int:
    """Return the seed of a step's random numbers, another for each batch."""
    return 1 + number * subject.world_size + subject.rank // subject.per_batch


def tracer(trace: Trace) -> Callable[[str, nn.Module, Any, Any], None]:
    """Return a function for `tracing` that records magnitudes."""

    def record(fqn: str, module: nn.Module, inputs: Any, output: Any) -> None:
        trace.append((fqn, sum(float(one.detach().double().abs().sum()) for one in floats_in(output))))

    return record


def ties_of(model: nn.Module) -> list[list[str]]:
    """Return the names that share a parameter, for each parameter with several."""
    names: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    return [group for group in names.values() if len(group) > 1]
