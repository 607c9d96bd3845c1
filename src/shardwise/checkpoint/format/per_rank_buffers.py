"""Tensors that every rank holds whole and that differ between ranks, such as statistics of unsynchronised batch norms.

The model's files have rank 0's numbers. `by_rank.safetensors` has those of all ranks: each such tensor with a further
first dim of size world_size. A load at the same world size gives each rank its own numbers back, as it does with random
states.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import xxhash

from shardwise.checkpoint.format.local_tensor import Piece
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.names.index_map import Place
from shardwise.checkpoint.ranks.consensus import Peers

STEM = "by_rank"


def differing(pieces: Iterable[Piece], peers: Peers) -> list[Piece]:
    """Return this rank's rows, 1-D, of the tensors in which some rank differs. Collective.

    pieces: with the same names on every rank.
    """
    whole = [piece for piece in pieces if piece.is_whole and piece.tensor.numel()]
    if not whole or peers.world_size == 1:
        return []
    alike = peers.equal_on_all_ranks([_checksum(piece) for piece in whole])
    rows = [_row(piece, peers) for piece, same in zip(whole, alike, strict=True) if not same]
    return [replace(row, tensor=row.tensor.reshape(-1)) for row in rows]


def own_rows(
    wanted: Sequence[tuple[Piece, Place]], stored: dict[str, StoredTensor], peers: Peers
) -> list[tuple[Piece, Place]]:
    """Return this rank's rows of the pieces that are read anyway, to be read after these. No communication.

    Warns, on rank 0, if another number of ranks saved them: then rank 0's numbers stay.
    """
    rows = [_row(piece, peers) for piece, _ in wanted if piece.is_whole and piece.name in stored]
    fitting = [row for row in rows if stored[row.name].shape == row.shape]
    if len(fitting) < len(rows) and peers.is_first:
        lost = next(row.name for row in rows if stored[row.name].shape != row.shape)
        warnings.warn(
            f"shardwise: {len(rows) - len(fitting)} tensors, such as {lost!r}, differed between ranks when "
            "another number of ranks saved them: every rank now has those of rank 0",
            stacklevel=5,
        )
    return [(row, row.places[0]) for row in fitting]


def _row(piece: Piece, peers: Peers) -> Piece:
    shape = (peers.world_size, *piece.shape)
    start = peers.rank * piece.tensor.numel()
    return replace(piece, shape=shape, start=start, is_whole=False, places=(Place.whole(piece.name, shape),))


def _checksum(piece: Piece) -> int:
    """Return a checksum of this rank's numbers, in [0, 2^62)."""
    data = piece.tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu()
    return int(xxhash.xxh3_64_intdigest(data.numpy().data)) >> 2
