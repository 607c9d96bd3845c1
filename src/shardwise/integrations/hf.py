"""transformers' Trainer, and trainers derived from it (TRL's), on sharded models.

    trainer = Trainer(model=model, args=TrainingArguments(...), train_dataset=rows, shard=dict(strategy="full_shard"))

    class ShardedSFTTrainer(ShardwiseTrainerMixin, SFTTrainer): ...

The Trainer's checkpoints are shardwise checkpoints, with the Trainer's own files in the same directory.
`from_pretrained` reads them, and training can resume from them with any number of ranks. A checkpoint of a PEFT model
holds only the adapters and their optimizer state.
"""

from __future__ import annotations

import functools
import os
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    import accelerate  # noqa: F401 - the Trainer needs it
    import transformers
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME
except ImportError as error:
    raise ModuleNotFoundError(
        "shardwise.integrations.hf needs transformers and Accelerate: pip install accelerate", name=error.name
    ) from error

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.pretrained import load_pretrained
from shardwise.checkpoint.saving import save
from shardwise.engine.lookup import engine_of
from shardwise.engine.setup.admission import check_not_transformers
from shardwise.errors import ConfigError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.integrations.accelerate import Accelerator, ShardwisePlugin, fsdp_not_asked
from shardwise.model_tools.unsharded import full_state_dict, unsharded
from shardwise.suggest import did_you_mean

__all__ = ["ShardwiseTrainerMixin", "Trainer"]


class ShardwiseTrainerMixin:
    """A mixin that makes a trainer shard its models. It must precede a base class derived from `transformers.Trainer`.

    TrainingArguments need no change. Without `shard`, the settings come from their `fsdp` and `fsdp_config`, or from
    the FSDP section of `accelerate launch`'s configuration. Models are sharded when training or evaluation begins, from
    the device that they are on then: none is moved to the accelerator whole.
    """

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any

    def __init__(self, *args: Any, shard: Any = None, **kwargs: Any) -> None:
        """
        Args:
            args, kwargs: as for the trainer.
            shard: how to shard: a mapping with fields of ShardwisePlugin, which are `sw.shard`'s arguments and a few
                more; or transformers' `DistributedConfig`.

        Raises LayoutError for a model that transformers has sharded, or cut over a tensor-parallel axis, itself.
        """
        self._plugin = None if shard is None else _plugin_of(shard)
        model = kwargs.get("model", args[0] if args else None)
        if isinstance(model, nn.Module):
            check_not_transformers(model, over_tensor_axis=False)
        self._accelerator_arguments: dict[str, Any] = {}
        self._is_saving_checkpoint = False
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Do what the trainer does, but with shardwise's Accelerator instead of Accelerate's."""
        with fsdp_not_asked():
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = Accelerator(shardwise_plugin=self._plugin, **self._accelerator_arguments)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        fsdp_plugin = kwargs.pop("fsdp_plugin", None)
        if fsdp_plugin is not None and self._plugin is None:
            self._plugin = ShardwisePlugin.from_fsdp(fsdp_plugin)
        self._accelerator_arguments = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        return self._accelerator_arguments

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: sharding moves the parameters, one shard at a time."""

    @property
    def _is_sharded(self) -> bool:
        return engine_of(self.model) is not None

    # Saving -----------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._is_saving_checkpoint = True
        try:
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._is_saving_checkpoint = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model for `from_pretrained`; only the adapters of a PEFT model. Every rank must call this.

        The full weights are gathered in rank 0's host memory. For the Trainer's checkpoints they are not.
        """
        where = output_dir if output_dir is not None else self.args.output_dir
        if not self._is_sharded:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        elif self._is_saving_checkpoint and not _is_peft(self.model):
            self._save_shards(where)
        else:
            with _whole_prompts(self.model):
                state = _adapters_of(self.model) if _is_peft(self.model) else full_state_dict(self.model)
                self._save(where, state_dict=state)  # type: ignore[attr-defined]
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(  # type: ignore[attr-defined]
                    commit_message="Model save", revision=self.args.hub_revision
                )

    def _save_shards(self, directory: str) -> None:
        """Save model and optimizer as one shardwise checkpoint, and the files that the Trainer adds to a model."""
        optimizer = None if self.args.save_only_model else _bare(self.optimizer)
        save(directory, self.model, optimizer, step=self.state.global_step, overwrite=True)  # type: ignore[attr-defined]
        if self.args.should_save:
            collator = getattr(self, "data_collator", None)
            processing = getattr(self, "processing_class", None) or getattr(collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(directory)
            torch.save(self.args, Path(directory, TRAINING_ARGS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._is_sharded:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        if _is_peft(self.model):
            state = _full_state(_bare(self.optimizer))
            if self.args.should_save:
                torch.save(state, Path(output_dir, OPTIMIZER_NAME))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    # Loading ----------------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of other checkpoints. `_load_optimizer_and_scheduler` loads those of a shardwise checkpoint
        together with the optimizer state, because the model is sharded by then."""
        if _is_ours(resume_from_checkpoint):
            return
        if self._is_sharded and not _is_peft(self.model):
            load_pretrained(resume_from_checkpoint, self.model)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        has_optimizer = any(Path(checkpoint).glob("optimizer*.safetensors"))
        load(checkpoint, self.model, _bare(self.optimizer) if has_optimizer else None)
        with suppress(FileNotFoundError):  # missing after save_only_model
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint  # type: ignore[attr-defined]
        if not self._is_sharded or _is_peft(self.model):
            super()._load_best_model()  # type: ignore[misc]
        elif _is_ours(best):
            load(best, self.model)
        else:
            load_pretrained(best, self.model)


class Trainer(ShardwiseTrainerMixin, transformers.Trainer):
    """A `transformers.Trainer` that shards its models: `Trainer(..., shard=dict(strategy="full_shard"))`."""


def _plugin_of(options: Any) -> ShardwisePlugin:
    if hasattr(options, "fsdp_size"):
        return ShardwisePlugin.from_distributed(options)
    known = [field.name for field in fields(ShardwisePlugin)]
    for name in options:
        if name not in known:
            raise ConfigError(f"shard: unknown option {name!r}{did_you_mean(name, known)}")
    return ShardwisePlugin(**options)


def _is_ours(checkpoint: str) -> bool:
    return os.path.isfile(os.path.join(checkpoint, manifest.NAME))  # noqa: PTH113, PTH118 - the Trainer's are strings


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer without Accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _is_peft(model: nn.Module) -> bool:
    peft = sys.modules.get("peft")  # whoever has such a model has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


def _whole_prompts(model: Any) -> AbstractContextManager[None]:
    """Unshard a PeftModel's prompt encoder inside the block, because PEFT computes the prompts that it saves with the
    modules themselves and not from a state_dict. Every rank must call this."""
    learns_prompts = _is_peft(model) and any(config.is_prompt_learning for config in model.peft_config.values())
    return unsharded(model.prompt_encoder) if learns_prompts else nullcontext()


def _adapters_of(model: Any) -> dict[str, Any]:
    """Return the model's state_dict, with full CPU tensors for those that PEFT saves. Every rank must call this."""
    import peft

    state = model.state_dict()
    wanted = {
        id(value)
        for name in model.peft_config
        for value in peft.get_peft_model_state_dict(model, state_dict=state, adapter_name=name).values()
    }
    return {name: _full(value) if id(value) in wanted else value for name, value in state.items()}


def _full_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state_dict with full tensors on the CPU. Every rank must call this."""
    found = optimizer.state_dict()
    state = {key: {name: _full(value) for name, value in one.items()} for key, one in found["state"].items()}
    return {**found, "state": state}


def _full(value: Any) -> Any:
    if isinstance(value, ShardedParameter):
        return value.full_tensor().cpu()
    return value.cpu() if isinstance(value, Tensor) else value
