"""Mistakes that show on a model before it is sharded: in its parameters, its modules, its batches and its loss."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.accelerators import CPU
from shardwise.diagnosis.result import Checks, Finding, attempt
from shardwise.diagnosis.subject import Subject, digest, floats_in, moved, tracing
from shardwise.diagnosis.unsharded import Whole, attempted, ties_of
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.modules.deferred_init.materialize import on_meta
from shardwise.policy.precision import short_dtype_name

_SAME = 1e-4
"""Relative difference of gradients that is rounding."""
_WEIGHT = 0.25
"""Share of the way from weights by targets to equal weights at which a batch's weight counts as wrong."""
_SEED = 1


def check_data(checks: Checks, subject: Subject) -> bool | None:
    """Add the check that each rank has batches of its own, the same whichever process asks; return whether it
    passed, None if a batch could not be drawn. Every rank must call this."""
    rank, size, steps = subject.rank, subject.world_size, range(subject.steps)
    other = (rank + subject.per_batch) % size

    def drawn(of: int) -> list[str]:
        return [digest(moved(subject.batch_fn(of, step), CPU)) for step in steps]

    found_here = attempt(checks, "data", lambda: (drawn(rank), drawn(other), drawn(rank), subject.batch(0)))
    if found_here is None:
        return None
    own, of_other, again, _ = found_here
    everyone = checks.ranks.all_gather_object(own)
    found = []
    for step in steps:
        twins = [one for one in range(0, size, subject.per_batch) if everyone[one][step] == own[step]]
        first = rank - rank % subject.per_batch
        if again[step] != own[step]:
            found.append(
                Finding(f"step {step}", f"batch_fn({rank}, {step}) gave another batch when called again{_PURE}")
            )
        elif of_other[step] != everyone[other][step]:
            words = f"batch_fn({other}, {step}) gives another batch on rank {rank} than on rank {other}{_PURE}"
            found.append(Finding(f"step {step}", words))
        elif everyone[first][step] != own[step]:
            words = (
                f"rank {rank} has another batch than rank {first}, though they work on the same one (ranks_per_batch)"
            )
            found.append(Finding(f"step {step}", words))
        elif len(twins) > 1 and rank == twins[0]:
            words = f"ranks {', '.join(map(str, twins))} have the same batch: give each its share of the data"
            found.append(Finding(f"step {step}", f"{words}, by its rank (DistributedSampler(rank=rank))"))
    words = f"{size // subject.per_batch} rank(s) with batches of their own, in the same order in every process"
    words = words if subject.per_batch == 1 else f"{words}, each shared by {subject.per_batch} ranks"
    return checks.conclude("data", found[:1], words)


_PURE = (
    ": let the order depend on rank, step and one seed alone, or ranks train on each other's rows, and a resumed run "
    "on rows that it has seen"
)


def whole_model(checks: Checks, subject: Subject, collectives: Collectives, strategy: str) -> Whole:
    """Build the model whole on each rank, with rank 0's values, and check that ranks built the same. Every rank must
    call this. `strategy`: one to initialise a model of the meta device with."""
    model = subject.build()
    if on_meta(model):
        sharded = subject.shard(subject.build(), strategy)
        tensors = dict([*sharded.named_parameters(), *sharded.named_buffers()])
        values = {fqn: p.full_tensor() if isinstance(p, ShardedParameter) else p for fqn, p in tensors.items()}
        ties = ties_of(model)
        model = model.to_empty(device=subject.device)  # which separates what is tied
        for first, *others in ties:
            for owner, _, leaf in (fqn.rpartition(".") for fqn in others):
                model.get_submodule(owner)._parameters[leaf] = model.get_parameter(first)
        with torch.no_grad():
            for fqn, tensor in _tensors(model):
                tensor.copy_(values[fqn])
        checks.skip("initial weights", "the model was built on the meta device: sw.shard draws its weights")
        return Whole(model, collectives)
    model = model.to(subject.device)
    own = {fqn: digest(tensor) for fqn, tensor in _tensors(model)}
    everyone = checks.ranks.all_gather_object(own)
    found = [
        Finding(fqn, f"rank {rank} built other values than rank 0: build it from the same seed on all ranks")
        for rank, theirs in enumerate(everyone)
        for fqn, one in theirs.items()
        if one != everyone[0].get(fqn)
    ]
    checks.conclude("initial weights", found, f"{len(own)} parameters and buffers are equal on all ranks")
    if all(theirs.keys() == own.keys() for theirs in everyone):
        for _, tensor in _tensors(model):
            collectives.broadcast(tensor.data, 0)
    return Whole(model, collectives)


def check_model(checks: Checks, subject: Subject, whole: Whole) -> None:
    """Add the checks of the model as it is built, without running it. Every rank must call this."""
    model = whole.model
    ties = ties_of(model)
    words = "; ".join(" = ".join(group) for group in ties) or "none"
    checks.conclude("tied weights", _dropped_ties(model), words)
    frozen = [fqn for fqn, parameter in model.named_parameters() if not parameter.requires_grad]
    found = [Finding(fqn, "is frozen (requires_grad=False): let it train") for fqn in frozen]
    count = sum(parameter.requires_grad for parameter in model.parameters())
    checks.conclude("trainable parameters", found, f"{count} parameters train")
    checks.conclude("hidden references", _hidden(model), "no parameter is kept outside of modules' own")


def check_runs(checks: Checks, subject: Subject, whole: Whole) -> bool:
    """Add the checks that run the whole model on this rank's first batch; return whether runs repeat. Every rank must
    call this."""
    words = "two runs from the same seed are equal to the bit"
    repeats = checks.conclude("repeatability", _unrepeatable(subject, whole), words)
    checks.conclude("casts", _casts(subject, whole), "no module computes in fewer bits than its inputs and weights")
    if not repeats:
        checks.skip("gradient hooks", "two runs differ already: see repeatability")
    else:
        checks.conclude("gradient hooks", _rescaled(subject, whole), "no hook changes a gradient")
    return repeats


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


# As built -------------------------------------------------------------------------------------------------------------


def _dropped_ties(model: nn.Module) -> Iterator[Finding]:
    """Yield parameters that should be one: the configuration says so, or their values are equal to the bit. Equal ones
    whose names differ only in numbers are copies of a block."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    if getattr(text, "tie_word_embeddings", False) and hasattr(model, "get_output_embeddings"):
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
        both = [names.get(id(getattr(one, "weight", None))) for one in (head, embedding)]
        if None not in both and both[0] != both[1]:
            words = f"config.tie_word_embeddings is true, but it is not {both[1]}: call model.tie_weights()"
            yield Finding(str(both[0]), words)
            return
    seen: dict[str, str] = {}
    for fqn, parameter in model.named_parameters():
        if parameter.numel() < 2 or not parameter.requires_grad or bool((parameter == parameter.flatten()[0]).all()):
            continue
        first = seen.setdefault(digest(parameter), fqn)
        if re.sub(r"\d+", "", first) != re.sub(r"\d+", "", fqn):
            words = f"equals {first} to the bit but is another parameter: a tie was lost; assign {first} to it again"
            yield Finding(fqn, words)


def _hidden(model: nn.Module) -> Iterator[Finding]:
    """Yield attributes of modules that hold a parameter beside those which modules register."""
    memory = {p.untyped_storage().data_ptr(): fqn for fqn, p in model.named_parameters() if p.numel()}
    registered = {id(p) for p in model.parameters()}
    own = {"_parameters", "_buffers", "_modules", "_flat_weights"}  # the last: of torch's RNNs, which renew it
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            where = f"{name}.{key}".lstrip(".")
            for one in () if key in own else _held(value, 3):
                if isinstance(one, nn.Module):
                    if any(id(p) not in registered for p in one.parameters()):
                        words = f"holds a {type(one).__name__} that is no submodule: its parameters are not trained"
                        yield Finding(where, f"{words}, sharded or saved; register it (nn.ModuleList, nn.ModuleDict)")
                elif fqn := memory.get(one.untyped_storage().data_ptr()):
                    words = f"holds {fqn}, and after sw.shard an old copy of it: read it from its module in forward"
                    yield Finding(where, words)
        for key, buffer in module._buffers.items():
            fqn = None if buffer is None else memory.get(buffer.untyped_storage().data_ptr())
            if fqn:
                words = f"shares memory with {fqn}, and after sw.shard goes stale: compute it in forward instead"
                yield Finding(f"{name}.{key}".lstrip("."), words)


def _held(value: Any, depth: int) -> Iterator[Tensor | nn.Module]:
    if isinstance(value, Tensor | nn.Module):
        yield value
    elif depth and isinstance(value, list | tuple | set):
        for one in value:
            yield from _held(one, depth - 1)
    elif depth and isinstance(value, dict):
        for one in value.values():
            yield from _held(one, depth - 1)


# As it runs -----------------------------------------------------------------------------------------------------------


def _once(subject: Subject, whole: Whole, hooks: bool = True) -> dict[str, Tensor | None]:
    """Take one step from the first values without averaging; return this rank's gradients.

    hooks: whether the user's hooks on gradients run.
    """
    whole.reset()
    whole.averages = False
    optimizer = subject.build_optimizer(whole.model)
    try:
        with nullcontext() if hooks else whole.without_hooks():
            attempted(subject, whole.model, optimizer, subject.batch(0), _SEED)
    finally:
        whole.averages = True
    found = whole.gradients
    whole.reset()
    return found


def _unrepeatable(subject: Subject, whole: Whole) -> Iterator[Finding]:
    runs: list[list[tuple[str, str, str]]] = []
    gradients = []
    for _ in range(2):
        seen: list[tuple[str, str, str]] = []

        def record(fqn: str, module: nn.Module, given: Any, output: Any, into: list[Any] = seen) -> None:
            into.append((fqn, digest([*floats_in(given)]), digest([*floats_in(output)])))

        with tracing(whole.model, record):
            gradients.append(_once(subject, whole))
        runs.append(seen)
    for (fqn, given, output), (_, given_again, again) in zip(*runs, strict=False):
        if given == given_again and output != again:
            words = "gives another output for the same input and seeds: draw from torch's generators, keep no count"
            yield Finding(fqn or "the model", f"{words}, and use deterministic kernels")
            return
    for fqn, grad in gradients[0].items():
        again = gradients[1][fqn]
        if grad is not None and again is not None and not torch.equal(grad, again):
            off = f"{float((grad - again).abs().max()):.1e}"
            words = f"its gradient differs by {off} between two runs"
            words = f"{words}: torch.use_deterministic_algorithms(True) finds why"
            yield Finding(fqn, words)
            return


def _casts(subject: Subject, whole: Whole) -> Iterator[Finding]:
    mode = _Casts(whole.model)
    before = [module.register_forward_pre_hook(mode.enter, with_kwargs=True) for module in whole.model.modules()]
    with tracing(whole.model, mode.leave), mode:
        try:
            _once(subject, whole)
        finally:
            for handle in before:
                handle.remove()
    for fqn, (wide, narrow) in mode.found.items():
        words = f"casts {short_dtype_name(wide)} to {short_dtype_name(narrow)} in its forward: leave dtypes"
        words = f"{words} to sw.Precision"
        yield Finding(fqn or "the model", words, {"from": str(wide), "to": str(narrow)})


class _Casts(TorchDispatchMode):
    """Records casts in forwards to a dtype with fewer bits than the inputs and weights of the module that casts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        self._names = {module: fqn for fqn, module in model.named_modules()}
        self._running: list[tuple[str, float]] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        floats = [*floats_in((args, dict(kwargs))), *(p for p in module.parameters() if p.is_floating_point())]
        self._running.append((self._names[module], min((torch.finfo(one.dtype).eps for one in floats), default=1.0)))

    def leave(self, fqn: str, module: nn.Module, inputs: Any, output: Any) -> None:
        while self._running and self._running.pop()[0] != fqn:
            pass

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and self._running and output.is_floating_point():
            fqn, eps = self._running[-1]
            if args[0].is_floating_point() and torch.finfo(output.dtype).eps > max(eps, torch.finfo(args[0].dtype).eps):
                self.found.setdefault(fqn, (args[0].dtype, output.dtype))
        return output


def _rescaled(subject: Subject, whole: Whole) -> Iterator[Finding]:
    """Yield the parameters whose gradients are others without the hooks of parameters and modules."""
    hooked = _once(subject, whole)
    plain = _once(subject, whole, hooks=False)
    for fqn, grad in plain.items():
        changed = hooked.get(fqn)
        if grad is None or changed is None or not bool(grad.any()):
            continue
        difference = float((changed - grad).norm() / grad.norm())
        if difference > _SAME:
            ratio = float((changed * grad).sum() / grad.square().sum())
            words = f"a hook changes its gradient by {difference:.1%}, a factor of {ratio:.3g}: remove the hook"
            yield Finding(fqn, words, {"factor": ratio})


# Over ranks -----------------------------------------------------------------------------------------------------------


def check_token_weights(checks: Checks, subject: Subject, whole: Whole) -> None:
    """Add the check that each target weighs the same, whichever rank has it. Every rank must call this.

    Rank 0 gets one batch and all others another, of fewer targets. The gradient is then a mean of the gradients that
    all ranks would have with the one batch and with the other, and the weights must be those of their targets.
    """
    name, size = "token weights", subject.world_size // subject.per_batch
    own = [subject.targets(subject.batch(step)) for step in range(subject.steps)]
    everyone = checks.ranks.all_gather_object(own)
    counts = {(rank, step): n for rank, theirs in enumerate(everyone) for step, n in enumerate(theirs)}
    if size == 1 or None in counts.values():
        why = (
            "all ranks have one batch"
            if size == 1
            else "batches without labels: pass targets=lambda batch: their number"
        )
        checks.skip(name, why)
        return
    few, many = (pick(counts, key=lambda at: counts[at] or 0) for pick in (min, max))
    n, m = counts[many] or 0, counts[few] or 0
    if n == m:
        checks.skip(name, f"all batches have {n} targets, so all weights are right: try batches that differ")
        return
    gradients = []
    for at_first, at_others in ((many, few), (many, many), (few, few)):
        whole.reset()
        rank, step = at_first if subject.rank < subject.per_batch else at_others
        optimizer = subject.build_optimizer(whole.model)
        taken, _ = attempted(subject, whole.model, optimizer, subject.batch(step, rank), _SEED)
        gradients.append([_flat(whole.gradients), _flat(taken.handed or {})])
    whole.reset()
    right, equal = n / (n + (size - 1) * m), 1 / size
    weights = []
    for mixed, first, others in zip(*gradients, strict=True):
        apart = first - others
        weights.append(float((mixed - others) @ apart / apart.square().sum().clamp_min(1e-30)))
    weight = min(weights, key=lambda one: abs(one - right))
    found = []
    if not abs(weight - right) <= _WEIGHT * abs(equal - right):
        words = f"rank 0 has {n} of {n + (size - 1) * m} targets but weighs {weight:.3f} instead of {right:.3f}: sum"
        words = f"{words} the loss over targets, times the number of ranks, over the targets of all ranks"
        found = [Finding("loss", words, {"weight": weight, "right": right})]
    checks.conclude(name, found, f"{n} and {m} targets weigh as many", {"weight": weight, "right": right})


def _flat(gradients: Mapping[str, Tensor | None]) -> Tensor:
    parts = [grad.flatten().double().cpu() for grad in gradients.values() if grad is not None]
    return torch.cat(parts) if parts else torch.zeros(1, dtype=torch.float64)
