"""The sharded model beside the whole one: the same losses, gradients and norm, every piece trained, nothing lost in a
checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.loading import load
from shardwise.checkpoint.saving import save
from shardwise.diagnosis.result import Checks, Finding, attempt
from shardwise.diagnosis.subject import Subject, Taken, own, take, tracing
from shardwise.diagnosis.unsharded import Reference, Trace, Whole, seed_of, ties_of, tracer
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.model_tools.describe import describe
from shardwise.policy.precision import short_dtype_name

_FINE, _COARSE = (1e-4, 1e-3), (3e-2, 0.15)
"""Relative differences of losses and of gradients that are rounding; coarse if units compute or reduce in 16 bits."""
_CUT = 10
"""Times more of the losses' fine difference is rounding where layers or sequences are cut, because products are summed
otherwise; what is coarse allows for that already."""
_SMALL = 1e-2
"""Of all gradients' norm: a smaller gradient may be off by as much as one of this share."""
_NORM = 0.05
"""Relative difference of norms that is rounding, also in 16 bits: a sum of squares averages it out."""
_MOST_LOST = 0.5
"""Share of elements in 16 bits that may stay as they were in spite of a gradient."""
_COMPARED = 2**16
"""Elements up to which buffers are compared between ranks."""
_SEE_LOSS = "the losses differ already: see loss"
_GLOBAL = "use torch.nn.utils.clip_grad_norm_(model.parameters(), ...), whose norm is global"


def check_strategy(
    checks: Checks, subject: Subject, whole: Whole, reference: Reference, strategy: str, directory: Path | None
) -> None:
    """Add the checks of one strategy. Every rank must call this. directory: for a checkpoint; all ranks see it."""
    whole.reset()
    trained = attempt(checks, "trains", lambda: _Trained(subject, whole, strategy))
    if trained is None:
        return
    held = _check_optimizer(checks, trained)
    found = [Finding(fqn, "sharding changed its first value: report this") for fqn in trained.off]
    checks.conclude("weights", found, f"{len(trained.before)} parameters as they were built")
    lost = [group for group in reference.ties if group not in ties_of(trained.model)]
    found = [Finding(group[-1], f"was tied to {group[0]} before sharding and is not any more") for group in lost]
    checks.conclude("ties", found, f"{len(reference.ties)} tie(s) kept")
    compared, equal = (reference.steps if held else reference.steps[:1]), True
    if compared:
        words = f"of {len(compared)} step(s) as unsharded"
        equal = checks.conclude("loss", _loss_findings(trained, reference, compared), words)
    else:
        checks.skip("loss", f"your step does not run with a model that is not sharded: {reference.failed}")
    if equal:
        _check_gradients(checks, trained, reference)
    else:
        checks.skip("gradients", _SEE_LOSS)
    words = f"in {subject.steps} step(s) every piece on every rank changed where it has a gradient"
    checks.conclude("every fragment changes", _still(trained, reference), words)
    _check_buffers(checks, trained, reference)
    reasons = {
        "several hosts: pass directory=, which all of them see": directory is not None,
        "two runs differ already: see repeatability": reference.repeats,
        "gradients that the optimizer does not know add up: see optimizer": held,
        _SEE_LOSS: equal,
    }
    if why := next((words for words, holds in reasons.items() if not holds), None):
        checks.skip("checkpoint", why)
        return
    assert directory is not None
    differ = attempt(checks, "checkpoint", lambda: _checkpoint_findings(trained, directory / f"doctor-{strategy}"))
    if differ is not None:
        checks.conclude("checkpoint", differ, "save, load and a step: every piece and the optimizer's state are equal")


class _Trained:
    """The sharded model after the first steps, and what it did on this rank."""

    def __init__(self, subject: Subject, whole: Whole, strategy: str) -> None:
        self.subject, self.whole, self.strategy = subject, whole, strategy
        self.model, self.optimizer = self.built()
        kinds = {name for unit in describe(self.model).units for p in unit.parameters for name in p.dtypes.split("/")}
        self.loss_rounding, self.rounding = _COARSE if any("16" in name for name in kinds) else _FINE
        is_cut = subject.per_batch > 1
        if is_cut:
            self.loss_rounding = max(self.loss_rounding, _CUT * _FINE[0])
        self.options = [_plain(group) for group in self.optimizer.param_groups]
        """Of the optimizer's groups, before the first step."""
        self.before = _pieces(self.model)
        """This rank's piece of each parameter, before the first step; `after`: after the last."""
        first = dict(whole.model.named_parameters())
        self.off = [f for f, p in self.model.named_parameters() if not torch.equal(self.before[f], piece(p, first[f]))]
        """Names of parameters that sharding changed."""
        self.trace: Trace = []
        self.steps: list[Taken] = []
        for number in range(subject.steps):
            with nullcontext() if number or is_cut else tracing(self.model, tracer(self.trace)):
                self.steps.append(self.step(self.model, self.optimizer, number))
        self.after = _pieces(self.model)

    def built(self) -> tuple[nn.Module, Optimizer]:
        """Return a new sharded model with the whole one's first values, and its optimizer. Every rank must call
        this."""
        self.whole.reset()
        model = self.subject.build()
        theirs = dict([*self.whole.model.named_parameters(), *self.whole.model.named_buffers()])
        with torch.no_grad():
            for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
                if not tensor.is_meta:
                    tensor.copy_(theirs[fqn])
        model = self.subject.shard(model, self.strategy)
        return model, self.subject.build_optimizer(model)

    def step(self, model: nn.Module, optimizer: Optimizer, number: int) -> Taken:
        """Take one of the subject's steps. Every rank must call this."""
        subject = self.subject
        return take(subject.step, model, optimizer, subject.batch(number), seed_of(subject, number))


def _pieces(model: nn.Module) -> dict[str, Tensor]:
    return {fqn: own(parameter).detach().clone() for fqn, parameter in model.named_parameters()}


def piece(parameter: Tensor, full: Tensor) -> Tensor:
    """Return this rank's piece of a whole tensor that stands for a sharded parameter."""
    return parameter.placement.piece(full) if isinstance(parameter, ShardedParameter) else full


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items()}
    return {key: value for key, value in values.items() if isinstance(value, int | float | str | tuple)}


def _check_optimizer(checks: Checks, trained: _Trained) -> bool:
    groups = trained.optimizer.param_groups
    names = {id(p): fqn for fqn, p in trained.model.named_parameters()}
    held = {id(p) for group in groups for p in group["params"]}
    words = "no group of the optimizer holds it, so it never changes: pass it to the optimizer"
    missing = (f for f, p in trained.model.named_parameters() if p.requires_grad and id(p) not in held)
    found = [Finding(fqn, words) for fqn in missing]
    if strangers := held - names.keys():
        words = f"{len(strangers)} of its tensors are no parameters of the model: build it after sw.shard"
        found.append(Finding("optimizer", words))
    mine = [
        (names.get(id(next(iter(group["params"]), None)), "?"), options)
        for group, options in zip(groups, trained.options, strict=True)
    ]
    everyone = checks.ranks.all_gather_object(mine)
    for rank, theirs in enumerate(everyone):
        for number, ((fqn, options), (_, first)) in enumerate(zip(theirs, everyone[0], strict=False)):
            for key in (key for key in options if options[key] != first.get(key)):
                words = f"{first.get(key)} on rank 0, {options[key]} on rank {rank}, in group {number}, that of {fqn}"
                found.append(Finding(key, f"{words}: set it alike on all ranks"))
    kind = type(trained.optimizer).__name__
    return checks.conclude("optimizer", found, f"{kind} holds every parameter, with the same options on all ranks")


# Losses and gradients -------------------------------------------------------------------------------------------------


def _off(ours: float, theirs: float) -> float:
    """Return the relative difference; infinite if one is not finite."""
    off = abs(ours - theirs) / max(abs(theirs), 1e-12)
    return off if math.isfinite(off) else math.inf


def _loss_findings(trained: _Trained, reference: Reference, compared: list[Taken]) -> Iterator[Finding]:
    rank = trained.subject.rank
    for number, (ours, theirs) in enumerate(zip(trained.steps, compared, strict=False)):
        if ours.loss is None or theirs.loss is None or _off(ours.loss, theirs.loss) <= trained.loss_rounding:
            continue
        words = f"step {number} on rank {rank}: {ours.loss:.6g}, unsharded {theirs.loss:.6g}"
        numbers = {"step": number, "rank": rank, "sharded": ours.loss, "unsharded": theirs.loss}
        for (fqn, one), (_, other) in zip(trained.trace, reference.trace, strict=False) if not number else ():
            if _off(one, other) > 10 * trained.loss_rounding:
                words = f"the first output that differs (magnitude {one:.4g}, unsharded {other:.4g}), {words}: look"
                yield Finding(fqn or "the model", f"{words} for what it reads and does not own", numbers)
                return
        yield Finding("loss", f"{words}: look at the checks before this one", numbers)
        return


def _check_gradients(checks: Checks, trained: _Trained, reference: Reference) -> None:
    """Compare what the optimizer was handed in the first step with the mean of the unsharded gradients, up to one
    factor, that of clipping; and their norm with that of the unsharded step."""
    ours, whole = trained.steps[0], reference.gradients
    if not any(grad is not None for grad in (ours.handed or {}).values()):
        checks.skip("gradients", "the step did not call optimizer.step(), or freed the gradients before it")
        return
    assert ours.handed is not None
    parameters = dict(trained.model.named_parameters())
    pairs = {
        fqn: (grad.double(), piece(parameters[fqn], theirs).double())
        for fqn, grad in ours.handed.items()
        if grad is not None and (theirs := whole.get(fqn)) is not None
    }
    dots = sum(float((a * b).sum()) for a, b in pairs.values())
    squares = sum(float(b.square().sum()) for _, b in pairs.values())
    factors = checks.ranks.all_gather_object(dots / squares if squares else math.nan)
    total = math.sqrt(sum(float(grad.double().square().sum()) for grad in whole.values() if grad is not None))
    factor = next((one for one in factors if math.isfinite(one)), 1.0)
    clipped = "" if factor > 1 - trained.rounding else f", clipped to {factor:.3g}"
    words = f"of {len(pairs)} parameters as unsharded{clipped}"
    found = _gradient_findings(trained, reference, pairs, factor, total)
    checks.conclude("gradients", found, words, {"factor": factor})
    norms = _norm_findings(trained, reference, factors, total)
    checks.conclude("gradient norm", norms, f"{total:.4g}, the same on all ranks", {"norm": total})


def _gradient_findings(
    trained: _Trained,
    reference: Reference,
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    factor: float,
    total: float,
) -> Iterator[Finding]:
    """factor: by which ranks clip; total: norm of all gradients before that."""
    rank, handed = trained.subject.rank, trained.steps[0].handed or {}
    everything = sum(float(b.square().sum()) for _, b in pairs.values())
    if everything:  # a rank may clip by a factor of its own, which is told apart
        factor = sum(float((a * b).sum()) for a, b in pairs.values()) / everything
    total *= factor
    for fqn, (ours, theirs) in pairs.items():
        scale, off = float(theirs.norm()) * abs(factor), float((ours - factor * theirs).norm())
        if not off <= trained.rounding * (scale + _SMALL * abs(total)):
            words = f"rank {rank}'s piece is off by {off:.3g} of {scale:.3g}, beside the unsharded gradient"
            yield Finding(fqn, f"{words}: look for a second use outside its module, or a hook", {"off": off})
    for fqn, whole in reference.gradients.items():
        if whole is not None and bool(whole.any()) and handed.get(fqn) is None:
            yield Finding(fqn, f"has no gradient on rank {rank}, but has one unsharded: look how it is used")


def _norm_findings(trained: _Trained, reference: Reference, factors: list[float], total: float) -> Iterator[Finding]:
    """Yield what shows that a norm is of one rank's pieces: ranks scale by other factors, or the step returns it."""
    ours, rounding = trained.steps[0], min(10 * trained.rounding, _NORM)
    known = [factor for factor in factors if math.isfinite(factor)]
    if known and max(known) - min(known) > rounding * max(map(abs, known)):
        each = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in enumerate(factors))
        yield Finding(
            "clipping", f"ranks scaled their gradients by {each}: the norm is of one rank's pieces; {_GLOBAL}"
        )
    elif reference.steps and _off(ours.total, reference.steps[0].total) > rounding:
        words = f"the optimizer is handed gradients of norm {ours.total:.6g}, unsharded {reference.steps[0].total:.6g}"
        yield Finding("clipping", f"{words}: {_GLOBAL}")
    if ours.norm is not None and _off(ours.norm, total) > rounding:
        words = f"the step returns {ours.norm:.6g} on rank {trained.subject.rank}, the global norm is {total:.6g}"
        yield Finding("norm", f"{words}: {_GLOBAL}")


# Every fragment -------------------------------------------------------------------------------------------------------


def _still(trained: _Trained, reference: Reference) -> Iterator[Finding]:
    """Yield the parameters of which this rank's piece did not change, or hardly, though it had gradients."""
    rank, steps = trained.subject.rank, trained.steps
    for fqn, parameter in trained.model.named_parameters():
        if not parameter.requires_grad:
            continue
        if fqn not in reference.reached:
            if rank == 0:
                yield Finding(fqn, f"no gradient reached it in {len(steps)} step(s): use it, or freeze it")
            continue
        before, after = trained.before[fqn], trained.after[fqn]
        given = [grad != 0 for taken in steps if taken.handed and (grad := taken.handed.get(fqn)) is not None]
        due = torch.stack(given).any(0) if given else torch.zeros_like(before, dtype=torch.bool)
        count, moved = int(due.sum()), int(((before != after) & due).sum())
        if count and (moved == 0 or (before.element_size() == 2 and moved < _MOST_LOST * count)):
            words = f"{moved} of {count} elements with a gradient changed on rank {rank}"
            yield Finding(fqn, f"{words}: {_why_still(trained, parameter, before)}", {"moved": moved, "due": count})


def _why_still(trained: _Trained, parameter: Tensor, before: Tensor) -> str:
    group = next((g for g in trained.optimizer.param_groups if any(p is parameter for p in g["params"])), None)
    if group is None:
        return "it is in no group of the optimizer"
    if not (lr := float(group.get("lr", 1.0))):
        return "its learning rate is 0"
    if before.element_size() == 2:
        gap, name = (
            float(before.double().abs().median()) * torch.finfo(before.dtype).eps,
            short_dtype_name(before.dtype),
        )
        words = f"steps of about {lr:.1e} are lost between neighbours in {name}, {gap:.1e} apart: keep masters in fp32"
        return f'{words} (build the model in fp32 with sw.Precision(param="{name}")), or use sw.optim.AdamWBF16'
    return "look at what writes it back, and at whether the optimizer steps"


def _check_buffers(checks: Checks, trained: _Trained, reference: Reference) -> None:
    buffers, found = dict(trained.model.named_buffers()), []
    for fqn, theirs in reference.buffers.items() if reference.steps else ():
        if (off := _distance(buffers[fqn], theirs)) > trained.rounding:
            words = f"is off by {off:.2g} of its size beside the unsharded one after {len(reference.steps)} step(s)"
            found.append(Finding(fqn, f"{words}: it is stale; compute it in forward", {"off": off}))
    small = {fqn: buffer.detach().cpu() for fqn, buffer in buffers.items() if buffer.numel() <= _COMPARED}
    everyone = checks.ranks.all_gather_object(small)
    for rank, of_rank in enumerate(everyone if checks.ranks.is_first else ()):
        for fqn, one in of_rank.items():
            if off := _distance(one, everyone[0][fqn]):
                words = (
                    f"differs between rank 0 and rank {rank} after {len(trained.steps)} step(s), and checkpoints have"
                )
                words = f"{words} rank 0's: average it over ranks (SyncBatchNorm)"
                found.append(Finding(fqn, words, {"rank": rank, "off": off}))
    checks.conclude("buffers", found, f"{len(buffers)} are equal on all ranks, and as unsharded")


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Return by how much tensors differ, relatively; infinite if not finite."""
    a, b = ours.detach().double().cpu(), theirs.detach().double().cpu()
    off = 0.0 if torch.equal(a, b) else float((a - b).norm() / b.norm().clamp_min(1e-12))
    return off if math.isfinite(off) else math.inf


def _checkpoint_findings(trained: _Trained, path: Path) -> list[Finding]:
    """Save, take a step, load into a model of other values, take the same step, and compare. Every rank must call
    this."""
    subject, number = trained.subject, len(trained.steps)
    save(path, trained.model, trained.optimizer, step=number)
    saved = _state(trained.model, trained.optimizer)
    trained.step(trained.model, trained.optimizer, number)
    model, optimizer = trained.built()
    with torch.no_grad():
        for parameter in (one for one in model.parameters() if one.requires_grad):
            parameter.zero_()
    load(path, model, optimizer)
    if lost := _differ(_state(model, optimizer), saved, 0.0):
        return [Finding(fqn, f"rank {subject.rank}'s piece is not what was saved: report this") for fqn in lost]
    trained.step(model, optimizer, number)
    words = f"rank {subject.rank}'s piece is another after loading and a step than without loading: save what else the"
    rounding = 0.0 if subject.device.type == "cpu" else trained.rounding
    differ = _differ(_state(model, optimizer), _state(trained.model, trained.optimizer), rounding)
    return [Finding(fqn, f"{words} step depends on (buffers with persistent=False, extra=)") for fqn in differ]


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return copies of this rank's pieces of all parameters and of the optimizer's state."""
    states = (
        (f"{fqn} ({key})", value)
        for fqn, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
    )
    return _pieces(model) | {name: own(one).detach().clone() for name, one in states if isinstance(one, Tensor)}


def _differ(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], rounding: float) -> list[str]:
    """Return the names of tensors that only one has, or that differ by more than rounding."""
    both = [name for name in theirs if name in ours]
    return [
        *sorted(ours.keys() ^ theirs.keys()),
        *(one for one in both if _distance(ours[one], theirs[one]) > rounding),
    ]
