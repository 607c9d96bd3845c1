"""World 1 against the plain model: losses, gradients and weights, with released memory full of NaN."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.accelerator import twins
from benchmarks.accelerator.bench import Bench, Case, Cases
from benchmarks.accelerator.device import same_bits, synchronize
from benchmarks.accelerator.models import SMALL, TINY, OddNet, seeded
from benchmarks.accelerator.row import Row, correct
from benchmarks.accelerator.twins import Course, Optimizers, Plain, Steps
from benchmarks.common.gpt import GPT
from shardwise.model_tools.activation_checkpointing import checkpoint_units

BITS = "equal bits"
_SLACK = {None: 1e-5, "bf16": 2e-2, "fp16": 4e-3}
"""Relative, by compute dtype: where the plain model does not repeat its own bits, or other kernels may be chosen."""
_THREE = Steps()
_FUSED: Optimizers = partial(twins.adamw, fused=True)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setting:
    """One way to train, the same for both twins."""

    compute: str | None = None
    recompute: str = "none"
    steps: Steps = _THREE
    optimizer: Optimizers = _FUSED
    odd: bool = False
    """Sizes that put parameters on other boundaries in a slot than alone, for which libraries have other kernels."""
    strategy: str = "full_shard"

    @property
    def precision(self) -> sw.Precision | None:
        return sw.Precision(param=self.compute, reduce="fp32") if self.compute else None

    @property
    def dtype(self) -> torch.dtype | None:
        return _DTYPES[self.compute] if self.compute else None


def builder(bench: Bench, odd: bool = False) -> Callable[[], nn.Module]:
    shape = TINY if bench.is_small else SMALL
    return lambda: seeded(lambda: OddNet(shape.vocab) if odd else GPT(shape), bench.device)


def batches(bench: Bench) -> twins.Batches:
    return twins.batches_on(bench.device, TINY if bench.is_small else SMALL)


def plain_course(bench: Bench, setting: Setting) -> Course:
    plain = Plain(builder(bench, setting.odd), setting.dtype, setting.optimizer)
    return twins.train_plain(plain, batches(bench), setting.steps)


def sharded_course(bench: Bench, setting: Setting) -> Course:
    model = sw.shard(builder(bench, setting.odd)(), setting.strategy, precision=setting.precision)
    checkpoint_units(model, setting.recompute)
    optimizer = setting.optimizer(model.parameters())
    course = twins.train_sharded(model, optimizer, batches(bench), setting.steps)
    synchronize(bench.device)
    return course


def compare(name: str, setting: Setting, plain: Course, again: Course, ours: Course) -> Row:
    """Bits where the plain model repeats its own (`again`), else a tolerance and why."""
    off, slack = twins.apart(plain, ours), _SLACK[setting.compute]
    found = BITS if twins.same(plain, ours) else f"off by {off:.2g}"
    if setting.odd:
        why = "odd sizes: libraries may choose other kernels for other boundaries in memory"
        return correct(name, off <= slack, found, f"at most {slack:g}", why)
    if not twins.same(plain, again):  # then AdamW makes much of little where gradients are near 0: losses alone
        off = twins.apart(Course(plain.losses), Course(ours.losses))
        why = f"the plain model does not repeat its own bits: off by {twins.apart(plain, again):.2g}"
        return correct(name, off <= slack, f"{found}, losses by {off:.2g}", f"losses by at most {slack:g}", why)
    return correct(name, found == BITS, found, BITS)


def _case(name: str, setting: Setting) -> Case:
    def run(bench: Bench) -> Iterator[Row]:
        same_bits()
        plain, again = plain_course(bench, setting), plain_course(bench, setting)
        yield compare(name, setting, plain, again, sharded_course(bench, setting))

    return run


def on_the_device(bench: Bench) -> Iterator[Row]:
    """Where `sw.shard` puts a model by itself."""
    model = sw.shard(builder(bench)())
    found = {p.local.device.type for p in model.parameters() if isinstance(p, sw.ShardedParameter)}
    yield correct("device chosen", found == {bench.device.type}, ", ".join(sorted(found)), bench.device.type)


def after_a_raise(bench: Bench) -> Iterator[Row]:
    """A backward that raised in the middle, caught, and training goes on: as if it had not been."""
    same_bits()
    setting = Setting("bf16")
    plain, again = plain_course(bench, setting), plain_course(bench, setting)
    model = sw.shard(builder(bench)(), precision=setting.precision)
    optimizer = setting.optimizer(model.parameters())
    handle = model.blocks[1].register_forward_hook(_raise_in_backward)
    kept = []  # the error, and with it the frames it came through, lives on as it does in an except block or a debugger
    try:
        model(*batches(bench)(99)).backward()
    except _Planted as error:
        kept.append(error)
    handle.remove()
    ours = twins.train_sharded(model, optimizer, batches(bench), setting.steps)
    yield correct("the error arrives", len(kept) == 1, f"{len(kept)} raised", "1")
    yield compare("after a backward that raised", setting, plain, again, ours)


class _Planted(Exception):
    pass


def _raise_in_backward(module: nn.Module, args: object, output: Tensor) -> None:
    def hook(grad: Tensor) -> None:
        raise _Planted

    output.register_hook(hook)


def scaler(bench: Bench) -> Iterator[Row]:
    """fp16 with a loss scale, one step of which overflows and is skipped."""
    same_bits()
    setting = Setting("fp16")
    kind = bench.device.type
    plain = _scaled_plain(bench, setting, torch.amp.GradScaler(kind, init_scale=256.0))
    again = _scaled_plain(bench, setting, torch.amp.GradScaler(kind, init_scale=256.0))
    ours = _scaled_sharded(bench, setting, sw.GradScaler(kind, init_scale=256.0))
    yield compare("fp16 with GradScaler", setting, plain, again, ours)
    scales = [float(course.losses[-1]) for course in (plain, ours)]
    ok = scales[0] == scales[1] == 128.0
    yield correct("fp16: the scale after an overflow", ok, f"{scales[1]:g}", "128", f"torch's: {scales[0]:g}")


def _factor(step: int) -> float:
    return 1e6 if step == 1 else 1.0


def _scaled_plain(bench: Bench, setting: Setting, grad_scaler: torch.amp.GradScaler) -> Course:
    plain, course = Plain(builder(bench), setting.dtype, setting.optimizer), Course()
    for step in range(setting.steps.steps):
        loss = plain.model(*batches(bench)(step)) * _factor(step)
        grad_scaler.scale(loss).backward()
        plain.collect()
        grad_scaler.step(plain.optimizer)
        grad_scaler.update()
        plain.optimizer.zero_grad()
        plain.refresh()
    course.losses.append(torch.tensor(grad_scaler.get_scale()))
    course.weights = [p.detach().clone() for p in plain.masters.parameters()]
    return course


def _scaled_sharded(bench: Bench, setting: Setting, grad_scaler: sw.GradScaler) -> Course:
    model, course = sw.shard(builder(bench)(), precision=setting.precision), Course()
    optimizer = setting.optimizer(model.parameters())
    for step in range(setting.steps.steps):
        loss = model(*batches(bench)(step)) * _factor(step)
        grad_scaler.scale(loss).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        optimizer.zero_grad()
    course.losses.append(torch.tensor(grad_scaler.get_scale()))
    course.weights = twins.whole(model.parameters())
    return course


_SGD: Optimizers = partial(torch.optim.SGD, lr=0.1)

_SETTINGS = {
    "fp32": Setting(),
    "fp32, default AdamW, clipped": Setting(optimizer=twins.adamw, steps=Steps(clip=0.1)),
    "bf16, fused AdamW": Setting("bf16"),
    "bf16, default AdamW, clipped": Setting("bf16", optimizer=twins.adamw, steps=Steps(clip=0.1)),
    "bf16, full recomputation": Setting("bf16", recompute="full"),
    "bf16, selective recomputation": Setting("bf16", recompute="selective-ops"),
    "fp32, full recomputation": Setting(recompute="full"),
    "bf16, accumulated": Setting("bf16", steps=Steps(micro=2)),
    "bf16, accumulated in no_sync": Setting("bf16", steps=Steps(micro=2, quiet=True)),
    "bf16, shard_grad_op": Setting("bf16", strategy="shard_grad_op"),
    "bf16, odd sizes": Setting("bf16", odd=True, optimizer=_SGD),
    "fp32, odd sizes": Setting(odd=True, optimizer=_SGD),
}

CASES: Cases = {
    "device chosen": on_the_device,
    **{name: _case(name, setting) for name, setting in _SETTINGS.items()},
    "fp16 with GradScaler": scaler,
    "after a backward that raised": after_a_raise,
}
