"""Recordings made from others are the ones that a dry run would give."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Recording
from shardwise.plan.dry_run.step import record
from shardwise.plan.models.source import resolve
from shardwise.plan.search.evaluator import Evaluator
from shardwise.plan.simulate.scaling import scaled
from shardwise.policy.precision import Precision

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320, "n_positions": 64}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
BF16 = Precision("bf16", "fp32", "fp32")


def recorded(config: dict[str, Any], micro_batch: int, **more: Any) -> Recording:
    job = Job(seq_len=64, gpus_per_node=2, precision=BF16, micro_batch=micro_batch, **more)
    return record(resolve(config).builder(), job)


@pytest.mark.parametrize("config", [LLAMA, GPT2, MIXTRAL], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("mode", ["none", "selective-ops"])
def test_what_is_made_equals_what_is_recorded(config: dict[str, Any], mode: str) -> None:
    two, four = (recorded(config, size, activation_checkpointing=mode) for size in (2, 4))
    made, whole = scaled(two, four, 7), recorded(config, 7, activation_checkpointing=mode)
    assert made == whole


def test_the_first_recording_of_a_process_is_as_any_other() -> None:
    """What the process did before, such as torch's own first use, numbers no blocks."""
    program = "from tests.plan.simulate.test_scaling import *; print(recorded(LLAMA, 2) == recorded(LLAMA, 2))"
    fresh = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert fresh.stdout == "True\n", fresh.stderr


def test_recordings_that_are_not_alike_make_nothing() -> None:
    one, two, four = (recorded(LLAMA, size) for size in (1, 2, 4))
    assert scaled(one, two, 4) is None
    other = recorded(LLAMA, 4, activation_checkpointing="full")
    assert scaled(two, other, 8) is None
    assert scaled(two, replace(four, events=four.events[:-1]), 8) is None
    assert scaled(two, recorded({**LLAMA, "vocab_size": 384}, 4), 8) is None
    first = next(n for n, event in enumerate(four.events) if event != two.events[n])
    uneven = replace(four.events[first], module="elsewhere")  # type: ignore[type-var]
    assert scaled(two, replace(four, events=(*four.events[:first], uneven, *four.events[first + 1 :])), 8) is None


def test_an_evaluator_records_as_little_as_it_must() -> None:
    evaluate, plain = Evaluator(resolve(LLAMA)), Evaluator(resolve(LLAMA), scale=False)
    jobs = [Job(seq_len=64, gpus_per_node=2, precision=BF16, micro_batch=size) for size in (1, 2, 4, 8, 16)]
    for job in jobs:
        assert evaluate(job).to_dict() == plain(job).to_dict()
    assert (evaluate.recorded, plain.recorded) == (3, 5)


def test_a_long_accumulation_is_forecast_from_short_ones() -> None:
    job = Job(seq_len=64, gpus_per_node=2, precision=BF16, micro_batch=2, accumulation=6)
    evaluate = Evaluator(resolve(LLAMA))
    made, whole = evaluate(job).to_dict(), Evaluator(resolve(LLAMA), scale=False)(job).to_dict()
    assert evaluate.recorded == 2
    timed = ("step_time_s", "tokens_per_s_per_gpu", "mfu", "compute_s", "exposed_comm_s")
    for name in timed:
        assert made.pop(name) == pytest.approx(whole.pop(name), rel=1e-3), name
    assert made.pop("tokens_per_s_range") == pytest.approx(whole.pop("tokens_per_s_range"), rel=1e-3)
    assert made == whole
