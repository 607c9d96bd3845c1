"""Scripts written for FSDP2, with its imports and with ours."""

from __future__ import annotations

import copy
import inspect
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardwise as sw
from shardwise.compat import fsdp2 as ours
from shardwise.compat.common import without_effect
from shardwise.compat.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from tests.engine.rig import Net, batch, on_ranks, seeded, squares


def script(
    fsdp: types.ModuleType,
    *,
    bf16: bool = False,
    replicas: bool = False,
    together: bool = False,
    autocast: bool = False,
) -> list[float]:
    """A user's: blocks and root, clipping, accumulation, a schedule; returns losses and norms."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"mesh": mesh if replicas else None}
    if bf16:
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = seeded(Net)
    for index, block in enumerate(model.blocks):
        fsdp.fully_shard(block, reshard_after_forward=index == 0, **options)
    if together:
        fsdp.fully_shard([model.enter, model.leave], **options)
    fsdp.fully_shard(model, **options)
    assert isinstance(model, Net)
    assert isinstance(model, fsdp.FSDPModule)
    assert isinstance(model.blocks[0], fsdp.FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = []
    for step in range(4):
        for micro in range(2):
            model.set_is_last_backward(micro == 1)
            model.set_requires_gradient_sync(micro == 1)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = squares(model, batch(2 * step + micro))
            loss.backward()
            found.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        found.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("together", [False, True])
@on_ranks(2, timeout_s=120)
def test_a_script_of_fsdp2s(together: bool) -> None:
    assert script(ours, together=together) == pytest.approx(script(torchs, together=together), rel=1e-5)


@pytest.mark.parametrize("together", [False, True])
@on_ranks(2, timeout_s=120)
def test_autocast_around_fp32_units(together: bool) -> None:
    found = script(ours, autocast=True, together=together)
    assert found == pytest.approx(script(torchs, autocast=True, together=together), rel=1e-5)
    assert found != pytest.approx(script(ours, together=together), rel=1e-5)


@on_ranks(4, timeout_s=120)
def test_with_replicas() -> None:
    assert script(ours, replicas=True) == pytest.approx(script(torchs, replicas=True), rel=1e-5)


@on_ranks(2, timeout_s=120)
def test_in_bf16() -> None:
    assert script(ours, bf16=True) == pytest.approx(script(torchs, bf16=True), rel=2e-2)


def accumulating(fsdp: types.ModuleType, replicas: bool) -> list[float]:
    """Gradients wait for other backwards, of some modules or for the replicas alone; sums are of a user's making."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"mesh": mesh if replicas else None}
    model: Any = seeded(Net)
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(3.0)
    model.blocks[0].set_all_reduce_hook(lambda reduced: reduced.mul_(2.0))
    model.set_reshard_after_forward(False, recurse=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(3):
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            model.blocks[1].set_requires_gradient_sync(micro == 2)
            model.set_requires_gradient_sync(micro != 1, recurse=False)
            if micro == 2:
                model.set_reshard_after_forward(step == 0) if step < 2 and not replicas else None
            squares(model, batch(3 * step + micro)).backward()
        for parameter in model.parameters():
            total = parameter.grad.to_local().square().sum()
            dist.all_reduce(total)
            found.append(float(total))
        optimizer.step()
        optimizer.zero_grad()
    return found


@on_ranks(4, timeout_s=120)
def test_reductions_of_a_users_making() -> None:
    for replicas in (False, True):
        assert accumulating(ours, replicas) == pytest.approx(accumulating(torchs, replicas), rel=1e-5)


@on_ranks(2, timeout_s=120)
def test_what_waits_is_reduced_where_backward_is_finalized() -> None:
    """As pipeline schedules do. Of torch 2.15, where it is compared with torch's own."""
    sides = [ours, torchs] if hasattr(torchs.FSDPModule, "finalize_backward") else [ours]
    found = []
    for fsdp in sides:
        model: Any = seeded(Net)
        for block in model.blocks:
            fsdp.fully_shard(block)
        fsdp.fully_shard(model)
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
        for index in range(2):
            squares(model, batch(index)).backward()
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=True)
        handle.wait()
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    plain = seeded(Net)
    for index in range(2):
        for rank in range(2):
            (squares(plain, batch(index, rank)) / 2).backward()
    found.append([parameter.grad for parameter in plain.parameters()])
    for side in found[1:]:
        torch.testing.assert_close(side, found[0])


@on_ranks(2)
def test_gradients_are_reduced_in_the_dtype_that_torch_reduces_in() -> None:
    found = []
    for fsdp in (ours, torchs):
        model: Any = seeded(Net)
        fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        (model(batch(0)) * 1e3).float().square().mean().backward()
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    in_bf16 = [[bool(torch.equal(grad, grad.bfloat16().float())) for grad in side] for side in found]
    assert all(in_bf16[1]) != hasattr(torchs.FSDPModule, "finalize_backward")  # torch 2.15 reduces in fp32
    if not all(in_bf16[1]):
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.skipif(not hasattr(torchs.FSDPModule, "finalize_backward"), reason="earlier torch rounds these gradients")
@on_ranks(2)
def test_gradients_that_an_operation_computes_in_fp32_are_as_precise_as_fsdp2s() -> None:
    """Those of norms' weights, in bf16."""
    found = []
    for fsdp in (ours, torchs):
        model: Any = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4)))
        fsdp.fully_shard(
            model, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        )
        model(batch(0)).float().square().mean().backward()
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    assert not torch.equal(found[1][2], found[1][2].bfloat16().float())
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.skipif(
    "param_dtype_override_fn" not in torchs.MixedPrecisionPolicy.__dataclass_fields__, reason="needs torch 2.15"
)
@on_ranks(2)
def test_parameters_that_a_policy_leaves_in_their_dtype() -> None:
    found = []
    for fsdp in (ours, torchs):
        model: Any = seeded(Kept)
        policy: Any = fsdp.MixedPrecisionPolicy
        fsdp.fully_shard(
            model,
            mp_policy=policy(
                param_dtype=torch.bfloat16,
                param_dtype_override_fn=lambda p: torch.float32 if p.ndim == 1 else None,
            ),
        )
        loss = model(batch(0)).float().square().mean()
        loss.backward()
        found.append([loss.detach(), *(parameter.grad.full_tensor() for parameter in model.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-8)
    policy = ours.MixedPrecisionPolicy
    wrong = policy(param_dtype=torch.bfloat16, param_dtype_override_fn=lambda p: torch.float16)
    with pytest.raises(ValueError, match="must return None, param_dtype, or the parameter's original dtype"):
        ours.fully_shard(seeded(Kept), mp_policy=wrong)


class Kept(nn.Module):
    """A scale that is multiplied in its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).to(self.scale.dtype) * self.scale).to(x.dtype)


def sharded() -> Any:
    model = seeded(Net)
    for block in model.blocks:
        ours.fully_shard(block)
    return ours.fully_shard(model)


@on_ranks(2)
def test_units_are_what_was_given_and_names_stay() -> None:
    names = list(seeded(Net).state_dict())
    model = sharded()
    assert list(model.state_dict()) == names
    assert type(model).__name__ == "FSDPNet"
    units = ["", *(f"blocks.{index}" for index in range(len(model.blocks)))]
    assert sorted(unit.fqn for unit in sw.describe(model).units) == units
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(full[name], value) for name, value in seeded(Net).state_dict().items())


@on_ranks(2)
def test_unshard_by_hand() -> None:
    model = sharded()
    handle = model.unshard(async_op=True)
    handle.wait()
    assert torch.equal(model.enter.weight, seeded(Net).enter.weight)
    model.reshard()
    assert isinstance(model.enter.weight, sw.ShardedParameter)
    assert model.unshard() is None


@on_ranks(2)
def test_methods_that_are_registered_gather() -> None:
    class Encoder(Net):
        def encode(self, x: Tensor) -> Tensor:
            return self.enter(x)  # type: ignore[no-any-return]

    plain = seeded(Encoder)
    model = ours.fully_shard(seeded(Encoder))
    ours.register_fsdp_forward_method(model, "encode")
    assert torch.equal(model.encode(batch(0)), plain.encode(batch(0)))
    ours.register_fsdp_forward_method(nn.Linear(2, 2), "encode")  # not sharded: nothing happens


@on_ranks(2)
def test_modules_without_parameters_and_ignored_ones() -> None:
    quiet: Any = ours.fully_shard(nn.ReLU())
    assert isinstance(quiet, ours.FSDPModule)
    quiet.set_requires_gradient_sync(False)
    quiet.unshard()
    quiet.reshard()
    model = seeded(Net)
    left = model.enter.weight
    ours.fully_shard(model, ignored_params={left})
    assert model.enter.weight is left


@on_ranks(2)
def test_what_has_no_effect_warns_once_and_what_cannot_be_had_raises() -> None:
    model = sharded()
    without_effect.cache_clear()
    with pytest.warns(UserWarning, match="set_modules_to_forward_prefetch has no effect: the engine learns"):
        model.set_modules_to_forward_prefetch([model.blocks[1]])
    with pytest.warns(UserWarning, match="on accelerators SHARDWISE_SEPARATE_REDUCTIONS=1 gives the reductions"):
        model.set_separate_reduce_scatter_group()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_modules_to_forward_prefetch([model.blocks[1]])
        model.reset_iter_state()
        ours.share_comm_ctx([model, model.blocks[0]])
    for call, said in (
        (lambda: model.set_custom_all_gather(None), "the engine's collectives cannot be exchanged"),
        (lambda: model.set_gradient_divide_factor(0.0), "a positive number"),
    ):
        with pytest.raises(UsageError, match=said):
            call()


@on_ranks(2)
def test_what_cannot_be_sharded_raises_fsdp2s_errors() -> None:
    with pytest.raises(ValueError, match="nothing calls a ModuleList"):
        ours.fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match="1D or 2D DeviceMesh"):
        ours.fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 1, 1)))
    model = sharded()
    for given in (model, model.blocks[0]):
        with pytest.raises(AssertionError, match="fully_shard has already been applied"):
            ours.fully_shard(given)


@on_ranks(2)
def test_placements_are_asked_for_and_checked_as_fsdp2_does() -> None:
    asked: list[torch.Size] = []

    def answering(answer: Any) -> Any:
        return lambda parameter: asked.append(parameter.shape) or answer

    without_effect.cache_clear()
    for answer, error in (
        (Shard(2), "Shard dim 2 is invalid for 2D tensor"),
        (Shard(-3), "Shard dim -1 is invalid for 2D tensor"),
        ("rows", "Invalid shard_placement_fn result: 'rows'"),
        (types.SimpleNamespace(placement=Shard(0), mesh_info=None), "a mesh of its own"),
    ):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        ours.fully_shard(model[0])
        with pytest.raises((AssertionError, ValueError, UsageError), match=error):
            ours.fully_shard(model, shard_placement_fn=answering(answer), ignored_params={model[1].bias})
    assert asked == [model[1].weight.shape] * 4  # neither what is sharded already nor what is ignored
    with pytest.raises(NotImplementedError, match=r"uneven sharding on dim 1.*world size: 2"):
        ours.fully_shard(nn.Linear(3, 4), shard_placement_fn=answering(Shard(1)))
    with pytest.warns(UserWarning, match="shard_placement_fn has no effect: parameters are cut as one flat buffer"):
        ours.fully_shard(nn.Linear(4, 4), shard_placement_fn=answering(Shard(-1)))


class Later(nn.Module):
    """As torchtitan's: `init_weights` knows what no constructor and no `reset_parameters` does."""

    def __init__(self, depth: int = 2, width: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.register_buffer("angles", torch.empty(width), persistent=False)
        self.register_buffer("turns", torch.empty(width, dtype=torch.complex64), persistent=False)
        self.phase = nn.Parameter(torch.empty(width, dtype=torch.complex64))
        self.inner = nn.ModuleList(Later(0, width) for _ in range(depth))
        self.linear = nn.Linear(width, width)

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.scale, std=std)
        nn.init.constant_(self.phase, std)
        nn.init.normal_(self.linear.weight, std=std)
        nn.init.zeros_(self.linear.bias)

    def turn(self) -> None:
        self.angles = torch.arange(4.0)
        self.turns = torch.polar(torch.ones(4), self.angles)

    def init_weights(self) -> None:
        self.turn()
        self.reset_parameters(0.3)
        for block in self.inner:
            block.init_weights()  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.linear(x + self.angles) + (self.turns * self.phase).imag
        for block in self.inner:
            x = block(x)
        return x


def on_meta() -> Any:
    with torch.device("meta"):
        model: Any = Later()
    ours.fully_shard(list(model.inner))
    return ours.fully_shard(model)


@on_ranks(2)
def test_what_only_the_script_initialises() -> None:
    plain, model = Later(), on_meta()
    losses = []
    for each in (plain, model):
        each.to_empty(device="cpu")
        torch.manual_seed(3)
        each.init_weights()
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.05)
        for step in range(2):
            loss = squares(each, batch(step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]


@on_ranks(2)
def test_nothing_is_drawn_and_all_is_on_the_meta_device_until_to_empty() -> None:
    before = torch.get_rng_state()
    model = on_meta()
    assert torch.equal(torch.get_rng_state(), before)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    for grad in (False, True):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(RuntimeError, match=r"on meta device: \['scale', 'phase', 'linear.weight', 'linear.bias'\]"),
        ):
            model(batch(0))
    with pytest.raises(NotImplementedError, match="to_empty"):
        model.to("cpu")
    faces = list(model.parameters())
    model.to_empty(device="cpu")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert all(parameter is face for parameter, face in zip(model.parameters(), faces, strict=True))
    assert all(tensor.detach().sum().isnan() for tensor in (*model.parameters(), *model.buffers()))
    model.init_weights()
    model.to_empty(device="cpu")  # what has numbers keeps them
    squares(model, batch(0)).backward()
    assert torch.isfinite(model.scale.grad).all()


@on_ranks(2)
def test_a_checkpoint_may_come_without_to_empty() -> None:
    whole = Later()
    whole.init_weights()
    model = on_meta()
    model.load_state_dict(whole.state_dict(), assign=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    with pytest.raises(RuntimeError, match=r"still on meta device: \['angles', 'turns', 'inner.0.angles', "):
        model(batch(0))
    model.to_empty(device="cpu")
    with torch.no_grad():
        assert model(batch(0)).isnan().all()
        for module in (model, *model.inner):
            module.turn()
    assert torch.equal(model(batch(0)), whole(batch(0)))


class Counting(Later):
    """With a buffer beside its own parameters, and in what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.count


@pytest.mark.parametrize("way", ["assign", "full", "rank 0's", "directory"])
@on_ranks(2)
def test_checkpoints_give_buffers_too(way: str, tmp_path: Path) -> None:
    whole = Counting()
    whole.init_weights()
    with torch.device("meta"):
        model: Any = Counting()
    ours.fully_shard(list(model.inner))
    ours.fully_shard(model)
    full = whole.state_dict()
    if way == "assign":
        model.load_state_dict(full, assign=True)
        assert model.count is not whole.count
    elif way == "directory":
        sw.checkpoint.save(tmp_path / "saved", ours.fully_shard(copy.deepcopy(whole)))
        sw.checkpoint.load(tmp_path / "saved", model)
    else:
        from_rank0 = way != "full"
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
        set_model_state_dict(model, {} if from_rank0 and dist.get_rank() else full, options=options)
    model.to_empty(device="cpu")
    for module in (model, *model.inner):
        module.turn()
    assert torch.equal(model(batch(0)), whole(batch(0)))


@on_ranks(2)
def test_what_nothing_initialises_is_named_where_training_begins() -> None:
    model = on_meta()
    model.to_empty(device="cpu")
    for block in model.inner:
        block.init_weights()
    model.linear.reset_parameters()
    model.angles.zero_()
    with torch.no_grad():
        assert model(batch(0)).isnan().all()
    with pytest.raises(UsageError, match=r"'scale' of FSDPLater was built on the meta device.*init_weights\)"):
        model(batch(0))
    model.init_weights()
    squares(model, batch(0)).backward()
    assert torch.isfinite(model.scale.grad).all()


@on_ranks(2)
def test_what_is_ignored_waits_on_the_meta_device_too() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        ours.fully_shard(model, ignored_params={model[1].weight}, offload_policy=ours.CPUOffloadPolicy())
    ignored = model[1].weight
    model.to_empty(device="cpu")
    assert model[1].weight is ignored
    for layer in model:
        layer.reset_parameters()
    model(batch(0)).sum().backward()
    assert ignored.grad is not None


@on_ranks(2)
def test_a_slice_and_a_copy() -> None:
    model = ours.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    assert type(model[:2]) is nn.Sequential
    assert list(model[:2]) == list(model)[:2]
    copied = copy.deepcopy(model)
    assert type(copied) is type(model)
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), model.parameters(), strict=True))


@on_ranks(2)
def test_parameters_that_lie_on_the_host_anyway() -> None:
    losses = []
    for policy in (None, ours.CPUOffloadPolicy()):
        model = ours.fully_shard(seeded(Net), offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(2):
            loss = squares(model, batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]


@on_ranks(2)
def test_torchs_replicate_around_it_reduces_what_is_not_sharded() -> None:
    models = [seeded(Net), seeded(Net)]
    for block in models[0].blocks:
        ours.fully_shard(block, reshard_after_forward=False)
    for model in models:
        replicate(model)
        for step in range(2):
            squares(model, batch(step)).backward()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert one.grad is not None
        whole = one.grad.full_tensor() if isinstance(one.grad, ShardedParameter) else one.grad
        torch.testing.assert_close(whole, other.grad)


def test_every_name_and_argument_of_torchs_is_there() -> None:
    fsdp1 = {"BackwardPrefetch", "CPUOffload", "FullyShardedDataParallel", "MixedPrecision", "ShardingStrategy"}
    of_fsdp1 = {name for name in torchs.__all__ if name in fsdp1 or "StateDict" in name or name == "OptimStateKeyType"}
    later = {"DataParallelMeshDims", "GradientReductionHandle"}  # of torch 2.13, 2.15
    assert set(torchs.__all__) - of_fsdp1 | later == set(ours.__all__)
    theirs = list(inspect.signature(torchs.fully_shard).parameters)
    mine_too = [*theirs] if "dp_mesh_dims" in theirs else [*theirs, "dp_mesh_dims"]  # of torch 2.13
    assert list(inspect.signature(ours.fully_shard).parameters) == mine_too
    for name, method in inspect.getmembers(torchs.FSDPModule, inspect.isfunction):
        if not name.startswith("_"):
            mine = inspect.signature(getattr(ours.FSDPModule, name))
            assert list(mine.parameters) == list(inspect.signature(method).parameters), name
