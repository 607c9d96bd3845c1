"""lightning.pytorch: `Trainer(strategy="shardwise")` after importing this module, or with a `ShardwiseStrategy(...)`.

It shards the LightningModule's only child with parameters (`self.model`), else the LightningModule itself, whose steps
then run inside its forward. A module that `configure_model` has already sharded is left unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

try:
    from lightning.pytorch import callbacks
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.strategies.strategy import _ForwardRedirection
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ModuleNotFoundError(
        "shardwise.integrations.lightning needs Lightning: pip install lightning", name=error.name
    ) from error

from shardwise.engine.lookup import engine_of
from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.integrations import lightning_common
from shardwise.model_tools.reduction import no_sync

__all__ = ["ShardwiseStrategy"]

_AVERAGING = tuple(
    getattr(callbacks, name) for name in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, name)
)


class ShardwiseStrategy(DDPStrategy):
    """A strategy of lightning.pytorch that shards the model, with one process a device like DDP.

    Checkpoints are shardwise checkpoints: directories, which any number of ranks can load under any sharding strategy,
    with a file for Lightning's own state. Checkpoint files of Lightning's other strategies can be loaded as well.
    """

    def __init__(
        self, *, process_group_backend: str | None = None, start_method: Any = "popen", **options: Any
    ) -> None:
        """
        Args:
            process_group_backend: default: "nccl" for GPUs, "gloo" for CPUs.
            start_method: "popen" or "spawn", for processes that Lightning starts itself, without torchrun or a cluster.
            options: `sw.shard`'s arguments, and Lightning's own (`accelerator`, `timeout`, ...).
        """
        theirs = lightning_common.taken_from(options)
        super().__init__(process_group_backend=process_group_backend, start_method=start_method, **theirs)
        self._options = options
        self._redirection = _ForwardRedirection()

    # Setting up -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Shard the model, then create the optimizers."""
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        lightning_common.check_checkpoint_io(self._checkpoint_io)
        if is_fitting:
            _check_callbacks(trainer.callbacks)
        self.accelerator.setup(trainer)
        module = self.precision_plugin.convert_module(self.lightning_module)
        if is_fitting and self._layer_sync is not None:
            module = _synchronized(module, self._layer_sync)
        lightning_common.shard_as(_to_shard(module), self._options, str(self.precision_plugin.precision))
        self.model = module
        self.model.to(self.root_device)  # for buffers, and for Lightning to note the device
        if (scaler := getattr(self.precision_plugin, "scaler", None)) is not None:
            self.precision_plugin.scaler = lightning_common.scaler_for_shards(scaler, self.root_device)
        if is_fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Have models built on the CPU, or on the meta device if `empty_init`: never whole on an accelerator."""
        return torch.device("meta") if empty_init else nullcontext()

    def teardown(self) -> None:
        """Tear down without moving the sharded model to the CPU."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # Steps ------------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._step("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._step("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._step("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._step("predict_step", args, kwargs)

    def _step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.lightning_module
        if engine_of(module, below=False) is None:
            return getattr(module, name)(*args, **kwargs)
        if name == "training_step" and not module.automatic_optimization:
            raise UsageError(
                "manual optimization runs backward inside training_step: keep everything with parameters in one "
                "submodule (self.model), so that it is sharded instead of the LightningModule"
            )
        return self._redirection(module, module, name, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Make backwards inside accumulate gradients locally; the first one outside reduces the sum."""
        with no_sync(self.lightning_module):
            yield

    # Checkpoints ------------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, because a checkpoint is loaded into shards, which `setup` makes."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False, because `load_checkpoint` has already loaded the optimizer state."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state that is not sharded, such as buffers of metrics. `save_checkpoint` writes the shards."""
        state = self.lightning_module.state_dict()
        return {name: value for name, value in state.items() if not isinstance(value, ShardedParameter)}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an empty dict: `save_checkpoint` writes the optimizer state."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint directory. Every rank must call this."""
        if storage_options is not None:
            raise UsageError("storage_options: a sharded model's checkpoint does not go through CheckpointIO")
        with_optimizer = "optimizer_states" in checkpoint
        rest = {key: value for key, value in checkpoint.items() if key != "optimizer_states"}
        lightning_common.save_directory(
            Path(self.broadcast(filepath)), self._sharded(), self._bare_optimizers() if with_optimizer else [], rest
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a directory from `save_checkpoint`, or the file of another strategy. Every rank must call this."""
        path = Path(self.broadcast(checkpoint_path))
        strict = self.lightning_module.strict_loading
        is_fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self._bare_optimizers() if is_fitting else []  # else they are of the module fitted last
        if lightning_common.is_directory_of_ours(path):
            lightning_common.load_directory(path, self._sharded(), optimizers, strict)
            return lightning_common.load_rest(path, weights_only)
        checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)
        for optimizer, state in zip(optimizers, checkpoint.get("optimizer_states", ()), strict=False):
            optimizer.load_state_dict(state)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state that is not sharded; `load_checkpoint` has already loaded the shards."""
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)

    def _sharded(self) -> nn.Module:
        module = lightning_common.sharded_in(self.lightning_module)
        assert module is not None, "setup has sharded"
        return module

    def _bare_optimizers(self) -> list[Optimizer]:
        return [one._optimizer if isinstance(one, LightningOptimizer) else one for one in self.optimizers]


def _to_shard(module: nn.Module) -> nn.Module:
    """Return the only child with parameters; the module itself if it has its own or there is not exactly one child."""
    with_parameters = [child for child in module.children() if next(child.parameters(), None) is not None]
    own = any(parameter is not None for parameter in module._parameters.values())
    return with_parameters[0] if len(with_parameters) == 1 and not own else module


def _check_callbacks(given: Sequence[Callback]) -> None:
    """Raise UsageError for callbacks that average weights: they copy the model before it is sharded."""
    for callback in given:
        if isinstance(callback, _AVERAGING):
            raise UsageError(
                f"{type(callback).__name__} averages a copy that Lightning makes before the model is sharded: "
                "write a callback that makes torch.optim.swa_utils.AveragedModel(module.model) in on_fit_start "
                "and calls its update_parameters in on_train_batch_end"
            )


def _synchronized(module: nn.Module, layer_sync: Any) -> nn.Module:
    """Return the module with its batch norms converted to synchronized ones; unchanged if it is already sharded. Raises
    UsageError if it was sharded with batch norms that are not synchronized."""
    if engine_of(module) is None:
        converted: nn.Module = layer_sync.apply(module)
        return converted
    for name, below in module.named_modules():
        if isinstance(below, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            raise UsageError(
                f"sync_batchnorm=True, but {name!r} was sharded as a {type(below).__name__}: call "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before sw.shard"
            )
    return module


StrategyRegistry.register("shardwise", ShardwiseStrategy, description="Fully sharded data parallelism by shardwise")
