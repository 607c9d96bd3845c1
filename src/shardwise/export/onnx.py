"""`export_onnx`: a checkpoint to a directory of ONNX files, compared with PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.publish import commit
from shardwise.errors import UsageError, UserError
from shardwise.export import media
from shardwise.export.graphs import Export, Form, export, quietly
from shardwise.export.inputs import Inputs
from shardwise.export.running import Session
from shardwise.export.source import TIMES, TIMES_QUANTIZED, Source, opened
from shardwise.export.verify import TEXT, Comparison, Reference

OPSETS = range(18, 24)
"""Versions of ONNX's operators that exporters write."""
DEFAULT_OPSET = 20
INT8 = "_int8"
"""The end of the names of quantized graphs, before `.onnx`."""
_QUANTIZED = ["MatMul", "Gemm", "Gather"]
"""Operators whose weights become int8: products and embeddings."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and what it is worth."""

    directory: Path
    form: Form
    exporter: str
    """Whose exporter made the graphs: "transformers" or "torch"."""
    refused: str
    """Why transformers' exporter did not, in one line; else empty."""
    opset: int
    sizes: dict[str, int]
    """Bytes by graph, its weights included."""
    inputs: dict[str, tuple[str, ...]]
    """Names of the inputs by graph."""
    outputs: dict[str, tuple[str, ...]]
    """Names of the outputs by graph."""
    generates: bool
    checked: Comparison
    perplexity: float | None
    """Of the text, by PyTorch."""
    int8: Comparison | None
    """None if not quantized."""


def export_onnx(  # noqa: PLR0913 - options of a command
    checkpoint: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    opset: int = DEFAULT_OPSET,
    quantize: str | None = None,
    base: str | None = None,
    text: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Exported:
    """Write a model as ONNX files, and compare them with PyTorch in onnxruntime. One process, no process group.

    Args:
        checkpoint: as in `find_model`: `final/`, a step directory, a run, an adapter, a hub's name and so on.
        directory: must be empty or absent. It appears complete, or not at all.
        opset: the version of ONNX's operators.
        quantize: "int8" also writes every graph with weights of 8 bits, under names that end with `_int8`.
        base: for an adapter, the base to merge it into; None = the one that its configuration names.
        text: a file whose perplexity is measured; None = a built-in paragraph.
        say: is told what begins, in a few words.

    Weights are exported in fp32. Files of the configuration and the tokenizer are copied.

    Raises:
        UserError: no such checkpoint; the directory holds something; an unknown `opset` or `quantize`; too little
            memory; neither exporter can export the model, or onnxruntime cannot run what they wrote.
    """
    end = Path(os.path.abspath(directory))  # noqa: PTH100 - not through links
    _check(end, opset, quantize, text)
    say("reading the model")
    with opened(os.fspath(checkpoint), base, TIMES if quantize is None else TIMES_QUANTIZED) as source:
        model = source.model
        generates = bool(model.can_generate())
        inputs = Inputs(model, pad_left=generates and not model.config.is_encoder_decoder)
        say("exporting it")
        graphs = export(model, inputs, generates, opset)
        if end.is_dir():
            end.rmdir()
        with commit.building(end) as building:
            _write(source, graphs.programs, building)
            say("comparing it with PyTorch")
            reference = Reference(model, inputs, graphs, _tokens(source, graphs, text))
            names = list(graphs.programs)
            checked = reference.compare(Session(building, names, graphs.form, inputs.media))
            int8 = None
            if quantize is not None:
                say("quantizing it")
                for name in names:
                    _quantize(graphs.programs[name], building / f"{name}{INT8}.onnx")
                int8 = reference.compare(Session(building, names, graphs.form, inputs.media, INT8))
    return Exported(
        end,
        graphs.form,
        graphs.exporter,
        graphs.refused,
        opset,
        {file.stem: _size(file) for file in sorted(end.glob("*.onnx"))},
        {name: tuple(value.name for value in program.graph.inputs) for name, program in graphs.programs.items()},
        {name: tuple(value.name for value in program.graph.outputs) for name, program in graphs.programs.items()},
        generates,
        checked,
        reference.perplexity,
        int8,
    )


def _check(directory: Path, opset: int, quantize: str | None, text: str | os.PathLike[str] | None) -> None:
    if opset not in OPSETS:
        raise UsageError(f"opset {opset}: must be from {OPSETS[0]} to {OPSETS[-1]}")
    if quantize not in {None, "int8"}:
        raise UsageError(f"quantize {quantize!r}: must be int8, or leave it out")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} exists and is not an empty directory: name another, or remove it first")
    if text is not None and not Path(text).is_file():
        raise UsageError(f"{os.fspath(text)}: no such file of text")
    import onnx  # noqa: F401 - a missing extra is told before any work
    import onnxruntime  # noqa: F401
    import onnxscript  # noqa: F401


def _write(source: Source, programs: dict[str, Any], directory: Path) -> None:
    for name, program in programs.items():
        _save(program, directory / f"{name}.onnx")
    for name, content in source.files.items():
        (directory / name).write_bytes(content)


def _save(program: Any, path: Path) -> None:
    """Write a graph, its weights in a file of their own: protobuf ends at 2 GiB."""
    import onnx_ir

    onnx_ir.save(program, str(path), external_data=f"{path.name}.data")


def _quantize(program: Any, path: Path) -> None:
    """Write a graph with weights of 8 bits, whose activations onnxruntime quantizes as it runs."""
    from transformers.exporters.configs import ExportFormat
    from transformers.exporters.quantizers.quantizer_onnxruntime import OnnxRuntimeDynamicConfig, OnnxRuntimeQuantizer

    settings = OnnxRuntimeDynamicConfig(op_types_to_quantize=_QUANTIZED, per_channel=True)
    with quietly():
        quantized = OnnxRuntimeQuantizer(settings).quantize(program, {}, ExportFormat.ONNX)
    _save(quantized, path)


def _tokens(source: Source, graphs: Export, text: str | os.PathLike[str] | None) -> torch.Tensor | None:
    """Return the ids of the text whose perplexity is measured, [1, length]; None where there is none."""
    is_causal = graphs.generates and graphs.form is not Form.SEQUENCES and media.BEGINS not in graphs.programs
    if not is_causal or source.tokenizer is None:
        if text is not None:
            raise UserError(
                f"--text {os.fspath(text)}: perplexity needs a causal language model, none of whose tokens sees later "
                "ones, and its tokenizer"
            )
        return None
    words = TEXT if text is None else Path(text).read_text(encoding="utf-8")
    ids = source.tokenizer(words, return_tensors="pt", verbose=False)["input_ids"]
    if ids.shape[1] < 2:
        raise UserError(f"--text {text}: has fewer than two tokens")
    return torch.as_tensor(ids)


def _size(file: Path) -> int:
    return sum(part.stat().st_size for part in (file, file.with_name(f"{file.name}.data")) if part.is_file())
