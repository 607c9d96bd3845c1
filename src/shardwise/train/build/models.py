"""`[model]`: from a configuration to an unsharded module, on the meta device or on the CPU."""

from __future__ import annotations

import copy
import fnmatch
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.errors import ConfigError, one_line
from shardwise.fsdp.strategy import dtype_name
from shardwise.hub import local
from shardwise.plan.models.factory import load_factory
from shardwise.plan.models.transformers_models import beyond_words, check_sizes, is_rotary, positions_of, text_part
from shardwise.suggest import did_you_mean, nearest_path
from shardwise.train.build.lora import add_adapter
from shardwise.train.config.files import reading
from shardwise.train.config.schema import LoraConfig, ModelConfig
from shardwise.train.config.tasks import DEFAULT, KINDS, check_task
from shardwise.train.data.data_checks import check_fits

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NO_ADAPTER = LoraConfig()


@dataclass(frozen=True, slots=True)
class TextShape:
    """The sizes that the data requires of a model."""

    vocab_size: int
    """All token ids are below this; 0 for data without text."""
    end_id: int
    """The end-of-document token."""
    seq_len: int
    pad_id: int | None = None
    """The token that pads texts; None = any."""
    labels: tuple[str, ...] = ()
    """Names of the outputs of a head that classifies, in order; empty for other heads."""


def build_model(config: ModelConfig, text: TextShape, lora: LoraConfig = NO_ADAPTER) -> nn.Module:
    """Build the model that a configuration names, in training mode, with its adapter if any. Not collective.

    Unless `init="cpu"`, parameters are on the meta device and `sw.shard` allocates and initialises them, so no rank
    ever holds the whole model; a factory's model is on the device where the factory builds it. Weights are not read
    here: `sw.checkpoint.load_pretrained` reads them straight into the shards.

    Args:
        config: the section `[model]`.
        text: the sizes of the data. An inline configuration takes from it the keys that it leaves out: `vocab_size`,
            the ids of the special tokens and, if the model type's default is less than `seq_len`,
            `max_position_embeddings`.
        lora: the section `[lora]`.

    Warns if sequences are longer than those that a model with rotary positions was made for.

    Raises:
        ConfigError: a path, model type, key or factory does not exist (the message names the most similar one); the
            model is too small for the vocabulary or the sequences, or cannot be built; or `init="device"` for a model
            that is already initialised.
    """
    model = _build_base(config, text)
    _freeze(model, config.freeze)
    return (add_adapter(model, lora, config) if lora.r else model).train()


def positions_and_dtype(config: ModelConfig) -> tuple[int | None, str]:
    """Return the longest sequence that a model's configuration states, None if it states none; and the dtype that it
    names, for `model.dtype`: "bf16" for one of 16 bits, else "fp32".

    Args:
        config: with `path`.

    Raises:
        ConfigError: there is no configuration at the path.
    """
    assert config.path is not None
    found: Any = _config_at(config.path)
    return positions_of(text_part(found)), "bf16" if found.dtype in {torch.bfloat16, torch.float16} else "fp32"


def _freeze(model: nn.Module, patterns: list[str]) -> None:
    """Freeze the parameters whose names match a pattern. Raises ConfigError for a pattern that matches none."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matched = [name for name in parameters if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            hint = did_you_mean(pattern, parameters) or f"; the first is {next(iter(parameters), 'missing')}"
            raise ConfigError(f"model.freeze: {pattern!r} matches no parameter of the model{hint}")
        for name in matched:
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"model.freeze={patterns} leaves no parameter to train")


def _build_base(config: ModelConfig, text: TextShape) -> nn.Module:
    if config.factory is not None:
        build = load_factory(config.factory, f"model.factory={config.factory!r}", ConfigError)
        return _stored_in(_without_numbers(build(), config), _dtype(config))
    hf_config = _read_config(config, text)
    check_task(config.task or DEFAULT, hf_config.model_type)
    _complete(hf_config, text)
    _check_fits(hf_config, text)
    model = _build_transformer(hf_config, config)
    if text.vocab_size:
        _end_answers_as_documents(model, text.end_id)
    return model


def _end_answers_as_documents(model: Any, end_id: int) -> None:
    """Let generation also stop at the token that ends documents, which the model learns to write, whatever its files
    say."""
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return
    own = generation.eos_token_id
    ends = [] if own is None else [own] if isinstance(own, int) else list(own)
    if end_id not in ends:
        generation.eos_token_id = [end_id, *ends] if ends else end_id


def _build_transformer(hf_config: PreTrainedConfig, config: ModelConfig) -> nn.Module:
    import transformers
    from transformers import GenerationConfig

    dtype = _dtype(config)
    auto: Any = getattr(transformers, KINDS[config.task or DEFAULT].auto)
    model: Any
    try:
        with torch.device("cpu" if config.init == "cpu" else "meta"):
            model = auto.from_config(hf_config, dtype=dtype)
        weights = None if config.pretrained is None else local(config.pretrained)
        if weights is not None and (weights / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(weights, local_files_only=True)
    except Exception as error:  # values that transformers does not check can raise anything
        raise ConfigError(f"[model]: transformers cannot build it: {one_line(error, with_type=True)}") from error
    built: nn.Module = model
    return built


def _complete(hf_config: Any, text: TextShape) -> None:
    """Give a configuration the labels of the data, and the tokens for padding and for a decoder's start if it has
    none."""
    if text.labels:
        hf_config.id2label = dict(enumerate(text.labels))
        hf_config.label2id = {name: number for number, name in enumerate(text.labels)}
    if text.pad_id is not None:
        if getattr(hf_config, "pad_token_id", None) is None:
            hf_config.pad_token_id = text.pad_id
        decodes = getattr(hf_config, "is_encoder_decoder", False)
        if decodes and getattr(hf_config, "decoder_start_token_id", None) is None:
            hf_config.decoder_start_token_id = hf_config.pad_token_id


def _dtype(config: ModelConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, dtype_name(config.dtype, "model.dtype"))
    return dtype


def _read_config(config: ModelConfig, text: TextShape) -> PreTrainedConfig:
    if config.config is not None:
        return _inline_config(config.config, text)
    assert config.path is not None, "ModelConfig must have exactly one of path, config and factory"
    return _config_at(config.path)


def _config_at(name: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    path = local(name)
    with reading("model.path", name):
        file = path / "config.json" if path.is_dir() else path
        is_there = file.exists()
    if not is_there:
        raise ConfigError(f"model.path={name!r}: no such file: {file}{nearest_path(path)}")
    try:
        loaded: PreTrainedConfig = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        raise ConfigError(
            f"model.path={name!r} is not a transformers configuration: {one_line(error, with_type=True)}"
        ) from error
    return loaded


def _inline_config(inline: dict[str, Any], text: TextShape) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING

    values = copy.deepcopy(inline)  # transformers keeps nested tables as its own
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"model.config.model_type={model_type!r} is unknown{did_you_mean(model_type, CONFIG_MAPPING)}"
        )
    config_class = CONFIG_MAPPING[model_type]
    blank = config_class()
    known = {*vars(blank), *blank.attribute_map}
    for key in values:
        if key not in known:
            raise ConfigError(f"model.config.{key} is not a key of model_type {model_type!r}{did_you_mean(key, known)}")
    for key in ("eos_token_id", "bos_token_id", "pad_token_id") if text.vocab_size else ():
        values.setdefault(key, text.end_id if key != "pad_token_id" or text.pad_id is None else text.pad_id)
    if text.vocab_size:
        values.setdefault("vocab_size", text.vocab_size)
    positions = blank.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if positions not in values and getattr(blank, positions, text.seq_len) < text.seq_len:
        values.setdefault("max_position_embeddings", text.seq_len)
    check_sizes(model_type, SimpleNamespace(**values), ConfigError)  # before transformers divides by them
    try:
        filled: PreTrainedConfig = config_class(**values)
    except Exception as error:
        raise ConfigError(
            f"model.config is invalid for model_type {model_type!r}: {one_line(error, with_type=True)}"
        ) from error
    return filled


def _check_fits(hf_config: PreTrainedConfig, text: TextShape) -> None:
    check_sizes(hf_config.model_type, hf_config, ConfigError)
    if not text.vocab_size:
        return
    own = text_part(hf_config)
    positions = positions_of(own)
    if positions is not None and positions < text.seq_len and is_rotary(own):
        warnings.warn(f"shardwise: {beyond_words(f'data.seq_len={text.seq_len}', positions)}", stacklevel=4)
        positions = None
    check_fits(getattr(own, "vocab_size", None), positions, text.vocab_size, text.seq_len)


def _without_numbers(model: nn.Module, config: ModelConfig) -> nn.Module:
    """Return a factory's model. Raises ConfigError if `init="device"` asks to initialise it and it already is."""
    if config.init == "device" and not any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            'model.init="device" initialises only models on the meta device, but '
            f'model.factory={config.factory!r} initialises its model itself: build it under torch.device("meta") '
            "there, or leave model.init out"
        )
    return model


def _stored_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the model converted to a dtype; untouched if it already has it, because fake tensors cannot be converted
    in place."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    return model if all(tensor.dtype == dtype for tensor in tensors) else model.to(dtype)
