"""The matrices of one unit: their owners, and the transfers between owners and the ranks that hold pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.sharded_parameter import Part, Placement, ShardedParameter
from shardwise.optim.matrices.lane import Arrivals, Lane, MatrixTransfer, most_sent_bytes
from shardwise.optim.matrices.ownership import OwnerRank

Wholes = dict[int, tuple[Tensor, Tensor]]
"""By index in a unit, a matrix and its gradient."""


def pieces_of(placement: Placement) -> list[tuple[int, int, int]]:
    """Return (rank in the shard group, start, stop) for every rank that holds elements of the parameter."""
    layout = placement.layout
    entry = layout.entries[placement.index]
    if not entry.numel:
        return []
    first, last = entry.start // layout.shard_numel, (entry.stop - 1) // layout.shard_numel
    held = [(rank, layout.fragment(placement.index, rank)) for rank in range(first, last + 1)]
    return [(rank, fragment.start, fragment.stop) for rank, fragment in held]


def axis_of(matrix: ShardedParameter) -> Collectives | None:
    """Return the tensor axis along which the matrix is cut, or None."""
    _, *axes = matrix.placement.groups
    return axes[0] if axes else None


def parts_of(matrix: ShardedParameter) -> Sequence[Part]:
    """Return the part of each rank of the tensor axis along which the matrix is cut; none if it is not."""
    if axis_of(matrix) is None:
        return ()
    from shardwise.engine.extensions.tensor_parallel import TensorPlacement  # imports torch's DTensor

    assert isinstance(matrix.placement, TensorPlacement)
    return matrix.placement.parts


class Lanes:
    """The lanes of one mesh: pieces to owners and back in a shard group, updated pieces to the replicas, and between
    the two, what is cut along the tensor axis to the one owner there, and back."""

    def __init__(self, mesh: Mesh, axis: Collectives | None, units: Sequence[UnitMatrices]) -> None:
        """Every rank must call this."""

        def most(transfers: Sequence[tuple[MatrixTransfer, ...]], copies: int) -> int:
            dtypes = [[[matrix.local.dtype] * copies for matrix in unit.matrices] for unit in units]
            return max(map(most_sent_bytes, transfers, dtypes), default=0)

        self.to_owners = Lane(mesh.shard, most([unit.to_owners for unit in units], 2))
        self.from_owners = Lane(mesh.shard, most([unit.from_owners for unit in units], 1))
        self.to_replicas = Lane(mesh.replicate, most([unit.to_replicas for unit in units], 1))
        self.along_axis: tuple[Lane, ...] = ()
        """To the owners and back; empty without a tensor axis."""
        if axis is not None:
            ways = ([unit.to_one for unit in units], 2), ([unit.from_one for unit in units], 1)
            self.along_axis = tuple(Lane(axis, most(*way)) for way in ways)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all lanes."""
        return sum(lane.nbytes for lane in (self.to_owners, self.from_owners, self.to_replicas, *self.along_axis))


class UnitMatrices:
    """The matrices of one unit and their owners. Has no other state."""

    def __init__(
        self,
        mesh: Mesh,
        matrices: Sequence[ShardedParameter],
        owners: Sequence[OwnerRank],
        axis: Collectives | None = None,
        parts: Sequence[Sequence[Part]] = (),
    ) -> None:
        """
        Args:
            axis: the tensor axis along which some of them are cut.
            parts: of each matrix that is cut, by rank of that axis; of others empty.
        """
        self.mesh = mesh
        self.matrices = list(matrices)
        self.owners = list(owners)
        self._own = OwnerRank(mesh.replicate.rank, mesh.shard.rank)
        self._axis = axis
        self._parts = parts

    def _is_gathered_here(self, index: int) -> bool:
        """Whether this rank gets all that its shard group holds of the matrix."""
        return self.owners[index][:2] == self._own[:2]

    @cached_property
    def to_owners(self) -> tuple[MatrixTransfer, ...]:
        """The transfers in this shard group of pieces to those of its ranks that own the matrix, or own it together
        with others of the tensor axis."""
        return tuple(
            MatrixTransfer(index, rank, owner.rank, start, stop)
            for index, (matrix, owner) in enumerate(zip(self.matrices, self.owners, strict=True))
            if owner.replica == self._own.replica
            for rank, start, stop in pieces_of(matrix.placement)
            if rank != owner.rank
        )

    @cached_property
    def from_owners(self) -> tuple[MatrixTransfer, ...]:
        """The transfers of the same pieces back from the owners."""
        return _back(self.to_owners)

    @cached_property
    def to_one(self) -> tuple[MatrixTransfer, ...]:
        """The transfers along this rank's tensor axis, of parts that its ranks have gathered, to the owner."""
        return tuple(
            MatrixTransfer(index, rank, owner.tensor, 0, numel)
            for index, owner in enumerate(self.owners)
            if owner.tensor is not None and self._is_gathered_here(index)
            for rank, part in enumerate(self._parts[index])
            if rank != owner.tensor and (numel := math.prod(sum(b - a for a, b in ranges) for ranges in part))
        )

    @cached_property
    def from_one(self) -> tuple[MatrixTransfer, ...]:
        """The transfers of the same parts back from the owner."""
        return _back(self.to_one)

    @cached_property
    def to_replicas(self) -> tuple[MatrixTransfer, ...]:
        """The transfers in this replicate group, whose ranks hold equal pieces, from the owner's replica to others."""
        found = []
        for index, (matrix, owner) in enumerate(zip(self.matrices, self.owners, strict=True)):
            piece = matrix.placement.fragment
            others = [replica for replica in range(self.mesh.replicate.world_size) if replica != owner.replica]
            if piece.numel:
                found += [MatrixTransfer(index, owner.replica, other, piece.start, piece.stop) for other in others]
        return tuple(found)

    def gather(self, lane: Lane, present: frozenset[int]) -> Arrivals | None:
        """Send pieces of the present matrices and of their gradients to their owners. Every rank of the shard group
        must call this."""

        def piece(transfer: MatrixTransfer) -> tuple[Tensor, Tensor]:
            matrix = self.matrices[transfer.matrix]
            return _gradient(matrix), matrix.local

        transfers = [transfer for transfer in self.to_owners if transfer.matrix in present]
        dtypes = [[matrix.local.dtype] * 2 for matrix in self.matrices]
        return lane.post(transfers, dtypes, piece)

    def assemble(self, arrivals: Arrivals | None, present: frozenset[int]) -> Wholes:
        """Return, by index, what the shard group holds of the present matrices that this rank owns, alone or with
        others of the tensor axis, and of their gradients.

        A matrix whose elements this rank all holds is a view, so writing it writes the shard.
        """
        wholes: Wholes = {}
        for index in sorted(present):
            if self._is_gathered_here(index):
                matrix = self.matrices[index]
                wholes[index] = (self._whole(matrix, matrix.local), self._whole(matrix, _gradient(matrix)))
        for transfer, (gradient, parameter) in arrivals.wait() if arrivals is not None else ():
            whole = wholes[transfer.matrix]
            whole[0].view(-1)[transfer.start : transfer.stop].copy_(parameter)
            whole[1].view(-1)[transfer.start : transfer.stop].copy_(gradient)
        return wholes

    @staticmethod
    def _whole(matrix: ShardedParameter, piece: Tensor) -> Tensor:
        fragment, entry = matrix.fragment, matrix.placement.layout.entries[matrix.placement.index]
        if fragment.numel == entry.numel:
            return piece.view(entry.shape)
        whole = torch.empty(entry.shape, dtype=piece.dtype, device=piece.device)
        whole.view(-1)[fragment.start : fragment.stop].copy_(piece)
        return whole

    def join(self, lanes: Lanes, gathered: Wholes, present: frozenset[int]) -> Wholes:
        """Return, by index, the present matrices that this rank owns and their gradients, in the global shape, given
        what `assemble` returned. Every rank of the tensor axis must call this."""
        if not lanes.along_axis:
            return gathered
        assert self._axis is not None
        transfers = [transfer for transfer in self.to_one if transfer.matrix in present]
        dtypes = [[matrix.local.dtype] * 2 for matrix in self.matrices]
        arrivals = lanes.along_axis[0].post(
            transfers, dtypes, lambda t: [whole.reshape(-1) for whole in gathered[t.matrix]]
        )
        wholes: Wholes = {}
        for index, (parameter, gradient) in gathered.items():
            if self.owners[index].tensor is None:
                wholes[index] = parameter, gradient
            elif self.owners[index].tensor == self._axis.rank:
                shape = self.matrices[index].shape
                wholes[index] = parameter.new_empty(shape), gradient.new_empty(shape)
                self._write(index, self._axis.rank, wholes[index], (parameter, gradient))
        for transfer, both in arrivals.wait() if arrivals is not None else ():
            self._write(transfer.matrix, transfer.source, wholes[transfer.matrix], both)
        return wholes

    def part(self, lanes: Lanes, wholes: Wholes, gathered: Wholes, present: frozenset[int]) -> None:
        """Write the updated matrices into those of `gathered` that they were joined from. Every rank of the tensor axis
        must call this."""
        if not lanes.along_axis:
            return
        assert self._axis is not None
        transfers = [transfer for transfer in self.from_one if transfer.matrix in present]
        dtypes = [[matrix.local.dtype] for matrix in self.matrices]
        arrivals = lanes.along_axis[1].post(
            transfers, dtypes, lambda t: [_cut(wholes[t.matrix][0], self._parts[t.matrix][t.target]).reshape(-1)]
        )
        for index, (whole, _) in wholes.items():
            if self.owners[index].tensor is not None:
                gathered[index][0].copy_(_cut(whole, self._parts[index][self._axis.rank]))
        for transfer, (piece,) in arrivals.wait() if arrivals is not None else ():
            gathered[transfer.matrix][0].view(-1).copy_(piece)

    def _write(self, index: int, rank: int, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Write a rank's part of a matrix and of its gradient into the whole ones."""
        rows, columns = self._parts[index][rank]
        sizes = [[stop - start for start, stop in ranges] for ranges in (rows, columns)]
        for whole, part in zip(wholes, parts, strict=True):
            by_rows = part.view(sum(sizes[0]), sum(sizes[1])).split(sizes[0])
            for (top, bottom), band in zip(rows, by_rows, strict=True):
                for (left, right), block in zip(columns, band.split(sizes[1], 1), strict=True):
                    whole[top:bottom, left:right].copy_(block)

    def scatter(self, lane: Lane, wholes: Wholes, present: frozenset[int]) -> Arrivals | None:
        """Write this rank's pieces of what `assemble` returned, updated, and send other ranks theirs.

        Every rank of the shard group must call this.
        """
        for index, (parameter, _) in wholes.items():
            piece = self.matrices[index].fragment
            if piece.numel != parameter.numel():
                self.matrices[index].local.copy_(parameter.view(-1)[piece.start : piece.stop])
        transfers = [transfer for transfer in self.from_owners if transfer.matrix in present]
        dtypes = [[matrix.local.dtype] for matrix in self.matrices]
        return lane.post(transfers, dtypes, lambda t: [wholes[t.matrix][0].view(-1)[t.start : t.stop]])

    def replicate(self, lane: Lane, present: frozenset[int]) -> Arrivals | None:
        """Send updated pieces to the replicas. Every rank of the replicate group must call this."""
        transfers = [transfer for transfer in self.to_replicas if transfer.matrix in present]
        dtypes = [[matrix.local.dtype] for matrix in self.matrices]
        return lane.post(transfers, dtypes, lambda t: [self.matrices[t.matrix].local])

    def receive(self, arrivals: Arrivals | None) -> None:
        """Wait for updated pieces and write them to the shard."""
        for transfer, (piece,) in arrivals.wait() if arrivals is not None else ():
            self.matrices[transfer.matrix].local.copy_(piece)


def _back(transfers: Sequence[MatrixTransfer]) -> tuple[MatrixTransfer, ...]:
    return tuple(MatrixTransfer(t.matrix, t.target, t.source, t.start, t.stop) for t in transfers)


def _cut(whole: Tensor, part: Part) -> Tensor:
    """Return a part of a matrix."""
    for dim, ranges in enumerate(part):
        whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    return whole


def _gradient(matrix: ShardedParameter) -> Tensor:
    gradient = matrix.grad
    assert isinstance(gradient, ShardedParameter)
    return gradient.local
