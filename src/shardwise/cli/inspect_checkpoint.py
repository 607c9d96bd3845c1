"""The report of `shardwise inspect CHECKPOINT`, for a terminal of 80 columns."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from shardwise.checkpoint import Inspection
from shardwise.checkpoint.interchange.inspection import InspectedRun, ModuleTensors, Partial
from shardwise.cli.convert import KINDS, counted
from shardwise.tables import format_bytes

_WIDTH = 80
_EXTRA_SHOWN = 8
_FILES_SHOWN = 12


def report(found: Inspection | Partial | InspectedRun, every_tensor: bool = False) -> str:
    """Return the text to print about a checkpoint, a partial one or a run."""
    if isinstance(found, Partial):
        return "\n".join(_partial(found))
    if isinstance(found, InspectedRun):
        return "\n".join(_run(found))
    sections = [_head(found), _tensors(found, every_tensor), _optimizer(found), _extra(found), _files(found.files)]
    return "\n\n".join("\n".join(section) for section in (*sections, _health(found)) if section)


def reading(done: int, total: int) -> str:
    """Return the progress of reading, in words."""
    return f"reading {format_bytes(done)} of {format_bytes(total)}"


def _head(found: Inspection) -> list[str]:
    facts = []
    if found.step is not None:
        facts.append(f"step {found.step:,}")
    if found.saved_by:
        facts.append(f"saved by {counted(found.saved_by, 'rank')}")
    elif found.version:
        facts.append("converted")
    if found.version:
        facts.append(f"shardwise {found.version}")
    size = format_bytes(sum(found.files.values()))
    facts.append(f"{size} in {counted(len(found.files), 'file')}")
    return [f"{found.location}: {KINDS[found.kind.value]}", ", ".join(facts)]


def _tensors(found: Inspection, every_tensor: bool) -> list[str]:
    if not found.model:
        return []
    rows: list[Sequence[str]] = [("module", "tensors", "elements", "bytes", "dtype")]
    for same in _runs(found.model):
        rows.append(_row(same))
        if every_tensor:
            rows.extend(_tensor_row(tensor) for group in same for tensor in group.tensors)
    everything = [tensor for group in found.model for tensor in group.tensors]
    rows.append(_row([ModuleTensors("all", tuple(everything))]))
    return _columns(rows, right=(1, 2, 3))


def _runs(groups: Iterable[ModuleTensors]) -> list[list[ModuleTensors]]:
    """Join consecutive groups that differ only in the number at the end of their prefix, such as blocks."""
    found: list[list[ModuleTensors]] = []
    for group in groups:
        before = found[-1][-1] if found else None
        stem = group.prefix.rpartition(".")[0]
        alike = before is not None and group.prefix.rpartition(".")[2].isdecimal()
        if before is not None and alike and (before.prefix.rpartition(".")[0], before.form) == (stem, group.form):
            found[-1].append(group)
        else:
            found.append([group])
    return found


def _row(groups: Sequence[ModuleTensors]) -> Sequence[str]:
    name = groups[0].prefix or "(top level)"
    if len(groups) > 1:
        name = f"{name} to {groups[-1].prefix.rpartition('.')[2]}"
    dtypes = sorted({tensor.dtype for group in groups for tensor in group.tensors})
    return (
        name,
        str(sum(len(group.tensors) for group in groups)),
        f"{sum(group.numel for group in groups):,}",
        format_bytes(sum(group.nbytes for group in groups)),
        " ".join(dtypes),
    )


def _tensor_row(tensor: Any) -> Sequence[str]:
    shape = "x".join(map(str, tensor.shape)) or "one"
    return (f"  {tensor.name}", shape, f"{tensor.numel:,}", format_bytes(tensor.nbytes), tensor.dtype)


def _optimizer(found: Inspection) -> list[str]:
    if found.optimizer is None:
        return ["no optimizer"] if found.model else []
    state = found.optimizer["state"]
    kinds = sorted({name for values in state.values() for name in values})
    kept = sum(bool(values) for values in state.values())
    name = found.optimizer["class"] if found.optimizer["class"] != "unknown" else "optimizer"
    of = f"{counted(kept, 'parameter')}, {format_bytes(found.optimizer_bytes)}"
    lines = [f"{name}: {', '.join(kinds) or 'nothing'} of {of}"]
    for number, group in enumerate(found.optimizer["groups"]):
        options = ", ".join(f"{key} {json.dumps(value)}" for key, value in group.items() if _told(key, value))
        lines += _wrapped(f"  group {number}: {counted(len(group['fqns']), 'parameter')}, {options}", 4)
    return lines


def _told(key: str, value: Any) -> bool:
    """Return whether to show an option of a parameter group: options that are None or False are left out."""
    return key != "fqns" and value is not None and value is not False


def _extra(found: Inspection) -> list[str]:
    lines = []
    items = list((found.extra or {}).items())
    for key, value in items[:_EXTRA_SHOWN]:
        text = json.dumps(value)
        lines.append(_cut(f"  {key}: {text}", _WIDTH))
    if len(items) > _EXTRA_SHOWN:
        lines.append(f"  and {len(items) - _EXTRA_SHOWN} more")
    if found.left_out:
        lines += _wrapped(f"  also stored, but not carried over by convert: {', '.join(found.left_out)}", 4)
    return ["extra", *lines] if lines else []


def _files(files: dict[str, int]) -> list[str]:
    if not files:
        return ["no files"]
    rows = [(f"  {name}", format_bytes(size)) for name, size in list(files.items())[:_FILES_SHOWN]]
    lines = ["files", *_columns(rows, right=(1,))]
    if len(files) > _FILES_SHOWN:
        lines.append(f"  and {len(files) - _FILES_SHOWN} more")
    return lines


def _health(found: Inspection) -> list[str]:
    if not found.damage:
        return [f"health: good ({found.checked})"]
    return ["health: DAMAGED", *(line for text in found.damage for line in _wrapped(f"  {text}", 4))]


def _partial(found: Partial) -> list[str]:
    what = f"{found.location}: left by a crash, or a save is under way; it is not a checkpoint"
    size = f"{format_bytes(sum(found.files.values()))} in {counted(len(found.files), 'file')}"
    return [*_wrapped(what, 2), f"{size}; the next save to the same name replaces it", "", *_files(found.files)]


def _run(found: InspectedRun) -> list[str]:
    rows: list[Sequence[str]] = [("checkpoint", "step", "ranks", "bytes", "")]
    good = [one.name for one in found.checkpoints if one.state == "committed" and not one.damage]
    for one in found.checkpoints:
        note = "" if one.state == "committed" else one.state
        note = "damaged" if one.damage else note
        if good and one.name == good[-1]:
            note = "newest"
        step = "" if one.step is None else f"{one.step:,}"
        rows.append((f"  {one.name}", step, str(one.saved_by or ""), format_bytes(one.nbytes), note))
    lines = [f"{found.location}: a run with {counted(len(good), 'checkpoint')}"]
    lines += _columns(rows, right=(1, 2, 3)) if found.checkpoints else []
    lines += [line for one in found.checkpoints for text in one.damage for line in _wrapped(f"  {text}", 4)]
    final = f"finished: `shardwise inspect {found.location}/final` shows the model"
    lines.append(final if found.has_final else "not finished: no final/")
    if found.checkpoints:
        lines.append("(sizes checked; inspect one of them to check every byte)")
    return lines


def _columns(rows: Sequence[Sequence[str]], right: tuple[int, ...]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rest = sum(widths[1:]) + 2 * (len(widths) - 1)
    widths[0] = max(12, min(widths[0], _WIDTH - rest))
    lines = []
    for row in rows:
        cells = [_middle(row[0], widths[0]).ljust(widths[0])]
        cells += [row[c].rjust(widths[c]) if c in right else row[c].ljust(widths[c]) for c in range(1, len(row))]
        lines.append("  ".join(cells).rstrip())
    return lines


def _middle(text: str, width: int) -> str:
    """Shorten a text in its middle, keeping more of its end, where names differ."""
    if len(text) <= width:
        return text
    front = (width - 3) // 3
    return f"{text[:front]}...{text[len(text) - (width - 3 - front) :]}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _wrapped(text: str, indent: int) -> list[str]:
    """Wrap a text at spaces and indent all lines after the first. Paths stay whole, so that they can be copied."""
    return textwrap.wrap(text, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
