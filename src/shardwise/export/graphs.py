"""From a transformers model to ONNX graphs: through transformers' exporter, or torch's where that one cannot."""

from __future__ import annotations

import contextlib
import enum
import io
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.errors import UserError
from shardwise.export import delta_rule, media, packing, pictures, sounds
from shardwise.export.inputs import Inputs, Shape
from shardwise.export.media import Media

_TRACED = Shape(2, 7, True)
"""What a graph is traced with: every size above one, because torch.export takes zero and one for constants."""
_ONE_SIZE = (packing.PIXELS, sounds.FEATURES)
"""Inputs of which a model takes one size; their batch alone may vary."""
_BATCH = {0: torch.export.Dim.AUTO}
_OPEN = ("input_ids", "inputs_embeds", "attention_mask", "encoder_attention_mask")
"""Inputs whose batch and length are both to stay open."""
_LONGEST_REASON = 300
_CACHES = ("past_key_values", "cache_params")
"""Arguments of a forward for what is kept of earlier tokens."""
_CONSTANT = "_sliding_window_tensor"
"""The end of the names of constants that transformers' caches hold beside keys and values."""
_UNUSED = (_CONSTANT, "encoder_outputs.last_hidden_state")
"""Ends of the names of inputs that a graph may have without need."""
_PAIRS = {"keys": "key", "values": "value"}
_STEPS = {"self_attention_cache": "decoder", "cross_attention_cache": "encoder"}
_LAYER = re.compile(r"(?:(self_attention_cache|cross_attention_cache)\.)?layers\.(\d+)\.(keys|values)")


class Form(enum.Enum):
    """Which graphs an export has."""

    FORWARD = "one graph, the model's forward"
    CACHED = "one graph that takes and returns the keys and values of earlier tokens"
    STAGES = "a graph for the prompt and one for each further token"
    SEQUENCES = "a graph for the encoder, one for the first token and one for each further one"
    PARTS = "a graph for pictures or sound, one for tokens and a decoder of both"


@dataclass(frozen=True, slots=True)
class Export:
    """The graphs of a model."""

    form: Form
    programs: dict[str, Any]
    """`onnx_ir.Model` by the name of the file, without its suffix."""
    generates: bool
    """Whether the model generates text; with the form FORWARD it computes all earlier tokens again for each new one."""
    exporter: str
    """Whose exporter made the graphs: "transformers" or "torch"."""
    refused: str = ""
    """Why the other exporter did not, in one line."""


def export(model: Any, inputs: Inputs, generates: bool, opset: int) -> Export:
    """Return the graphs of a model in evaluation mode, on the CPU.

    Args:
        model: a transformers model in fp32. It answers as before, but is good for nothing else: parts of it are
            prepared for the trace.
        inputs: makes its inputs.
        generates: whether the model is to generate text: its graphs then carry what it keeps of earlier tokens.
        opset: the version of ONNX's operators.

    Raises UserError if neither exporter can.
    """
    with quietly():
        try:
            return _by_transformers(model, inputs, generates, opset)
        except Exception as error:  # whatever a trace meets
            refused = _reason(error)
        if generates and (model.config.is_encoder_decoder or inputs.media is not None):
            raise UserError(f"{type(model).__name__} cannot be exported: {refused}")
        try:
            return Export(Form.FORWARD, _by_torch(model, inputs, opset), generates, "torch", refused)
        except Exception as error:
            raise UserError(
                f"{type(model).__name__} cannot be exported; transformers' exporter: {refused}; "
                f"torch's: {_reason(error)}"
            ) from error


def _by_transformers(model: Any, inputs: Inputs, generates: bool, opset: int) -> Export:
    from transformers.exporters.configs import OnnxConfig
    from transformers.exporters.exporter_dynamo import get_auto_dynamic_shapes
    from transformers.exporters.exporter_onnx import OnnxExporter

    exporter: Any = OnnxExporter  # untyped
    exporter = exporter()

    def traced(module: Any, sample: dict[str, Any]) -> Any:
        sizes = dict.fromkeys(_ONE_SIZE, _BATCH) if inputs.media is None else inputs.media.packing.open_sizes()
        sizes = {name: sizes[name] for name in sizes if name in sample}
        shapes = {**get_auto_dynamic_shapes(sample), **sizes} if sizes else None
        config = OnnxConfig(dynamic=True, dynamic_shapes=shapes, opset_version=opset)
        with delta_rule.of_any_length(module):
            program = exporter.export(module, sample, config).program
        _drop_unused(program.graph)
        _name(program.graph)
        _refuse_fixed(program.graph)
        return program

    shape = replace(_TRACED, length=3 * delta_rule.PIECE) if delta_rule.modules(model) else _TRACED
    sample = inputs.make(inputs.with_room(shape))
    if not generates:
        return Export(Form.FORWARD, {"model": traced(model, sample)}, False, "transformers")
    if model.config.is_encoder_decoder:
        encoder = traced(model.get_encoder(), dict(sample))
        stages = _stages(model, {**sample, "decoder_input_ids": _beginning(model)}, several=False)
        programs = {
            "encoder_model": encoder,
            "decoder_model": traced(*stages["prefill"]),
            "decoder_with_past_model": traced(*stages["decode"]),
        }
        return Export(Form.SEQUENCES, programs, True, "transformers")
    if inputs.media is not None:
        parts = _parts(model, sample, inputs.media)
        return Export(Form.PARTS, {name: traced(*part) for name, part in parts.items()}, True, "transformers")
    stages = _stages(model, sample, several=True)
    if _holds_only_pairs(stages["decode"][1]):
        return Export(Form.CACHED, {"model": traced(*stages["decode"])}, True, "transformers")
    stages = _stages(model, sample, several=False)
    return Export(Form.STAGES, {name: traced(*stage) for name, stage in stages.items()}, True, "transformers")


def _parts(model: Any, sample: dict[str, Any], known: Media) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the parts of a model of text and pictures, or of text and sound, and the arguments of their forwards, by
    the graph's name."""
    parts: dict[str, tuple[Any, dict[str, Any]]] = {
        known.graph: known.packing.seeing(model, sample),
        media.EMBEDS: (media.Embedding(model), {"input_ids": sample["input_ids"]}),
    }
    decoder = {}
    if not pictures.reads_prompts_otherwise(model):
        stages = _stages(model, sample, several=True)
        if _holds_only_pairs(stages["decode"][1]):
            decoder = {media.READS: stages["decode"]}
    if not decoder:
        stages = _stages(model, sample, several=False)
        stages["decode"][1].pop("token_type_ids", None)  # it is read for prompts alone
        decoder = {media.BEGINS: stages["prefill"], media.CONTINUES: stages["decode"]}
    for name, (module, arguments) in decoder.items():
        parts[name] = module, media.of_embeddings(model, arguments, known)
    return parts


def _beginning(model: Any) -> torch.Tensor:
    """Return the first tokens of a decoder, [batch, 3]: more than one, so that their number stays open."""
    return torch.full((_TRACED.batch, 3), start_of(model))


def start_of(model: Any) -> int:
    """Return the token that a decoder beside an encoder begins with. Raises UserError if the model names none."""
    for settings in (model.generation_config, model.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            found = getattr(settings, name, None)
            if found is not None:
                return int(found)
    raise UserError(f"{type(model).__name__}: decoder_start_token_id is missing from its generation_config.json")


def _stages(model: Any, sample: dict[str, Any], several: bool) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the model and the arguments of its forward for a prompt and for a later step of generation.

    Args:
        model: the model.
        sample: arguments for `generate`.
        several: whether the later step is given two tokens, so that the traced graph takes any number.
    """
    from transformers.exporters.utils import decompose_prefill_decode

    prompt = {name: value for name, value in sample.items() if name != "position_ids"}  # `generate` counts itself
    stages = decompose_prefill_decode(model, prompt, multi_token_decode=several)
    for _, arguments in stages.values():
        arguments.pop("return_dict", None)
    return stages


def _holds_only_pairs(arguments: dict[str, Any]) -> bool:
    """Return whether the cache among the arguments is keys and values of every layer and nothing else."""
    from transformers.exporters.utils import get_leaf_tensors

    caches = {name: arguments[name] for name in _CACHES if arguments.get(name) is not None}
    kept = [name.partition(".")[2] for name in get_leaf_tensors(caches) if not name.endswith(_CONSTANT)]
    return bool(kept) and all(_LAYER.fullmatch(name) for name in kept)


# Names ----------------------------------------------------------------------------------------------------------------


def _name(graph: Any) -> None:
    """Give a graph's inputs and outputs the names that optimum and transformers.js know: `past_key_values.0.key`,
    `present.0.key`, `encoder_hidden_states`."""
    is_decoder = any(value.name == "decoder_input_ids" for value in graph.inputs)
    for value in graph.inputs:
        value.name = _decoder_input(value.name) if is_decoder else _kept(value.name, "past_key_values")
        value.shape = None if value.shape is None else type(value.shape)(map(_as_number, value.shape))
    for value in graph.outputs:
        value.name = _kept(value.name, "present")
    given = {value.name for value in graph.inputs}
    for value in [value for value in graph.outputs if value.name in given]:  # Qwen2-Audio returns its mask
        _drop_output(graph, value)


def _drop_unused(graph: Any) -> None:
    """Remove the constants of a cache from a graph's inputs and outputs, where nothing is computed from them."""
    for value in [value for value in graph.outputs if value.name.endswith(_CONSTANT)]:
        _drop_output(graph, value)
    for value in [value for value in graph.inputs if value.name.endswith(_UNUSED) and not value.uses()]:
        graph.inputs.remove(value)


def _drop_output(graph: Any, value: Any) -> None:
    graph.outputs.remove(value)
    node = value.producer()
    if node is not None and node.op_type == "Identity" and not value.uses():
        graph.remove(node, safe=True)


def _refuse_fixed(graph: Any) -> None:
    """Raise ValueError if the trace has made a constant of the batch, or of the length of a text."""
    for value in graph.inputs:
        fixed = [dim for dim in list(value.shape)[:2] if isinstance(dim, int)]
        one_token = value.name in {"input_ids", "inputs_embeds"} and fixed == [1]
        if value.name in _OPEN and fixed and not one_token:
            raise ValueError(f"the traced {value.name} {list(map(str, value.shape))} takes no other length")


def _decoder_input(name: str) -> str:
    renamed = {
        "decoder_input_ids": "input_ids",
        "attention_mask": "encoder_attention_mask",
        "encoder_outputs.last_hidden_state": "encoder_hidden_states",
    }
    return renamed.get(name) or _kept(name, "past_key_values")


def _kept(name: str, prefix: str) -> str:
    """Return the name of a part of a cache with its new prefix, or that of another input as in transformers.js."""
    plain = name.removeprefix("input.").removeprefix("output.")
    for argument in _CACHES:
        if plain.startswith(f"{argument}."):
            rest = plain.removeprefix(f"{argument}.")
            found = _LAYER.fullmatch(rest)
            if found is None:
                return f"{prefix}.{rest}"
            step = f"{_STEPS[found[1]]}." if found[1] else ""
            return f"{prefix}.{found[2]}.{step}{_PAIRS[found[3]]}"
    return {**packing.INPUTS, **sounds.INPUTS}.get(plain, plain)


def _as_number(dim: Any) -> Any:
    """Return a dimension that is a constant as an int: the exporter names some of them "8"."""
    text = str(getattr(dim, "value", dim))
    return int(text) if text.isdecimal() else dim


# torch's exporter -----------------------------------------------------------------------------------------------------


def _by_torch(model: Any, inputs: Inputs, opset: int) -> dict[str, Any]:
    """Return the model's forward without a cache, through `torch.onnx.export`."""
    sample = inputs.make(_TRACED)
    auto = torch.export.Dim.AUTO
    shapes = {
        name: _BATCH if name in _ONE_SIZE else dict.fromkeys(range(value.dim()), auto) for name, value in sample.items()
    }
    with torch.no_grad():
        named = [name for name, value in model(**sample, **_no_cache(model)).items() if isinstance(value, torch.Tensor)]
        program = torch.onnx.export(
            _Forward(model, named),
            kwargs={"arguments": sample},
            dynamo=True,
            dynamic_shapes={"arguments": shapes},
            input_names=list(sample),
            output_names=named,
            opset_version=opset,
            verbose=False,
        )
    assert program is not None
    _refuse_fixed(program.model.graph)
    return {"model": program.model}


class _Forward(torch.nn.Module):
    """A model's forward from a dict of arguments to a tuple of its tensors."""

    def __init__(self, model: Any, named: list[str]) -> None:
        super().__init__()
        self._model = model
        self._named = named
        self._fixed = _no_cache(model)

    def forward(self, arguments: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        returned = self._model(**arguments, **self._fixed)
        return tuple(returned[name] for name in self._named)


def _no_cache(model: Any) -> dict[str, bool]:
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}


# What exporters say ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep what exporters print and log to themselves: it is about their own inner state."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _reason(error: BaseException) -> str:
    """Return the first cause of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:_LONGEST_REASON].rstrip('.')}" if lines else type(error).__name__
