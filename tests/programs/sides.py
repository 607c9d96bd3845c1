"""The two sides of a comparison: a program's plain model, trained as all ranks together would, and the sharded one.

Every rank has both. The plain side takes each rank's forwards and backwards by itself, one rank after another, with
buffers of that rank's own, and adds the gradients as the engine does: scaled by 1 / world_size in the dtype that
travels, in rank order (over the shard group, then over replicas), in fp32 or wider, each backward's sum to what is in
`.grad`. What `sw.no_sync` leaves waiting is added up by rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.engine.extensions.any_units import any_units_of
from shardwise.engine.lookup import require_engine
from shardwise.engine.setup.tensor_random import EvenDraws
from tests.programs import parts
from tests.programs.feed import WALKS, Batch, Losses, Place, batch_of
from tests.programs.parts import DTYPES, Model, OnPurpose, build, plan_of, unpacked
from tests.programs.program import Edit, Evaluate, Freeze, Node, Program, Raise, Train

Seen = list[tuple[str, Tensor]]
"""What an action showed on the way, in order."""

PLAIN = Train()
CLIP = 0.3
EDIT = 0.75


class Side:
    """What is alike on both: one model, an optimizer over its parameters, and what was seen."""

    def __init__(self, program: Program, model: nn.Module) -> None:
        self.program = program
        self.model = model
        self.optimizer = optimizer_of(program.optimizer, model)
        self.seen: Seen = []

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def freeze(self, action: Freeze) -> None:
        for index, (name, parameter) in enumerate(self.parameters.items()):
            if index % 3 == action.phase and not name.startswith("leave."):
                parameter.requires_grad_(not parameter.requires_grad)

    def change_gradients(self, how: str) -> None:
        for index, parameter in enumerate(self.parameters.values()):
            grad = parameter.grad
            if grad is None:
                continue
            if how == "scale":
                grad.mul_(0.5)
            elif how == "assign":
                parameter.grad = grad * 2.0
            elif index % 3 == 0:
                parameter.grad = None

    def zero(self, how: str) -> None:
        if how == "model":
            self.model.zero_grad()
        elif how != "keep":
            self.optimizer.zero_grad(set_to_none=how == "none")

    def step(self) -> None:
        self.optimizer.step()

    def copy(self) -> None:
        """On the plain side all that is seen of it: copies of parameters have no gradients."""
        self.zero("none")

    def release(self) -> None:
        """On the plain side nothing."""


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW's eps is large against rounding, so that a gradient that cancels out does not become a step."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name == "muon":
        adamw = {"lr": 0.02, "eps": 1e-2}
        hidden: Any = lambda fqn, parameter: parameter.ndim == 2 and parameter.numel() > 1  # noqa: E731
        return sw.optim.whole_matrix(torch.optim.Muon, model, adamw=adamw, hidden=hidden, lr=0.005)
    options = {"adamw-loop": {"foreach": False}, "adamw-foreach": {"foreach": True}, "adamw-fused": {"fused": True}}
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2, **options[name])  # type: ignore[arg-type]


@dataclass
class _Pass:
    """One rank's micro-batch: carries out what `feed.WALKS` asks."""

    program: Program
    model: Model
    place: Place
    rank: int
    action: Train
    run_backward: Callable[[Tensor, bool], None]
    seen: Seen = field(default_factory=list)
    is_backward: bool = False
    """A backward has begun: gradients are in no state to be compared if it raised."""
    _inputs: list[Tensor] = field(default_factory=list)

    def forward(self, index: int) -> Losses:
        batch, output = self._run(index, self.action)
        aux = sum(self.model.moment.aux, torch.zeros(()))
        losses = Losses((output - batch.target).square().mean() + 0.1 * aux, 0.1 * output.tanh().mean() + 0.3 * aux)
        self.seen += [("loss", losses.main.detach()), ("side loss", losses.side.detach())]
        return losses

    def evaluate(self, index: int, mode: str = "no_grad") -> None:
        contexts: dict[str, Callable[[], Any]] = {
            "no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": nullcontext
        }  # fmt: skip
        with contexts[mode]():
            self.seen.append(("output", self._run(index, PLAIN)[1].detach().clone()))

    def backward(self, loss: Tensor, retain: bool = False) -> None:
        self.is_backward = True
        self.run_backward(loss, retain)

    def input_gradients(self) -> None:
        """Add them to what was seen."""
        for x in self._inputs:
            self.seen.append(("input gradient", torch.zeros(()) if x.grad is None else x.grad))

    def _run(self, index: int, action: Train) -> tuple[Batch, Tensor]:
        place = Place(self.place.action, self.place.micro_batch, index)
        batch = batch_of(self.program, place, self.rank)
        moment = self.model.moment
        moment.rank, moment.action, moment.ids = self.rank, place.action, batch.ids
        moment.aux, moment.entered = [], 0
        torch.manual_seed(place.seed(self.program, self.rank))
        if action.input_grad or action.recompute == "reentrant":  # which hands on gradients to inputs alone
            self._inputs.append(batch.x.requires_grad_())
        output = self._called(batch.x, action.recompute)
        return batch, output.to(batch.target.dtype)

    def _called(self, x: Tensor, recompute: str) -> Tensor:
        if not recompute:
            return unpacked(self.model(x))
        call: Callable[[Tensor], Tensor] = lambda x: unpacked(self.model(x))  # noqa: E731
        return checkpoint(call, x, use_reentrant=recompute == "reentrant")  # type: ignore[no-any-return]


# Plain ----------------------------------------------------------------------------------------------------------------

Gradients = dict[str, Tensor]


class Plain(Side):
    """The whole model in one process, for all ranks."""

    def __init__(self, program: Program, rank: int) -> None:
        super().__init__(program, build(program))
        self.rank = rank
        """Whose losses, outputs and buffers are looked at."""
        self._casts = program.sharding.param is not None
        self._computing: Model = self.model  # type: ignore[assignment]
        if self._casts:
            self._computing = build(program)
            self._computing.register_forward_pre_hook(self._cast_input)
        self._buffers = [[b.clone() for b in self._computing.buffers()] for _ in range(program.world_size)]
        self._waiting: list[Gradients] = [{} for _ in range(program.world_size)]
        self._saved: Any = None

    @property
    def buffers(self) -> dict[str, Tensor]:
        names = [name for name, _ in self._computing.named_buffers()]
        return dict(zip(names, self._buffers[self.rank], strict=True))

    def draw_as(self, sharded: nn.Module) -> None:
        """After dropouts, go on with the states that a sharded model with uneven parts goes on with."""
        own = dict(self._computing.named_modules())
        for name, module in sharded.named_modules():
            draws = [getattr(hook, "__self__", None) for hook in module._forward_hooks.values()]
            for even in draws:
                if isinstance(even, EvenDraws):
                    even.watch(own[name])

    def micro_batch(self, place: Place, action: Train, synced: bool) -> None:
        """Forwards and backwards of every rank, and what becomes of the gradients."""
        backwards: list[list[Gradients]] = []
        for rank, walked in self._each_rank(place, action):
            WALKS[action.shape](walked)
            walked.input_gradients()
            backwards.append(self._taken)
            if rank == self.rank:
                self.seen += walked.seen
        for by_rank in zip(*backwards, strict=True):
            self._accumulate(by_rank, synced)

    def evaluate(self, place: Place, action: Evaluate) -> None:
        self._computing.train(not action.evaluating)
        for rank, walked in self._each_rank(place):
            walked.evaluate(0, action.mode)
            if rank == self.rank:
                self.seen += walked.seen
        self._computing.train()

    def raise_midway(self, place: Place, action: Raise) -> None:
        dropped = False
        for rank, walked in self._each_rank(place):
            raised = _raises(walked, action)
            if rank == self.rank:
                self.seen += [*walked.seen, ("raised", torch.tensor(raised))]
            dropped |= walked.is_backward
        if dropped:
            self.zero("none")

    def zero(self, how: str) -> None:
        super().zero(how)
        if how != "keep":
            for waiting in self._waiting:
                waiting.clear()

    def clip(self, how: str) -> None:
        self.seen.append(("norm", nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)))

    def edit(self, action: Edit) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(EDIT)

    def save(self, path: Path) -> None:
        model = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._saved = model, copy.deepcopy(self.optimizer.state_dict()), copy.deepcopy(self._buffers)

    def load(self, path: Path) -> None:
        model, optimizer, buffers = self._saved
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(model[name])
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        self._buffers = copy.deepcopy(buffers)

    def _each_rank(self, place: Place, action: Train = PLAIN) -> Iterator[tuple[int, _Pass]]:
        """Every rank in turn, with buffers of its own; `.grad` is as before when all are done."""
        self._follow_masters()
        before = {p: p.grad for p in self._computing.parameters()}
        for rank in range(self.program.world_size):
            self._taken: list[Gradients] = []
            _copy_all(self._buffers[rank], list(self._computing.buffers()))
            self._computing.zero_grad()
            yield rank, _Pass(self.program, self._computing, place, rank, action, self._backward)
            _copy_all(list(self._computing.buffers()), self._buffers[rank])
        for p, grad in before.items():
            p.grad = grad

    def _backward(self, loss: Tensor, retain: bool) -> None:
        loss.backward(retain_graph=retain)
        grads = {name: p.grad for name, p in self._computing.named_parameters() if p.grad is not None}
        self._computing.zero_grad()
        self._taken.append(grads)

    def _accumulate(self, by_rank: tuple[Gradients, ...], synced: bool) -> None:
        for waiting, gradients in zip(self._waiting, by_rank, strict=True):
            for name, grad in gradients.items():
                scaled = self._scaled(grad)
                waiting[name] = waiting[name] + scaled if name in waiting else scaled
        if not synced:
            return
        for name, parameter in self.model.named_parameters():
            terms = [waiting.get(name) for waiting in self._waiting]
            total = _sum([_sum([wide(terms[r]) for r in group]) for group in self._shard_groups])
            if total is not None:
                before = parameter.grad
                parameter.grad = (total if before is None else wide(before) + total).to(parameter.dtype)  # type: ignore[operator]
        for waiting in self._waiting:
            waiting.clear()

    def _scaled(self, grad: Tensor) -> Tensor:
        reduce = self.program.sharding.reduce
        return grad.to(DTYPES[reduce] if reduce else grad.dtype) * (1.0 / self.program.world_size)

    @property
    def _shard_groups(self) -> list[list[int]]:
        ranks = list(range(self.program.world_size))
        return [ranks[:2], ranks[2:]] if self.program.sharding.strategy.startswith("hybrid") else [ranks]

    def _follow_masters(self) -> None:
        if self._casts:
            dtype = DTYPES[str(self.program.sharding.param)]
            for own, master in zip(self._computing.parameters(), self.model.parameters(), strict=True):
                own.data = master.detach().to(dtype)
                own.requires_grad_(master.requires_grad)

    def _cast_input(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0].to(DTYPES[str(self.program.sharding.param)]),)


def wide(tensor: Tensor | None) -> Tensor | None:
    return tensor.float() if tensor is not None and tensor.dtype is torch.bfloat16 else tensor


def _sum(terms: list[Tensor | None]) -> Tensor | None:
    total = None
    for term in terms:
        if term is not None:
            total = term if total is None else total + term
    return total


def _copy_all(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _raises(walked: _Pass, action: Raise) -> bool:
    moment = walked.model.moment
    moment.where, moment.at = action.where, action.at
    try:
        WALKS["plain"](walked)
    except OnPurpose:
        return True
    finally:
        moment.where = ""
    return False


# Sharded --------------------------------------------------------------------------------------------------------------


class Sharded(Side):
    """The model under test: this rank's."""

    def __init__(self, program: Program, rank: int) -> None:
        mesh = mesh_of(program)
        model = build(program, None if mesh is None or program.tp == 1 or program.lora else mesh["tp"])
        self._moment = model.moment
        super().__init__(program, shard(program, model, mesh))
        self._rank = rank
        self._joined = any_units_of(require_engine(self.model)).allowed() if program.joined else nullcontext()
        self._joined.__enter__()

    @property
    def buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())

    def micro_batch(self, place: Place, action: Train, synced: bool) -> None:
        walked = self._pass(place, action)
        held: Any = None
        if action.hold:
            held = self.model if action.hold == "whole" else self.model.body.parts[0]  # type: ignore[union-attr]
            sw.unshard(held)
        with self._syncing(synced):
            WALKS[action.shape](walked)
        if action.hold == "twice":
            sw.unshard(held)
        if action.hold:
            sw.reshard(self.model)
        walked.input_gradients()
        self.seen += walked.seen

    def evaluate(self, place: Place, action: Evaluate) -> None:
        self.model.train(not action.evaluating)
        walked = self._pass(place)
        walked.evaluate(0, action.mode)
        self.seen += walked.seen
        self.model.train()

    def raise_midway(self, place: Place, action: Raise) -> None:
        walked = self._pass(place)
        with self._syncing(action.synced):
            raised = _raises(walked, action)
        self.seen += [*walked.seen, ("raised", torch.tensor(raised))]
        if walked.is_backward:
            self.zero("none")

    def clip(self, how: str) -> None:
        if how == "sw":
            self.seen.append(("norm", sw.clip_grad_norm_(self.model, CLIP)))
        else:
            self.seen.append(("norm", nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)))

    @torch.no_grad()
    def edit(self, action: Edit) -> None:
        parameters: list[Any] = list(self.model.parameters())
        if action.how == "inplace":
            for parameter in parameters:
                parameter.mul_(EDIT)
        elif action.how == "local":
            for parameter in parameters:
                parameter.local.mul_(EDIT)
        elif action.how == "data":
            for parameter in parameters:
                parameter.data = parameter.detach() * EDIT
        else:
            with sw.unsharded(self.model, writeback=True):
                for full in self.model.parameters():
                    full.mul_(EDIT)

    def save(self, path: Path) -> None:
        sw.checkpoint.save(path, self.model, self.optimizer)

    def load(self, path: Path) -> None:
        sw.checkpoint.load(path, self.model, self.optimizer)

    def copy(self) -> None:
        self.model.moment.aux.clear()  # type: ignore[union-attr]  # of the last pass, in a graph: deepcopy refuses those
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))

    def release(self) -> None:
        sw.release(self.model)

    def _pass(self, place: Place, action: Train = PLAIN) -> _Pass:
        return _Pass(self.program, self.model, place, self._rank, action, self._backward)  # type: ignore[arg-type]

    @staticmethod
    def _backward(loss: Tensor, retain: bool) -> None:
        loss.backward(retain_graph=retain)

    @contextmanager
    def _syncing(self, synced: bool) -> Iterator[None]:
        with nullcontext() if synced else sw.no_sync(self.model):
            yield


def mesh_of(program: Program) -> DeviceMesh | None:
    """The mesh of all ranks; None if they are one shard group. Every rank must call this."""
    hybrid, ranks = program.sharding.strategy.startswith("hybrid"), program.world_size
    sizes = {"dp_replicate": 2, "dp_shard": ranks // 2} if hybrid else {"dp_shard": ranks}
    if program.tp > 1:
        sizes["tp"] = program.tp
        _clear_sharding_prop_cache()  # it takes earlier programs' meshes, whose groups are gone, for equal to this one
    elif not hybrid:
        return None
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shard(program: Program, model: Model, mesh: DeviceMesh | None) -> nn.Module:
    """Every rank must call this."""
    sharding = program.sharding
    options: dict[str, Any] = {"units": _units(program), "slots": 2 + _nesting(program) + sharding.extra_slots}
    if mesh is not None:
        options["mesh"] = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tp")]
    if program.lora and program.tp > 1:
        options |= {"mesh": mesh, "tp_plan": plan_of(program, model)}
    if sharding.param is not None:
        options["precision"] = sw.Precision(param=sharding.param, reduce=sharding.reduce)
    options["reshard_after_forward"] = sharding.reshard
    if sharding.first:
        sw.shard(model.body.parts[0], sharding.strategy, **options)
    return sw.shard(model, sharding.strategy, **options)


def classes() -> Mapping[str, type[nn.Module]]:
    """What names in `Sharding.units` stand for."""
    return {**{kind.__name__: kind for kind in parts.PARTS.values()}, "Linear": nn.Linear}


def _units(program: Program) -> Any:
    units = program.sharding.units
    if units == "marked":
        return lambda fqn, module: getattr(module, "marked", False)
    return {classes()[name] for name in units} if isinstance(units, tuple) else units


def _nesting(program: Program) -> int:
    """At most this many units lie around a unit, the model not counted."""
    units = program.sharding.units

    def deepest(node: Node) -> int:
        below = max(map(deepest, node.children), default=0)
        if units == "marked":
            return below + node.unit
        if isinstance(units, tuple):
            return max(below, "Linear" in units) + (node.kind.capitalize() in units)
        return 1 + max(below, 1)

    nesting = 0 if units is None else max(0, deepest(program.model) - 1)
    return nesting + program.sharding.first
