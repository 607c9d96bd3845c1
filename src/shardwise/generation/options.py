"""Options of transformers' `GenerationConfig`: names and values, checked before a model computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shardwise.errors import UsageError, one_line
from shardwise.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import GenerationConfig

NEW_TOKENS = 256
"""`max_new_tokens` if neither the options nor the model's own `generation_config` say how long an answer may be."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Options that turn sampling on."""
_OF_RESULTS = ("return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_logits")
_UNSUPPORTED = {
    **dict.fromkeys(_OF_RESULTS, "it changes what transformers returns, not what is generated: call model.generate"),
    "prefill_chunk_size": "ranks with prompts of different lengths would compute different numbers of chunks",
    "continuous_batching_config": "batches are fixed, so that answers do not depend on the number of ranks",
}
_INTERNAL = {"transformers_version", "is_assistant"}


def checked_options(options: Mapping[str, Any], own: GenerationConfig) -> dict[str, Any]:
    """Return options for `model.generate`. No communication.

    With an option of sampling (`temperature`, `top_p`, ...) and without `do_sample`, `do_sample` becomes True. Where
    nothing limits the length of answers, `max_new_tokens` becomes 256.

    Args:
        options: by their names in `GenerationConfig`. Options that are None count as left out.
        own: the model's own configuration, which holds for options that are left out.

    Raises:
        UsageError: there is no such option, it cannot be used here, or transformers refuses its value.
    """
    from transformers import GenerationConfig

    configuration: Any = GenerationConfig  # untyped
    known = {name for name in configuration().to_dict() if not name.startswith("_")} - _INTERNAL
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in known:
            raise UsageError(f"{name!r} is no option of transformers' GenerationConfig{did_you_mean(name, known)}")
        if name in _UNSUPPORTED:
            raise UsageError(f"{name}={given[name]!r} cannot be set here: {_UNSUPPORTED[name]}")
    if "do_sample" not in given and any(name in given for name in SAMPLING):
        given["do_sample"] = True
    limited = any(name in given for name in ("max_new_tokens", "max_length")) or own.max_new_tokens or own.max_length
    if not limited:
        given["max_new_tokens"] = NEW_TOKENS
    _check_values(given, own)
    return given


def merged(options: Mapping[str, Any], own: GenerationConfig) -> dict[str, Any]:
    """Return the values that hold, without those that nobody set."""
    values: dict[str, Any] = {name: value for name, value in own.to_dict().items() if value is not None}
    return {**values, **options}


def _check_values(options: Mapping[str, Any], own: GenerationConfig) -> None:
    from transformers import GenerationConfig

    configuration: Any = GenerationConfig  # untyped
    values = merged(options, own)
    for name, least in (("num_beams", 1), ("num_return_sequences", 1), ("max_length", 1)):
        if name in options and (type(options[name]) is not int or options[name] < least):
            raise UsageError(f"{name}={options[name]!r}: must be a whole number of {least} or more")
    samples = values.get("do_sample", False)
    for name, build in _processors().items():
        if name not in options:
            continue
        if name in SAMPLING and not samples:
            raise UsageError(f"{name}={options[name]!r} with do_sample=False has no effect: leave one of them out")
        try:
            build(options[name])
        except (ValueError, TypeError) as error:
            greedy = "; for greedy generation, leave it out and set do_sample=False" if name == "temperature" else ""
            raise UsageError(f"{name}={options[name]!r}: {one_line(error)}{greedy}") from None
    several = values.get("num_return_sequences") or 1
    if several > max(values.get("num_beams") or 1, several if samples else 1):
        raise UsageError(
            f"num_return_sequences={several}: without do_sample there are only as many answers as num_beams "
            f"({values.get('num_beams') or 1})"
        )
    checked = {*SAMPLING, "num_return_sequences"}
    try:
        configuration(**{name: value for name, value in options.items() if name not in checked})
    except (ValueError, TypeError) as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise UsageError(f"{shown}: {one_line(error)}") from None


def _processors() -> dict[str, Callable[[Any], object]]:
    """Return transformers' own class for each option whose values it checks only when it generates."""
    import transformers as hf

    return {
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
        "typical_p": hf.TypicalLogitsWarper,
        "epsilon_cutoff": hf.EpsilonLogitsWarper,
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": hf.NoRepeatNGramLogitsProcessor,
    }
