"""What the tests of training share: small configurations and runs of them."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.plan.hardware.devices import Figure, find_device, write_device
from shardwise.train import trainer
from shardwise.train.config.files import load
from shardwise.train.config.schema import Config

_LLAMA = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2

[data]
source = "texts/*.txt"
seq_len = 32
"""

TINY = f"""{_LLAMA}eval_fraction = 0.2

[train]
steps = 6
micro_batch = 2
global_batch = 8
lr = 1e-2
eval_every = 3

[parallel]
units = ["LlamaDecoderLayer"]
"""


def furnish(folder: Path) -> None:
    """Write `tiny.toml`, and documents of unequal length, so that ranks and micro-batches have unequal numbers of
    targets."""
    (folder / "texts").mkdir()
    for i in range(20):
        (folder / "texts" / f"{i}.txt").write_text(f"the {i} quick brown foxes jump over {i} lazy dogs. " * (1 + i % 5))
    (folder / "tiny.toml").write_text(TINY)


def run_alone(*overrides: str) -> None:
    trainer.run(load("tiny.toml", overrides))


def run_here(folder: str, overrides: tuple[str, ...]) -> str:
    """Train in a folder. Returns what the rank prints."""
    printed = io.StringIO()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            run_alone(*overrides)
    finally:
        os.chdir(before)
    return printed.getvalue()


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def losses(name: str) -> list[float]:
    return [row["loss"] for row in read(f"runs/{name}/metrics.jsonl")]


masking_utils = pytest.importorskip("transformers.masking_utils")


aten: Any = torch.ops.aten


WAITING_KERNELS = {
    aten._local_scalar_dense, aten.equal, aten.nonzero, aten.is_nonzero, aten.masked_select, aten._unique2,
}  # fmt: skip
"""Kernels that wait. `item`, `float`, `bool` and `if tensor:` call the first."""


WAITING_METHODS = {Tensor.cpu, Tensor.numpy, Tensor.tolist}
"""Methods that wait. On a CPU's tensors they call no kernel."""


class WaitsForDeviceError(AssertionError):
    pass


class _Kernels(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if func.overloadpacket in {aten.index, aten.index_put, aten.index_put_} else ()
        masked = any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in indices)
        if masked or func.overloadpacket in WAITING_KERNELS:
            raise WaitsForDeviceError(str(func))
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING_METHODS:
            raise WaitsForDeviceError(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Make operations that wait raise inside. One wait is taken out, because it is not the trainer's: in each forward,
    transformers' models check whether several sequences are packed in a row, and here none are."""
    packed = mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
    with packed, _Kernels(), _Methods():
        yield


def without_waits(step: Callable[..., None]) -> Callable[..., None]:
    def checked(self: trainer.Trainer, number: int) -> None:
        with waiting_raises():
            step(self, number)

    return checked


def train(folder: Path, *overrides: str) -> str:
    """Train as on a device: steps must not wait, and are read late. Returns what the run prints."""
    printed, before = io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with (
            contextlib.redirect_stdout(printed),
            mock.patch.object(trainer.Trainer, "reads_late", True),
            mock.patch.object(trainer.Trainer, "step", without_waits(trainer.Trainer.step)),
        ):
            trainer.run(load("tiny.toml", overrides))
    finally:
        os.chdir(before)
    return printed.getvalue()


AUTO = f"""{_LLAMA}eval_fraction = 0.0

[train]
steps = 2
micro_batch = 4
global_batch = 8

[parallel]
strategy = "auto"
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(8):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"the {i} quick brown foxes jump over {i} lazy dogs. " * 3)
    (tmp_path / "tiny.toml").write_text(AUTO)
    monkeypatch.chdir(tmp_path)


def small_device(path: str, usable_bytes: float) -> str:
    """Write the hardware file of a CPU with this much memory."""
    little = Figure(usable_bytes, "made for a test")
    cpu = find_device("cpu")
    write_device(replace(cpu, memory=replace(cpu.memory, bytes=little, usable_bytes=little)), Path(path))
    return path


def configured(tmp_path: Path, log: str) -> Config:
    path = tmp_path / "tiny.toml"
    path.write_text(f"""
        model.config = {{model_type = "llama"}}
        train.steps = 10
        {log}
    """)
    return load(path)
