"""Dtypes by name or as torch's own."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.fsdp.strategy import dtype_name

FIELDS = ("param", "reduce", "master", "output", "buffers")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32"), ("fp64", "float64"),
        ("float32", "float32"), (torch.bfloat16, "bfloat16"), (torch.float64, "float64"), (None, None),
    ],
)  # fmt: skip
def test_names_and_dtypes(field: str, given: Any, name: str | None) -> None:
    precision = sw.Precision(**{field: given})
    assert getattr(precision, field) == name
    assert name is None or isinstance(getattr(torch, name), torch.dtype)
    assert all(getattr(precision, other) is None for other in FIELDS if other != field)


def test_equal_however_it_was_written_and_frozen() -> None:
    precision = sw.Precision(param="bf16", reduce="fp32")
    assert precision == sw.Precision(param=torch.bfloat16, reduce="float32")
    assert precision.cast_inputs
    with pytest.raises(dataclasses.FrozenInstanceError):
        precision.param = "fp32"  # type: ignore[misc]


@pytest.mark.parametrize("given", ["bf61", "fp8", "int8", torch.int64, 16, "", True, torch.complex64])
def test_what_is_no_such_dtype_raises_with_its_place(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"precision\.reduce = .*: must be one of the dtypes fp32, bf16, fp16, fp64"):
        sw.Precision(reduce=given)


def test_the_nearest_name_is_offered() -> None:
    with pytest.raises(ConfigError, match=r"train\.dtype = 'bfloat1'.*did you mean 'bfloat16'"):
        dtype_name("bfloat1", "train.dtype")


def test_layout_and_policy_import_no_torch() -> None:
    code = """
import sys
import shardwise.fsdp.layout, shardwise.layout.groups, shardwise.fsdp.strategy, shardwise.fsdp.strategy
sys.exit('torch' in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
