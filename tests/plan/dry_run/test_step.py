"""A dry run says what the real engine does: memory to the byte, collectives in order, a step that ends as it began."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ConfigError, PlanError
from shardwise.fsdp.layout import round_up
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import (
    Allocate,
    Collective,
    Free,
    Kernel,
    KernelKind,
    StepPhase,
    UnitMark,
    Wait,
)
from shardwise.plan.dry_run.step import record
from shardwise.plan.models.source import resolve
from tests.engine.cases import CASES, FP32, MIXED, Case
from tests.engine.rig import Block
from tests.plan.rig import Regression, gpt2, job_of, muon, real, regression, state_of, traffic_of

if TYPE_CHECKING:
    from tests.ranks import RankPools


def wide() -> nn.Module:
    """With matrices that have moments in 8 bits, and vectors that have not."""
    model = Regression(2, lambda: Block(72))
    model.enter, model.leave = nn.Linear(4, 72), nn.Linear(72, 3)
    return model


@pytest.mark.parametrize("precision", [FP32, MIXED], ids=["fp32", "mixed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_engine_memory_and_traffic(ranks: RankPools, case: Case, precision: sw.Precision) -> None:
    """To the byte, on the first and the last rank; the collectives of each group in their order."""
    of_ranks = ranks(case.world_size).run(real, case, precision)
    for rank in (0, case.world_size - 1):
        state, sent = of_ranks[rank]
        recorded = record(regression, job_of(case, precision), rank)
        assert state_of(recorded) == state
        dry = traffic_of(recorded)
        for group in ("shard", "replicate", "secondary"):
            assert [event for event in dry if event[0] == group] == [event for event in sent if event[0] == group]


@pytest.mark.parametrize("case", [Case("full_shard", 3), Case("no_shard", 2), Case("hybrid_shard", 4)], ids=str)
def test_muons_memory_and_traffic(ranks: RankPools, case: Case) -> None:
    """To the byte, on every rank: whose matrix is whose, and what travels."""
    of_ranks = ranks(case.world_size).run(real, case, FP32, muon)
    for rank, (state, sent) in enumerate(of_ranks):
        recorded = record(regression, job_of(case, FP32, optimizer="muon"), rank)
        assert state_of(recorded) == state
        dry = traffic_of(recorded)
        for group in ("shard", "replicate"):
            assert [event for event in dry if event[0] == group] == [event for event in sent if event[0] == group]
    assert len({state["optimizer"] for state, _ in of_ranks}) > 1


def test_memory_of_moments_in_8_bits(ranks: RankPools) -> None:
    """To the byte, and so of slices that are aligned to blocks."""
    case = Case("full_shard", 3)
    of_ranks = ranks(3).run(real, case, FP32, sw.optim.AdamW8bit, wide, sw.optim.AdamW8bit.BLOCK_NUMEL)
    for rank, (state, _) in enumerate(of_ranks):
        assert state_of(record(wide, job_of(case, FP32, optimizer="adamw-8bit"), rank)) == state


@pytest.mark.parametrize("mode", ["none", "full", "selective-ops", "every-2"])
@pytest.mark.parametrize("gpu", ["cpu", "h100-sxm-80gb"])
def test_a_step_ends_as_it_began(gpu: str, mode: str) -> None:
    """Blocks live once, are freed once, and those of the beginning stay; every collective is waited for once."""
    job = Job(gpu=gpu, seq_len=16, activation_checkpointing=mode, precision=MIXED, accumulation=2)
    events = record(gpt2, job).events
    born = [event.block for event in events if isinstance(event, Allocate)]
    freed = [event.block for event in events if isinstance(event, Free)]
    setup = [event.block for event in events if isinstance(event, Allocate) and event.phase is StepPhase.SETUP]
    assert len(set(born)) == len(born)
    assert len(set(freed)) == len(freed)
    assert set(born) - set(freed) == set(setup)
    alive: set[int] = set()
    for event in events:
        if isinstance(event, Allocate):
            alive.add(event.block)
        elif isinstance(event, Free):
            alive.remove(event.block)
    issued = [event.number for event in events if isinstance(event, Collective)]
    assert [event.number for event in events if isinstance(event, Wait)] != []
    assert sorted(event.number for event in events if isinstance(event, Wait)) == issued
    assert {event.phase for event in events if isinstance(event, Kernel)} == {
        StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER, *([StepPhase.RECOMPUTE] if mode != "none" else []),
    }  # fmt: skip


def test_marks_tell_a_units_life() -> None:
    events = record(gpt2, Job(gpu="cpu", seq_len=16)).events
    block = [
        (event.what, event.phase) for event in events if isinstance(event, UnitMark) and event.unit == "transformer.h.1"
    ]
    assert block == [
        ("gather", StepPhase.FORWARD),
        ("release", StepPhase.FORWARD),
        ("gather", StepPhase.BACKWARD),
        ("grads", StepPhase.BACKWARD),
        ("release", StepPhase.BACKWARD),
        ("reduced", StepPhase.BACKWARD),
    ]


@pytest.mark.parametrize(
    ("strategy", "units_behind"), [("hybrid_shard", 2), ("hybrid_shard_zero2", 2), ("no_shard", 1)]
)
def test_replicas_are_waited_for_units_later(strategy: str, units_behind: int) -> None:
    """A unit's sum over replicas is handed out right behind its sum in the shard group, and waited for when the
    backward of so many further units is over."""
    job = Job(seq_len=16, gpus_per_node=2, nodes=2, strategy=strategy)  # type: ignore[arg-type]
    events = record(lambda: gpt2(n_layer=6), job).events
    waited = {event.number: at for at, event in enumerate(events) if isinstance(event, Wait)}
    over = {e.unit: at for at, e in enumerate(events) if isinstance(e, UnitMark) and e.what == "grads"}
    summed = {
        event.unit: at
        for at, event in enumerate(events)
        if isinstance(event, Collective) and event.op == "all_reduce" and event.unit in over and event.nbytes > 1000
    }
    assert set(summed) == set(over)
    products = [(at, e) for at, e in enumerate(events) if isinstance(e, Kernel) and e.kind is KernelKind.MATMUL]
    computed = {".".join(kernel.module.split(".")[1:3]): at for at, kernel in products}
    for at in summed.values():
        assert not any(isinstance(event, Kernel) for event in events[at - 1 : at])
    for layer in range(5, units_behind - 1, -1):
        at = waited[events[summed[f"transformer.h.{layer}"]].number]  # type: ignore[union-attr]
        assert at > computed[f"h.{layer - units_behind}"]
    last = max(at for at, event in enumerate(events) if isinstance(event, UnitMark) and event.what == "reduced")
    assert all(event.phase is not StepPhase.OPTIMIZER for event in events[:last] if isinstance(event, Kernel))


def test_kernels_are_counted_and_named() -> None:
    """Matrix products of a GPT: three times forward's 2 * parameters * tokens, and attention in its module."""
    recorded = record(gpt2, Job(seq_len=64, micro_batch=2, precision=MIXED))
    kernels = [event for event in recorded.events if isinstance(event, Kernel)]
    tokens = 128
    matrices = 12 * 32 * 32 * 3 + 32 * 100
    assert sum(kernel.flops for kernel in kernels if kernel.kind is KernelKind.MATMUL) == 3 * 2 * matrices * tokens
    for kernel in kernels:
        if kernel.kind is KernelKind.MATMUL and kernel.matmul is not None:
            batch, m, n, k = kernel.matmul
            assert kernel.flops == 2 * batch * m * n * k
    attention = [kernel for kernel in kernels if kernel.kind is KernelKind.ATTENTION]
    assert Counter((kernel.module, kernel.phase) for kernel in attention) == {
        (f"transformer.h.{layer}.attn", phase): 1
        for layer in range(3)
        for phase in (StepPhase.FORWARD, StepPhase.BACKWARD)
    }
    square = 2 * 2 * 2 * 2 * 64 * 64 * 16  # two products, 2 flops, batch and heads, scores, width
    assert [kernel.flops for kernel in attention[:3]] == [square // 2] * 3
    assert [kernel.flops for kernel in attention[3:]] == [square // 2 * 5 // 2] * 3
    assert {kernel.dtype for kernel in attention} == {"bf16"}


def test_facts() -> None:
    facts = record(gpt2, Job(gpu="cpu", seq_len=16, precision=MIXED)).facts
    assert (facts.name, facts.layers, facts.width, facts.sequence) == ("GPT2LMHeadModel", 3, 32, 16)
    assert facts.params == facts.trainable == sum(p.numel() for p in gpt2().parameters())
    assert facts.embeddings == 64 * 32  # positions; the tokens' are the head's
    of_ranks = 8 * 64  # each rank's slice of a reduce slot begins on 64 bytes
    assert facts.unit_reduce_bytes["transformer.h.0"] == round_up(2 * facts.unit_bytes["transformer.h.0"], of_ranks)


class Deciding(nn.Module):
    """Looks at its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.float()[..., None].expand(-1, -1, 4))
        return y.sum() if y.sum() > 0 else -y.sum()


class Twofold(Deciding):
    """Returns nothing that a loss could be taken of."""

    def forward(self, x: Tensor) -> Any:
        return x, self.linear(x.float()[..., None].expand(-1, -1, 4))


def test_models_that_cannot_be_planned() -> None:
    job = Job(gpu="cpu", seq_len=4)
    with pytest.raises(PlanError, match="depends on values of tensors"):
        record(Deciding, job)
    with pytest.raises(PlanError, match="Twofold returned tuple without a loss"):
        record(Twofold, job)
    with pytest.raises(PlanError, match="cannot be run dry: ValueError: expected 4D input"):
        record(lambda: nn.BatchNorm2d(4), job)
    with pytest.raises(PlanError, match=r"a plan calls it with input; if it needs others, .* example_inputs\("):
        record(lambda: nn.BatchNorm2d(4), job)
    with pytest.raises(PlanError, match="rank=8: must be a rank from 0 to 7"):
        record(gpt2, job, rank=8)
    with pytest.raises(ConfigError, match="no such module"):
        record(gpt2, Job(gpu="cpu", units={nn.Conv2d}))


def test_a_model_of_images_and_text_keeps_no_gathered_parameters() -> None:
    """A cache of keys and values would keep what recomputation saved: every block's gathered parameters."""
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    config = {
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral", "vocab_size": 100, "num_key_value_heads": 2, **text},
    }
    config["vision_config"] = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    config["vision_config"] |= {"num_hidden_layers": 1, "num_attention_heads": 4}
    job = Job(gpus_per_node=2, seq_len=32, activation_checkpointing="full")
    recording = record(resolve(config).builder(), job)
    with torch.device("meta"):
        model = resolve(config).builder()()
    of_images = [
        module
        for name, module in model.named_modules()
        if name in {"model.vision_tower", "model.multi_modal_projector"}
    ]
    assert recording.facts.unused == sum(p.numel() for module in of_images for p in module.parameters()) > 0
    events = recording.events
    assert sum(event.nbytes for event in events if isinstance(event, Allocate) and event.kind == "other") < 4096


@pytest.mark.parametrize("optimizer", ["adamw-bf16", "adamw-8bit"])
def test_a_step_on_an_accelerator_takes_its_own_chunks(optimizer: str) -> None:
    """Dry runs have CPU tensors, of which these optimizers update fewer elements at a time."""

    def kernels(gpu: str, numel: int) -> int:
        job = Job(gpu=gpu, gpus_per_node=1, strategy="no_shard", optimizer=optimizer)  # type: ignore[arg-type]
        events = record(lambda: Weight(numel), job).events
        return sum(isinstance(event, Kernel) and event.phase is StepPhase.OPTIMIZER for event in events)

    assert kernels("h100-sxm-80gb", 2**20) == kernels("h100-sxm-80gb", 2**18) == kernels("cpu", 2**18)
    assert kernels("cpu", 2**20) > 2 * kernels("cpu", 2**18)


class Weight(nn.Module):
    """Returns its loss."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, numel // 2))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.weight.square().mean()


def test_two_encoders_are_given_images_and_text() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"model_type": "siglip_text_model", "vocab_size": 100, "max_position_embeddings": 16, **sizes}
    vision = {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 16, **sizes}
    config = {"model_type": "siglip", "architectures": ["SiglipModel"], "text_config": text, "vision_config": vision}
    source = resolve(config)
    recording = record(source.builder(), Job(gpus_per_node=2, seq_len=16))
    assert recording.facts.unused == 0
    assert sum(isinstance(event, Kernel) for event in recording.events) > 0


def test_positions_of_a_decoder_of_speech_are_known() -> None:
    assert resolve("whisper-large-v3").positions == 448
