"""The shorter way to a kept result leads to the same results."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.plan.dry_run import step
from shardwise.plan.dry_run.fake_tensors import FakeTensors
from shardwise.plan.dry_run.job import Job
from shardwise.plan.models.source import resolve

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "mixtral": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_local_experts": 4,
    },
    "bert": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recomputes", ["none", "full"])
def test_a_recording_is_that_of_torchs_own_mode(name: str, recomputes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = resolve({"model_type": name, "vocab_size": 320, **MODELS[name]}).builder()
    job = Job(gpus_per_node=2, seq_len=64, micro_batch=2, activation_checkpointing=recomputes)
    found = step.record(builder, job)
    monkeypatch.setattr(step, "FakeTensors", FakeTensorMode)
    FakeTensorMode.cache_clear()
    assert step.record(builder, job) == found


def described(out: Any) -> Any:
    if isinstance(out, Tensor):
        return (
            *(out.dtype, out.shape, out.stride(), out.storage_offset(), out.device, out.requires_grad),
            *(out.is_conj(), out.is_neg(), out.untyped_storage().nbytes()),
        )
    return [described(item) for item in out] if isinstance(out, tuple | list) else out


def alike() -> list[Callable[[], Any]]:
    """Calls that differ from the one before in one thing that a result may depend on."""
    x = torch.empty(4, 6)
    wide = torch.empty(4, 6, dtype=torch.float64)
    return [
        lambda: x + x,
        lambda: x.t() + x.t(),
        lambda: wide + wide,
        lambda: x + 1,
        lambda: x.long() + 1,
        lambda: x.long() + 1.0,
        lambda: x.long() + True,
        lambda: x.bool() + 1,
        lambda: x.bool() + True,
        lambda: x[1:] + 1,
        lambda: x[:3] + 1,
        lambda: x[:3].view(9, 2),
        lambda: x[1:].view(9, 2),
        lambda: x.requires_grad_(False) * 2,
        lambda: torch.empty(4, 6, requires_grad=True) * 2,
        lambda: x.sum(0),
        lambda: x.sum([0]),
        lambda: x.sum([0, 1]),
        lambda: x.sum([0], keepdim=True),
        lambda: torch.cat([x, x]),
        lambda: torch.cat([x, x], 1),
        lambda: torch.cat((x, x, x)),
        lambda: torch.empty(4, 6, dtype=torch.complex64).conj() * 2,
        lambda: torch.empty(4, 6, dtype=torch.complex64) * 2,
        lambda: x.to(torch.bfloat16),
        lambda: x.to(torch.float16),
        lambda: x.new_empty(3),
        lambda: x.new_empty(3, dtype=torch.int8),
        lambda: x.clone(memory_format=torch.contiguous_format),
        lambda: x.t().clone(memory_format=torch.preserve_format),
        lambda: torch.empty(2, device="meta") * 2,
        lambda: torch.empty(2) * 2,
        lambda: x.split([1, 3]),
        lambda: x.split([3, 1]),
        lambda: x.expand(2, 4, 6) + 1,
        lambda: torch._foreach_add([x, x], 1.0),
        lambda: torch._foreach_add([x], 1.0),
    ]


def test_calls_that_differ_in_one_thing_have_results_of_their_own() -> None:
    FakeTensorMode.cache_clear()
    with FakeTensorMode():
        plain = [described(call()) for call in alike()]
    FakeTensorMode.cache_clear()
    with FakeTensors():
        first, again = ([described(call()) for call in alike()] for _ in range(2))
    assert first == plain
    assert again == plain
    assert FakeTensorMode.cache_hits > len(plain) / 2  # else nothing was asked of the cache


def test_a_mode_keeps_a_result_of_inference_apart() -> None:
    with FakeTensors():
        x = torch.empty(3)
        assert not (x + x).is_inference()
        with torch.inference_mode():
            assert (x + x).is_inference()
        assert not (x + x).is_inference()


def test_the_collector_is_as_it_was_after_a_dry_run() -> None:
    builder = resolve({"model_type": "llama", "vocab_size": 320, **MODELS["llama"]}).builder()
    step.record(builder, Job(gpus_per_node=2, seq_len=64))
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
