"""Sizes in a transformers configuration that no model can have, though many are built from them without a word."""

from __future__ import annotations

from shardwise.errors import UserError

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
        raise error(f"there is no such {model_type}: {wrong}")


def impossible_size(config: object) -> str | None:
    """What is wrong with a configuration's counts and widths, in a few words; None if nothing is.

    config: any transformers configuration; sizes that it does not have, or has by layer, are left alone.
    """
    counts = {name: value for name in _LEAST if type(value := getattr(config, name, None)) is int}
    for name, value in counts.items():
        if value < _LEAST[name]:
            return f"{name}={value} is less than {_LEAST[name]}"
    heads, shared = counts.get("num_attention_heads"), counts.get("num_key_value_heads")
    if heads is not None and shared is not None and heads % shared:
        return f"num_attention_heads={heads} is no multiple of num_key_value_heads={shared}"
    return None
