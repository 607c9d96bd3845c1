"""Parameters that are read inside the model's forward but outside their module's: they are gathered on demand and get
gradients."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import MismatchError, UsageError
from shardwise.fsdp.parameter_group import ParameterState
from tests import device
from tests.engine.cases import AT_MOST_TWO_AND_FOUR, Case, collectives
from tests.engine.rig import Block, Net, Twins, batch, count, on_ranks, recording, seeded, squares, unwarned
from tests.ranks import RankPools


class Reads(Block):
    """A block with a kind of attention over the rows of an embedding table that belongs to the model."""

    table: list[nn.Embedding]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.table[0].weight
        return super().forward(x + torch.softmax(x @ weight.t(), -1) @ weight)


class Reading(Net):
    """A model whose embedding is called, and read by the blocks and the head. The head is only read, in chunks."""

    def __init__(self) -> None:
        super().__init__(block=Reads)
        self.embed = nn.Embedding(7, 6)
        for block in self.blocks:
            block.table = [self.embed]  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.embed((x[:, 0].abs() * 3).long().clamp(max=6))
        for block in self.blocks:
            x = block(x)
        parts = [F.linear(chunk, self.leave.weight, self.leave.bias) for chunk in x.chunk(3)]
        return torch.cat([torch.cat(parts), F.linear(x, self.embed.weight)], -1)


def every_module(fqn: str, module: nn.Module) -> bool:
    return isinstance(module, Block) or fqn in {"enter", "leave", "embed"}


@pytest.mark.parametrize("checkpointed", ["no", "blocks", "inside blocks", "reentrant"])
@pytest.mark.parametrize("case", AT_MOST_TWO_AND_FOUR, ids=str)
def test_read_on_demand(ranks: RankPools, case: Case, checkpointed: str) -> None:
    ranks(case.world_size).run(_read, case, checkpointed)


def checkpoint_blocks(model: Any, how: str) -> None:
    for block in model.blocks:
        if how == "inside blocks":
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        elif how != "no":
            plain = block._call_impl
            block._call_impl = functools.partial(checkpoint, plain, use_reentrant=how == "reentrant")


def _read(case: Case, checkpointed: str) -> None:
    options: dict[str, Any] = {"strategy": case.strategy, "reshard_after_forward": case.reshard}
    if case.replicas > 1 and case.shards > 1:
        options["mesh"] = init_device_mesh(device.kind(), (case.replicas, case.shards))
    with unwarned():
        twins = Twins(Reading, units=every_module, **options)
        for model in (twins.plain, twins.sharded):
            checkpoint_blocks(model, checkpointed)
        if (
            case.world_size == 2 and checkpointed != "reentrant"
        ):  # whose sums of a parameter's gradients associate otherwise
            twins.train(3)
        for synced in (False, True):
            if synced:
                twins.backward()
            else:
                with sw.no_sync(twins.sharded):
                    twins.backward()
        for p, q in zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)  # type: ignore[union-attr, operator]
        with torch.no_grad():
            assert torch.equal(twins.sharded(batch(0)), twins.plain(batch(0)))
    assert all(isinstance(p, sw.ShardedParameter) for p in twins.sharded.parameters())


@on_ranks(2)
def test_what_is_read_is_gathered_once_by_its_reader_and_predicted() -> None:
    with recording():
        twins = Twins(Reading, units=every_module)
        twins.train(2)
        before = count(twins.engine, "all_gather")
        twins.train(1)
    # Forward: root, enter, embed and the head once, each block, and the table again for each block and for the head.
    # Backward: the root and the last readers' loans stay; whatever order, no more than once for each point of the pass.
    gathers = count(twins.engine, "all_gather") - before
    assert gathers <= 4 + 4 + 5 + 4 + 5 + 3
    assert twins.engine.schedule.divergences == 0


OPERATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "matmul": lambda m, x: x @ m.square.weight,
    "addmm": lambda m, x: torch.addmm(m.square.bias, x, m.square.weight),
    "linear of a batch": lambda m, x: F.linear(x[None], m.square.weight, m.square.bias)[0],
    "layer_norm": lambda m, x: F.layer_norm(x, (6,), m.norm.weight, m.norm.bias),
    "row": lambda m, x: x * m.square.weight[1],
    "elementwise": lambda m, x: x * m.norm.weight + m.norm.bias,
    "converted": lambda m, x: F.linear(x.double(), m.square.weight.double()).float(),
    "detached": lambda m, x: F.linear(x, m.square.weight.detach()) + x,
    "normalized": lambda m, x: F.linear(x, F.normalize(m.square.weight, dim=1)),
    "viewed": lambda m, x: x + m.square.weight.view(4, 9).sum(0)[:6],
    "embedding": lambda m, x: x + F.embedding(torch.tensor([0, 3, 3, 5, 1]), m.square.weight),
    "two units": lambda m, x: x @ torch.cat([m.square.weight[:3], m.other.weight[3:]]),
    "also called": lambda m, x: m.square(x) @ m.square.weight,
    "einsum": lambda m, x: torch.einsum("bi,oi->bo", x, m.square.weight),
    "one number": lambda m, x: x * m.scale.factor,
    "taken before": lambda m, x: (lambda w: m.square(x) @ w + x @ w)(m.square.weight),
    "penalty too": lambda m, x: x @ m.square.weight + m.square.weight.square().sum(),
}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))


class Parts(Net):
    operation = ""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.square, self.other, self.norm, self.scale = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6), Scale()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.enter(x))
        x = OPERATIONS[Parts.operation](self, x)
        return self.leave(self.blocks[1](x))  # type: ignore[no-any-return]


def parts(fqn: str, module: nn.Module) -> bool:
    return fqn in {"square", "other", "norm", "scale"} or isinstance(module, Block)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_operations_on_whole_parameters(strategy: str, operation: str) -> None:
    Parts.operation = operation
    twins = Twins(Parts, strategy=strategy, units=parts)
    for _ in range(2):
        values = [squares(m, twins.batch()) for m in (twins.plain, twins.sharded)]
        torch.testing.assert_close(values[1], values[0])
        twins.plain_backward([lambda m, r=rank: squares(m, twins.batch(r)) for rank in twins.every_rank])
        values[1].backward()
        for (name, p), q in zip(twins.plain.named_parameters(), twins.sharded.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(q.grad.full_tensor(), p.grad, msg=name)  # type: ignore[union-attr]
        if operation not in {"converted", "penalty too"}:
            twins.same_gradients()
        for optimizer in twins.optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("reduce", ["bf16", "fp32"])
@on_ranks(2)
def test_in_low_precision(reduce: str) -> None:
    """A read parameter has the dtype that modules compute in, and its gradient travels as others do."""
    dtypes: list[torch.dtype] = []

    class Noting(Reading):
        def forward(self, x: Tensor) -> Tensor:
            dtypes.append(F.linear(self.enter(x), self.embed.weight).dtype)
            return super().forward(x)

    model = sw.shard(seeded(Noting), units=every_module, precision=sw.Precision(param="bf16", reduce=reduce))
    low = seeded(Reading).bfloat16()
    expected = []
    for rank in range(2):
        low.zero_grad()
        squares(low, batch(0, rank).bfloat16()).backward()
        expected.append({name: p.grad.float() / 2 for name, p in low.named_parameters() if p.grad is not None})
    squares(model, batch(0)).backward()
    for name, p in model.named_parameters():
        assert isinstance(p.grad, sw.ShardedParameter)
        total = expected[0][name] + expected[1][name]
        read = name.startswith(("embed", "leave"))  # the parts of their gradients are summed in fp32
        tolerance = {"rtol": 0.02, "atol": 0.002} if read or reduce == "bf16" else {}
        torch.testing.assert_close(p.grad.full_tensor(), total, msg=name, **tolerance)
    assert dtypes == [torch.bfloat16]


@on_ranks(1, 2)
def test_frozen_parameters_are_read_too() -> None:
    def build() -> nn.Module:
        model = Reading()
        for module in (model.embed, model.leave):
            module.requires_grad_(False)
        return model

    Twins(build, units=every_module).train(3)


@on_ranks(2)
def test_more_units_are_read_than_there_are_slots() -> None:
    class Greedy(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = x + F.linear(F.linear(x, block.up.weight), block.down.weight)  # type: ignore[union-attr, arg-type]
            return self.leave(x)  # type: ignore[no-any-return]

    with unwarned():
        Twins(lambda: Greedy(depth=7), units=every_module).train(3)


@on_ranks(2)
def test_an_exception_after_a_read() -> None:
    twins = Twins(Reading, units=every_module)
    twins.train(1)
    fails = True

    def fail(*_: object) -> None:
        if fails:
            raise ValueError("on purpose")

    twins.sharded.blocks[2].register_forward_hook(fail)  # type: ignore[index, union-attr]
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            twins.sharded(batch(0))
        assert all(isinstance(p, sw.ShardedParameter) for p in twins.sharded.parameters())
    fails = False
    twins.train(2)


@pytest.mark.parametrize("how", ["row", "whole"])
@on_ranks(2)
def test_writes_to_what_is_read_are_refused(how: str) -> None:
    class Writes(Reading):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                if how == "row":
                    self.leave.weight[0].zero_()
                else:
                    self.leave.weight.copy_(x.new_zeros(6, 3).t()[:, :1])
            return super().forward(x)

    model = sw.shard(seeded(Writes), units=every_module)
    with pytest.raises(UsageError, match=r"wrote parameter 'leave\.weight' in place|only single numbers combine"):
        model(batch(0))


@on_ranks(1, 2)
def test_outside_a_forward_it_stays_an_error_that_names_the_way_out() -> None:
    model: Any = sw.shard(seeded(Reading), units=every_module)
    hidden = torch.ones(2, 6)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"'leave.weight' is not possible.*sw\.unshard\(module\)"):
            F.linear(hidden, model.leave.weight)
        model(batch(0))
    resharded = [unit for unit in model._shardwise_engine.units if unit.reshards_after_forward]
    assert all(unit.parameters.state is not ParameterState.IN_USE for unit in resharded)


def chunked_loss(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Compute the loss in chunks, like fused losses, without ever holding all logits."""
    chunks = zip(hidden[:, :-1].flatten(0, 1).chunk(4), ids[:, 1:].flatten().chunk(4), strict=True)
    return torch.stack([F.cross_entropy(F.linear(h, weight), t, reduction="sum") for h, t in chunks]).sum()


@pytest.mark.parametrize("where", ["in the forward", "outside"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_a_chunked_loss_over_the_head_of_a_llama(strategy: str, where: str) -> None:
    """With automatic units, where the head is one that is never called."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=211, max_position_embeddings=64, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip

    class Chunked(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def forward(self, ids: Tensor) -> Tensor:
            return chunked_loss(self.model(input_ids=ids).last_hidden_state, self.lm_head.weight, ids)

    def loss(model: Any, x: Tensor) -> Tensor:
        ids = (x * 50).long().abs() % 211
        if where == "in the forward":
            return model(ids)  # type: ignore[no-any-return]
        hidden = model.model(input_ids=ids).last_hidden_state
        if isinstance(model.lm_head.weight, sw.ShardedParameter):
            sw.unshard(model.lm_head)
        return chunked_loss(hidden, model.lm_head.weight, ids)

    def decoder(model: Any) -> None:
        if where == "outside":  # so that it may be called by itself
            sw.shard(model.model, strategy)

    twins = Twins(lambda: Chunked(config), loss=loss, shape=(2, 9), first=decoder, strategy=strategy)
    assert "lm_head" in [unit.fqn for unit in twins.engine.units]
    with unwarned():
        twins.train(3)


class OneReads(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        if dist.get_rank() == 0:
            x = x + F.linear(F.linear(x, self.leave.weight), self.leave.weight.t())
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_rank_that_reads_alone_is_told(ranks: RankPools, transport: str, strategy: str) -> None:
    said = ranks(2).run(_read_alone, transport, strategy)
    assert all("'leave'" in text for text in said), said


def _read_alone(transport: str, strategy: str) -> str:
    with collectives(transport):
        model = sw.shard(seeded(OneReads), strategy, units=every_module)
    began = time.monotonic()
    with pytest.raises(MismatchError) as caught:
        squares(model, batch(0)).backward()
    assert time.monotonic() - began < 10
    return str(caught.value)
