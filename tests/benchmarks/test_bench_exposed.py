"""What changes of order would gain: each changed recording is the same step, in the order that it is named after."""

from dataclasses import replace

import pytest
import torch

from benchmarks.plans.exposed import ENGINES, job_of
from benchmarks.plans.exposed_changes import (
    finer,
    gathered_together,
    norms_first,
    reduced_together,
    reductions,
    simulated,
)
from shardwise.plan.dry_run.recording import Collective, Kernel, Recording, StepPhase, Wait
from shardwise.plan.dry_run.step import record
from shardwise.plan.models.source import resolve

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
EMBEDDING = "model.embed_tokens"


@pytest.fixture(scope="module")
def recording() -> Recording:
    job = job_of("h100-sxm-80gb", 64, seq_len=8192)
    return record(resolve(LLAMA).builder(job.attention), job)


def collectives(recording: Recording) -> list[Collective]:
    return [event for event in recording.events if isinstance(event, Collective)]


def norms(recording: Recording) -> list[Kernel]:
    return [e for e in recording.events if isinstance(e, Kernel) and e.name == "_foreach_norm"]


def exposed_s(recording: Recording) -> float:
    return simulated(recording, "shardwise").exposed_comm_s


def test_the_last_reductions_are_those_of_what_is_needed_first(recording: Recording) -> None:
    assert [collective.unit for collective in reductions(recording.events)[-2:]] == [EMBEDDING, ""]


def test_norms_first_waits_between_two_parts_of_the_same_norms(recording: Recording) -> None:
    changed = norms_first(recording)
    (before,) = norms(recording)
    others, theirs = norms(changed)
    assert others.bytes_moved + theirs.bytes_moved == before.bytes_moved
    start, end = changed.events.index(others), changed.events.index(theirs)
    waited = [event.number for event in changed.events[start:end] if isinstance(event, Wait)]
    assert waited == [collective.number for collective in reductions(recording.events)[-2:]]
    assert collectives(changed) == collectives(recording)
    assert exposed_s(changed) < exposed_s(recording)


@pytest.mark.parametrize(("change", "op"), [(reduced_together, "reduce_scatter"), (gathered_together, "all_gather")])
def test_what_travels_together_is_one_launch_of_as_many_bytes(recording: Recording, change, op: str) -> None:
    changed = change(recording)
    before, after = collectives(recording), collectives(changed)
    assert len(after) == len(before) - 1
    assert sum(c.nbytes for c in after) == sum(c.nbytes for c in before)
    (gone,) = {c.number for c in before} - {c.number for c in after}
    assert next(c for c in before if c.number == gone).op == op
    assert not any(isinstance(event, Wait) and event.number == gone for event in changed.events)
    assert exposed_s(changed) < exposed_s(recording)


def test_a_root_without_parameters_has_nothing_to_send_along(recording: Recording) -> None:
    events = [e for e in recording.events if not (isinstance(e, Collective) and e.unit == "")]
    with pytest.raises(SystemExit, match="no parameters of its own"):
        reduced_together(Recording(recording.job, recording.facts, tuple(events), recording.rank))


@pytest.mark.parametrize("nested", [False, True])
def test_finer_units_at_the_first_block(nested: bool) -> None:
    builder = resolve(LLAMA).builder("sdpa")
    wanted = finer(builder, nested)
    with torch.device("meta"):
        names = {fqn for fqn, module in builder().named_modules() if wanted(fqn, module)}
    first = "model.layers.0" if nested else "model.layers.0.self_attn"
    assert names == {EMBEDDING, first, "model.layers.0.mlp", "model.layers.1", "model.layers.2", "lm_head"}


def test_phases_of_a_changed_recording_stay_in_order(recording: Recording) -> None:
    changed = gathered_together(reduced_together(norms_first(recording)))
    phases = [event.phase for event in changed.events if isinstance(event, Kernel) and not event.stream]
    assert phases == sorted(phases, key=list(StepPhase).index)


@pytest.mark.parametrize("nested", [False, True])
def test_finer_units_leave_less_exposed(recording: Recording, nested: bool) -> None:
    builder = resolve(LLAMA).builder(recording.job.attention)
    divided = record(builder, replace(recording.job, units=finer(builder, nested)))
    for engine in ENGINES:
        whole, parts = simulated(recording, engine), simulated(divided, engine)
        assert parts.exposed_comm_s < whole.exposed_comm_s
        assert parts.step_time_s < whole.step_time_s
