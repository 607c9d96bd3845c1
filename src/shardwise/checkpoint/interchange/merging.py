"""An adapter in PEFT's files, merged into the weights of its base, a part of a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from shardwise.checkpoint.format import manifest, tensor_files
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.format.tensor_files import ADAPTER_CONFIG as CONFIG
from shardwise.checkpoint.interchange.carried import Carried, Run, Tensors, parts
from shardwise.checkpoint.interchange.kinds import ADAPTER_WEIGHTS as WEIGHTS
from shardwise.checkpoint.interchange.safetensors_files import (
    SafetensorsTensors,
    configuration_of,
    read_hugging_face,
)
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.errors import CheckpointError, HubError
from shardwise.hub import fetch, hub_name
from shardwise.modules.adapters import FILE_PREFIX, low_rank
from shardwise.suggest import nearest_path

_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "alpha_pattern": (None, {}),
    "rank_pattern": (None, {}),
}
"""Keys of a configuration, with the values for which merging is one matrix product a layer."""


def read_adapter(adapter: Path) -> Carried:
    """Return the adapter alone, under PEFT's names. Raises CheckpointError."""
    directory = LocalDirectory(adapter)
    return Carried(_tensors(directory), SafetensorsTensors(directory, {}), files=configuration_of(adapter))


def read_merged(adapter: Path, base: str | None) -> Carried:
    """Return the base's model with a LoRA adapter added, under the base's names; tensors stay in their files.

    Args:
        adapter: PEFT's directory, or a checkpoint of an adapter.
        base: a Hugging Face directory or a name of a hub; None = the one that the adapter's configuration names.

    Raises HubError if the base cannot be fetched from a hub, CheckpointError if there is no base, the adapter is not
    plain LoRA, or it does not belong to this base.
    """
    config = _config(adapter)
    for key, plain in _PLAIN.items():
        if config.get(key) not in plain:
            raise CheckpointError(
                f"{adapter}: {key}={config[key]!r} in {CONFIG} cannot be merged here, only plain LoRA: let PEFT "
                "merge it (merge_and_unload, then save_pretrained)"
            )
    whole = read_hugging_face(_base(adapter, base, config))
    return Carried(Merged(whole.model, _factors(adapter, config, whole.model)), whole.state, files=whole.files)


class Factors(NamedTuple):
    """The factors of what is added to a weight: `scale * left @ right`."""

    left: Tensor
    """[rows, r]."""
    right: Tensor
    """[r, columns]."""
    scale: float


class Merged:
    """The tensors of a base with an adapter added, as PEFT adds it: rounded once, to the base's dtype."""

    def __init__(self, base: Tensors, factors: Mapping[str, Factors]) -> None:
        self._base = base
        self._factors = factors

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """See `Tensors`."""
        return self._base.stored

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `Tensors`."""
        values = self._base.read(name, start, stop)
        if name in self._factors and stop > start:
            values += low_rank(*self._factors[name], start, stop)
        return values

    def runs(self, name: str) -> Iterator[Run]:
        """See `Tensors`."""
        return parts(self, name)


def _config(adapter: Path) -> dict[str, Any]:
    try:
        with manifest.reading(adapter / CONFIG):
            read = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
        return dict(read)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{adapter / CONFIG} is damaged: {error}") from None


def _base(adapter: Path, given: str | None, config: Mapping[str, Any]) -> Path:
    name = given if given is not None else str(config.get("base_model_name_or_path") or "")
    if name and Path(name).is_dir():
        return Path(name)
    if given is not None:
        if hub_name(given) is None:
            raise CheckpointError(f"--base {given} is not a directory{nearest_path(Path(given))}")
        return fetch(given, f"--base {given}", weights=True)
    if hub_name(name) is not None:
        revision = config.get("revision")
        try:
            return fetch(f"{name}@{revision}" if revision else name, f"{adapter}: its base {name!r}", weights=True)
        except HubError as error:
            raise HubError(f"{error}; or give the base's directory with --base") from None
    named = f"names the base {name!r}, which does not exist here" if name else "names no base"
    raise CheckpointError(
        f"{adapter} is an adapter, and its {CONFIG} {named}: give the directory of its base with --base"
    )


def _factors(adapter: Path, config: Mapping[str, Any], base: Tensors) -> dict[str, Factors]:
    tensors = _tensors(LocalDirectory(adapter))
    found: dict[str, Factors] = {}
    for name in tensors.stored:
        layer, end = name.removeprefix(FILE_PREFIX).removesuffix(".weight").rsplit(".", 1)
        if end == "lora_B" and name.replace("lora_B", "lora_A") in tensors.stored:
            continue
        target, partner = f"{layer}.weight", name.replace("lora_A", "lora_B")
        if end != "lora_A" or partner not in tensors.stored:
            raise CheckpointError(f"{adapter}: {name!r} is not a factor of plain LoRA: let PEFT merge this adapter")
        right, left = _whole(tensors, name), _whole(tensors, partner)
        if config.get("fan_in_fan_out"):  # stored transposed, as GPT-2's
            left, right = right.T, left.T
        if target not in base.stored or base.stored[target].shape != (left.shape[0], right.shape[1]):
            raise CheckpointError(
                f"{adapter}: {name!r} is for a weight {target!r} of shape {(left.shape[0], right.shape[1])}, "
                "which the base does not have: give the base that it was trained on with --base, or let PEFT "
                "merge it"
            )
        rank = left.shape[1]
        divisor = rank**0.5 if config.get("use_rslora") else rank
        found[target] = Factors(left, right, config["lora_alpha"] / divisor)
    return found


def _tensors(directory: LocalDirectory) -> SafetensorsTensors:
    path = f"{directory}/{WEIGHTS}"
    with manifest.reading(path), directory.open(WEIGHTS) as source:
        return SafetensorsTensors(directory, {WEIGHTS: tensor_files.read_layout(path, source, directory.size(WEIGHTS))})


def _whole(tensors: Tensors, name: str) -> Tensor:
    stored = tensors.stored[name]
    return tensors.read(name, 0, stored.numel).view(stored.shape)
