"""Accelerate: an `Accelerator` whose `prepare` shards models, where Accelerate's own wraps them in DDP or FSDP.

    accelerator = Accelerator(shardwise_plugin=ShardwisePlugin(strategy="full_shard"))
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)

`distributed_type` only names the kind of processes (MULTI_GPU, MULTI_CPU, NO) and never FSDP: the code that Accelerate
and transformers have for FSDP expects FSDP's modules, whereas the code for DDP is what this class replaces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

try:
    import accelerate
    from accelerate.utils import DDPCommunicationHookType, DistributedType, FullyShardedDataParallelPlugin
except ImportError as error:
    raise ModuleNotFoundError(
        "shardwise.integrations.accelerate needs Accelerate: pip install accelerate", name=error.name
    ) from error

from shardwise.checkpoint.loading import load
from shardwise.checkpoint.saving import save
from shardwise.engine.lookup import engine_of
from shardwise.engine.setup.shard import shard
from shardwise.engine.setup.torch_patches import give_sharded_parameters
from shardwise.errors import UsageError
from shardwise.fsdp.strategy import Precision
from shardwise.integrations import fsdp_settings
from shardwise.model_tools.activation_checkpointing import checkpoint_units
from shardwise.model_tools.reduction import no_sync, synced
from shardwise.model_tools.unsharded import full_state_dict
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.scaler import GradScaler
from shardwise.policy.settings import ARGUMENTS, ShardArguments

__all__ = ["Accelerator", "ShardwisePlugin"]

_FSDP_ASKED = "ACCELERATE_USE_FSDP"
_SERVED = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
    DistributedType.MULTI_MLU,
}
_DIRECTORY = "shardwise"


@dataclass(frozen=True)
class ShardwisePlugin(ShardArguments):
    """How an `Accelerator` shards models. The fields are `sw.shard`'s arguments, except for the last two.

    `precision=None` is what the Accelerator's `mixed_precision` says: with "bf16" or "fp16" weights are gathered in
    that dtype, gradients are summed in fp32, masters are fp32, and Accelerate's autocast stays on in forward.
    `units` may also be a list of names of classes.
    """

    ignored_modules: Iterable[nn.Module] | str | None = None
    """Modules whose parameters are not sharded, or a regular expression that matches their whole fqns."""
    activation_checkpointing: str = "none"
    """As `train.activation_checkpointing` of a configuration: "none", "full", "selective-ops", "every-2"."""

    @classmethod
    def from_fsdp(cls, plugin: FullyShardedDataParallelPlugin) -> ShardwisePlugin:
        """Translate an FSDP plugin. Raises UsageError for settings that the engine does not support.

        Prefetching, `limit_all_gathers`, `use_orig_params`, `sync_module_states` and `state_dict_type` have no effect:
        the engine always does the first two, does not need the next two, and has only one checkpoint format.
        """
        fsdp_settings.check_honoured(plugin)
        settings = fsdp_settings.settings_of(plugin)
        return cls(
            strategy=settings.get("parallel.strategy"),
            units=settings.get("parallel.units"),
            precision=fsdp_settings.precision_of(plugin),
            offload=fsdp_settings.offload_of(plugin),
            ignored_modules=plugin.ignored_modules,
            activation_checkpointing=settings.get("train.activation_checkpointing") or "none",
        )

    @classmethod
    def from_distributed(cls, config: Any) -> ShardwisePlugin:
        """Translate transformers' `DistributedConfig`, with the model's own plan for units. Every rank must call this.

        Raises ConfigError for another number of ranks, for other kinds of parallelism, and for an `fsdp_plan`.
        """
        return cls(**fsdp_settings.arguments_of(config))

    def shard(self, model: nn.Module, mixed_precision: str) -> None:
        """Shard a model in place. Every rank must call this.

        Args:
            mixed_precision: the Accelerator's, which applies if the plugin has no `precision`.

        Raises ConfigError if the plugin names module classes that the model does not have.
        """
        precision = self.precision
        if precision is None and mixed_precision in {"bf16", "fp16"}:
            precision = Precision(param=mixed_precision, reduce="fp32", master="fp32", cast_inputs=False)
        arguments = {name: getattr(self, name) for name in ARGUMENTS}
        ignored = [*self.ignored, *fsdp_settings.ignored_in(model, self.ignored_modules)]
        units = fsdp_settings.units_in(model, self.units)
        shard(model, **{**arguments, "precision": precision, "ignored": ignored, "units": units})
        checkpoint_units(model, self.activation_checkpointing)


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` that shards every model that it prepares, in place, also models for evaluation.

    Do not `prepare` models that only some ranks call. Accelerate's other engines raise a UsageError. An FSDP plugin, or
    the FSDP section of `accelerate launch`'s configuration, is translated to a ShardwisePlugin.
    """

    scaler: torch.amp.GradScaler | None
    _models: list[nn.Module]
    _optimizers: list[Any]
    """Prepared optimizers, which are AcceleratedOptimizers."""

    def __init__(self, *args: Any, shardwise_plugin: ShardwisePlugin | None = None, **kwargs: Any) -> None:
        """
        Args:
            args, kwargs: as for `accelerate.Accelerator`.
            shardwise_plugin: how to shard. Default: as the FSDP plugin or configuration says, else `sw.shard`'s
                defaults.
        """
        foreign = kwargs.pop("fsdp_plugin", None)
        if foreign is None and os.environ.get(_FSDP_ASKED, "").lower() == "true":
            foreign = FullyShardedDataParallelPlugin()  # reads what `accelerate launch` left in the environment
        if shardwise_plugin is None:
            shardwise_plugin = ShardwisePlugin() if foreign is None else ShardwisePlugin.from_fsdp(foreign)
        self.shardwise_plugin = shardwise_plugin
        self._is_saving = False
        self._all_optimizers: list[Any] = []
        with fsdp_not_asked():
            super().__init__(*args, **kwargs)
        if self.distributed_type not in _SERVED:
            raise UsageError(
                f"Accelerate is set up for {self.distributed_type.value}, but shardwise's Accelerator works on "
                "plain processes: choose multi-GPU, multi-CPU or FSDP in `accelerate config`, or start it with "
                "torchrun"
            )
        hook = getattr(self.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
        if hook != DDPCommunicationHookType.NO:
            raise UsageError(
                f"comm_hook={hook.value!r} is not supported, because hooks of DDP see no gradients of sharded "
                'models; to send fewer bits, use ShardwisePlugin(precision=sw.Precision(reduce="bf16"))'
            )
        if self.scaler is not None:
            options = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            self.scaler = GradScaler(device=self.device.type, **options)
        self.register_save_state_pre_hook(self._save_sharded)
        self.register_load_state_pre_hook(self._load_sharded)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model in place, then apply autocast and compilation as Accelerate does. Every rank must call this.

        `device_placement` and `evaluation_mode` have no effect: the shards are on the rank's device in any case.
        """
        if engine_of(model) is None:
            bare: nn.Module = getattr(model, "_orig_mod", model)  # after torch.compile(model)
            self.shardwise_plugin.shard(bare, self.mixed_precision if self.native_amp else "no")
            for prepared_first in self._optimizers:
                give_sharded_parameters(prepared_first.optimizer)
        prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared  # evaluation_mode=True: not wrapped in DDP

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer as Accelerate does, also one that was built before its model was sharded. The optimizer
        state is allocated where the shards are."""
        give_sharded_parameters(optimizer)
        return super().prepare_optimizer(optimizer, device_placement=False)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Make backwards inside accumulate locally; the first one outside reduces the sum. See `sw.no_sync`."""
        if engine_of(model) is None:
            yield
        else:
            with no_sync(model):
                yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Make backwards inside reduce even within `no_sync`, together with the gradients accumulated so far."""
        if engine_of(model) is None:
            yield
        else:
            with synced(model):
                yield

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        """Raise UsageError: every rank of a sharded model must take part in every step."""
        raise UsageError(
            "join_uneven_inputs is not supported, because sharded ranks step together: keep even_batches=True, so "
            "that all ranks have data, or iterate over sw.join(model, batches), where ranks may run out"
        )

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip by the global norm, and return it on every rank. Every rank must call this."""
        self.unscale_gradients()
        return clip_grad_norm_(list(parameters), max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return full tensors on rank 0's CPU, and an empty dict on other ranks. Every rank must call this."""
        if engine_of(model) is None:
            plain: dict[str, Any] = super().get_state_dict(model, unwrap=unwrap)
            return plain
        if self._is_saving:
            return _Left()
        return full_state_dict(self.unwrap_model(model, keep_torch_compile=False))

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save as Accelerate does, but each sharded model and its optimizer as a shardwise checkpoint below
        `output_dir`, which any number of ranks can load. Every rank must call this."""
        self._is_saving = True
        try:
            with self._without_optimizers_of_shards():
                for model in self._sharded():
                    self._optimizer_of(model)  # raises before Accelerate makes the directory
                return super().save_state(output_dir, *args, **kwargs)
        finally:
            self._is_saving = False

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` wrote. Every rank must call this."""
        with self._without_optimizers_of_shards():
            super().load_state(input_dir, *args, **kwargs)

    def _sharded(self) -> list[nn.Module]:
        return [model for model in self._models if engine_of(model) is not None]

    def _optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Return the prepared optimizer with a parameter of the model, without Accelerate's wrapper; None without one.
        Raises UsageError if there are several."""
        ours = {id(parameter) for parameter in model.parameters()}
        found = [prepared.optimizer for prepared in self._all_optimizers if _has_any(prepared.optimizer, ours)]
        if len(found) > 1:
            raise UsageError(
                "save_state and load_state take at most one optimizer for each sharded model, but there are several"
            )
        return found[0] if found else None

    @contextmanager
    def _without_optimizers_of_shards(self) -> Iterator[None]:
        """Hide optimizers with sharded parameters from Accelerate inside the block."""
        self._all_optimizers = self._optimizers
        ours = {id(parameter) for model in self._sharded() for parameter in model.parameters()}
        self._optimizers = [one for one in self._optimizers if not _has_any(one.optimizer, ours)]
        try:
            yield
        finally:
            self._optimizers = self._all_optimizers

    def _save_sharded(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        weights[:] = [one for one in weights if not isinstance(one, _Left)]
        for number, model in enumerate(self._sharded()):
            bare = self.unwrap_model(model, keep_torch_compile=False)
            save(_place(output_dir, number), bare, self._optimizer_of(model), overwrite=True)

    def _load_sharded(self, models: list[nn.Module], input_dir: str) -> None:
        models[:] = [model for model in models if engine_of(model) is None]
        for number, model in enumerate(self._sharded()):
            bare = self.unwrap_model(model, keep_torch_compile=False)
            load(_place(input_dir, number), bare, self._optimizer_of(model))


class _Left(dict[str, Any]):
    """Placeholder for the state of a sharded model, which `_save_sharded` removes: it saves the shards itself."""


def _place(directory: str, number: int) -> Path:
    return Path(directory) / (_DIRECTORY if not number else f"{_DIRECTORY}_{number}")


def _has_any(optimizer: torch.optim.Optimizer, ids: set[int]) -> bool:
    return any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])


@contextmanager
def fsdp_not_asked() -> Iterator[None]:
    """Hide the environment variable that asks Accelerate for FSDP inside the block."""
    asked = os.environ.pop(_FSDP_ASKED, None)
    try:
        yield
    finally:
        if asked is not None:
            os.environ[_FSDP_ASKED] = asked
