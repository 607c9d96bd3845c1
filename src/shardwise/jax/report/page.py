"""An HTML page about a compiled program: placement, memory and collectives. One file, without scripts."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import jax

from shardwise.errors import UsageError
from shardwise.jax.report.checks import check
from shardwise.jax.report.collectives import MAKE_REDUCE_SCATTERS, NOTE, CollectivesReport, collectives
from shardwise.jax.report.colours import KINDS, OPERATIONS, OTHER, of_pieces
from shardwise.jax.report.compiled import mesh_of, unwrapped
from shardwise.jax.report.described import ArrayDescription, TreeDescription, describe
from shardwise.jax.report.memory import ProgramMemory, memory
from shardwise.jax.report.tables import amount, without_numbers

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .2rem .7rem; text-align: left; border-bottom: 1px solid #e4e4e4 }
.n { text-align: right; font-variant-numeric: tabular-nums } code { font-size: .92em }
.bar { display: flex; height: 1.5rem; background: #f1f1f1 } .bar i { display: block }
.key i { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem }
.cut { display: grid; width: 13rem; height: 4.4rem; font-size: .7rem; color: #fff }
.cut b { display: flex; align-items: center; justify-content: center; overflow: hidden; font-weight: 500 }
.say { border-left: 4px solid #b3541e; padding: .3rem .8rem; background: #fbf3ee }
.good { border-color: #5b8c3a; background: #f0f6ec }
"""
_MANY = 64
"""A picture of at least this many pieces omits the devices' numbers."""


def page(compiled: Any, path: str | os.PathLike[str]) -> None:
    """Write a page about a compiled program: `describe` of its arguments, `memory`, `collectives` and `check`.

    With several processes, let one of them call this. Does not communicate.

    Args:
        compiled: `step.lower(state, batch).compile()`, or any other program compiled by JAX for a mesh.
        path: of the HTML file, which needs no other file.

    Raises:
        UsageError: a program whose arguments are not on a mesh, or a file that cannot be written.
    """
    compiled = unwrapped(compiled)
    mesh = mesh_of(compiled)
    platform = mesh.devices.flat[0].platform
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    body = [
        f"<h1>A program for {mesh.size} {escape(platform)} devices</h1><p>{escape(axes)}</p>",
        *_said(check(compiled)),
        *needs(memory(compiled), collectives(compiled)),
        *_arrays(describe(_arguments(compiled))),
    ]
    write(f"{mesh.size} devices: {axes}", body, path)


def write(title: str, body: Iterable[str], path: str | os.PathLike[str]) -> None:
    """Write an HTML page.

    Args:
        title: plain text, which is escaped.
        body: pieces of HTML.
        path: of the file.

    Raises:
        UsageError: the file cannot be written.
    """
    head = f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>\n"
    try:
        Path(path).write_text(head + "\n".join(body), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {os.fspath(path)}: {error.strerror}") from None


def needs(held: ProgramMemory, sent: CollectivesReport) -> list[str]:
    """Return HTML about the memory and the collectives of one device in one run of a program."""
    return [*_memory(held), *_collectives(sent)]


def _arguments(compiled: Any) -> Any:
    """Return the program's arguments as abstract arrays with shardings; None for those that it does not read."""
    arguments, tree = jax.tree.flatten(compiled.args_info[0])
    shardings = jax.tree.leaves(compiled.input_shardings[0], is_leaf=lambda sharding: sharding is None)
    placed = [
        None if sharding is None else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(arguments, shardings, strict=True)
    ]
    found = jax.tree.unflatten(tree, placed)
    return found[0] if len(found) == 1 else dict(zip(("state", "batch"), found, strict=False))


def _said(lines: Sequence[str]) -> Iterable[str]:
    """Yield HTML with the lines from `check`."""
    if not lines:
        yield '<p class="say good">Nothing looks unintended.</p>'
    yield from (f'<p class="say">{escape(line)}</p>' for line in lines)


def _memory(found: ProgramMemory) -> Iterable[str]:
    """Yield HTML with the bytes of one device as a bar, and a table of the bytes by kind, whole and per device."""
    yield "<h2>Memory of one device</h2>"
    parts = {kind.name: kind.device_bytes for kind in found.kinds}
    parts["new outputs"] = found.output_bytes - found.alias_bytes
    parts["temporaries"] = found.temporary_bytes
    yield _bar(parts, KINDS)
    more = " Gradients are among the temporaries." if found.gradients else ""
    yield f"<p>Together at most {amount(found.peak_bytes)}, as reported by XLA.{more}</p>"
    kinds = [*found.kinds, *([found.gradients] if found.gradients else [])]
    yield table(("", "whole", "a device"), [(k.name, amount(k.nbytes), amount(k.device_bytes)) for k in kinds], {1, 2})


def _collectives(found: CollectivesReport) -> Iterable[str]:
    """Yield HTML with the bytes by operation as a bar, and a table with a row for each operation and parameter."""
    yield "<h2>Collectives of one run</h2>"
    if not found.parts:
        yield "<p>None.</p>"
        return
    yield _bar(found.bytes(), OPERATIONS)
    rows = [(line.operation, line.axes, line.what, line.times, amount(line.nbytes)) for line in found.lines()]
    yield table(("operation", "axes", "of", "times", "bytes a device"), rows, {3, 4})
    if found.platform not in MAKE_REDUCE_SCATTERS:
        yield f"<p>{escape(NOTE)}</p>"


def _arrays(found: TreeDescription) -> Iterable[str]:
    """Yield an HTML table with one row for arrays that differ only in numbers, and a picture of their placement."""
    alike: dict[tuple[Any, ...], list[ArrayDescription]] = defaultdict(list)
    for array in found.arrays:
        alike[without_numbers(array.path), array.shape, array.dtype, array.spec].append(array)
    yield f"<h2>{len(found.arrays)} arrays: {amount(found.nbytes)}, {amount(found.device_bytes)} a device</h2>"
    yield "<p>In the pictures each cell is a piece, with the numbers of the devices that hold it.</p>"
    yield "<table><tr><th>path<th>arrays<th>shape<th>dtype<th>spec<th>whole<th>a device<th>who has what"
    for (path, shape, dtype, spec), same in alike.items():
        sizes = [amount(sum(sizes)) for sizes in zip(*((p.nbytes, p.device_bytes) for p in same), strict=True)]
        cells = [f"<code>{escape(path)}</code>", len(same), shape, dtype, spec, *sizes, _picture(found, same[0])]
        numbers = {1, 5, 6}
        yield "<tr>" + "".join(
            f"<td class=n>{cell}" if index in numbers else f"<td>{cell}" for index, cell in enumerate(cells)
        )
    yield "</table>"


def _picture(found: TreeDescription, array: ArrayDescription) -> str:
    """Return HTML of an array's pieces as a grid; empty if every device holds the array whole."""
    if array.pieces == 1 or not array.shape:
        return ""
    pieces = found.pieces(array.path)
    count = len(pieces.devices)
    cells = "".join(
        f'<b style="background:{colour}">{",".join(map(str, sorted(devices))) if count < _MANY else ""}</b>'
        for colour, devices in zip(of_pieces(count), pieces.devices.values(), strict=True)
    )
    columns = pieces.shape[-1]
    return f'<div class=cut style="grid-template-columns:repeat({columns},1fr)">{cells}</div>'


def _bar(parts: dict[str, int], colours: dict[str, str]) -> str:
    """Return HTML of a bar with the parts as lengths, and a key of the colours."""
    parts = {name: size for name, size in parts.items() if size}
    total = sum(parts.values()) or 1
    bars = "".join(
        f'<i style="width:{100 * size / total:.2f}%;background:{colours.get(name, OTHER)}"></i>'
        for name, size in parts.items()
    )
    key = "".join(
        f'<i style="background:{colours.get(name, OTHER)}"></i>{escape(name)} {amount(size)}'
        for name, size in parts.items()
    )
    return f"<div class=bar>{bars}</div><p class=key>{key}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], numbers: set[int]) -> str:
    """Return an HTML table. All cells are plain text, which is escaped.

    numbers: the indices of the columns that are aligned right.
    """

    def line(tag: str, cells: Sequence[object]) -> str:
        marks = (" class=n" if index in numbers else "" for index in range(len(cells)))
        return "<tr>" + "".join(f"<{tag}{mark}>{escape(str(cell))}" for cell, mark in zip(cells, marks, strict=True))

    return "<table>" + line("th", head) + "".join(line("td", row) for row in rows) + "</table>"
