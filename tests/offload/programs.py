"""Trainings that give the same bits wherever parameters, gradients and optimizer state rest: one column of the matrix
each. A program trains a model with an Offload or without and returns what it has computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import device_tools
from shardwise.engine.extensions.offloaded import gradient_stores
from shardwise.engine.lookup import require_engine
from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.offload.offloaded_state import OffloadedState
from shardwise.sharded.extensions.offloaded import slice_of
from tests import device
from tests.engine.rig import Net, adamw, batch, seeded, squares
from tests.engine.streams import Event
from tests.offload.rig import (
    Adapted,
    Everything,
    Rotated,
    accumulated,
    amsgrad,
    edited_steps,
    fused,
    momentum,
    plain_adam,
    scaled,
    shared_folder,
)
from tests.optim.rig import Late, Tied, Twice

Optimizers = Callable[[Any], torch.optim.Optimizer]


@dataclass
class Trained:
    """What a program has computed: losses, norms and scales in order, and whole tensors by name."""

    numbers: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def note(self, **named: Tensor | None) -> None:
        """Add tensors of this moment, this rank's piece of sharded ones."""
        for name, value in named.items():
            if value is not None:
                piece = value.local if isinstance(value, ShardedParameter) else value
                self.tensors[f"{name} {len(self.tensors)}"] = piece.detach().clone()

    def note_model(self, model: nn.Module) -> None:
        """Add weights and gradients."""
        for parameter in model.parameters():
            self.note(weight=parameter, gradient=parameter.grad)

    def note_states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Add whole tensors, and wait until they are there: what lies on the host is no device's to free."""
        for parameter in model.parameters():
            for name, value in optimizer.state.get(parameter, {}).items():
                whole = value.full_tensor() if isinstance(value, ShardedParameter) else torch.as_tensor(value)
                self.note(**{name: whole})
        device_tools.wait(torch.device("cpu"))

    def note_whole(self, model: nn.Module) -> None:
        self.note(**sw.full_state_dict(model, rank0_only=False))


Program = Callable[[sw.Offload | None, str], Trained]


def rests_where_told(model: nn.Module, optimizer: torch.optim.Optimizer, offload: sw.Offload | None) -> None:
    """What is said to lie elsewhere does, and nothing else. Of a CPU's memory nothing can be told apart."""
    parameters = [p for p in model.parameters() if isinstance(p, ShardedParameter)]
    engine = require_engine(model)
    places = [getattr(offload, name, None) for name in ("params", "gradients", "optimizer")]
    if not device_tools.has_memory(parameters[0].device):
        places = [place if place == "nvme" else None for place in places]
    params, gradients, states = places
    assert all((slice_of(p) is not None) == (params is not None) for p in parameters)
    assert bool(gradient_stores(engine)) == (gradients is not None)
    kept = {type(v) for s in optimizer.state.values() for v in s.values() if isinstance(v, ShardedParameter)}
    stays = offload is not None and offload.step is not None and states == "cpu"  # nothing of it goes through a ring
    assert kept == {ShardedParameter if states is None or stays else OffloadedState}


def steps(
    build: Callable[[], nn.Module] = Net,
    optimizer: Optimizers = amsgrad,
    micro_batches: int = 1,
    clip: float | None = None,
    **options: Any,
) -> Program:
    """Three steps; gradients of the last, weights and states at the end."""

    def program(offload: sw.Offload | None, strategy: str) -> Trained:
        found = Trained()
        model = sw.shard(seeded(build), strategy, offload=offload, **options)
        updates = optimizer(model.parameters())
        for step in range(3):
            for micro in range(micro_batches):
                loss = squares(model, batch(micro_batches * step + micro))
                loss.backward()  # type: ignore[no-untyped-call]
                found.numbers.append(loss.item())
            if step == 2:  # before, nobody reads them between backward and step
                found.note_model(model)
            if clip is not None:
                found.numbers.append(sw.clip_grad_norm_(model, clip).item())
            torch.manual_seed(step)  # of those that round at random
            updates.step()
            updates.zero_grad()
        found.note_model(model)
        if "align" not in options:  # else state is in blocks of fewer bits
            rests_where_told(model, updates, offload)
            found.note_states(model, updates)
        return found

    return program


def trainings(*parts: Callable[[nn.Module], list[float]]) -> Program:
    """Trainings of `rig`, one after another, of a model whose units are more than a ring has buffers."""

    def program(offload: sw.Offload | None, strategy: str) -> Trained:
        mesh = init_device_mesh(device.kind(), (2, dist.get_world_size() // 2)) if "hybrid" in strategy else None
        found = Trained()
        model = sw.shard(seeded(Net), strategy, mesh=mesh, offload=offload)
        for training in parts:
            found.numbers += training(model)
        found.note_whole(model)
        return found

    return program


def without_grad(model: nn.Module) -> list[float]:
    return edited_steps(model, torch.no_grad)


def in_inference_mode(model: nn.Module) -> list[float]:
    return edited_steps(model, torch.inference_mode)


def without_a_wait(model: nn.Module) -> list[float]:
    """Of the thread that trains, for the device."""
    losses = in_inference_mode(model)
    waits = Event.order.waits
    assert not waits, waits[0]
    return losses


def in_backward(offload: sw.Offload | None, strategy: str) -> Trained:
    """The optimizer steps in backward."""
    found = Trained()
    model = sw.shard(seeded(Net), strategy, offload=offload)
    optimizer = adamw(model.parameters())
    sw.optimizer_in_backward(model, optimizer)
    for step in range(3):
        loss = squares(model, batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        found.numbers.append(loss.item())
    assert all(group.gradients.flat is None for unit in require_engine(model).units for group in unit.groups)
    found.note_whole(model)
    found.note_states(model, optimizer)
    return found


def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(0.5)


def steered(offload: sw.Offload | None, strategy: str) -> Trained:
    """Steps with a schedule, a closure, and a hook of the user's that changes gradients before the step."""
    found = Trained()
    model = sw.shard(seeded(Net), strategy, offload=offload)
    optimizer = adamw(model.parameters())
    optimizer.register_step_pre_hook(halve)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        squares(model, batch(step)).backward()  # type: ignore[no-untyped-call]
        assert optimizer.step(lambda: 3.5) == 3.5
        optimizer.zero_grad()
        schedule.step()
    found.note_whole(model)
    return found


def all_at_once(frozen: str | None) -> Program:
    """Tied and frozen parameters, these in few bits if asked, two micro-batches, the first without communication, and
    clipping."""

    def program(offload: sw.Offload | None, strategy: str) -> Trained:
        found = Trained()
        model = sw.shard(seeded(Everything), strategy, precision=sw.Precision(frozen=frozen), offload=offload)
        optimizer = adamw([p for p in model.parameters() if p.requires_grad])
        for step in range(3):
            with sw.no_sync(model):
                first = squares(model, batch(2 * step))
                first.backward()  # type: ignore[no-untyped-call]
            second = squares(model, batch(2 * step + 1))
            second.backward()  # type: ignore[no-untyped-call]
            norm = sw.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            found.numbers += [first.item(), second.item(), norm.item()]
        found.note_whole(model)
        return found

    return program


def through_checkpoints(offload: sw.Offload | None, strategy: str) -> Trained:
    """From the place to the device in another strategy and back, with steps in between; each save and load is between
    two micro-batches."""
    found, path = Trained(), shared_folder()

    def made(where: sw.Offload | None, strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = sw.shard(seeded(Tied), strategy, offload=where)
        return model, adamw([p for p in model.parameters() if p.requires_grad])

    model, optimizer = made(offload, strategy)
    for number, (where, then) in enumerate([(None, "no_shard"), (offload, strategy), (offload, "shard_optimizer")]):
        for step in range(2):
            squares(model, batch(10 * number + step)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        squares(model, batch(10 * number + 5)).backward()  # type: ignore[no-untyped-call]
        sw.checkpoint.save(f"{path}/{number}", model, optimizer)
        device_tools.wait(torch.device("cpu"))  # numbers that the save has read on the host are replaced by the load
        sw.checkpoint.verify(f"{path}/{number}")
        sw.checkpoint.load(f"{path}/{number}", model, optimizer)
        squares(model, batch(10 * number + 6)).backward()  # type: ignore[no-untyped-call]
        found.note_model(model)
        if offload is not None and number == 0 and offload.step is None:
            with pytest.raises(UsageError, match="offloaded"):
                sw.checkpoint.save(f"{path}/late", model, optimizer, asynchronous=True)
        model, optimizer = made(where, then)
        sw.checkpoint.load(f"{path}/{number}", model, optimizer)
        found.note_whole(model)
        found.note_states(model, optimizer)
    return found


class Keeping(torch.optim.Optimizer):
    """Steps by the mean of the last two gradients. Makes a new dict in each step, keeps a gradient as it is, leaves
    frozen parameters alone, scales gradients in place and, if asked, drops them."""

    def __init__(self, parameters: Any, drops: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1, "drops": drops})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None and p.requires_grad):
                parameter.grad.mul_(0.5)
                last = self.state[parameter].get("last", parameter.grad)
                parameter.add_(parameter.grad.add(last), alpha=-group["lr"])
                self.state[parameter] = {"last": parameter.grad.detach()}
                if group["drops"]:
                    parameter.grad = None


def keeping(drops: bool) -> Program:
    """With an optimizer that keeps gradients as state; what it leaves of them."""

    def program(offload: sw.Offload | None, strategy: str) -> Trained:
        found = Trained()
        model = sw.shard(seeded(Net), strategy, offload=offload)
        optimizer = Keeping(model.parameters(), drops)
        for step in range(4):
            squares(model, batch(step)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            assert all((p.grad is None) == drops for p in model.parameters())
            found.note_model(model)
            optimizer.zero_grad()
        found.note_whole(model)
        return found

    return program


def nadam(parameters: Any) -> torch.optim.Optimizer:
    """Two numbers by parameter, and no fused kernel."""
    return torch.optim.NAdam([p for p in parameters if p.requires_grad], lr=0.01)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05)


def of_blocks(kind: Callable[..., torch.optim.Optimizer]) -> Program:
    """With an optimizer whose state has fewer bits."""
    return steps(optimizer=lambda parameters: kind(parameters, lr=0.05), align=sw.optim.AdamW8bit.BLOCK_NUMEL)


BASIC: dict[str, Program] = {
    "net": steps(Net, momentum),
    "tied": steps(Tied, plain_adam),
    "frozen": steps(Adapted, amsgrad),
}
IN_PARTS: dict[str, Program] = {"reduced in parts": steps(Late, fused), "used twice or not": steps(Twice, fused)}
OF_DTYPES: dict[str, Program] = {
    "dtypes": steps(Rotated, amsgrad, micro_batches=2, clip=0.5),
    **{
        name: steps(Net, amsgrad, micro_batches=2, clip=0.5, precision=sw.Precision(**precision))
        for name, precision in (
            ("reduced in fp32", {"param": "bf16", "reduce": "fp32"}),
            ("reduced in bf16", {"param": "bf16", "reduce": "bf16"}),
            ("bf16 masters", {"master": "bf16", "param": "bf16"}),
        )
    },
}
OF_OPTIMIZERS: dict[str, Program] = {
    "nadam": steps(Adapted, nadam),
    "adagrad": steps(Net, adagrad),
    "8 bits": of_blocks(sw.optim.AdamW8bit),
    "bf16": of_blocks(sw.optim.AdamWBF16),
    "keeps gradients": keeping(drops=False),
    "drops gradients": keeping(drops=True),
}
OTHERS: dict[str, Program] = {
    "accumulation, clipping, evaluation and edits": trainings(without_grad),
    "evaluation in inference mode": trainings(in_inference_mode),
    "edits without a wait": trainings(without_a_wait),
    "sums of micro-batches": trainings(accumulated),
    "loss scaling": trainings(scaled),
    "replicas": trainings(without_grad, accumulated),
    "steps in backward": in_backward,
    "all at once": all_at_once(None),
    "all at once, nf4": all_at_once("nf4"),
    "checkpoints": through_checkpoints,
    "schedules, closures and hooks": steered,
    "amsgrad": steps(Net, amsgrad),
    "few slots": steps(Net, adamw, reshard_after_forward=False, slots=4),
}
PROGRAMS = {**BASIC, **IN_PARTS, **OF_DTYPES, **OF_OPTIMIZERS, **OTHERS}
