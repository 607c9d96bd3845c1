"""`final/`: the trained model in files that other programs can read."""

from __future__ import annotations

import copy
import enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.format.model_state import pieces_to_write
from shardwise.checkpoint.format.tensor_files import ADAPTER
from shardwise.errors import UsageError
from shardwise.model_tools.merging import merge_adapter
from shardwise.modules.adapters import adapter_config, adapter_names
from shardwise.train.data.tokenizer import Saved, files_of
from shardwise.train.process.ranks import Ranks
from shardwise.train.run.directory import RunDirectory
from shardwise.train.run.run_lock import NAME


class Form(enum.Enum):
    """The form in which `final/` holds the model."""

    WHOLE = enum.auto()
    MERGED = enum.auto()
    """The whole model with the adapter added to its weights. The model in memory must not be trained further."""
    ADAPTER = enum.auto()
    """Only the adapter, in PEFT's format."""


def export(
    model: nn.Module, processor: Saved, directory: RunDirectory, ranks: Ranks, step: int, form: Form = Form.WHOLE
) -> None:
    """Write `final/`, a checkpoint without an optimizer. Every rank must call this; each writes its own part.

    A transformers model becomes a directory that transformers' Auto classes load, for its task and for its processor;
    any other module becomes safetensors files of its state_dict.

    If the ranks cannot write their own parts, because they do not share the directory or because the tensors that
    transformers stores are computed from the model's, rank 0 gathers the whole model on its CPU and writes it.

    Args:
        step: number of steps taken.
    """
    if form is Form.MERGED:
        merge_adapter(model)
    is_adapter = form is Form.ADAPTER
    if not (_is_shared(directory.path, ranks) and (is_adapter or _has_ranges(model))):
        _export_gathered(model, processor, directory, ranks, is_adapter)
        return
    files: dict[str, bytes] = {}
    with ranks.together():
        if ranks.is_first:
            files = files_of(processor)
    sw.checkpoint.save(directory.final, model, step=step, files=files, overwrite=True, adapter=is_adapter)


def _is_shared(run: Path, ranks: Ranks) -> bool:
    """Return whether every rank can read the claim that rank 0 wrote to the run's directory. Every rank must call
    this."""
    try:
        claim = (run / NAME).read_bytes()
    except OSError:
        claim = b""
    claims = ranks.all_gather_object(claim)
    return claims[0] != b"" and len(set(claims)) == 1


def _has_ranges(model: nn.Module) -> bool:
    """Return whether each tensor has its own byte range in the files. The same on every rank."""
    try:
        pieces_to_write(model)
    except UsageError:
        return False
    return True


def _export_gathered(
    model: nn.Module, processor: Saved, directory: RunDirectory, ranks: Ranks, is_adapter: bool
) -> None:
    write = write_adapter if is_adapter else write_model
    state = _adapter_of(model) if is_adapter else sw.full_state_dict(model, cpu=True, rank0_only=True)
    with ranks.together():  # no rank returns before the files exist, or waits for files that cannot be written
        if ranks.is_first:
            with directory.writing_final() as partial:
                write(model, state, partial)
                processor.save(partial)


def _adapter_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapter's full tensors on the CPU, by PEFT's names. Every rank must call this."""
    state: dict[str, Any] = model.state_dict()
    return {theirs: state[own].full_tensor().cpu() for own, theirs in adapter_names(model).items()}


def write_adapter(model: nn.Module, state: dict[str, Tensor], directory: Path) -> None:
    """Write an adapter in PEFT's format. Not collective.

    Args:
        model: provides the configuration; its own parameters are not read.
        state: PEFT's name -> the full tensor, on the CPU.
    """
    config = copy.copy(adapter_config(model))
    config.inference_mode = True
    config.save_pretrained(directory)
    _write_safetensors(state, directory / f"{ADAPTER}.safetensors")


def write_model(model: nn.Module, state: dict[str, Tensor], directory: Path) -> None:
    """Write a model's full tensors to a directory. Not collective.

    Args:
        model: provides the class and configuration; its own parameters are not read.
        state: fqn -> the full tensor, on the CPU.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "save_pretrained"):
        _write_safetensors(state, directory / "model.safetensors")
        return
    whole: Any
    with torch.device("meta"):
        whole = type(model)(copy.deepcopy(config))
    whole.load_state_dict(state, strict=False, assign=True)
    whole.tie_weights()
    whole.generation_config = getattr(model, "generation_config", None)
    whole.save_pretrained(directory)


def _write_safetensors(state: dict[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file; tied tensors once, under their first name, as the format has no aliases."""
    from safetensors.torch import save_file

    unique: dict[int, str] = {}
    for name, tensor in state.items():
        unique.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), name)
    save_file({name: state[name].contiguous() for name in unique.values()}, path)
