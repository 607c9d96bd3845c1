"""Compute, reduce and master dtypes, compared with the same arithmetic written by hand."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.fsdp.parameter_group import Dtypes
from tests import device
from tests.engine.cases import AT_MOST_TWO_AND_FOUR, Case
from tests.engine.rig import Net, Twins, adamw, batch, on_ranks, seeded, squares
from tests.ranks import RankPools


class Shadow:
    """Mixed precision of an unsharded model: fp32 masters, a copy in the compute dtype, and gradients in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.masters, self.model = seeded(Net), seeded(Net).to(dtype)
        self.dtype, self.optimizer = dtype, adamw(self.masters.parameters())
        self.world_size = dist.get_world_size()

    def backward(self, index: int, scale: float = 1.0) -> list[Tensor]:
        losses = []
        for own, master in zip(self.model.parameters(), self.masters.parameters(), strict=True):
            own.data.copy_(master.data)
            master.grad = None
        for rank in range(self.world_size):
            self.model.zero_grad()
            loss = self.model(batch(index, rank).to(self.dtype)).float().square().mean()
            (loss * scale).backward()
            losses.append(loss.detach())
            for own, master in zip(self.model.parameters(), self.masters.parameters(), strict=True):
                grad = own.grad.float() * (1.0 / self.world_size)  # type: ignore[union-attr]
                master.grad = grad if master.grad is None else master.grad + grad
        return losses


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer", "no_shard", "hybrid_shard"])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@on_ranks(1, 2)
def test_low_precision_compute_with_fp32_reduction_and_masters(name: str, strategy: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    shadow = Shadow(dtype)
    model = sw.shard(seeded(Net), strategy, precision=sw.Precision(param=name, reduce="fp32"))
    optimizer = adamw(model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for index in range(3):
        losses = shadow.backward(index)
        output = model(batch(index))  # inputs are cast
        assert output.dtype == dtype
        loss = output.float().square().mean()
        loss.backward()
        assert torch.equal(loss.detach(), losses[dist.get_rank()])
        for ours, theirs in zip(model.parameters(), shadow.masters.parameters(), strict=True):
            assert torch.equal(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr, arg-type]
        for each in (optimizer, shadow.optimizer):
            each.step()
            each.zero_grad()
        for ours, theirs in zip(model.parameters(), shadow.masters.parameters(), strict=True):
            assert torch.equal(ours.full_tensor(), theirs)  # type: ignore[attr-defined]


class Scaled(nn.Module):
    """A scale in the compute dtype and a wider tensor are multiplied, as norms do it: its gradient is wide too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * self.scale


@on_ranks(2)
def test_a_gradient_is_not_rounded_on_its_way_to_a_wider_reduction() -> None:
    wide, narrow = (
        sw.shard(Scaled(), precision=sw.Precision(param="bf16", reduce=reduce)) for reduce in ("fp32", "bf16")
    )
    for model in (wide, narrow):
        for _ in range(2):  # the second is added to the first
            with sw.no_sync(model):
                (model(batch(0)) ** 2).mean().backward()
        (model(batch(0)) ** 2).mean().backward()
    mean = torch.zeros(4)
    for rank in range(2):
        x, scale = batch(0, rank).bfloat16().float(), torch.linspace(0.5, 1.5, 4).bfloat16().float()
        mean += 3 * (2 * x * x * scale).sum(0) / x.numel() / 2
    found = wide.scale.grad.full_tensor()
    torch.testing.assert_close(found, mean)
    assert not torch.equal(found, found.bfloat16().float())
    torch.testing.assert_close(narrow.scale.grad.full_tensor(), mean, rtol=2e-2, atol=0)


@on_ranks(2)
def test_masters_of_models_stored_in_bf16() -> None:
    """master=None keeps the stored dtype, "fp32" widens it; frozen parameters are never upcast."""

    def build() -> nn.Module:
        model = Net().bfloat16()
        model.enter.requires_grad_(False)
        return model

    kept = sw.shard(seeded(build))
    assert {p.dtype for p in kept.parameters()} == {torch.bfloat16}
    wide = sw.shard(seeded(build), precision=sw.Precision(param="bf16", master="fp32", reduce="fp32"))
    dtypes = {p.requires_grad: p.dtype for p in wide.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    wide(batch(0)).float().sum().backward()
    twins = Twins(build, loss=lambda model, x: model(x.bfloat16()).float().square().mean())
    twins.train(2)


@on_ranks(2)
def test_output_inputs_and_buffers() -> None:
    class Notes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x: Any) -> Any:
            seen.append((x["x"].dtype, x["i"].dtype, self.scale.dtype))
            return {"y": super().forward(x["x"]), "n": x["i"]}

    seen: list[Any] = []
    inputs = {"x": batch(0), "i": torch.tensor([1, 2])}
    model = sw.shard(seeded(Notes), precision=sw.Precision(param="bf16", output="fp32", buffers="bf16"))
    output = model(inputs)
    assert seen == [(torch.bfloat16, torch.int64, torch.bfloat16)]
    assert (output["y"].dtype, output["n"].dtype) == (torch.float32, torch.int64)
    output["y"].sum().backward()
    uncast = sw.shard(seeded(Notes), precision=sw.Precision(param="bf16", cast_inputs=False))
    with pytest.raises(RuntimeError, match="dtype"):
        uncast(inputs)
    assert seen[1] == (torch.float32, torch.int64, torch.float32)


# Of modules that were sharded first ----------------------------------------------------------------------------------

FP32_INSIDE = sw.Precision(param="fp32", output="bf16")


def cast_norms(model: nn.Module) -> None:
    """Do in a plain model what the precision of the sharded norms does."""
    for block in model.blocks:  # type: ignore[union-attr]
        norm: nn.Module = block.norm  # type: ignore[assignment, union-attr]
        norm.register_forward_pre_hook(lambda module, args: tuple(x.float() for x in args))
        norm.register_forward_hook(lambda module, args, output: output.bfloat16())


def low_but_norms() -> nn.Module:
    model = Net().bfloat16()
    for block in model.blocks:
        block.norm.float()  # type: ignore[union-attr, operator]
    return model


def shard_norms(model: Any, **options: Any) -> None:
    for block in model.blocks:
        sw.shard(block.norm, precision=FP32_INSIDE, **options)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("case", AT_MOST_TWO_AND_FOUR, ids=str)
def test_a_norm_in_another_dtype(ranks: RankPools, case: Case, checkpointed: bool) -> None:
    ranks(case.world_size).run(_norms_in_fp32, case, checkpointed)


def _norms_in_fp32(case: Case, checkpointed: bool) -> None:
    """Train with norms in fp32, bit-equal to a plain model with casts around its norms. Gradients are sent in the dtype
    of their parameters."""
    options: dict[str, Any] = {"strategy": case.strategy, "reshard_after_forward": case.reshard}
    if case.replicas > 1 and case.shards > 1:
        options["mesh"] = init_device_mesh(device.kind(), (case.replicas, case.shards))
    twins = Twins(
        low_but_norms,
        loss=lambda model, x: squares(model, x.bfloat16()),
        first=lambda model: shard_norms(model, **options),
        precision=sw.Precision(param="bf16"),
        **options,
    )
    cast_norms(twins.plain)
    if checkpointed:
        for block in twins.sharded.blocks:  # type: ignore[union-attr]
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[union-attr]
    seen: list[torch.dtype] = []
    norm: Any = twins.sharded.blocks[0].norm  # type: ignore[index]
    norm.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    if case.strategy.startswith("hybrid"):  # rounded to bf16 twice
        twins.backward()
        for p, q in zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=0.02, atol=1e-3)  # type: ignore[union-attr, operator]
    else:
        twins.train(3)
    assert set(seen) == {torch.float32}
    unit = twins.unit("blocks.0.norm")
    assert [group.dtypes for group in unit.groups] == [Dtypes(torch.float32, torch.float32, torch.float32)]


@pytest.mark.parametrize("casts", [True, False])
@on_ranks(2)
def test_input_casts_of_a_module_are_switched_by_its_own_precision(casts: bool) -> None:
    model: Any = seeded(Net)
    sw.shard(model.leave, precision=sw.Precision(param="bf16", cast_inputs=casts))
    sw.shard(model, precision=sw.Precision())
    if casts:
        assert model(batch(0)).dtype is torch.bfloat16
    else:
        with pytest.raises(RuntimeError, match="dtype"):
            model(batch(0))


@on_ranks(2)
def test_casts_of_a_module_whose_parameters_are_all_in_units_below_stay() -> None:
    """The module itself has none, and is a unit for its casts alone."""
    plain, model = seeded(low_block), seeded(low_block)
    sw.shard(model[1], units=[nn.Linear], precision=sw.Precision(param="bf16", output="fp32"))  # type: ignore[index, arg-type]
    sw.shard(model, precision=sw.Precision())
    plain[1].register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))  # type: ignore[index, union-attr]
    plain[1].register_forward_hook(lambda module, args, output: output.float())  # type: ignore[index, union-attr]
    own, expected = model(batch(0)), plain(batch(0))
    assert own.dtype is torch.float32
    assert torch.equal(own, expected)


def low_block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16())


@on_ranks(2)
def test_buffers_of_a_module_that_was_sharded_first_keep_their_dtype() -> None:
    model: Any = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4)))
    sw.shard(model[1], precision=sw.Precision(param="fp32"))
    sw.shard(model, precision=sw.Precision(param="bf16", buffers="bf16"))
    assert [model[0].running_mean.dtype, model[1][0].running_mean.dtype] == [torch.bfloat16, torch.float32]


@dataclass(frozen=True)
class Judged:
    score: Tensor
    parts: list[Tensor]
    name: str = "a"


@on_ranks(1)
def test_dataclasses_are_cast_too() -> None:
    class Judge(Net):
        def forward(self, x: Any) -> Any:
            return Judged(super().forward(x.score), [x.parts[0], x.score])

    model = sw.shard(seeded(Judge), precision=sw.Precision(param="bf16", output="fp32"))
    given = Judged(batch(0), [torch.tensor([1, 2])], "b")
    judged = model(given)
    assert [t.dtype for t in (judged.score, *judged.parts)] == [torch.float32, torch.int64, torch.float32]
    assert (judged.name, given.score.dtype) == ("a", torch.float32)
    assert not torch.equal(judged.parts[1], given.score), "it went through bf16"


@pytest.mark.parametrize("kind", [sw.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "hybrid_shard"])
@on_ranks(2)
def test_scaler_skips_the_step_on_every_rank(strategy: str, kind: type[torch.amp.GradScaler]) -> None:
    """An inf that one rank alone produces makes all ranks skip, and the scale shrink alike."""
    shadow = Shadow(torch.float16)
    model = sw.shard(seeded(Net), strategy, precision=sw.Precision(param="fp16", reduce="fp32"))
    optimizer = adamw(model.parameters())
    scaler = kind("cpu", init_scale=64.0, growth_interval=100)
    for index in range(4):
        poisoned = index == 1
        before = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
        loss = model(batch(index)).float().square().mean()
        scaled = scaler.scale(loss)
        if poisoned and dist.get_rank() == 1:
            scaled = scaled * float("inf")
        scaled.backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (64.0 if index < 1 else 32.0)
        if poisoned:
            assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))  # type: ignore[attr-defined]
            continue
        shadow.backward(index, 64.0 if index < 1 else 32.0)
        for p in shadow.masters.parameters():
            p.grad *= 1 / (64.0 if index < 1 else 32.0)
        shadow.optimizer.step()
        for ours, theirs in zip(model.parameters(), shadow.masters.parameters(), strict=True):
            assert torch.equal(ours.full_tensor(), theirs)  # type: ignore[attr-defined]


class Asking(nn.Module):
    """A module that casts the inputs of its layers, which are units, to the dtype of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.ask()
        x = torch.tanh(self.first(x.float().to(self.first.weight.dtype)))
        self.ask()
        return self.second(x.float().to(self.second.bias.dtype))  # type: ignore[no-any-return]

    def ask(self) -> None:
        self.seen += [self.first.weight.dtype, self.second.weight.dtype, next(self.parameters()).dtype]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_parameters_say_what_they_compute_in_while_the_model_runs(strategy: str) -> None:
    """As an unsharded model in bf16 would; before and after, what optimizers update."""
    model = seeded(Asking)
    sw.shard(model, strategy, units={nn.Linear}, precision=sw.Precision(param="bf16", reduce="fp32"))
    optimizer = adamw(model.parameters())
    for step in range(2):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        loss = model(batch(step)).float().square().mean()
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(model.seen) == {torch.bfloat16}  # type: ignore[arg-type]
    state = {name: v.dtype for values in optimizer.state.values() for name, v in values.items() if name != "step"}
    assert state == {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}


class Shifted(nn.Linear):
    """A module that adds a buffer to its input."""

    def __init__(self) -> None:
        super().__init__(4, 6)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


class Careless(nn.Module):
    """A block that passes fp32 on, or has an fp32 buffer inside."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.first = Shifted() if buffer else nn.Linear(4, 6)
        self.rest = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x if isinstance(self.first, Shifted) else x.float()
        return self.first(x) * self.rest  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (
            False,
            "unit 'first' computes in bfloat16 and was given float32. precision.cast_inputs casts the inputs of",
        ),
        (True, "unit 'first' computes in bfloat16 and holds buffer 'shift' in float32: cast the buffers with"),
    ],
)
@on_ranks(1)
def test_mixed_dtypes_are_explained(buffer: bool, said: str) -> None:
    model = sw.shard(Careless(buffer), units={nn.Linear, Shifted}, precision=sw.Precision(param="bf16"))
    with pytest.raises(RuntimeError, match="dtype") as caught:
        model(batch(0))
    (note,) = caught.value.__notes__
    assert note.startswith(f"shardwise: {said}")
    assert "sw.shard(ignored=module.parameters())" in note


@on_ranks(1)
def test_other_errors_are_left_alone() -> None:
    model = sw.shard(seeded(Net), precision=sw.Precision(param="bf16"))
    with pytest.raises(RuntimeError, match="shapes") as caught:
        model(batch(0)[:, :3])
    assert not hasattr(caught.value, "__notes__")


class Router(nn.Module):
    """A router whose weight is used in fp32, while the rest of its unit computes in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.router = nn.Linear(8, 8, bias=False)
        self.leave = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        weights = nn.functional.linear(y.float(), self.router.weight).softmax(-1)
        return self.leave(y * weights.to(y.dtype))  # type: ignore[no-any-return]


def _kept_by_hand(index: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    masters, model = seeded(Router), seeded(Router).to(torch.bfloat16)
    model.router.weight = nn.Parameter(masters.router.weight.detach().clone())
    losses, grads, world_size = [], {}, dist.get_world_size()
    for rank in range(world_size):
        model.zero_grad()
        loss = model(torch.ones(3, 6, dtype=torch.bfloat16) * (index + rank)).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        for name, p in model.named_parameters():
            grads[name] = grads.get(name, 0) + p.grad.float() * (1.0 / world_size)  # type: ignore[union-attr, operator]
    return losses, grads


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(1, 2)
def test_parameters_that_keep_their_dtype_in_a_unit_of_another(strategy: str) -> None:
    precision = sw.Precision(param="bf16", reduce="fp32", keep=("router.*",))
    assert precision == sw.Precision(param="bf16", reduce="fp32", keep=["router.*"])  # type: ignore[arg-type]
    model = sw.shard(seeded(Router), strategy, precision=precision)
    losses, grads = _kept_by_hand(2)
    loss = model(torch.ones(3, 6) * (2 + dist.get_rank())).float().square().mean()
    loss.backward()
    assert torch.equal(loss.detach(), losses[dist.get_rank()])
    for name, p in model.named_parameters():
        assert torch.equal(p.grad.full_tensor(), grads[name]), name  # type: ignore[union-attr, operator]


@on_ranks(1)
def test_what_a_module_below_keeps_says_nothing_of_the_rest() -> None:
    model = nn.Sequential(Router(), nn.Linear(4, 4))
    sw.shard(model[0], precision=sw.Precision(param="bf16", reduce="fp32", keep=("router.weight",)))
    sw.shard(model)  # in bf16 too
    unit = {name: p.unit for name, p in model.named_parameters()}  # type: ignore[union-attr]
    assert [g.dtypes.compute for g in unit["0.enter.weight"].groups] == [torch.bfloat16, torch.float32]
    assert [g.dtypes.compute for g in unit["1.weight"].groups] == [torch.bfloat16]


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        (("router.wieght",), r"'router\.wieght' matches no parameter of this Router .* mean router\.weight"),
        ("router.weight", r"precision\.keep = 'router\.weight': must be a tuple"),
        ((3,), r"precision\.keep = \(3,\): must be a tuple"),
    ],
)
def test_mistakes_in_what_is_kept_are_told(keep: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sw.shard(Router(), precision=sw.Precision(param="bf16", keep=keep))
