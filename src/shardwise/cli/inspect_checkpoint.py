"""The report of `shardwise inspect CHECKPOINT`, for a terminal of 80 columns."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from io import StringIO
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

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
    for same in _alike(found.model):
        rows.append(_row(same))
        if every_tensor:
            for tensor in (tensor for group in same for tensor in group.tensors):
                shape = "x".join(map(str, tensor.shape)) or "one"
                size = format_bytes(tensor.nbytes)
                rows.append((f"  {tensor.name}", shape, f"{tensor.numel:,}", size, tensor.dtype))
    everything = [tensor for group in found.model for tensor in group.tensors]
    rows.append(_row([ModuleTensors("all", tuple(everything))]))
    return _table(rows, right=(1, 2, 3))


def _alike(groups: Iterable[ModuleTensors]) -> list[list[ModuleTensors]]:
    """Join consecutive groups that differ only in the number at the end of their prefix, such as blocks."""

    def form(group: ModuleTensors) -> tuple[object, ...]:
        stem, _, number = group.prefix.rpartition(".")
        return (stem, group.form) if number.isdecimal() else (group.prefix,)

    return [list(same) for _, same in groupby(groups, form)]


def _row(groups: Sequence[ModuleTensors]) -> Sequence[str]:
    name = groups[0].prefix or "(top level)"
    if len(groups) > 1:
        name = f"{name} to {groups[-1].prefix.rpartition('.')[2]}"
    return (
        name,
        str(sum(len(group.tensors) for group in groups)),
        f"{sum(group.numel for group in groups):,}",
        format_bytes(sum(group.nbytes for group in groups)),
        " ".join(sorted({tensor.dtype for group in groups for tensor in group.tensors})),
    )


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
        options_set = [(key, value) for key, value in group.items() if key != "fqns" and value is not None]
        options = ", ".join(f"{key} {json.dumps(value)}" for key, value in options_set if value is not False)
        lines += _wrapped(f"  group {number}: {counted(len(group['fqns']), 'parameter')}, {options}", 4)
    return lines


def _extra(found: Inspection) -> list[str]:
    lines = [f"  {key}: {json.dumps(value)}" for key, value in (found.extra or {}).items()]
    shown = [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..." for line in lines[:_EXTRA_SHOWN]]
    lines = [*shown, *_more(len(lines) - _EXTRA_SHOWN)]
    if found.left_out:
        lines += _wrapped(f"  also stored, but not carried over by convert: {', '.join(found.left_out)}", 4)
    return ["extra", *lines] if lines else []


def _files(files: dict[str, int]) -> list[str]:
    rows = [(f"  {name}", format_bytes(size)) for name, size in files.items()]
    if not rows:
        return ["no files"]
    return ["files", *_table(rows[:_FILES_SHOWN], right=(1,)), *_more(len(rows) - _FILES_SHOWN)]


def _more(number: int) -> list[str]:
    return [f"  and {number} more"] if number > 0 else []


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
        note = "damaged" if one.damage else "newest" if [one.name] == good[-1:] else ""
        note = note or one.state.replace("committed", "")
        step = "" if one.step is None else f"{one.step:,}"
        rows.append((f"  {one.name}", step, str(one.saved_by or ""), format_bytes(one.nbytes), note))
    lines = [f"{found.location}: a run with {counted(len(good), 'checkpoint')}"]
    lines += _table(rows, right=(1, 2, 3)) if found.checkpoints else []
    lines += [line for one in found.checkpoints for text in one.damage for line in _wrapped(f"  {text}", 4)]
    final = f"finished: `shardwise inspect {found.location}/final` shows the model"
    lines.append(final if found.has_final else "not finished: no final/")
    if found.checkpoints:
        lines.append("(sizes checked; inspect one of them to check every byte)")
    return lines


def _table(rows: Sequence[Sequence[str]], right: Iterable[int]) -> list[str]:
    """Return the lines of a table whose `right` columns are aligned to the right; names that are too long go on in the
    next line."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for column in range(len(rows[0])):
        table.add_column(justify="right" if column in right else "left", no_wrap=bool(column), overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console(file=StringIO(), width=_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def _wrapped(text: str, indent: int) -> list[str]:
    """Wrap a text at spaces and indent all lines after the first. Paths stay whole, so that they can be copied."""
    return textwrap.wrap(text, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
