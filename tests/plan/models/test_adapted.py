"""Adapters of a plan beside PEFT's: the same parameters, bytes and kernels, and no need of PEFT."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Facts
from shardwise.plan.dry_run.step import record
from shardwise.plan.models import adapted
from shardwise.plan.models.adapted import with_adapters
from shardwise.plan.models.source import resolve
from shardwise.plan.simulate.forecast import forecast
from shardwise.policy.adapters import Adapters
from shardwise.policy.precision import precision_of
from tests.plan.rig import with_peft

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 100}
MOE = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(
    "adapters",
    [Adapters(4), Adapters(4, ("q_proj", "down_proj"), dropout=0.1), Adapters(8, dtype="fp32")],
    ids=["all", "two", "fp32"],
)
@pytest.mark.parametrize("job", [{}, {"strategy": "no_shard", "gpus_per_node": 1}], ids=["full_shard", "no_shard"])
def test_the_step_is_that_of_pefts_adapters(config: dict[str, Any], adapters: Adapters, job: dict[str, Any]) -> None:
    """Every kernel, byte and flop, in order, and every parameter."""
    if config is GPT2 and adapters.targets:
        adapters = replace(adapters, targets=("c_attn", "c_fc"))
    asked = Job(seq_len=32, precision=precision_of("bf16"), activation_checkpointing="full", **job)
    builder = resolve(config).builder()
    own = record(with_adapters(builder, adapters, "bf16"), asked)
    pefts = record(with_peft(builder, adapters, torch.float32 if adapters.dtype else torch.bfloat16), asked)
    assert without_names(own.facts) == without_names(pefts.facts)
    assert 0 < own.facts.trainable < own.facts.params
    assert own.events == pefts.events


def without_names(facts: Facts) -> Facts:
    """Without the names of classes, which are PEFT's or those of a plan's own adapters."""
    return replace(facts, smaller_units=())


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_a_base_in_few_bits_is_that_of_pefts_adapters(base: str) -> None:
    asked = Job(seq_len=32, precision=replace(precision_of("bf16"), frozen=base))
    builder, adapters = resolve(LLAMA).builder(), Adapters(4)
    own = record(with_adapters(builder, adapters, "bf16"), asked)
    pefts = record(with_peft(builder, adapters, torch.bfloat16), asked)
    assert without_names(own.facts) == without_names(pefts.facts)
    assert own.events == pefts.events


def test_a_plan_does_without_peft() -> None:
    script = (
        "import sys\n"
        "import shardwise as sw\n"
        f"f = sw.plan.forecast({LLAMA!r}, lora=4, seq_len=32, gpus_per_node=1)\n"
        "print(f.recording.facts.trainable, 'peft' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    trainable, imported = told.stdout.split()
    assert imported == "False"
    assert int(trainable) == 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))


def test_the_mfu_of_adapters_counts_what_is_computed() -> None:
    found = forecast(LLAMA, lora=4, seq_len=32, gpus_per_node=1, precision=precision_of("bf16"))
    facts = found.recording.facts
    operations = 4 * facts.params + 2 * facts.trainable + 12 * facts.layers * facts.width * 32
    peak = found.job.hardware.peak("bf16")
    assert found.mfu == pytest.approx(found.tokens_per_s_per_gpu * operations / peak)


def test_a_target_that_the_model_lacks() -> None:
    with pytest.raises(PlanError, match="the model has no module 'q_prj'; did you mean q_proj"):
        record(with_adapters(resolve(LLAMA).builder(), Adapters(4, ("q_prj",)), "bf16"), Job(seq_len=32))


def test_what_only_peft_has_adapters_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapted, "find_spec", lambda name: None)
    for config, targets, tp, words in (
        (LLAMA, ("embed_tokens",), 1, r"adapters of model.embed_tokens \(Embedding\) need PEFT"),
        (MOE, None, 1, "adapters of stacked experts need PEFT, which is not installed: pip install 'shardwise"),
        (LLAMA, None, 2, "adapters of a model that tp=2 cuts need PEFT"),
    ):
        with pytest.raises(PlanError, match=words):
            record(with_adapters(resolve(config).builder(), Adapters(4, targets), "bf16", tp), Job(seq_len=32))
