"""An adapter in PEFT's files, merged into the weights of its base, a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from shardwise.checkpoint.format import manifest, tensor_files
from shardwise.checkpoint.format.tensor_files import ADAPTER_CONFIG as CONFIG
from shardwise.checkpoint.interchange.checkpoint_contents import CheckpointContents, LazyTensor, LazyTensors
from shardwise.checkpoint.interchange.kinds import ADAPTER_WEIGHTS as WEIGHTS
from shardwise.checkpoint.interchange.safetensors_files import configuration_of, lazy_tensors, read_hugging_face
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.errors import CheckpointError, HubError
from shardwise.hub import fetch, hub_name
from shardwise.modules.adapters import FILE_PREFIX
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

_ADAPTERS_OWN = ("adapter_config.json", "README.md", "training_args.bin")
"""Files of an adapter that say nothing of the merged model."""


def read_adapter(adapter: Path) -> CheckpointContents:
    """Return the adapter alone, under PEFT's names. Raises CheckpointError."""
    directory, path = LocalDirectory(adapter), f"{adapter}/{WEIGHTS}"
    with manifest.reading(path), directory.open(WEIGHTS) as source:
        layout = tensor_files.read_layout(path, source, directory.size(WEIGHTS))
    return CheckpointContents(lazy_tensors(directory, {WEIGHTS: layout}), files=configuration_of(adapter))


def read_merged(adapter: Path, base: str | None) -> CheckpointContents:
    """Return the base's model with a LoRA adapter added, under the base's names; tensors stay in their files. Files of
    the tokenizer that are beside the adapter come before the base's: a chat template may be among them.

    Args:
        adapter: PEFT's directory, or a checkpoint of an adapter.
        base: a Hugging Face directory or a name of a hub; None = the one that the adapter's configuration names.

    Raises HubError if the base cannot be fetched from a hub, CheckpointError if there is no base, the adapter is not
    plain LoRA, or it does not belong to this base.
    """
    config = read_config(adapter)
    for key, plain in _PLAIN.items():
        if config.get(key) not in plain:
            raise CheckpointError(
                f"{adapter}: {key}={config[key]!r} in {CONFIG} cannot be merged here, only plain LoRA: let PEFT "
                "merge it (merge_and_unload, then save_pretrained)"
            )
    whole = read_hugging_face(find_base(adapter, base, config))
    factors = _factors(adapter, config, whole.model)
    merged = {
        name: replace(tensor, load=partial(_merged, tensor, factors[name])) if name in factors else tensor
        for name, tensor in whole.model.items()
    }
    own = {name: data for name, data in configuration_of(adapter).items() if name not in _ADAPTERS_OWN}
    return replace(whole, model=merged, files={**whole.files, **own})


class Factors(NamedTuple):
    """The factors of what is added to a weight: `scale * left @ right`."""

    left: Tensor
    """[rows, r]."""
    right: Tensor
    """[r, columns]."""
    scale: float


def _merged(base: LazyTensor, factors: Factors) -> Tensor:
    """Return a weight with an adapter added, as PEFT adds it: rounded once, to the base's dtype."""
    values = base.load()
    values += (factors.left @ factors.right) * factors.scale
    return values


def read_config(adapter: Path) -> dict[str, Any]:
    """Return the configuration of an adapter's directory. Raises CheckpointError if it is damaged."""
    try:
        with manifest.reading(adapter / CONFIG):
            read = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
        return dict(read)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{adapter / CONFIG} is damaged: {error}") from None


def find_base(adapter: Path, given: str | None, config: Mapping[str, Any], *, weights: bool = True) -> Path:
    """Return the directory of an adapter's base, downloaded if it is named on a hub. Arguments and errors are as of
    `read_merged`; `config` is the adapter's, and `weights` as of `hub.fetch`."""
    name = given if given is not None else str(config.get("base_model_name_or_path") or "")
    if name and Path(name).is_dir():
        return Path(name)
    if given is not None:
        if hub_name(given) is None:
            raise CheckpointError(f"--base {given} is not a directory{nearest_path(Path(given))}")
        return fetch(given, f"--base {given}", weights=weights)
    if hub_name(name) is not None:
        revision = config.get("revision")
        try:
            return fetch(f"{name}@{revision}" if revision else name, f"{adapter}: its base {name!r}", weights=weights)
        except HubError as error:
            raise HubError(f"{error}; or give the base's directory with --base") from None
    named = f"names the base {name!r}, which does not exist here" if name else "names no base"
    raise CheckpointError(
        f"{adapter} is an adapter, and its {CONFIG} {named}: give the directory of its base with --base"
    )


def _factors(adapter: Path, config: Mapping[str, Any], base: LazyTensors) -> dict[str, Factors]:
    tensors = read_adapter(adapter).model
    found: dict[str, Factors] = {}
    for name in tensors:
        layer, end = name.removeprefix(FILE_PREFIX).removesuffix(".weight").rsplit(".", 1)
        if end == "lora_B" and name.replace("lora_B", "lora_A") in tensors:
            continue
        target, partner = f"{layer}.weight", name.replace("lora_A", "lora_B")
        if end != "lora_A" or partner not in tensors:
            raise CheckpointError(f"{adapter}: {name!r} is not a factor of plain LoRA: let PEFT merge this adapter")
        right, left = tensors[name].load(), tensors[partner].load()
        if config.get("fan_in_fan_out"):  # stored transposed, as GPT-2's
            left, right = right.T, left.T
        if target not in base or base[target].shape != (left.shape[0], right.shape[1]):
            raise CheckpointError(
                f"{adapter}: {name!r} is for a weight {target!r} of shape {(left.shape[0], right.shape[1])}, "
                "which the base does not have: give the base that it was trained on with --base, or let PEFT "
                "merge it"
            )
        rank = left.shape[1]
        divisor = rank**0.5 if config.get("use_rslora") else rank
        found[target] = Factors(left, right, config["lora_alpha"] / divisor)
    return found
