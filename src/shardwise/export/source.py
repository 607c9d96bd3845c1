"""What is exported: a checkpoint of any kind that the commands take, as a model in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise import checkpoint, device_tools
from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.interchange.model_directories import find_model
from shardwise.checkpoint.interchange.safetensors_files import configuration_of
from shardwise.errors import CheckpointError, UsageError, one_line
from shardwise.export import delta_rule, pictures
from shardwise.tables import format_bytes

TIMES, TIMES_QUANTIZED, TIMES_MORE = 3, 5, 2
"""Memory that an export takes, in times the weights' in fp32, without and with quantization, and how much more where
there are two decoders (`docs/export.md` has what was measured)."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model and the files that belong beside it."""

    model: Any
    """In fp32, in evaluation mode, on the CPU."""
    tokenizer: Any
    """None if the checkpoint has none."""
    files: dict[str, bytes]
    """Configuration and tokenizer by name of the file."""


@contextmanager
def opened(text: str, base: str | None, times: int) -> Iterator[Source]:
    """Yield the model of a checkpoint.

    Args:
        text, base: as in `find_model`. An adapter is merged into its base.
        times: the memory that the work on it takes, in times its weights' in fp32.

    Raises CheckpointError or HubError if there is no such checkpoint or it has no configuration of transformers;
    UsageError if there is too little memory, before any weight is read.
    """
    found = find_model(text, base, weights=False)
    if found.adapter is not None and found.adapter.resolve() == found.weights.resolve():  # Granite Speech's
        raise UsageError(
            f"{text} holds an adapter beside its base: let PEFT merge it (PeftModel.merge_and_unload), save the model, "
            "and export that"
        )
    model_class, config = _described(found.weights, text)
    _refuse_large(model_class, config, text, times)
    found = find_model(text, base)
    with tempfile.TemporaryDirectory() as merged:
        path = found.weights
        if (path / manifest.NAME).is_file():
            checkpoint.verify(path)
        if found.adapter is not None:
            path = Path(merged) / "merged"
            checkpoint.convert(found.adapter, path, "hf", base=found.weights)
        yield Source(_loaded(model_class, path, text), _tokenizer(found.tokenizer), configuration_of(path))


def _described(path: Path, text: str) -> tuple[Any, Any]:
    """Return the class of transformers that a directory's configuration names, and the configuration."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"{text}: its config.json is not transformers': {one_line(error)}") from error
    if getattr(config, "quantization_config", None):
        raise CheckpointError(
            f"{text} holds quantized weights: dequantize them once with transformers, and export that"
        )
    named = (config.architectures or [None])[0]
    model_class = getattr(transformers, str(named), None)
    if model_class is None:
        raise CheckpointError(
            f"{text}: `architectures` of its config.json names {named}, which transformers does not have"
        )
    return model_class, config


def _refuse_large(model_class: Any, config: Any, text: str, times: int) -> None:
    """Raise UsageError if an export of this model would take more memory than there is."""
    with torch.device("meta"):
        model = model_class(config)
    numel = sum(parameter.numel() for parameter in model.parameters())
    if model.can_generate() and (pictures.reads_prompts_otherwise(model) or delta_rule.modules(model)):
        times += TIMES_MORE
    needed, free = times * 4 * numel, device_tools.free_host_bytes()
    if needed > free:
        raise UsageError(
            f"{text}: exporting its {numel:,} parameters takes about {format_bytes(needed)} of memory, and "
            f"{format_bytes(free)} are free here: export on a larger machine"
        )


def _loaded(model_class: Any, path: Path, text: str) -> Any:
    try:
        model = model_class.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"{text}: transformers cannot load it: {one_line(error, with_type=True)}") from error
    return model.eval().requires_grad_(requires_grad=False)


def _tokenizer(directory: Path | None) -> Any:
    import transformers

    if directory is None:
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"{directory}: its tokenizer cannot be loaded: {one_line(error)}") from error
