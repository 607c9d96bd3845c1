"""The report of `shardwise export`."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

from shardwise.export.onnx import INT8, Exported
from shardwise.export.verify import Comparison
from shardwise.tables import format_bytes


def quieten() -> None:
    """Keep transformers' warnings and progress bars off the terminal: what matters is in the report."""
    from transformers.utils import logging

    untyped: Any = logging
    untyped.set_verbosity_error()
    untyped.disable_progress_bar()


def say(line: str) -> None:
    """Show what begins, if standard error is a terminal."""
    if sys.stderr.isatty():
        print(f"{line} ...", file=sys.stderr, flush=True)


def lines(exported: Exported, tolerance: float) -> list[str]:
    """Return what was written and how it compares with PyTorch, a line each."""
    exact = {name: size for name, size in exported.sizes.items() if not name.endswith(INT8)}
    said = [f"{exported.directory}: {exported.form.value}; opset {exported.opset}, exported by {exported.exporter}"]
    if exported.refused:
        without = "; tokens are computed again for each new one" if exported.generates else ""
        said.append(f"  transformers' exporter refused: {exported.refused}{without}")
    for name, size in exact.items():
        said.append(
            f"  {name}.onnx, {format_bytes(size)}: {_named(exported.inputs[name])} -> {_named(exported.outputs[name])}"
        )
    checked = exported.checked
    said.append(
        f"onnxruntime {version('onnxruntime')} beside PyTorch {version('torch')}: {', '.join(map(str, checked.shapes))}"
    )
    said += [f"  {line}" for line in _compared(exported, checked)]
    if exported.int8 is not None:
        small = format_bytes(sum(exported.sizes[f"{name}{INT8}"] for name in exact))
        said.append(f"int8 (*{INT8}.onnx, {small} instead of {format_bytes(sum(exact.values()))})")
        said += [f"  {line}" for line in _compared(exported, exported.int8)]
    if checked.passes(tolerance):
        said.append(f"verified: no difference above {tolerance:g}, every answer the same")
    else:
        said.append(f"NOT VERIFIED: a difference above {tolerance:g}, or another answer; see --tolerance")
    return said


def _compared(exported: Exported, found: Comparison) -> list[str]:
    said = [f"greatest difference {found.difference:.3g}"]
    if found.answers:
        what = "greedy tokens" if exported.generates else "answers (where logits are greatest)"
        said.append(f"{found.same} of {found.answers} {what} the same, {found.same / found.answers:.1%}")
    if found.perplexity is not None and exported.perplexity is not None:
        ours, pytorch = (
            f"{one:.4g}" if one < 1000 else f"{one:,.0f}" for one in (found.perplexity, exported.perplexity)
        )
        said.append(f"perplexity {ours}, PyTorch's {pytorch}")
    return said


def _named(names: tuple[str, ...]) -> str:
    """Return names as text; those of a cache as one."""
    shown = dict.fromkeys(
        f"{name.partition('.')[0]}.*" if name.startswith(("past_key_values.", "present.")) else name for name in names
    )
    return ", ".join(shown)
