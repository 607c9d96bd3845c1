"""`read`, which recognises a file of another library by its keys and reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, one_line
from shardwise.foreign import accelerate, deepspeed, fsdp, transformers_sharding
from shardwise.foreign.settings import ForeignSettings
from shardwise.suggest import nearest_path

SUFFIXES = (".json", ".yaml", ".yml")
_FSDP_KEYS = (
    "sharding_strategy",
    "transformer_layer_cls_to_wrap",
    "reshard_after_forward",
    "min_num_params",
    "version",
)


def read(path: Path) -> ForeignSettings:
    """Read DeepSpeed's `ds_config.json`, the file of `accelerate config`, a file for transformers' `fsdp_config`, or
    one that its `DistributedConfig` wrote.

    Raises ConfigError, naming the cause: the file is missing, is none of these, or has an invalid value.
    """
    values = _tree(path)
    if accelerate.KEYS & values.keys():
        return accelerate.read_accelerate(values, str(path), lambda name: _tree(_beside(path, name)))
    if deepspeed.KEYS & values.keys():
        return deepspeed.read_deepspeed(values, str(path))
    if transformers_sharding.KEYS & values.keys():
        return transformers_sharding.read_distributed(values, str(path))
    if any(key.removeprefix("fsdp_") in _FSDP_KEYS for key in values):
        return fsdp.read_fsdp(values, str(path))
    found = f"it has {', '.join(sorted(map(str, values))[:5])}" if values else "it is empty"
    raise ConfigError(
        f"{path} is not a configuration of DeepSpeed (zero_optimization, ...), of Accelerate (distributed_type, ...) "
        f"or of transformers (fsdp_size, ...): {found}"
    )


def _beside(path: Path, name: str) -> Path:
    """Resolve a file name in another file: against the working directory if it exists there, else next to that file."""
    return Path(name) if Path(name).exists() else path.parent / name


def _tree(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{nearest_path(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    values = _parsed(path, text)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} is a {type(values).__name__}, not a table of settings")
    tables: list[Mapping[Any, Any]] = [values]
    while tables:
        table = tables.pop()
        for key, value in table.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path}: the key {key!r} must be a string")
            if isinstance(value, Mapping):
                tables.append(value)
    return values


def _parsed(path: Path, text: str) -> Any:
    if path.suffix.lower() == ".json":
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON: {one_line(error)}") from None
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date
        raise ConfigError(f"{path} is not YAML: {one_line(error)}") from None
