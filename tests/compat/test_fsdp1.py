"""Scripts written for FSDP1, with its imports and with ours."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import sharded_grad_scaler as torchs_scaler
from torch.distributed.fsdp import wrap as torchs_wrap

import shardwise as sw
from shardwise.compat import fsdp1 as ours
from shardwise.compat.common import without_effect
from shardwise.compat.fsdp1 import wrap as ours_wrap
from shardwise.errors import LayoutError, UsageError
from tests.engine.rig import Block, Net, batch, on_ranks, same_tensors, seeded, squares

FSDP = ours.FullyShardedDataParallel
CPU = torch.device("cpu")


def script(fsdp: types.ModuleType, wrap: types.ModuleType, strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    """A user's: wraps by a policy, accumulates, clips, saves and loads full state, and trains on."""
    fully_sharded = fsdp.FullyShardedDataParallel
    policy = functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})

    def build() -> Any:
        return fully_sharded(
            seeded(Net),
            sharding_strategy=fsdp.ShardingStrategy[strategy],
            auto_wrap_policy=policy,
            device_id=CPU,
            sync_module_states=fsdp is ours,  # torch cannot on CPUs
            limit_all_gathers=True,
            use_orig_params=True,
        )

    def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        found = []
        for step in steps:
            with model.no_sync():
                squares(model, batch(2 * step)).backward()
            loss = squares(model, batch(2 * step + 1))
            loss.backward()  # type: ignore[no-untyped-call]
            found += [loss.item(), float(model.clip_grad_norm_(0.5))]
            optimizer.step()
            optimizer.zero_grad()
        return found

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if fsdp is torchs and strategy != "NO_SHARD":  # its state dicts of shards end the process on CPUs
        return train(model, optimizer, range(5)), {}
    found = train(model, optimizer, range(3))
    options = fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=fsdp is ours)
    with fully_sharded.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, options):
        saved = model.state_dict()
    assert fsdp is torchs or bool(saved) == (dist.get_rank() == 0)
    everywhere = model.state_dict()
    of_optimizer = fully_sharded.optim_state_dict(model, optimizer)
    again = build()
    again.load_state_dict(everywhere)
    second = torch.optim.AdamW(again.parameters(), lr=0.05)
    second.load_state_dict(fully_sharded.optim_state_dict_to_load(again, second, of_optimizer))
    found += train(again, second, range(3, 5))
    with fully_sharded.summon_full_params(again, writeback=True), torch.no_grad():
        found.append(float(again.module.enter.weight.sum()))
        again.module.enter.weight.mul_(2.0)
    found.append(squares(again, batch(20)).item())
    return found, {name: value.clone() for name, value in again.state_dict().items()}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2, timeout_s=120)
def test_a_script_of_fsdp1s(strategy: str) -> None:
    warnings.simplefilter("ignore")  # torch's own, of what is deprecated
    mine, my_weights = script(ours, ours_wrap, strategy)
    theirs, their_weights = script(torchs, torchs_wrap, strategy)
    assert mine[: len(theirs)] == pytest.approx(theirs, rel=1e-4)
    assert list(my_weights) == list(seeded(Net).state_dict())
    for name, value in their_weights.items():
        torch.testing.assert_close(my_weights[name], value, rtol=1e-3, atol=1e-4)


@on_ranks(2)
def test_autocast_around_fp32_units() -> None:
    warnings.simplefilter("ignore")
    found = []
    for fsdp, wrap in ((ours, ours_wrap), (torchs, torchs_wrap)):
        model = fsdp.FullyShardedDataParallel(
            seeded(Net),
            auto_wrap_policy=wrap.ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = squares(model, batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def wrapped(**options: Any) -> Any:
    return FSDP(seeded(Net), auto_wrap_policy=ours.ModuleWrapPolicy({Block}), **options)


@on_ranks(2)
def test_the_model_is_its_own_wrapper() -> None:
    model = wrapped()
    assert isinstance(model, FSDP)
    assert isinstance(model, Net)
    assert model.module is model
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in seeded(Net).named_parameters()]
    assert FSDP.fsdp_modules(model) == [model, *model.blocks]
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert (model.check_is_root(), model.blocks[0].check_is_root()) == (True, False)
    assert {unit.fqn for unit in sw.describe(model).units} == {"", *(f"blocks.{i}" for i in range(len(model.blocks)))}
    same_tensors(dict(seeded(Net).named_parameters()), dict(copy.deepcopy(model).named_parameters()))
    with pytest.raises(UsageError, match="was already given to FSDP"):
        FSDP(model)


@on_ranks(2)
def test_nested_by_hand_and_by_wrap() -> None:
    plain, model = seeded(Net), seeded(Net)
    with ours_wrap.enable_wrap(wrapper_cls=FSDP, sharding_strategy=ours.ShardingStrategy.FULL_SHARD):
        model.blocks = nn.ModuleList(ours_wrap.wrap(block) for block in model.blocks)
        model = ours_wrap.wrap(model)
    assert len(FSDP.fsdp_modules(model)) == 1 + len(plain.blocks)
    assert torch.equal(model(batch(0)), plain(batch(0)))
    assert list(model.state_dict()) == list(plain.state_dict())


@on_ranks(2)
def test_policies_choose_as_they_do_for_fsdp1() -> None:
    for policy, count in (
        (functools.partial(ours.size_based_auto_wrap_policy, min_num_params=150), 5),
        (functools.partial(ours.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)), 5),
        (ours.CustomPolicy(lambda m: isinstance(m, Block)), 5),
        (ours.always_wrap_policy, 20),
    ):
        mine = FSDP(seeded(Net), auto_wrap_policy=policy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = torchs.FullyShardedDataParallel(seeded(Net), auto_wrap_policy=policy, device_id=CPU)
        found = len(FSDP.fsdp_modules(mine)), len(torchs.FullyShardedDataParallel.fsdp_modules(theirs))
        assert found == (count, count), (found, count, policy)
        squares(mine, batch(0)).backward()  # type: ignore[no-untyped-call]


@on_ranks(2)
def test_precision_of_the_model_of_batch_norms_and_of_one_module() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.seen: list[torch.dtype] = []

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.seen += [y.dtype, self.norm(y).dtype, self.leave.weight.dtype, self.norm.weight.dtype]
            return self.norm(y)  # type: ignore[no-any-return]

    def choose(module: nn.Module) -> Any:
        if isinstance(module, Block):
            return {"mixed_precision": ours.MixedPrecision(param_dtype=torch.float32)}
        return False

    mixed = ours.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    model: Any = FSDP(seeded(Normed), auto_wrap_policy=ours.ModuleWrapPolicy({Block}), mixed_precision=mixed)
    squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    assert model.seen == [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32]
    assert model.enter.weight.grad.dtype == torch.float32
    other: Any = FSDP(seeded(Net), auto_wrap_policy=ours.CustomPolicy(choose), mixed_precision=None)
    assert torch.equal(other(batch(0)), seeded(Net)(batch(0)))


@on_ranks(2)
def test_a_batch_norm_that_is_ignored_stays_as_it_is() -> None:
    mixed = ours.MixedPrecision(param_dtype=torch.bfloat16)
    for affine in (True, False):
        plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=affine), nn.Linear(4, 4))
        policy = ours.ModuleWrapPolicy({nn.Linear})
        model = FSDP(plain, auto_wrap_policy=policy, mixed_precision=mixed, ignored_modules=[plain[1]])
        assert not any(isinstance(parameter, sw.ShardedParameter) for parameter in plain[1].parameters())
        squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]


@on_ranks(2)
def test_apply_and_full_state_of_a_part_and_of_what_is_around() -> None:
    def halve(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.div_(2)

    plain, model = seeded(Net).apply(halve), wrapped().apply(halve)
    same_tensors(plain.state_dict(), model.state_dict())
    for one, other in ((plain.blocks[1], model.blocks[1]), (nn.ModuleList([plain]), nn.ModuleList([model]))):
        full = other.state_dict(prefix="a.")
        assert not any(isinstance(value, sw.ShardedParameter) for value in full.values())
        same_tensors(one.state_dict(prefix="a."), full)
    with FSDP.summon_full_params(model):
        same_tensors(plain.state_dict(), model.state_dict())
    with FSDP.state_dict_type(model, ours.StateDictType.SHARDED_STATE_DICT):
        assert all(
            isinstance(value, sw.ShardedParameter) for value in model.blocks[0].state_dict(keep_vars=True).values()
        )


@on_ranks(4)
def test_hybrids_take_a_mesh_and_groups() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    plain = seeded(Net)
    for strategy in (ours.ShardingStrategy.HYBRID_SHARD, ours.ShardingStrategy._HYBRID_SHARD_ZERO2):
        model = wrapped(sharding_strategy=strategy, device_mesh=mesh)
        assert torch.equal(model(batch(0)), plain(batch(0)))
    pair = dist.new_subgroups(2)[0]
    model = wrapped(process_group=pair)
    assert next(model.parameters()).placement.shard_group.world_size == 2
    with pytest.raises(UsageError, match="device_mesh=init_device_mesh"):
        wrapped(process_group=(pair, pair))


@pytest.mark.parametrize("recomputed", [False, True])
@on_ranks(2)
def test_state_of_optimizers_goes_every_way(recomputed: bool) -> None:
    model = wrapped()
    if recomputed:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    name, parameter = "enter.weight", model.enter.weight
    moment = optimizer.state[parameter]["exp_avg"].full_tensor()
    full, sharded = ours.StateDictType.FULL_STATE_DICT, ours.StateDictType.SHARDED_STATE_DICT
    kinds = [
        (full, ours.FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True)),
        (full, ours.FullOptimStateDictConfig(rank0_only=True)),
        (full, ours.FullOptimStateDictConfig()),
        (sharded, ours.ShardedOptimStateDictConfig()),
    ]
    for kind, options in kinds:
        with FSDP.state_dict_type(model, kind, None, options):
            state = FSDP.optim_state_dict(model, optimizer)
            alone = getattr(options, "rank0_only", False)
            assert bool(state) == (not alone or dist.get_rank() == 0)
            if state:
                assert [*state["state"]] == [name for name, _ in Net().named_parameters()]
            if state and kind is full:
                assert torch.equal(state["state"][name]["exp_avg"], moment)
            fresh = torch.optim.AdamW(model.parameters())
            FSDP.optim_state_dict_to_load(model, fresh, state, load_directly=True)
        assert torch.equal(fresh.state[parameter]["exp_avg"].full_tensor(), moment)


def sharded_checkpoint(path: str) -> None:
    model = wrapped()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    with FSDP.state_dict_type(model, ours.StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        again = wrapped()
        FSDP.set_state_dict_type(again, ours.StateDictType.SHARDED_STATE_DICT)
        state = {"model": again.state_dict()}
        dcp.load(state, checkpoint_id=path)
        again.load_state_dict(state["model"])
    settings = FSDP.get_state_dict_type(model)
    assert settings.state_dict_type is ours.StateDictType.FULL_STATE_DICT
    assert all(bool((value == 0.25).all()) for value in sw.full_state_dict(again, rank0_only=False).values())


def test_sharded_state_dicts_go_through_torchs_checkpoints(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(sharded_checkpoint, str(tmp_path))


@on_ranks(2)
def test_meta_models_are_initialised_as_the_user_says() -> None:
    def initialise(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.5)

    with torch.device("meta"):
        model = Net()
    sharded: Any = FSDP(model, param_init_fn=initialise)
    assert all(bool((value == 0.5).all()) for value in sharded.state_dict().values())

    def reset(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 2.0)

    assert sharded.apply(reset) is sharded
    assert all(bool((value == 2.0).all()) for value in sharded.state_dict().values())


@on_ranks(2)
def test_rank_0s_weights_are_everybodys_where_others_have_none() -> None:
    if dist.get_rank() == 0:
        model = seeded(Net)
    else:
        with torch.device("meta"):
            model = Net()
    empty = None if dist.get_rank() == 0 else lambda module: module.to_empty(device="cpu", recurse=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded: Any = FSDP(model, sync_module_states=True, param_init_fn=empty)
    same_tensors(dict(seeded(Net).named_parameters()), dict(sharded.named_parameters()))


@on_ranks(2)
def test_what_has_no_effect_warns_once_and_what_cannot_be_had_raises() -> None:
    without_effect.cache_clear()
    with pytest.warns(UserWarning, match="forward_prefetch=True"):
        wrapped(forward_prefetch=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = wrapped(forward_prefetch=True)
    with pytest.warns(UserWarning, match=r"limit_all_gathers=False\) has no effect"):
        wrapped(limit_all_gathers=False)
    plain = seeded(Net)
    for call, said in (
        (lambda: model.register_comm_hook(None, print), "hook_gradients"),
        (lambda: FSDP.set_state_dict_type(model, ours.StateDictType.LOCAL_STATE_DICT), "SHARDED_STATE_DICT"),
        (lambda: FSDP.optim_state_dict(model, torch.optim.SGD(model.parameters()), {}), "leave optim_state_dict out"),
    ):
        with pytest.raises(UsageError, match=said):
            call()
    with pytest.raises(LayoutError, match="nothing to shard"):
        FSDP(plain, ignored_modules=[plain])
    assert type(plain) is Net, "what failed is left as it was"
    with pytest.raises(UsageError, match="with_grads"), FSDP.summon_full_params(model, with_grads=True):
        pass


def test_every_name_and_argument_of_torchs_is_there() -> None:
    of_fsdp2 = {"CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "fully_shard", "MixedPrecisionPolicy"}
    of_fsdp2 |= {"OffloadPolicy", "UnshardHandle", "register_fsdp_forward_method", "share_comm_ctx"}
    of_fsdp2 |= {"GradientReductionHandle"}  # of torch 2.15
    assert set(torchs.__all__) - of_fsdp2 | set(torchs_wrap.__all__) - {"wrap"} | {"ShardedGradScaler"} == set(
        ours.__all__
    )
    assert set(torchs_wrap.__all__) == set(ours_wrap.__all__)
    theirs = torchs.FullyShardedDataParallel
    pairs = [(theirs.__init__, FSDP.__init__), (torchs_scaler.ShardedGradScaler, ours.ShardedGradScaler)]
    inherited = {name for name, _ in inspect.getmembers(nn.Module, inspect.isfunction)} - {"apply"}
    kinds = ("full", "sharded", "shard_full", "scatter_full", "flatten_sharded", "rekey")
    deprecated = {f"{kind}_optim_state_dict" for kind in kinds}
    for name, method in inspect.getmembers(theirs, inspect.isfunction):
        if not name.startswith("_") and name not in inherited | deprecated:
            pairs.append((method, getattr(FSDP, name)))
    assert len(pairs) > 10
    assert not any(hasattr(FSDP, name) for name in deprecated)
    for method, mine in pairs:
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(method).parameters), method
