"""Frozen weights in few bits (`precision.frozen`), bit-equal to a plain model with encoded and decoded weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.pretrained import blank_for
from shardwise.engine.extensions.few_bits import BlockGroup
from shardwise.engine.lookup import require_engine
from shardwise.errors import ConfigError, UsageError
from shardwise.sharded.extensions.blocks import BLOCK_NUMEL, Coder, block_bytes
from shardwise.sharded.extensions.few_bits import FewBitsParameter
from tests.engine.cases import Case
from tests.engine.rig import Net, Twins, batch, events, on_ranks, recording, seeded, squares
from tests.engine.streams import played
from tests.ranks import RankPools

WIDTH = 20
NF4 = sw.Precision(frozen="nf4")


class Adapted(nn.Module):
    """A block of frozen matrices, a trained low-rank adapter and a trained norm, of sizes that no block divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1).requires_grad_(False)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.down(torch.tanh(self.up(x))) + self.b(self.a(x))


def build(kind: str = "nf4", dtype: torch.dtype = torch.float32) -> Net:
    """Build a model, with its frozen weights encoded in blocks and decoded again."""
    model = Net(3, Adapted)
    model.enter, model.leave = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
    model.to(dtype)
    for block in model.blocks:
        for layer in (block.up, block.down):
            layer.weight.data = through_blocks(layer.weight.data, kind)  # type: ignore[union-attr, operator]
    return model


def through_blocks(weight: Tensor, kind: str) -> Tensor:
    coder, count = Coder.on(weight.device, kind), -(-weight.numel() // BLOCK_NUMEL)
    blocks = torch.empty(count, block_bytes(kind), dtype=torch.uint8)
    coder.encode(weight.reshape(-1), blocks)
    numbers = torch.empty(count * BLOCK_NUMEL, dtype=weight.dtype)
    coder.decode(blocks, numbers)
    return numbers[: weight.numel()].view(weight.shape)


def in_few_bits(model: nn.Module) -> dict[str, FewBitsParameter]:
    return {name: p for name, p in model.named_parameters() if isinstance(p, FewBitsParameter)}


def in_dtype(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x.to(next(model.parameters()).dtype))


def train_twins(case: Case, kind: str, dtype: torch.dtype) -> None:
    options = {"strategy": case.strategy, "reshard_after_forward": case.reshard}
    twins = Twins(lambda: build(kind, dtype), in_dtype, precision=sw.Precision(frozen=kind), **options)
    assert len(in_few_bits(twins.sharded)) == 6
    twins.train(3)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (Case("full_shard", 1), "nf4"),
        (Case("full_shard", 2), "nf4"),
        (Case("full_shard", 2), "int8"),
        (Case("no_shard", 2), "nf4"),
        (Case("shard_grad_op", 2), "nf4"),
        (Case("full_shard", 4, reshard=2), "nf4"),
    ],
    ids=str,
)
def test_training_is_that_of_a_plain_model(ranks: RankPools, case: Case, kind: str) -> None:
    ranks(case.world_size).run(train_twins, case, kind, torch.float32)


def test_also_in_bf16(ranks: RankPools) -> None:
    ranks(2).run(train_twins, Case("full_shard", 2), "nf4", torch.bfloat16)


@on_ranks(2)
def test_blocks_travel_and_nothing_else_is_kept() -> None:
    with recording():
        model = sw.shard(seeded(build), units={Adapted}, precision=NF4)
    squares(model, batch(0)).backward()
    engine = require_engine(model)
    unit = next(unit for unit in engine.units if unit.fqn == "blocks.0")
    [group] = [group for group in unit.groups if isinstance(group, BlockGroup)]
    numel = -(-2 * (2 * WIDTH + 1) * WIDTH // 1024) * 1024  # two matrices: slices of whole rows of 16 bytes
    assert group.shard.nbytes == numel // 2 // 64 * 34
    travelled = [event.bytes_sent for event in events(engine) if event.op == "all_gather"]
    sent = sum(each.shard.nbytes for each in unit.groups)
    assert travelled == [336, *[sent] * 6]  # forward and backward: in a first step the last block is no exception
    assert sw.memory(model).now["param_shards"] == sum(g.shard.nbytes for u in engine.units for g in u.groups)
    assert "nf4 of fp32 frozen" in str(sw.describe(model))


@on_ranks(2)
def test_a_parameter_shows_numbers() -> None:
    plain = seeded(build)
    model = sw.shard(seeded(build), precision=NF4)
    name, weight = next(iter(in_few_bits(model).items()))
    whole = plain.get_parameter(name).detach()
    assert (weight.shape, weight.dtype, weight.numel()) == (whole.shape, torch.float32, whole.numel())
    assert torch.equal(weight.full_tensor(), whole)
    assert torch.equal(weight.norm(), whole.norm()) or torch.allclose(weight.norm(), whole.norm())
    torch.testing.assert_close(weight.std(), whole.std())
    assert torch.equal((weight * 2).full_tensor(), whole * 2)
    with sw.unsharded(model, writeback=True):
        assert torch.equal(model.get_parameter(name), whole)
        with torch.no_grad():
            model.get_parameter(name).mul_(2)
    assert torch.equal(weight.full_tensor(), whole * 2)  # a power of two: the same codes
    with torch.no_grad():
        weight.mul_(0.5)
        assert torch.equal(weight.full_tensor(), whole)
        weight.copy_(whole * 4)
    assert torch.equal(weight.full_tensor(), whole * 4)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(weight.full_tensor(), whole)
    assert torch.equal(sw.full_state_dict(copy.deepcopy(model), rank0_only=False)[name], whole)


@on_ranks(2)
def test_a_write_reaches_the_next_forward() -> None:
    plain, model = seeded(build), sw.shard(seeded(build), precision=NF4)
    for step in range(2):
        with torch.no_grad():
            assert torch.equal(squares(model, batch(step)), squares(plain, batch(step)))
            for name, weight in in_few_bits(model).items():
                weight.mul_(2)
                plain.get_parameter(name).mul_(2)


@on_ranks(2)
def test_checkpoints_have_numbers(tmp_path: Path) -> None:
    path = broadcast(tmp_path)
    model = sw.shard(seeded(lambda: Net(2, Adapted)), precision=NF4)
    expected = sw.full_state_dict(model, rank0_only=False)
    for name, asynchronous in (("now", False), ("later", True)):
        sw.checkpoint.save(path / name, model, asynchronous=asynchronous)
        sw.checkpoint.wait(model)
        other = sw.shard(Net(2, Adapted), "no_shard", precision=NF4)
        sw.checkpoint.load(path / name, other)
        full = sw.shard(Net(2, Adapted))
        sw.checkpoint.load(path / name, full)
        for loaded in (other, full):
            found = sw.full_state_dict(loaded, rank0_only=False)
            assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@on_ranks(2, timeout_s=120)
def test_a_base_is_read_by_range_and_encoded_piece_by_piece(tmp_path: Path, kind: str) -> None:
    """Also where the files have experts one by one, and the model a stack of them."""
    import transformers

    path = broadcast(tmp_path)
    sizes = {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {"num_local_experts": 3} if kind == "mixtral" else {}
    config = transformers.AutoConfig.for_model(kind, vocab_size=64, num_key_value_heads=2, **sizes, **options)
    torch.manual_seed(3)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if not dist.get_rank():
        plain.save_pretrained(path)
    dist.barrier()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
    with blank_for(path, model):
        sw.shard(model, precision=NF4)
    sw.checkpoint.load_pretrained(path, model)
    few = in_few_bits(model)
    assert len(few) == (14 if kind == "llama" else 12)
    for name, whole in sw.full_state_dict(model, rank0_only=False).items():
        expected = plain.state_dict()[name]
        assert torch.equal(whole, through_blocks(expected, "nf4") if name in few else expected), name


@on_ranks(2, timeout_s=120)
def test_the_planner_knows_the_bytes() -> None:
    """Of blocks and slots, and of moments in bf16, to within a percent."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=128, **sizes)

    def trains_norms_and_head() -> nn.Module:
        model: nn.Module = transformers.LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name or "head" in name)
        return model

    precision = sw.Precision(param="bf16", reduce="fp32", frozen="nf4")
    forecast = sw.plan.forecast(
        trains_norms_and_head, gpu="cpu", gpus_per_node=2, precision=precision, optimizer="adamw-bf16", seq_len=32
    )
    model = sw.shard(trains_norms_and_head(), precision=precision)
    optimizer = sw.optim.AdamWBF16(p for p in model.parameters() if p.requires_grad)
    ids = torch.arange(32).view(1, 32)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    known = sw.memory(model).now
    assert len(in_few_bits(model)) == 21
    for kind in ("param_shards", "gathered_slots", "optimizer"):
        assert forecast.memory[kind] == pytest.approx(known[kind], rel=0.01), kind


def broadcast(path: Path) -> Path:
    """Return rank 0's path."""
    given = [path]
    dist.broadcast_object_list(given)
    return given[0]


@on_ranks(2)
def test_what_is_frozen_so_cannot_train() -> None:
    model = sw.shard(seeded(build), precision=NF4)
    weight = next(iter(in_few_bits(model).values()))
    with pytest.raises(UsageError, match=r"requires_grad_\(True\) of .*'blocks.0.up.weight' .* kept in nf4. Shard"):
        model.blocks.requires_grad_(True)
    with pytest.raises(UsageError, match="kept in nf4"):
        weight.requires_grad = True
    model.blocks.requires_grad_(False)
    with pytest.raises(UsageError, match=r"loading with torch.distributed.checkpoint .*load_pretrained"):
        weight.__create_chunk_list__()


@on_ranks(2)
def test_trained_weights_heads_and_embeddings_keep_their_numbers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(64, 64)
            self.conv = nn.Conv1d(64, 64, 3)
            self.free, self.fixed, self.lm_head = (nn.Linear(64, 64) for _ in range(3))
            self.tied = nn.Linear(64, 64)
            self.tied.weight = self.wte.weight
            self.experts = nn.Module()
            self.experts.stack = nn.Parameter(torch.randn(2, 64, 64))
            self.requires_grad_(False)
            self.free.requires_grad_(True)

        def forward(self, x: Tensor) -> Tensor:
            return x

    model = sw.shard(Model(), precision=NF4)
    assert list(in_few_bits(model)) == ["fixed.weight", "experts.stack"]


@on_ranks(2)
def test_streams_and_retired_slots() -> None:
    """No access is unordered; a view that somebody keeps stays as it was."""
    with played() as order:
        twins = Twins(build, precision=NF4)
        kept: list[Tensor] = []
        twins.sharded.blocks[1].up.register_forward_hook(lambda m, args, out: kept.append(m.weight.t()))  # type: ignore[index, union-attr]
        twins.train(2)
    assert order.races == []
    assert torch.equal(kept[0].t(), twins.plain.get_parameter("blocks.1.up.weight"))


def test_something_has_to_be_frozen() -> None:
    with pytest.raises(ConfigError, match=r"precision.frozen='nf4', but no linear layer of this Net is frozen: call"):
        sw.shard(Net(), precision=NF4)


def test_the_kind_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"precision.frozen = 'nf': must be one of nf4, int8; did you mean 'nf4'"):
        sw.Precision(frozen="nf")


@on_ranks(2)
def test_steps_in_backward_beside_a_frozen_base() -> None:
    model = sw.shard(seeded(build), precision=NF4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sw.optimizer_in_backward(model, optimizer)
    for step in range(2):
        squares(model, batch(step)).backward()
        optimizer.step()  # has nothing left to do


@on_ranks(1)
def test_aliases_have_what_was_merged_from_the_parameter() -> None:
    model = sw.shard(seeded(build), precision=NF4)
    weight = next(iter(in_few_bits(model).values()))
    before, alias = weight.full_tensor(), weight.detach()
    weight.merge(lambda start, stop: torch.full((stop - start,), 10.0))
    assert torch.equal(alias.full_tensor(), before + 10.0)
    weight.merge(lambda start, stop: torch.full((stop - start,), 5.0))
    assert torch.equal(alias.full_tensor(), before + 15.0)
    with torch.no_grad():
        alias.copy_(torch.full(weight.shape, 2.0))
    assert torch.equal(weight.full_tensor(), torch.full(weight.shape, 2.0))


@on_ranks(2)
def test_inference_mode() -> None:
    model = sw.shard(seeded(build), precision=NF4)
    weight = next(iter(in_few_bits(model).values()))
    whole = weight.full_tensor()
    with torch.inference_mode():
        assert torch.equal(weight.norm(), whole.norm()) or torch.allclose(weight.norm(), whole.norm())
        weight.mul_(2)
        handles = model.state_dict()
    assert all(torch.equal(handle.full_tensor(), whole * 2) for handle in (weight, handles[weight.fqn]))
