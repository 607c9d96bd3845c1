"""Advice where nothing fits: what costs least first, each answered by a forecast of the question so changed."""

from __future__ import annotations

import functools
import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.fsdp.strategy import Precision
from shardwise.plan import planner
from shardwise.plan.dry_run.job import Job
from shardwise.plan.hardware.devices import Figure, find_device
from shardwise.plan.report.rendering import page_html, table_text
from shardwise.plan.report.sentences import faster_sentence
from shardwise.plan.search import advice
from shardwise.plan.search.advice import MOST, _kinds, context_ranks, faster_with_axis, tensor_ranks
from shardwise.plan.search.evaluator import Evaluator
from shardwise.plan.search.exploration import judge, needed_bytes
from shardwise.plan.search.search import Question
from shardwise.plan.simulate.forecast import Forecast
from shardwise.policy.precision import precision_of

MIB = 2**20
WIDE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 32000,
    "num_attention_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
"""17 M parameters, nearly all in two tables, and logits that are larger than anything else."""
SMALL: dict[str, Any] = {
    **WIDE, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3, "vocab_size": 320,
}  # fmt: skip
"""13 M parameters."""
DEEP = {**SMALL, "num_hidden_layers": 6}
"""25 M parameters, none larger than a ring's least buffer, together more than its buffers."""
TWO_LARGE: dict[str, Any] = {**DEEP, "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 2}
"""Two layers of 42 M parameters, of which attention has 17 M."""
BF16 = precision_of("bf16")
PLACES = "params=cpu,optimizer=cpu,gradients=cpu"
OFFLOADED = {"seq_len": 16, "accumulation": 2, "optimizer": "momentum", "strategy": "full_shard"}
ALONE = {"gpus_per_node": 1, "precision": BF16, "micro_batch": 1, "activation_checkpointing": "full"}


def needs(model: dict[str, Any], **arguments: Any) -> int:
    return needed_bytes(sw.plan.forecast(model, **{**ALONE, **arguments}))


def advised(
    model: dict[str, Any], budget_bytes: int, most: int = MOST, **arguments: Any
) -> tuple[planner.Plan, list[dict[str, Any]]]:
    """Ask for advice, at `most` so many ways out: each takes a second to look for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "MOST", most)
        answer = planner.plan(Question(model, {**ALONE, **arguments}, budget_bytes=budget_bytes))
    assert answer.best is None
    plain = json.loads(json.dumps(answer.to_dict()))["advice"]
    assert len(plain) <= most
    for one in plain:
        assert one["forecast"]["reserved_memory_bytes"] <= budget_bytes
        assert one["forecast"]["tokens_per_s_per_gpu"] > 0
    return answer, plain


def test_a_fused_loss_comes_before_offload() -> None:
    """The case of a 32B on 16 H100, small: the logits in fp32 are what does not fit."""
    strategy = {"strategy": "no_shard", "seq_len": 4096}
    enough = needs(WIDE, loss="fused", **strategy)
    assert needs(WIDE, **strategy) > enough + 100 * MIB
    answer, advice = advised(WIDE, enough + 20 * MIB, **strategy)
    assert advice[0]["flags"] == "--loss fused"
    assert advice[0]["keys"] == ""
    assert all("--offload" not in one["flags"] for one in advice[:1])
    again = planner.plan(Question(WIDE, {**ALONE, **strategy, "loss": "fused"}, budget_bytes=enough + 20 * MIB))
    assert again.best is not None
    assert again.best.tokens_per_s_per_gpu == advice[0]["forecast"]["tokens_per_s_per_gpu"]
    shown = " ".join(table_text(answer.report).split())
    assert "It would fit with --loss fused (--loss fused is no setting of `shardwise train`): no_shard, " in shown
    assert " GiB per GPU; " in shown
    assert shown.count("Or with --") == len(advice) - 1
    assert "It would fit with --loss fused" in page_html(answer.report)
    with pytest.raises(PlanError, match=r"it would fit with --loss fused$"):
        answer.check_fits()


def test_what_does_not_suffice_alone_is_combined_and_nothing_else_is() -> None:
    given = {"strategy": "no_shard", "seq_len": 16}
    both = {"optimizer_in_backward": True, "optimizer": "adamw-bf16"}
    enough = needs(SMALL, **given, **both) + 2 * MIB
    assert all(needs(SMALL, **given, **{name: value}) > enough for name, value in both.items())
    _, advice = advised(SMALL, enough, most=1, **given)
    assert advice[0]["flags"] == "--optimizer-in-backward --optimizer adamw-bf16"
    assert advice[0]["keys"] == "train.optimizer_in_backward=true train.clip=0 train.optimizer=adamw-bf16"


def test_more_ranks_are_an_answer_and_a_shorter_sequence() -> None:
    given = {"seq_len": 2048, "optimizer": "momentum", "loss": "fused", "gpus_per_node": 2, "slots": 2}
    given |= {"activation_checkpointing": "offload", "optimizer_in_backward": True}
    given |= {"context_bytes": 0, "nccl_bytes": 0, "tp": 1, "cp": 1}
    enough = max(needs(DEEP, **{**given, **change}) for change in ({"gpus_per_node": 4}, {"seq_len": 1024}))
    assert needs(DEEP, **given) > enough
    _, advice = advised(DEEP, enough, most=2, **given)
    assert [(one["flags"], one["keys"]) for one in advice[:2]] == [
        ("--gpus 4", "parallel.ranks=4"),
        ("--seq-len 1024", "data.seq_len=1024"),
    ]


def test_a_tensor_axis_is_proposed_inside_a_node_at_sizes_that_divide_heads() -> None:
    given = {**ALONE, "gpus_per_node": 8, "seq_len": 16}
    found = sw.plan.forecast(SMALL, **given)
    assert tensor_ranks(found) == [2, 4]  # of 4 heads
    kinds = [[change.flags for change in kind] for _, kind in _kinds(Question(SMALL, given), found)]
    assert ["--tp 2", "--tp 4"] in kinds
    assert kinds.index(["--tp 2", "--tp 4"]) < kinds.index(["--optimizer-in-backward"])
    asked = [[change.flags for change in kind] for _, kind in _kinds(Question(SMALL, {**given, "tp": 1}), found)]
    assert ["--tp 2", "--tp 4"] not in asked
    assert tensor_ranks(replace(found, job=replace(found.job, tp=2))) == [4]
    assert tensor_ranks(replace(found, job=replace(found.job, gpus_per_node=6))) == [2]
    assert tensor_ranks(replace(found, job=replace(found.job, gpu="cpu"))) == []
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 320}
    assert tensor_ranks(sw.plan.forecast(gpt2, **given)) == []  # no plan of its own


def test_an_axis_of_experts_is_proposed_where_a_mixture_does_not_fit_or_waits_for_the_network() -> None:
    given = {**ALONE, "gpus_per_node": 8, "seq_len": 16, "strategy": "full_shard"}
    mixture = {**SMALL, "model_type": "mixtral", "num_local_experts": 6, "num_key_value_heads": 4}
    found = sw.plan.forecast(mixture, **given)
    assert found.recording.facts.experts_divided_by == 6
    kinds = [[change.flags for change in kind] for _, kind in _kinds(Question(mixture, given), found)]
    assert kinds.index(["--ep 2"]) < kinds.index(["--tp 2", "--tp 4"])
    asked = [[change.flags for change in kind] for _, kind in _kinds(Question(mixture, {**given, "ep": 1}), found)]
    assert ["--ep 2"] not in asked
    divided = sw.plan.forecast(mixture, **given, ep=2)
    assert divided.recording.facts.experts_divided_by == 6
    assert divided.memory["gathered_slots"] < found.memory["gathered_slots"]

    def faster(job: Job) -> Forecast:
        return replace(found, job=job, tokens_per_s_per_gpu=found.tokens_per_s_per_gpu * job.ep)

    waiting = replace(judge(found, None), limited_by="network")
    advice = faster_with_axis(Question(mixture, {**given, "tp": 1}), waiting, faster)
    assert advice is not None
    assert (advice.flags, advice.keys) == ("--ep 2", "parallel.ep=2")


def test_a_context_axis_is_proposed_for_sequences_that_do_not_fit() -> None:
    given = {"gpus_per_node": 2, "seq_len": 4096, "loss": "fused", "slots": 2, "nccl_bytes": 0}
    given |= {"activation_checkpointing": "offload"}
    enough = needs(SMALL, cp=2, **given) + 2 * MIB
    assert needs(SMALL, **given) > enough + 4 * MIB
    _, advice = advised(SMALL, enough, most=1, **given)
    assert (advice[0]["flags"], advice[0]["keys"]) == ("--cp 2", "parallel.cp=2")
    assert advice[0]["forecast"]["job"]["mesh"] == {"dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 1, "ep": 1}
    _, advice = advised(SMALL, enough, most=1, cp=1, **given)
    assert all("--cp" not in one["flags"] for one in advice)


def test_sizes_of_a_context_axis_divide_heads_on_a_rank_and_a_node() -> None:
    given = {**ALONE, "gpus_per_node": 8, "seq_len": 16}
    assert context_ranks(sw.plan.forecast(SMALL, **given)) == [2, 4]  # of 4 heads
    cut = sw.plan.forecast(SMALL, **given, tp=2)
    assert context_ranks(cut) == [2]
    assert context_ranks(replace(cut, job=replace(cut.job, gpus_per_node=2))) == []
    t5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 320}
    assert context_ranks(sw.plan.forecast(t5, **given)) == []


def test_what_recomputes_a_single_sequence_is_tried_with_slices_and_without() -> None:
    """With as many sequences in a step, and only if the question leaves the axis and recomputation open."""
    arguments = {**ALONE, "gpus_per_node": 8, "activation_checkpointing": None}
    found = sw.plan.forecast(SMALL, **{**arguments, "activation_checkpointing": "full"})
    asked: list[Job] = []

    def faster_sliced(job: Job) -> Forecast:
        asked.append(job)
        return replace(found, job=job, tokens_per_s_per_gpu=found.tokens_per_s_per_gpu * (1.2 if job.cp == 2 else 1.1))

    best = replace(judge(found, None), limited_by="memory")
    advice = faster_with_axis(Question(SMALL, arguments), best, faster_sliced)
    assert advice is not None
    assert (advice.flags, advice.keys) == ("--cp 2", "parallel.cp=2")
    assert faster_sentence(advice).startswith("It would recompute nothing, and be faster, with --cp 2 (parallel.cp=2)")
    assert [(job.cp, job.accumulation, job.activation_checkpointing) for job in asked] == [
        (2, 2, "none"),
        (4, 4, "none"),
    ]
    for fixed in ({"cp": 1}, {"activation_checkpointing": "full"}):
        assert faster_with_axis(Question(SMALL, {**arguments, **fixed}), best, faster_sliced) is None


def test_a_step_that_waits_for_the_network_is_tried_with_a_tensor_axis() -> None:
    """With as many sequences in a step, and only if the question leaves the axis open."""
    slow = {"gpus_per_node": 2, "nodes": 2, "interconnect": "1gbps", "strategy": "full_shard"}
    question = Question(SMALL, {**ALONE, **slow})
    asked: list[Job] = []
    found = sw.plan.forecast(SMALL, **{**ALONE, **slow})
    best = judge(found, None)
    assert best.limited_by == "network"

    def faster_cut(job: Job) -> Forecast:
        asked.append(job)
        return replace(found, job=job, tokens_per_s_per_gpu=found.tokens_per_s_per_gpu * job.tp)

    advice = faster_with_axis(question, best, faster_cut)
    assert advice is not None
    assert advice.flags == "--tp 2"
    assert [(job.tp, job.micro_batch, job.data_ranks) for job in asked] == [(2, 2, 2)]
    assert faster_with_axis(question, best, lambda job: replace(found, job=job)) is None
    assert faster_with_axis(replace(question, arguments={**ALONE, **slow, "tp": 1}), best, faster_cut) is None


def test_a_smaller_micro_batch_keeps_the_batch() -> None:
    given = {"strategy": "no_shard", "seq_len": 1024, "micro_batch": 8, "loss": "fused"}
    given["activation_checkpointing"] = "none"
    enough = needs(SMALL, **{**given, "micro_batch": 4, "accumulation": 2}) + MIB
    _, advice = advised(SMALL, enough, most=2, **given)
    assert advice[0]["flags"] == "--micro-batch 4 --accumulation 2"
    assert advice[0]["keys"] == "train.micro_batch=4 train.global_batch=8"
    assert advice[1]["flags"] == "--activation-checkpointing full"


def test_a_strategy_that_was_asked_for_may_be_the_trouble() -> None:
    given = {"strategy": "no_shard", "gpus_per_node": 4, "seq_len": 16}
    enough = needs(SMALL, **{**given, "strategy": "full_shard"}) + MIB
    _, advice = advised(SMALL, enough, most=1, **given)
    assert (advice[0]["flags"], advice[0]["keys"]) == ("--strategy full_shard", "parallel.strategy=full_shard")


@pytest.mark.slow
def test_smaller_units_are_an_answer_where_one_unit_is_the_trouble() -> None:
    """Two layers that 64 ranks share: the slots take nearly everything, and a linear layer is smaller than both."""
    given = {"strategy": "full_shard", "gpus_per_node": 8, "nodes": 8, "seq_len": 16, "slots": 2, "loss": "chunked"}
    names = ["Linear", "LlamaDecoderLayer"]
    enough = needs(TWO_LARGE, **{**given, "units": names, "slots": 3}) + MIB
    assert needs(TWO_LARGE, **given) > enough + 16 * MIB
    _, advice = advised(TWO_LARGE, enough, **given)
    assert advice[0]["flags"] == "--units Linear,LlamaDecoderLayer --slots 3"
    assert shlex.split(advice[0]["keys"]) == ['parallel.units=["Linear","LlamaDecoderLayer"]', "parallel.slots=3"]
    assert advice[0]["forecast"]["job"]["units"] == names
    assert advice[0]["forecast"]["tokens_per_s_per_gpu"] > 0


def test_where_slots_of_one_module_do_not_fit_nothing_else_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []
    whole = Evaluator.whole
    monkeypatch.setattr(Evaluator, "whole", lambda self, job: (asked.append(job), whole(self, job))[1])
    given = {"strategy": "full_shard", "gpus_per_node": 8, "nodes": 8, "seq_len": 16, "slots": 2, "loss": "chunked"}
    model = {**TWO_LARGE, "model_type": "mixtral", "num_local_experts": 8, "num_key_value_heads": 4}
    forecast = sw.plan.forecast(model, **{**ALONE, **given})
    slots = forecast.memory["gathered_slots"] + forecast.memory["reduce_slots"]
    answer, advice = advised(model, slots - MIB, **given)
    assert advice == []
    assert {job.world_size for job in asked} == {64}
    assert not any(job.offload or job.optimizer_in_backward for job in asked)
    with pytest.raises(PlanError, match=r"the trouble is one unit, .* split its largest module"):
        answer.check_fits()


def test_beside_adapters_the_base_takes_fewer_bits() -> None:
    large = {**DEEP, "hidden_size": 2048, "intermediate_size": 8192}
    given = {"strategy": "full_shard", "seq_len": 16, "lora": 4, "slots": 2}
    frozen = replace(BF16, frozen="int8")
    _, advice = advised(large, needs(large, **{**given, "precision": frozen}) + MIB, most=1, **given)
    assert (advice[0]["flags"], advice[0]["keys"]) == ("--base int8", "lora.base=int8")


@functools.cache
def enough_for_offload() -> int:
    """What OFFLOADED needs with everything in host memory, which is less than with gradients on the device."""
    enough = needs(DEEP, **OFFLOADED, gpu="h100-sxm-80gb", offload=PLACES) + 4 * MIB
    assert needs(DEEP, **OFFLOADED, gpu="h100-sxm-80gb", offload="cpu") > enough
    return enough


@pytest.mark.parametrize(
    ("rate", "step", "given"),
    [
        pytest.param(1e10, "", {}, marks=pytest.mark.slow),
        (1e12, ",step=cpu", {"loss": "chunked", "slots": 2, "activation_checkpointing": "offload"}),
    ],
)
def test_offload_is_last_and_the_faster_processor_steps(rate: float, step: str, given: dict[str, Any]) -> None:
    """After whatever the question leaves open."""
    gpu = replace(find_device("h100-sxm-80gb"), node={"processors_bytes_per_s": Figure(rate, "a test")})
    _, advice = advised(DEEP, enough_for_offload(), **OFFLOADED, gpu=gpu, **given)
    assert advice[-1]["flags"] == f"--offload {PLACES}{step}"
    keys = "offload.params=cpu offload.optimizer=cpu offload.gradients=cpu"
    assert advice[-1]["keys"] == keys + (" offload.step=cpu" if step else "")


def test_a_cpus_ranks_share_memory_and_may_use_its_disk() -> None:
    given = {"gpu": "cpu", "precision": Precision(), "seq_len": 16, "optimizer": "momentum"}
    enough = needs(DEEP, **given, offload="optimizer=nvme", optimizer_in_backward=True) + 2 * MIB
    answer, advice = advised(DEEP, enough, **given)
    assert [one["flags"] for one in advice] == ["--optimizer-in-backward --offload optimizer=nvme"]
    assert advice[0]["keys"].endswith("offload.optimizer=nvme offload.path=...")
    assert "of the step spent waiting for copies" in " ".join(table_text(answer.report).split())


def test_what_is_answered_with_several_values_and_where_engines_are_compared() -> None:
    given = {"seq_len": [16, 32], "strategy": "no_shard", "loss": ["model", "fused"]}
    answer, advice = advised(
        SMALL, needs(SMALL, seq_len=16, strategy="no_shard", optimizer="adamw-bf16") + MIB, **given
    )
    assert advice[0]["forecast"]["job"]["seq_len"] == answer.report.exploration.candidates[0].job.seq_len
    compared = {"seq_len": 16, "gpus_per_node": 2}
    question = Question(SMALL, compared, budget_bytes=600 * MIB, compare=("fsdp2", "shardwise"))
    assert planner.plan(question).extra["advice"] == []
