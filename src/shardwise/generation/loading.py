"""From the files of a model to a sharded model, of which each rank reads its own bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
from shardwise.checkpoint.interchange.kinds import ADAPTER_WEIGHTS
from shardwise.checkpoint.interchange.model_directories import CONFIG
from shardwise.checkpoint.pretrained import blank_for
from shardwise.errors import ConfigError, UserError, one_line
from shardwise.fsdp.strategy import LEAST_SLOTS
from shardwise.generation.generate import check_generates
from shardwise.generation.source import Source
from shardwise.modules.adapters import adapter_names
from shardwise.plan.models.transformers_models import model_and_config
from shardwise.together import Together

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_model(source: Source, dtype: torch.dtype | None, ranks: Together) -> nn.Module:
    """Return the model, sharded over the ranks, in evaluation mode. Every rank must call this.

    Each rank reads its own bytes. While it computes it holds its share, one unit, and the unit that is gathered next.
    One rank alone holds the model once.

    Args:
        dtype: of the weights; None = as they are stored.

    Raises:
        UserError: the model cannot be built, read or generate. Raised on every rank.
    """
    with ExitStack() as reading:
        with ranks.together():
            model = build_model(source, dtype).requires_grad_(False)  # else ranks make room for gradients
            reading.enter_context(blank_for(source.weights, model))
        sharded = _shard(model, ranks)
    sw.checkpoint.load_pretrained(source.weights, sharded)
    if source.adapter is not None:
        with ranks.together():
            _load_adapter(source.adapter, sharded)
    return sharded.eval()


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """Return the tokenizer, with the source's chat template. Raises ConfigError if transformers cannot load it."""
    from transformers import AutoTokenizer

    with _explained(f"{source.tokenizer}: transformers cannot load its tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.tokenizer, local_files_only=True)
    if source.chat_template is not None:
        tokenizer.chat_template = source.chat_template
    return tokenizer


def build_model(source: Source, dtype: torch.dtype | None) -> nn.Module:
    """Return the model on the meta device, with its adapter if any. Raises UserError if it cannot be built, or cannot
    generate."""
    from transformers import AutoConfig, GenerationConfig

    with _explained(f"{source.weights}/{CONFIG}: transformers cannot build this model"):
        config: Any = AutoConfig.from_pretrained(source.weights, local_files_only=True)
        model_class, config = model_and_config(config)
        with torch.device("meta"):
            model: Any = model_class._from_config(config, dtype=dtype or _stored(config))
        if (source.weights / "generation_config.json").is_file() and hasattr(model, "generation_config"):
            model.generation_config = GenerationConfig.from_pretrained(source.weights, local_files_only=True)
    check_generates(model)
    return model if source.adapter is None else _adapted(model, source.adapter)


def _stored(config: Any) -> torch.dtype:
    dtype = config.dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _shard(model: nn.Module, ranks: Together) -> nn.Module:
    if ranks.world_size == 1:
        return sw.shard(model, "no_shard")
    try:
        return sw.shard(model, slots=LEAST_SLOTS)
    except ConfigError:  # units inside units, each of which is gathered while those around it are
        return sw.shard(model)


def _adapted(model: nn.Module, adapter: Path) -> nn.Module:
    """Put PEFT's layers for an adapter into the model, in place, on the meta device."""
    try:
        import peft
    except ModuleNotFoundError:
        raise ConfigError(f"{adapter} is a PEFT adapter: pip install 'shardwise[peft]'") from None
    with _explained(f"{adapter}: PEFT cannot add this adapter to the model"):
        config = peft.PeftConfig.from_pretrained(str(adapter))
        config.inference_mode = True
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # it is overwritten; other ways would compute with the base's weights
        with torch.device("meta"):
            adapted: nn.Module = peft.inject_adapter_in_model(config, model)
    return adapted


def _load_adapter(adapter: Path, model: nn.Module) -> None:
    """Read an adapter into the model's shards. It is small beside its base, and every rank reads all of it."""
    stored = load_file(adapter / ADAPTER_WEIGHTS)
    names = adapter_names(model)
    missing = sorted(set(names.values()) - stored.keys()) or sorted(stored.keys() - set(names.values()))
    if missing:
        raise ConfigError(
            f"{adapter}: its tensors and those of its configuration differ, first in {missing[0]!r}: it belongs to "
            "another base, or was written by another version of PEFT"
        )
    try:
        model.load_state_dict({own: stored[theirs] for own, theirs in names.items()}, strict=False)
    except RuntimeError as error:
        raise ConfigError(f"{adapter} does not fit its base: {one_line(error)}") from None


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turn what other libraries raise inside the block into a ConfigError of one line that begins with `where`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # values that they do not check can raise anything
        raise ConfigError(f"{where}: {one_line(error, with_type=True)}") from error
