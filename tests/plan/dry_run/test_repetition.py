"""Blocks that are the same are recorded once, and nobody can tell from the recording."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan.dry_run import step
from shardwise.plan.dry_run.depth import deepened
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Recording
from shardwise.plan.dry_run.repetition import repeated_blocks
from shardwise.plan.dry_run.step import record, record_once
from shardwise.plan.models.source import resolve
from shardwise.policy.precision import Precision

BF16 = Precision("bf16", "fp32", "fp32")
DEPTH = 16
_TEXT = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": DEPTH, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "gpt2": {"n_embd": 64, "n_layer": DEPTH, "n_head": 4, "vocab_size": 320, "n_positions": 128},
    "gemma": _GROUPED,
    "qwen2": _GROUPED,
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": _TEXT,
    "vit": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": DEPTH, "num_attention_heads": 4,
            "image_size": 32, "patch_size": 8},
    "qwen3": _GROUPED,
}  # fmt: skip


@pytest.fixture
def wholes(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], nn.Module]]:
    """The builders of models that were run block by block."""
    seen: list[Callable[[], nn.Module]] = []
    own = step.record

    def noted(builder: Callable[[], nn.Module], job: Job, rank: int = 0) -> Recording:
        seen.append(builder)
        return own(builder, job, rank)

    monkeypatch.setattr(step, "record", noted)
    return seen


def check(builder: Callable[[], nn.Module], job: Job, seen: list[Callable[[], nn.Module]], rank: int = 0) -> None:
    once = record_once(builder, job, rank)
    assert seen, "nothing was run"
    assert builder not in seen, "all blocks were run"
    block_by_block = record(builder, job, rank)
    assert once.facts == block_by_block.facts
    assert list(once.facts.unit_bytes) == list(block_by_block.facts.unit_bytes)
    assert once.events == block_by_block.events


QUICK = ("llama", "mixtral", "hybrid_shard", "one GPU")
"""The others are as good, and take as long each."""


def in_turn(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("model_type", in_turn(ARCHITECTURES))
def test_block_once_is_block_by_block(model_type: str, wholes: list[Callable[[], nn.Module]]) -> None:
    builder = resolve({"model_type": model_type, **ARCHITECTURES[model_type]}).builder()
    check(builder, Job(seq_len=64, gpus_per_node=4, precision=BF16), wholes)


JOBS: dict[str, dict[str, Any]] = {
    "one GPU": {"gpus_per_node": 1},
    "no_shard": {"strategy": "no_shard"},
    "hybrid_shard": {"strategy": "hybrid_shard", "nodes": 2},
    "recomputed but for products": {"activation_checkpointing": "selective-ops"},
    "accumulated": {"accumulation": 3, "micro_batch": 2},
    "compiled": {"compile": True},
    "moments in bf16": {"optimizer": "adamw-bf16"},
    "moments in 8 bits": {"optimizer": "adamw-8bit"},
}


@pytest.mark.parametrize("name", in_turn(JOBS))
def test_every_job(name: str, wholes: list[Callable[[], nn.Module]]) -> None:
    config = {"model_type": "llama", **_GROUPED}
    given = {"seq_len": 64, "gpus_per_node": 4, "precision": BF16, **JOBS[name]}
    check(resolve(config).builder(given.get("attention", "sdpa")), Job(**given), wholes)


def test_a_rank_in_the_middle(wholes: list[Callable[[], nn.Module]]) -> None:
    config = {"model_type": "llama", **_GROUPED}
    check(resolve(config).builder(), Job(seq_len=64, gpus_per_node=4, precision=BF16), wholes, rank=2)


# What is not the same -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, number: int, width: int = 16) -> None:
        super().__init__()
        self.number = number
        self.rate = 0.1
        self.inner = nn.Linear(width, 16)
        self.outer = nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).relu())


class Tower(nn.Module):
    """The simplest model with a stack of blocks."""

    def __init__(
        self, change: Callable[[nn.ModuleList], None] = lambda blocks: None, kind: type[Block] = Block
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(kind(number) for number in range(DEPTH))
        self.head = nn.Linear(16, 32)
        change(self.blocks)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


JOB = Job(seq_len=64, gpus_per_node=2, precision=BF16)


def repeated(change: Callable[[nn.ModuleList], None] = lambda blocks: None, kind: type[Block] = Block) -> Any:
    stack = repeated_blocks(lambda: Tower(change, kind), JOB)
    return None if stack is None else (stack.start, stack.stop, stack.period)


def test_numbers_of_blocks_may_differ(wholes: list[Callable[[], nn.Module]]) -> None:
    assert repeated() == (0, DEPTH, 1)
    check(Tower, JOB, wholes)


def _other_setting(blocks: nn.ModuleList) -> None:
    blocks[DEPTH - 2].rate = 0.2


def _frozen(blocks: nn.ModuleList) -> None:
    blocks[DEPTH - 2].inner.requires_grad_(False)


def _other_dtype(blocks: nn.ModuleList) -> None:
    blocks[DEPTH - 2].outer.to(torch.float64)


def _tied(blocks: nn.ModuleList) -> None:
    blocks[DEPTH - 2].outer.weight = blocks[DEPTH - 1].outer.weight


def _hooked(blocks: nn.ModuleList) -> None:
    blocks[DEPTH - 2].register_forward_hook(lambda module, args, output: None)


@pytest.mark.parametrize("change", [_other_setting, _frozen, _other_dtype, _hooked], ids=lambda change: change.__name__)
def test_a_block_that_differs_is_not_one_of_them(change: Callable[[nn.ModuleList], None]) -> None:
    found = repeated(change)
    assert found == (0, DEPTH - 2, 1) or (change is _other_dtype and found is None)  # a mix of dtypes cannot be run


def test_tied_blocks_are_not_the_same() -> None:
    assert repeated(_tied) == (0, DEPTH - 2, 1)


class Counting(Block):
    """Does something else in one block, by its number alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin() if self.number == DEPTH - 2 else super().forward(x)


def test_the_same_modules_that_compute_something_else_are_not_the_same(wholes: list[Callable[[], nn.Module]]) -> None:
    assert repeated(kind=Counting) == (0, DEPTH - 2, 1)
    check(lambda: Tower(kind=Counting), JOB, wholes)


class Alternating(Block):
    """Does something more in every second block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin() if self.number % 2 else super().forward(x)


def test_a_stack_may_repeat_with_a_period(wholes: list[Callable[[], nn.Module]]) -> None:
    def build() -> nn.Module:
        model = Tower()
        model.blocks = nn.ModuleList(Alternating(number) for number in range(2 * DEPTH))
        return model

    stack = repeated_blocks(build, JOB)
    assert stack is not None
    assert (stack.start, stack.stop, stack.period) == (0, 2 * DEPTH, 2)
    check(build, JOB, wholes)


class Collecting(Tower):
    """Reads what every block gave at the end."""

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = [self.table(input_ids)]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        return self.head(torch.stack(hidden).mean(0))


def test_what_grows_with_the_depth_is_never_guessed() -> None:
    assert record_once(Collecting, JOB).events == record(Collecting, JOB).events


class ByNumber(Tower):
    """Counts on all of its blocks."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for number in range(DEPTH):
            x = self.blocks[number](x)
        return self.head(x)


def test_code_that_counts_on_every_block_is_run_whole() -> None:
    assert record_once(ByNumber, JOB) == record(ByNumber, JOB)


@dataclass
class Builder:
    """As dataclasses are, without a hash."""

    depth: int = DEPTH

    def __call__(self) -> nn.Module:
        return Tower()


def test_a_builder_without_a_hash(wholes: list[Callable[[], nn.Module]]) -> None:
    check(Builder(), JOB, wholes)


def test_recordings_of_two_models_make_nothing() -> None:
    configs = (
        {"model_type": "llama", **_GROUPED, "num_hidden_layers": depth, "intermediate_size": size}
        for depth, size in ((4, 96), (5, 128))
    )
    small, other = (record(resolve(config).builder(), JOB) for config in configs)
    assert deepened(small, other, "model.layers", 1, 1, 3) is None


class Named(nn.Module):
    """Blocks whose layers know what they are called, as PEFT's do, or what somebody else is."""

    def __init__(self, of: Callable[[int], int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(DEPTH))
        for number, block in enumerate(self.layers):
            linear: Any = block.get_submodule("0")
            linear.kwargs = {"target_name": f"layers.{of(number)}.0"}

    def forward(self, input_ids: Tensor) -> Tensor:
        x = input_ids.float()
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def test_a_layers_own_name_may_differ_and_no_other() -> None:
    job = Job(seq_len=16)
    own = repeated_blocks(lambda: Named(lambda number: number), job)
    assert own is not None
    assert (own.start, own.stop) == (1, DEPTH), "the first one gets what needs no gradient"
    assert repeated_blocks(lambda: Named(lambda number: DEPTH - number), job) is None
