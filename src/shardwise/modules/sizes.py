"""Sizes in a transformers configuration that no model can have, though it is built from them without a word."""

from __future__ import annotations


def impossible_size(config: object) -> str | None:
    """What is wrong with a configuration's counts of layers and heads, in a few words; None if nothing is.

    config: any transformers configuration; counts that it does not have, or has by layer, are left alone.
    """
    least = {"num_hidden_layers": 0, "num_attention_heads": 1, "num_key_value_heads": 1}
    counts = {name: value for name in least if type(value := getattr(config, name, None)) is int}
    for name, value in counts.items():
        if value < least[name]:
            return f"{name}={value} is less than {least[name]}"
    heads, shared = counts.get("num_attention_heads"), counts.get("num_key_value_heads")
    if heads is not None and shared is not None and heads % shared:
        return f"num_attention_heads={heads} is no multiple of num_key_value_heads={shared}"
    return None
