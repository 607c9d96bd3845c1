"""The matrices of one unit: their owners, and the transfers between owners and the ranks that hold pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.sharded_parameter import Placement, ShardedParameter
from shardwise.optim.matrices.lane import Arrivals, Lane, MatrixTransfer, most_sent_bytes
from shardwise.optim.matrices.ownership import OwnerRank


def pieces_of(placement: Placement) -> list[tuple[int, int, int]]:
    """Return (rank in the shard group, start, stop) for every rank that holds elements of the parameter."""
    layout = placement.layout
    entry = layout.entries[placement.index]
    first, last = entry.start // layout.shard_numel, (entry.stop - 1) // layout.shard_numel
    held = [(rank, layout.fragment(placement.index, rank)) for rank in range(first, last + 1)]
    return [(rank, fragment.start, fragment.stop) for rank, fragment in held]


class Lanes:
    """The three lanes of one mesh: pieces to owners and back in a shard group, and updated pieces to the replicas."""

    def __init__(self, mesh: Mesh, units: Sequence[UnitMatrices]) -> None:
        """Every rank must call this."""

        def most(transfers: Sequence[tuple[MatrixTransfer, ...]], copies: int) -> int:
            dtypes = [[[matrix.local.dtype] * copies for matrix in unit.matrices] for unit in units]
            return max(map(most_sent_bytes, transfers, dtypes), default=0)

        self.to_owners = Lane(mesh.shard, most([unit.to_owners for unit in units], 2))
        self.from_owners = Lane(mesh.shard, most([unit.from_owners for unit in units], 1))
        self.to_replicas = Lane(mesh.replicate, most([unit.to_replicas for unit in units], 1))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all three lanes."""
        return sum(lane.nbytes for lane in (self.to_owners, self.from_owners, self.to_replicas))


class UnitMatrices:
    """The matrices of one unit and their owners. Has no other state."""

    def __init__(self, mesh: Mesh, matrices: Sequence[ShardedParameter], owners: Sequence[OwnerRank]) -> None:
        self.mesh = mesh
        self.matrices = list(matrices)
        self.owners = list(owners)
        self._own = OwnerRank(mesh.replicate.rank, mesh.shard.rank)

    def is_mine(self, index: int) -> bool:
        """Whether this rank owns the matrix."""
        return self.owners[index] == self._own

    @cached_property
    def to_owners(self) -> tuple[MatrixTransfer, ...]:
        """The transfers in this shard group of pieces to those of its ranks that own the matrix."""
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
        return tuple(MatrixTransfer(t.matrix, t.target, t.source, t.start, t.stop) for t in self.to_owners)

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

    def assemble(self, arrivals: Arrivals | None, present: frozenset[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return, by index, the present matrices that this rank owns and their gradients, whole, in the global shape.

        A matrix whose elements this rank all holds is a view, so writing it writes the shard.
        """
        wholes: dict[int, tuple[Tensor, Tensor]] = {}
        for index in sorted(present):
            if self.is_mine(index):
                matrix = self.matrices[index]
                wholes[index] = (self._whole(matrix, matrix.local), self._whole(matrix, _gradient(matrix)))
        for transfer, (gradient, parameter) in arrivals.wait() if arrivals is not None else ():
            whole = wholes[transfer.matrix]
            whole[0].view(-1)[transfer.start : transfer.stop].copy_(parameter)
            whole[1].view(-1)[transfer.start : transfer.stop].copy_(gradient)
        return wholes

    @staticmethod
    def _whole(matrix: ShardedParameter, piece: Tensor) -> Tensor:
        fragment = matrix.fragment
        if fragment.numel == matrix.numel():
            return piece.view(matrix.shape)
        whole = torch.empty(matrix.shape, dtype=piece.dtype, device=piece.device)
        whole.view(-1)[fragment.start : fragment.stop].copy_(piece)
        return whole

    def scatter(self, lane: Lane, wholes: dict[int, tuple[Tensor, Tensor]], present: frozenset[int]) -> Arrivals | None:
        """Write this rank's pieces of the matrices that it updated, and send other ranks theirs.

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


def _gradient(matrix: ShardedParameter) -> Tensor:
    gradient = matrix.grad
    assert isinstance(gradient, ShardedParameter)
    return gradient.local
