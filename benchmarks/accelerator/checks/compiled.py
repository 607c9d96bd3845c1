"""Blocks compiled one by one, plain and sharded alike. Last of the checks: a compiler may take its time."""

from collections.abc import Iterator

from torch import nn

import shardwise as sw
from benchmarks.accelerator import twins
from benchmarks.accelerator.bench import Bench, Cases
from benchmarks.accelerator.checks.parity import Setting, batches, builder, compare
from benchmarks.accelerator.device import same_bits
from benchmarks.accelerator.row import Row, correct, impossible
from benchmarks.accelerator.twins import Course, Plain

_SLACK = 2e-2


def blocks(bench: Bench) -> Iterator[Row]:
    """Bits where the compiled plain model repeats its own; and near the plain model that is not compiled."""
    same_bits()
    setting = Setting("bf16")
    backend = "aot_eager" if bench.on_cpu else "inductor"
    name = f"blocks compiled with {backend}"
    try:
        plain, again = (_plain(bench, setting, backend) for _ in range(2))
    except Exception as error:
        yield impossible(name, f"the plain model does not compile: {type(error).__name__}: {error}")
        return
    eager = _plain(bench, setting, None)
    model = sw.shard(builder(bench)(), precision=setting.precision)
    _compile(model, backend)
    ours = twins.train_sharded(model, setting.optimizer(model.parameters()), batches(bench), setting.steps)
    yield compare(name, setting, plain, again, ours)
    off = twins.apart(Course(eager.losses), Course(ours.losses))
    yield correct(
        f"{name}, against eager", off <= _SLACK, f"off by {off:.2g}", f"at most {_SLACK:g}", "bf16 rounds elsewhere"
    )


def _compile(model: nn.Module, backend: str | None) -> None:
    for block in model.blocks if backend else ():
        block.compile(backend=backend)


def _plain(bench: Bench, setting: Setting, backend: str | None) -> Course:
    plain = Plain(builder(bench), setting.dtype, setting.optimizer)
    _compile(plain.model, backend)
    return twins.train_plain(plain, batches(bench), setting.steps)


CASES: Cases = {"blocks": blocks}
