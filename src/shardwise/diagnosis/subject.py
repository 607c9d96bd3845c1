"""What is diagnosed: a model, batches, an optimizer and a training step, and how a step is watched."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise import device_tools
from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter

Loss = Callable[[nn.Module, Any], Tensor]
Step = Callable[[nn.Module, Optimizer, Any], Any]
IGNORED = -100
"""The label of what is no target, in torch's cross entropy and in transformers."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What the user gave, with defaults for what was left out."""

    build_model: Callable[[], nn.Module]
    batch_fn: Callable[[int, int], Any]
    step: Step
    build_optimizer: Callable[[nn.Module], Optimizer]
    shard: Callable[[nn.Module, str], nn.Module]
    targets: Callable[[Any], int | None]
    say: Callable[[str], object]
    device: torch.device
    rank: int
    world_size: int
    steps: int
    per_batch: int
    """Number of consecutive ranks that work on the same batch."""
    states: tuple[Any, ...]
    """Random states of the moment at which the first model was built."""
    _batches: dict[tuple[int, int], Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """Return a new model, from the random numbers of the first one."""
        restore(self.device, self.states)
        return self.build_model()

    def batch(self, step: int, rank: int | None = None) -> Any:
        """Return a batch of a rank, by default this one's, on the device; the same one again when asked again."""
        key = (self.rank if rank is None else rank, step)
        if key not in self._batches:
            self._batches[key] = moved(self.batch_fn(*key), self.device)
        return self._batches[key]


# Defaults -------------------------------------------------------------------------------------------------------------


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Call a model with a batch; its output is the loss, or has it as `.loss`.

    Raises:
        UsageError: it has none.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, Sequence) else model(batch)
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            f"{type(model).__name__} returned {type(output).__name__}, which is no loss: pass "
            "loss_fn=lambda model, batch: ..., which returns it, or your own step="
        )
    return loss.reshape(())


def step_of(loss_fn: Loss) -> Step:
    """Return the simplest training step of a loss."""

    def step(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def default_optimizer(model: nn.Module) -> Optimizer:
    """Return AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def default_targets(batch: Any) -> int | None:
    """Return how many labels of a batch are targets; None if it has no `labels`."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
    return int((labels != IGNORED).sum()) if isinstance(labels, Tensor) else None


# Batches --------------------------------------------------------------------------------------------------------------


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with the tensors in its mappings, lists and tuples on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch


def digest(value: Any) -> str:
    """Return a text that is equal if and only if two batches are, as far as tensors, arrays and plain values go."""
    state, seen = xxhash.xxh3_64(), set[int]()

    def note(text: str) -> None:
        state.update(f"{text};".encode())

    def add(one: Any) -> None:
        if isinstance(one, Tensor):
            note(f"{one.dtype}{tuple(one.shape)}")
            state.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(one, np.ndarray):
            add(torch.from_numpy(one))
        elif isinstance(one, Mapping):
            for key, each in one.items():
                note(str(key))
                add(each)
        elif isinstance(one, list | tuple):
            note(str(len(one)))
            for each in one:
                add(each)
        elif hasattr(one, "__dict__") and not isinstance(one, type) and id(one) not in seen:
            seen.add(id(one))  # a dataclass, or an object of a collator's
            add(vars(one))
        else:
            note(repr(one) if isinstance(one, str | bytes | int | float | np.generic) else type(one).__name__)

    add(value)
    return state.hexdigest()


# Random numbers -------------------------------------------------------------------------------------------------------


def random_states(device: torch.device) -> tuple[Any, ...]:
    """Return the random states of Python, numpy, torch and the device."""
    numpy_state = np.random.get_state()
    return random.getstate(), numpy_state, torch.get_rng_state(), device_tools.random_state(device)


def restore(device: torch.device, states: tuple[Any, ...]) -> None:
    """Go back to states that `random_states` returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    device_tools.set_random_state(device, states[3])


def seed_all(seed: int) -> None:
    """Seed Python, numpy, torch and all devices."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# A step, watched ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Taken:
    """What a training step did on this rank."""

    loss: float | None = None
    """What the step returned, if it did."""
    norm: float | None = None
    """What it returned as "grad_norm", in a mapping."""
    handed: dict[str, Tensor | None] | None = None
    """The gradients that the optimizer was handed, by fqn; of sharded parameters, this rank's pieces."""
    total: float = 0.0
    """Their joint norm, as torch.nn.utils.get_total_norm finds it: global for sharded parameters."""


def take(step: Step, model: nn.Module, optimizer: Optimizer, batch: Any, seed: int) -> Taken:
    """Take a step and watch it. Every rank must call this."""
    taken = Taken()
    named = dict(model.named_parameters())

    def look(*_: object) -> None:
        if taken.handed is None:
            taken.handed = {fqn: None if p.grad is None else own(p.grad).detach().clone() for fqn, p in named.items()}
            grads = [p.grad for p in named.values() if p.grad is not None]
            taken.total = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    seed_all(seed)
    handle = optimizer.register_step_pre_hook(look)
    try:
        said = step(model, optimizer, batch)
    finally:
        handle.remove()
    if isinstance(said, Mapping):
        taken.norm = _number(said.get("grad_norm"))
        said = said.get("loss")
    taken.loss = _number(said)
    return taken


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number else None


def own(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a sharded tensor, or a plain one as it is."""
    return tensor.local if isinstance(tensor, ShardedParameter) else tensor


@contextmanager
def tracing(model: nn.Module, record: Callable[[str, nn.Module, Any, Any], None]) -> Iterator[None]:
    """In the block, call `record(fqn, module, inputs, output)` after each module's forward, children first."""
    handles = [
        module.register_forward_hook(
            lambda m, args, kwargs, output, fqn=fqn: record(fqn, m, (args, kwargs), output), with_kwargs=True
        )
        for fqn, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def floats_in(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in mappings, lists, tuples and outputs of transformers."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from floats_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from floats_in(one)
