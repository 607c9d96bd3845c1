"""The groups of devices of a collective, parsed from XLA's text, and the mesh axes that they correspond to."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
from jax.sharding import Mesh

Groups = frozenset[frozenset[int]]
"""Groups of devices, each a position in the mesh's flattened devices."""

_IOTA = r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"


def groups_in(text: str, devices: int) -> Groups:
    """Parse the groups of a collective.

    Args:
        text: its operands and attributes as XLA prints them.
        devices: number of devices of the program, which are one group if the text names none.
    """
    if "source_target_pairs=" in text:
        return _braces(text.partition("source_target_pairs=")[2])
    said = text.partition("replica_groups=")[2]
    if said.startswith("mesh["):
        return _named(said)
    if said.startswith("{{"):
        return _braces(said)
    iota = re.match(_IOTA, said)
    if iota is not None:
        return _rows(_iota(iota).reshape(_ints(iota[1])))
    return frozenset({frozenset(range(devices))})


def axes_of_groups(groups: Groups, mesh: Mesh) -> str:
    """Return the axes along which the groups' devices differ, such as "fsdp" or "replica x fsdp"; "?" if none fit."""
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    names = [name for name in mesh.axis_names if mesh.shape[name] > 1]
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            last = [mesh.axis_names.index(name) for name in axes]
            length = math.prod(mesh.shape[name] for name in axes)
            rows = _rows(np.moveaxis(places, last, range(-count, 0)).reshape(-1, length))
            if all(any(group <= row for row in rows) for group in groups):
                return " x ".join(axes)
    return "?"


def _named(said: str) -> Groups:
    """Parse the groups along the axes in braces, from "mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'a'}"."""
    shape = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", said.partition("]")[0])}
    ids = re.match(r"[^]]*\], device_ids=\((\[[^)]*\)?)\)", said)
    order = np.arange(math.prod(shape.values()))
    if ids is not None:
        transposed = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids[1])
        assert transposed is not None
        order = order.reshape(_ints(transposed[1]))
        order = order.transpose(_ints(transposed[2])) if transposed[2] else order
    used = re.findall(r"'(\w+)'", re.findall(r"\{([^}]*)\}", said)[0])
    last = [list(shape).index(name) for name in used]
    length = math.prod(shape[name] for name in used)
    return _rows(np.moveaxis(order.reshape(tuple(shape.values())), last, range(-len(last), 0)).reshape(-1, length))


def _iota(match: re.Match[str]) -> np.ndarray:
    numbers = np.arange(math.prod(_ints(match[2]))).reshape(_ints(match[2]))
    return numbers.transpose(_ints(match[3])) if match[3] else numbers


def _braces(said: str) -> Groups:
    inside = said[: said.index("}}") + 1]
    return frozenset(frozenset(_ints(group)) for group in re.findall(r"\{([\d,]+)\}", inside))


def _rows(table: np.ndarray) -> Groups:
    return frozenset(frozenset(int(place) for place in row) for row in table)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
