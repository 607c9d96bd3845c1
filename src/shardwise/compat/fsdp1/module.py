"""`FullyShardedDataParallel`: the class with FSDP1's methods that is added to a model's own class."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.optim import Optimizer

from shardwise.compat.common import allow_autocast, mixed_class, without_effect
from shardwise.compat.fsdp1 import arguments
from shardwise.compat.fsdp1.settings import restore, set_settings, settings_of
from shardwise.compat.state_dict import StateDictOptions, get_optimizer_state_dict, loadable_state_dict
from shardwise.engine.lookup import engine_of
from shardwise.engine.setup.shard import shard
from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.model_tools.reduction import no_sync
from shardwise.model_tools.unsharded import full_state_dict, unsharded
from shardwise.optim.clip import clip_grad_norm_

__all__ = ["FullyShardedDataParallel"]


class FullyShardedDataParallel(nn.Module):
    """FSDP1's methods. `FullyShardedDataParallel(module, ...)` shards the module and returns it, with this class added.

    Every rank must construct it, and call the methods whose docstrings say so. `docs/fsdp1.md` lists every argument.
    """

    def __new__(cls, module: nn.Module | None = None, *args: Any, **kwargs: Any) -> Self:
        """Return the module, with this class added to its own. Without one (copies), make a new object as usual."""
        if module is None:
            return super().__new__(cls)
        if isinstance(module, FullyShardedDataParallel):
            raise UsageError(f"this {type(module).__name__} was already given to FSDP")
        kind = type(module)
        module.__class__ = mixed_class(cls, kind, f"FSDP{kind.__name__}")
        assert isinstance(module, cls)
        return module

    def __init__(  # noqa: PLR0913, PLR0917 - FSDP1's signature
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., Any] | ModuleWrapPolicy | CustomPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[Any] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        """Shard the module. Every rank must call this. Raises UsageError if not supported; otherwise as `sw.shard`."""
        try:
            arguments.warn_of_others(backward_prefetch, forward_prefetch, limit_all_gathers)
            arguments.initialise(self, param_init_fn)
            ignored = arguments.ignored_of(ignored_modules, ignored_states)
            shared: dict[str, Any] = {
                "mesh": arguments.mesh_of(process_group, device_mesh),
                "ignored": ignored,
                "strategy": arguments.strategy_of(sharding_strategy),
                "offload": arguments.offload_of(cpu_offload),
            }
            own = {
                "process_group": process_group,
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "mixed_precision": mixed_precision,
                "device_mesh": device_mesh,
                "ignored_states": ignored,
            }
            chosen = arguments.units_of(self, auto_wrap_policy, ignored)
            if auto_wrap_policy is not None:
                for exempt in arguments.exempt_modules(self, mixed_precision, ignored):
                    assert mixed_precision is not None
                    shard(exempt, precision=arguments.exempt_precision(mixed_precision), **shared)
            for below, options in chosen.items():
                if options:
                    FullyShardedDataParallel(below, **(own | options))
            with warnings.catch_warnings():
                if sync_module_states:
                    warnings.filterwarnings("ignore", "shardwise: initial values differ")
                precision = arguments.precision_of(mixed_precision)
                shard(self, units=lambda fqn, inner: inner in chosen, precision=precision, **shared)
        except BaseException:
            self.__class__ = type(self).__bases__[1]
            raise
        allow_autocast(self)
        for below in chosen:
            if not isinstance(below, FullyShardedDataParallel):
                below.__class__ = mixed_class(FullyShardedDataParallel, type(below), f"FSDP{type(below).__name__}")

    # Looking ----------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The model itself, since there is no wrapper; or the model's child named "module", if it has one."""
        child = self._modules.get("module")
        return self if child is None else child

    def check_is_root(self) -> bool:
        """Whether this is the root: the outermost sharded module, which has the engine of all units below."""
        return engine_of(self, below=False) is not None

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the FSDP modules at or below a module."""
        found = [below for below in module.modules() if isinstance(below, FullyShardedDataParallel)]
        return [below for below in found if below.check_is_root()] if root_only else found

    # Training ---------------------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards accumulate unreduced: `sw.no_sync`. Every rank must enter it."""
        return no_sync(self)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip as `sw.clip_grad_norm_`. Returns the norm over all ranks before that. Every rank must call this."""
        return clip_grad_norm_(self, max_norm, norm_type)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Raise UsageError: not supported."""
        raise UsageError(
            "FSDP.register_comm_hook is not supported, because the engine does the reductions: use "
            "hook_gradients(model, hook) of shardwise.model_tools.reduction, which gives the hook this rank's "
            "slice of each"
        )

    # Full parameters --------------------------------------------------------------------------------------------------

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Enter `sw.unsharded` for a module and everything below it. Every rank must enter and leave.

        Raises UsageError with `with_grads`.
        """
        if with_grads:
            raise UsageError(
                "FSDP.summon_full_params(with_grads=True) is not supported: use parameter.grad.full_tensor() "
                "before it, on every rank"
            )
        if not recurse:
            without_effect("FSDP.summon_full_params(recurse=False)", "everything below the module is unsharded too")
        if engine_of(module) is None and not any(True for _ in module.parameters()):
            yield
            return
        with unsharded(module, writeback=writeback, rank0_only=rank0_only, cpu=offload_to_cpu):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Run `nn.Module.apply` with full parameters, and write them back. Every rank must call this, with a function
        that does the same on each."""
        if not _holds_shards(self):
            return super().apply(fn)
        with unsharded(self, writeback=True):
            return super().apply(fn)

    # State dicts ------------------------------------------------------------------------------------------------------

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the kind of state dicts at and below a module. Returns the former settings. Raises UsageError for
        LOCAL_STATE_DICT."""
        before = FullyShardedDataParallel.get_state_dict_type(module)
        modules = [module, *FullyShardedDataParallel.fsdp_modules(module)]
        set_settings(modules, state_dict_type, state_dict_config, optim_state_dict_config)
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the state dict settings of the first FSDP module at or below a module."""
        found = FullyShardedDataParallel.fsdp_modules(module)
        return settings_of(found[0] if found else module)

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Inside, set the kind of state dicts at and below a module."""
        modules = [module, *FullyShardedDataParallel.fsdp_modules(module)]
        before = [settings_of(one) for one in modules]
        set_settings(modules, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            restore(modules, before)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a full state_dict, unless the settings say otherwise.

        For a full one every rank must call this, or the `state_dict` of a module around it. A state_dict of
        `ShardedParameter`s, which `keep_vars` also gives (this package calls it so), needs no communication.
        """
        settings = settings_of(self)
        destination, prefix, keep_vars = _asked(*args, **kwargs)
        if keep_vars or settings.state_dict_type is not StateDictType.FULL_STATE_DICT or not _holds_shards(self):
            return super().state_dict(*args, **kwargs)
        config = settings.state_dict_config
        assert isinstance(config, FullStateDictConfig)
        full = full_state_dict(self, cpu=config.offload_to_cpu, rank0_only=config.rank0_only)
        found: dict[str, Any] = {} if destination is None else destination
        found.update({f"{prefix}{name}": value for name, value in full.items()})
        return found

    # Optimizer state --------------------------------------------------------------------------------------------------

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the optimizer state by names, as the settings say. Every rank must call this.

        Raises UsageError if `optim_state_dict` is given.
        """
        if optim_state_dict is not None:
            raise UsageError("FSDP.optim_state_dict reads the optimizer itself: leave optim_state_dict out")
        config = settings_of(model).optim_state_dict_config
        if not isinstance(config, FullOptimStateDictConfig):
            return get_optimizer_state_dict(model, optim)
        alone = config.rank0_only and config.offload_to_cpu
        options = StateDictOptions(full_state_dict=True, cpu_offload=alone)
        state = get_optimizer_state_dict(model, optim, options=options)
        if config.rank0_only and dist.is_initialized() and dist.get_rank() != 0:
            return {}
        return _on_cpu(state) if config.offload_to_cpu else state

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return what `optim.load_state_dict` takes, from an `optim_state_dict`. Every rank must call this."""
        config = settings_of(model).optim_state_dict_config
        from_rank0 = isinstance(config, FullOptimStateDictConfig) and config.rank0_only and dist.is_initialized()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
        state = loadable_state_dict(model, optim, optim_state_dict, options)
        if load_directly:
            optim.load_state_dict(state)
        return state


def _asked(
    destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
) -> tuple[dict[str, Any] | None, str, bool]:
    """Return the arguments of an `nn.Module.state_dict` call, defaults included."""
    return destination, prefix, keep_vars


def _holds_shards(module: nn.Module) -> bool:
    """Whether the module or one below holds a sharded parameter. None does inside `sw.unsharded`, and so inside
    `summon_full_params`, nor if all parameters are ignored."""
    return any(isinstance(parameter, ShardedParameter) for parameter in module.parameters())


def _on_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on_cpu(inner) for key, inner in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value
