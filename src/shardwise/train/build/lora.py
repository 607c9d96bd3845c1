"""`[lora]`: PEFT's adapters in a model whose own weights are frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.hugging_face import weights_of
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.errors import ConfigError, one_line
from shardwise.hub import hub_name, local
from shardwise.suggest import did_you_mean
from shardwise.train.config.schema import Config, LoraConfig, ModelConfig
from shardwise.train.config.tasks import CLASSIFIES, DEFAULT, KINDS

_ADAPTER, _BASES = "default", ".original_module."
"""PEFT's name of an adapter that gets none, and what it puts into the names of a base's module beside a trained one."""
_SAMPLE_NUMEL = 16
"""Number of elements of each of the base's tensors that its digest covers."""


def add_adapter(model: nn.Module, lora: LoraConfig, config: ModelConfig) -> nn.Module:
    """Freeze a model and put an fp32 adapter beside the layers that `[lora]` names, in place. Not collective.

    The adapter of a model on the meta device is on the meta device too; `sw.shard` initialises it.

    Args:
        lora: the section `[lora]`, with r > 0.
        config: the section that the model was built from; the adapter is recorded as made for its weights.

    Raises:
        ConfigError: the model lacks a target, or PEFT has no adapter for it.
    """
    import peft

    is_meta = any(parameter.is_meta for parameter in model.parameters())
    adapter = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets if lora.targets is not None else "all-linear",
        task_type=KINDS[config.task or DEFAULT].peft,
        modules_to_save=heads_of(model) if config.task in CLASSIFIES else None,
        **_name_of_base(config),
    )
    _check_targets(model, lora)
    model.requires_grad_(False)
    try:
        with torch.device("meta" if is_meta else "cpu"):
            adapted: Any = peft.inject_adapter_in_model(adapter, model)
    except ValueError as error:
        raise ConfigError(f"[lora]: PEFT cannot add adapters: {one_line(error)}") from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    result: nn.Module = adapted
    return result


def heads_of(model: nn.Module) -> list[str]:
    """Return the names of a transformers model's modules with parameters that are not its base model: of its head."""
    base = getattr(model, "base_model_prefix", "")
    return [name for name, child in model.named_children() if name != base and any(True for _ in child.parameters())]


def start_heads(model: nn.Module) -> None:
    """Copy the base's heads to those that an adapter trains instead. Call it after the base was read: a head that the
    base lacks was initialised twice, differently. Every rank must call this.

    model: sharded.
    """
    names = {
        name: str(name).replace(".original_module.", f".modules_to_save.{_ADAPTER}.") for name in model.state_dict()
    }
    copied = {copy: name for name, copy in names.items() if copy != name}
    state: dict[str, Any] = model.state_dict()
    whole = {copy: state[name].full_tensor() for copy, name in copied.items()}
    model.load_state_dict(whole, strict=False)


def base_digest(config: Config) -> str:
    """Return a text that tells one base from another; empty without an adapter. For pretrained weights it is a hash
    over a sample of each tensor, independent of the directory's name; for random weights it names the seed and the way
    of initialisation. Reads files; not collective."""
    if not config.lora.r:
        return ""
    if config.model.pretrained is None:
        return f"random numbers of train.seed={config.train.seed} and model.init={config.model.init!r}"
    directory = LocalDirectory(local(config.model.pretrained))
    samples: list[tuple[str, bytes]] = []
    for file, layout in weights_of(directory).files.items():
        with manifest.reading(f"{directory}/{file}"), directory.open(file) as source:
            for name, tensor in layout.tensors.items():
                middle = tensor.numel // 2
                place = layout.byte_range(name, middle, min(middle + _SAMPLE_NUMEL, tensor.numel))
                sample = bytearray(place.length)
                source.read_at(place.start, memoryview(sample))
                samples.append((name, f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + sample))
    digest = xxhash.xxh3_64()
    for _, sampled in sorted(samples):
        digest.update(sampled)
    return f"weights with the digest {digest.hexdigest()}"


def check_base(saved: str | None, own: str, path: Path | str) -> None:
    """Raise ConfigError if a run's adapter was trained beside another base.

    Args:
        saved: `base_digest` as stored in the checkpoint; None or empty if not known.
        own: `base_digest` of this launch.
        path: the checkpoint, to name it in the error.
    """
    if saved and own and saved != own:
        raise ConfigError(
            f"{path} is an adapter that was trained for the base {saved}, but this run's base is {own}: set "
            "the model's weights, model.init and train.seed back, or set log.name to train anew"
        )


def _name_of_base(config: ModelConfig) -> dict[str, str | None]:
    """Return the keys of PEFT's configuration that name the base; empty if it starts from random numbers."""
    if config.pretrained is None:
        return {}
    name = hub_name(config.pretrained)
    if name is None:
        return {"base_model_name_or_path": str(Path(config.pretrained).resolve())}
    return {"base_model_name_or_path": name.repository, "revision": name.revision}


def _check_targets(model: nn.Module, lora: LoraConfig) -> None:
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if not list(module.children())}
    for target in lora.targets or ():
        if target not in names and not any(name.endswith(f".{target}") for name, _ in model.named_modules()):
            hint = did_you_mean(target, names) or f"; its modules are {', '.join(sorted(names - {''}))}"
            raise ConfigError(f"lora.targets: the model has no module {target!r}{hint}")
