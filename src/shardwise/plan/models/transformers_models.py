"""transformers configurations: checked, completed, built into models on the meta device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shardwise.errors import PlanError, UserError, one_line
from shardwise.plan import cache
from shardwise.suggest import did_you_mean

if TYPE_CHECKING:
    from torch import nn

# The head that training needs, for models whose configuration does not name their class, in order of preference.
_HEADS = (
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageTextToText",
    "AutoModel",
)
_SEQUENCE_TO_SEQUENCE = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
"""Preferred for models with an encoder and a decoder: a causal head would leave the encoder out."""


def quiet_transformers() -> None:
    """Keep transformers' progress bars and advice off a terminal that belongs to something else."""
    from transformers.utils import logging as transformers_logging

    hub: Any = transformers_logging  # untyped
    hub.disable_progress_bar()
    hub.set_verbosity_error()


def check_model_type(model_type: str, where: str) -> None:
    """Raise PlanError for a type that transformers does not know. `where` begins the message."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise PlanError(
            f"{where}: model_type {model_type!r} is unknown to "
            f"transformers{did_you_mean(model_type, CONFIG_MAPPING)}; for a model of your own, give "
            "module:function"
        )


_NOT_THE_SHAPE = ("transformers_version", "dtype", "torch_dtype")
"""Keys that do not belong to a model's shape. The dtype follows from the precision, as in training."""


@dataclass(frozen=True, slots=True)
class ConfigDescription:
    """What a plan needs to know about a configuration before it is built."""

    positions: int | None
    """The longest sequence that the model was made for; None: any."""
    is_rotary: bool
    """Whether longer sequences can be computed too, because positions are rotary."""
    normalised: dict[str, Any]
    """The configuration's own keys, under the names that the installed transformers has for them."""
    is_language_model: bool
    """Whether it is a causal language model."""
    attention: str
    """The fastest attention that transformers has for it: "sdpa", or "eager" if none is fused."""


def described(config: Mapping[str, Any]) -> ConfigDescription:
    """Return the description of a configuration, from the cache or from transformers. Raises PlanError if transformers
    refuses it."""
    found = cached_description(config)
    if found is None:
        found = _described(config)
        cache.write(_name(config), asdict(found))
    return found


def cached_description(config: Mapping[str, Any]) -> ConfigDescription | None:
    """Return the description of a configuration if it is stored, else None. Does not import transformers."""
    try:
        return ConfigDescription(**cache.read(_name(config)))
    except TypeError:  # no file, or a damaged one
        return None


def _name(config: Mapping[str, Any]) -> str:
    return cache.name_of("model", config)


def _described(config: Mapping[str, Any]) -> ConfigDescription:
    from transformers import AutoModelForCausalLM

    filled = complete_config(config)
    text = text_part(filled)
    with _errors_on_one_line(config["model_type"]):
        model, _ = model_and_config(filled)
    return ConfigDescription(
        positions=positions_of(text),
        is_rotary=is_rotary(text),
        normalised=_normalised(config, filled.to_diff_dict()),
        is_language_model=type(filled) in AutoModelForCausalLM._model_mapping,
        attention="sdpa" if getattr(model, "_supports_sdpa", True) else "eager",
    )


def _normalised(config: Mapping[str, Any], filled: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {"rope_parameters"} if _ROTARY & config.keys() else set()
    given = [key for key in (*config, *renamed) if key not in _ROTARY and key not in _NOT_THE_SHAPE]
    values = {key: filled.get(key, config.get(key)) for key in given}
    return {key: value for key, value in values.items() if value is not None}


_ROTARY = {"rope_theta", "rope_scaling"}
"""Keys that transformers 5 replaces by `rope_parameters`."""


def complete_config(config: Mapping[str, Any]) -> Any:
    """Return the configuration as a transformers object. Raises PlanError if transformers refuses it."""
    from transformers import CONFIG_MAPPING

    values = {key: value for key, value in config.items() if key not in _NOT_THE_SHAPE}
    model_type = values.pop("model_type")
    check_sizes(model_type, SimpleNamespace(**values), PlanError)  # before transformers divides by them
    with TemporaryDirectory() as folder, _errors_on_one_line(model_type):
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(values), encoding="utf-8")  # only transformers knows how it writes infinite numbers
        filled = CONFIG_MAPPING[model_type].from_json_file(file)
    check_sizes(model_type, filled, PlanError)
    return filled


def text_part(filled: Any) -> Any:
    """Return the part of a transformers configuration that describes the model of text: of a model that reads more than
    text, a configuration inside it; else the configuration itself."""
    try:
        return filled.get_text_config(decoder=True)
    except ValueError:  # there are several
        return filled


def positions_of(text: Any) -> int | None:
    """Return the longest sequence that a transformers configuration of text states; None if it states none."""
    longest = getattr(text, "max_position_embeddings", getattr(text, "max_target_positions", None))
    return longest if isinstance(longest, int) and longest > 0 else None


def is_rotary(text: Any) -> bool:
    """Whether a transformers configuration of text has rotary positions. They are computed for any position, so
    sequences may be longer than those that the model was made for."""
    return bool(getattr(text, "rope_parameters", None))


def beyond_words(seq_len: str, positions: int) -> str:
    """Return the warning for sequences that are longer than those that a model with rotary positions was made for.

    seq_len: the setting and its value.
    """
    return (
        f"{seq_len} is more than the model's max_position_embeddings={positions}: rotary positions go on, but "
        "a model trained before has not seen them"
    )


def build_transformer(config: Mapping[str, Any], attention: str) -> nn.Module:
    """Build a configuration's model for training, on the current default device.

    Args:
        config: with its "model_type".
        attention: transformers' name of the implementation: "sdpa" or "eager".

    Raises:
        PlanError: transformers cannot build it.
    """
    with _errors_on_one_line(config["model_type"]):
        model_class, filled = model_and_config(complete_config(config))
        for part in _parts(filled):
            if getattr(part, "use_cache", None):
                part.use_cache = False  # a training step keeps no keys and values for generation
            for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
                if getattr(part, name, 0):
                    setattr(part, name, 0.0)  # the step that is planned skips no layer
            if getattr(part, "is_encoder_decoder", False):
                for name in ("decoder_start_token_id", "pad_token_id"):  # of shifted labels; some types have no default
                    if getattr(part, name, None) is None:
                        setattr(part, name, 0)
        model: nn.Module = model_class._from_config(filled, attn_implementation=attention)
    return model.train()


def without_cache(config: object) -> dict[str, bool]:
    """Return the argument with which a model's forward keeps no keys and values for generation. If they were kept, so
    would be what recomputation saves, gathered parameters included.

    config: the model's `config`, whatever it is; of a model of more than text, the part for text may have the setting.
    """
    has_cache = hasattr(config, "use_cache") or hasattr(getattr(config, "text_config", None), "use_cache")
    return {"use_cache": False} if has_cache else {}


def _parts(filled: Any) -> Iterator[Any]:
    """Yield a transformers configuration and all configurations inside it."""
    yield filled
    for name in getattr(filled, "sub_configs", ()):
        part = getattr(filled, name, None)
        if part is not None:
            yield from _parts(part)


@contextmanager
def _errors_on_one_line(model_type: str) -> Iterator[None]:
    """Turn errors of transformers into a PlanError of one line. If a constructor needs values that fake tensors do not
    have, the error stays what it is: the dry run then calls it without them."""
    try:
        yield
    except Exception as error:  # transformers does not check values: it may raise anything
        if _needs_values(error):
            raise
        if "scaled_dot_product_attention" in str(error):
            raise PlanError(f'transformers has no fused attention for {model_type}: use attention "eager"') from error
        raise PlanError(f"transformers cannot build this {model_type}: {one_line(error, with_type=True)}") from error


def _needs_values(error: Exception) -> bool:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def model_and_config(config: Any) -> tuple[Any, Any]:
    """Return the class of a configuration's model and the configuration that it takes. The class is the one that the
    configuration names, else the first head that its type has; if that is a model of text alone, it takes only the part
    of the configuration for text, as with transformers' own AutoModelForCausalLM. Raises ValueError if there is
    no class."""
    found = _model_class(config)
    of_text = getattr(config, "sub_configs", {}).get("text_config")
    return found, config.text_config if of_text is not None and found.config_class is of_text else config


def _model_class(config: Any) -> Any:
    import transformers

    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if named is not None:
            return named
    heads = (*_SEQUENCE_TO_SEQUENCE, *_HEADS) if getattr(config, "is_encoder_decoder", False) else _HEADS
    for name in heads:
        known = getattr(transformers, name)._model_mapping
        if type(config) in known:
            found = known[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(f"transformers has no model class for {type(config).__name__}")


_LEAST = {
    "num_hidden_layers": 0,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "hidden_size": 1,
    "intermediate_size": 1,
    "vocab_size": 1,
}


def check_sizes(model_type: str, config: object, error: type[UserError]) -> None:
    """Raise `error` for a configuration that no model of the type can have; see `impossible_size`."""
    if wrong := impossible_size(config):
        raise error(f"invalid {model_type} configuration: {wrong}")


def impossible_size(config: object) -> str | None:
    """Return the first invalid count or width of a configuration, in a few words; None if all are valid.

    config: any transformers configuration; sizes that it does not have, or has by layer, are not checked.
    """
    counts = {name: value for name in _LEAST if type(value := getattr(config, name, None)) is int}
    for name, value in counts.items():
        if value < _LEAST[name]:
            return f"{name}={value} is less than {_LEAST[name]}"
    heads, shared = counts.get("num_attention_heads"), counts.get("num_key_value_heads")
    if heads is not None and shared is not None and heads % shared:
        return f"num_attention_heads={heads} is not a multiple of num_key_value_heads={shared}"
    return None
