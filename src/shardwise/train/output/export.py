"""`final/`: the trained model as files that other programs read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.format.model_state import pieces_to_write
from shardwise.errors import UsageError
from shardwise.train.data.tokenizer import Tokenizer, files_of
from shardwise.train.process.ranks import Ranks
from shardwise.train.run.claim import NAME
from shardwise.train.run.directory import RunDirectory


def export(model: nn.Module, tokenizer: Tokenizer, directory: RunDirectory, ranks: Ranks, step: int) -> None:
    """Write `final/`, a checkpoint of the model alone. Every rank must call this; each writes its own part.

    A transformers model becomes a directory that `AutoModelForCausalLM.from_pretrained` and
    `AutoTokenizer.from_pretrained` load; any other module safetensors files of its state_dict.

    Where that cannot be, because ranks do not share the directory or transformers computes what it stores, rank 0
    gathers the whole model on its CPU and writes.

    Args:
        step: how many were taken.
    """
    if not (_has_ranges(model) and _is_shared(directory.path, ranks)):
        _export_gathered(model, tokenizer, directory, ranks)
        return
    files: dict[str, bytes] = {}
    with ranks.together():
        if ranks.is_first:
            files = files_of(tokenizer)
    sw.checkpoint.save(directory.final, model, step=step, files=files, overwrite=True)


def _is_shared(run: Path, ranks: Ranks) -> bool:
    """Whether every rank reads the claim that rank 0 wrote in the run's directory. Every rank must call this."""
    try:
        claim = (run / NAME).read_bytes()
    except OSError:
        claim = b""
    claims = ranks.hear(claim)
    return claims[0] != b"" and len(set(claims)) == 1


def _has_ranges(model: nn.Module) -> bool:
    """Whether tensors have byte ranges of their own in the files. The same on every rank."""
    try:
        pieces_to_write(model)
    except UsageError:
        return False
    return True


def _export_gathered(model: nn.Module, tokenizer: Tokenizer, directory: RunDirectory, ranks: Ranks) -> None:
    state = sw.full_state_dict(model, cpu=True, rank0_only=True)
    with ranks.together():  # nobody leaves before the files are there, or waits for files that cannot be
        if ranks.is_first:
            with directory.writing_final() as partial:
                write_model(model, state, partial)
                tokenizer.save(partial)


def write_model(model: nn.Module, state: dict[str, Tensor], directory: Path) -> None:
    """Write whole tensors to a directory. Not collective.

    Args:
        model: gives the class and configuration; its own parameters are not read.
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
    """Tied tensors are written once, under their first name: safetensors stores no aliases."""
    from safetensors.torch import save_file

    unique: dict[int, str] = {}
    for name, tensor in state.items():
        unique.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), name)
    save_file({name: state[name].contiguous() for name in unique.values()}, path)
