"""What is exported: a checkpoint of any kind that the commands take, as a model in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise import checkpoint, hub
from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.interchange.kinds import Kind, is_adapter, kind_of
from shardwise.checkpoint.interchange.safetensors_files import configuration_of
from shardwise.checkpoint.publish.commit import FINAL
from shardwise.errors import CheckpointError, UsageError, one_line
from shardwise.suggest import nearest_path
from shardwise.tables import format_bytes

TIMES, TIMES_QUANTIZED = 3, 5
"""Memory that an export takes, in times the weights' in fp32, without and with quantization (`docs/export.md` has what
was measured)."""
_ADAPTERS_OWN = ("adapter_config.json", "README.md", "training_args.bin")


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
        text: `final/`, a step directory, a finished run, an adapter, a Hugging Face directory, or a hub's name.
        base: for an adapter, the base to merge it into; None = the one that its configuration names.
        times: the memory that the work on it takes, in times its weights' in fp32.

    Raises CheckpointError or HubError if there is no such checkpoint or it has no configuration of transformers;
    UsageError if there is too little memory, before any weight is read.
    """
    path, name = _found(text)
    adapter = None
    if name is None:
        with manifest.reading(path):
            kind = kind_of(path)
        if kind is Kind.ADAPTER or (kind is Kind.SHARDWISE and is_adapter(path)):
            adapter = path
        elif kind not in {Kind.HUGGING_FACE, Kind.SHARDWISE}:
            raise CheckpointError(
                f"{path} is not a Hugging Face directory: write one with `shardwise convert {path} DIR --to hf "
                "--files-from A_DIRECTORY_WITH_CONFIG_JSON`, and export that"
            )
    if adapter is None and base is not None:
        raise CheckpointError(f"{text} is not an adapter: leave --base {base} out")
    with tempfile.TemporaryDirectory() as merged:
        if adapter is not None:
            path = Path(merged) / "merged"
            checkpoint.convert(adapter, path, "hf", base=base)
        model_class, config = _described(path, text)
        _refuse_large(model_class, config, text, times)
        if name is not None:
            path = hub.fetch(text, text, weights=True)
        elif (path / manifest.NAME).is_file():
            checkpoint.verify(path)
        files = configuration_of(path)
        if adapter is not None:
            files |= {key: value for key, value in configuration_of(adapter).items() if key not in _ADAPTERS_OWN}
        yield Source(_loaded(model_class, path, text), _tokenizer(path, adapter), files)


def _found(text: str) -> tuple[Path, hub.HubName | None]:
    """Return the directory of a checkpoint, and its name if it is on a hub: then only its configuration is there."""
    name = hub.hub_name(text)
    if name is not None:
        return hub.fetch(text, text), name
    path = Path(text)
    if not path.exists():
        raise CheckpointError(f"{text}: no such checkpoint{nearest_path(path)}")
    if not (path / "config.json").is_file() and (path / FINAL).is_dir():
        path /= FINAL
    return path, None


def _described(path: Path, text: str) -> tuple[Any, Any]:
    """Return the class of transformers that a directory's configuration names, and the configuration."""
    import transformers

    if not (path / "config.json").is_file():
        raise CheckpointError(f"{text} has no config.json: only models of transformers can be exported")
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
        numel = sum(parameter.numel() for parameter in model_class(config).parameters())
    needed, free = times * 4 * numel, _free_bytes()
    if needed > free:
        raise UsageError(
            f"{text}: exporting its {numel:,} parameters takes about {format_bytes(needed)} of memory, and "
            f"{format_bytes(free)} are free here: export on a larger machine"
        )


def _free_bytes() -> int:
    """Return the memory that new work can have: this machine's, or its control group's limit if that is less."""
    page = os.sysconf("SC_PAGE_SIZE")
    free = page * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines("/proc/meminfo"):  # counts what the page cache would give back
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
    limit, used = (next(iter(_lines(f"/sys/fs/cgroup/memory.{what}")), "max") for what in ("max", "current"))
    return min(free, int(limit) - int(used)) if limit.isdecimal() and used.isdecimal() else free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def _loaded(model_class: Any, path: Path, text: str) -> Any:
    try:
        model = model_class.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"{text}: transformers cannot load it: {one_line(error, with_type=True)}") from error
    return model.eval().requires_grad_(requires_grad=False)


def _tokenizer(path: Path, adapter: Path | None) -> Any:
    import transformers

    for directory in (adapter, path):
        if directory is not None and any((directory / name).is_file() for name in _TOKENIZERS):
            try:
                return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
            except Exception as error:
                raise CheckpointError(f"{directory}: its tokenizer cannot be loaded: {one_line(error)}") from error
    return None


_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json")
