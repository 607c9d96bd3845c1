"""The group of parameters that are DTensors on a tensor-parallel mesh: each rank's local tensor is sharded further.

The shard group is the ranks that hold the same local tensors, the data ranks of one position in the tensor mesh. Flat
buffers hold local tensors, so every collective of a step is within the shard group, as without tensor parallelism. What
is particular:

- while the unit is unsharded, modules hold a DTensor around the local tensor, which is a view of the slot;
- a gradient has the placements of its parameter before it is collected, so sums over the tensor mesh are made there,
  once: a Partial gradient is reduced, a Shard or Replicate one is taken as it is;
- outside, a sharded parameter has the global shape over both meshes, and reductions go over both.

Source: FSDP2 x TP of torch (`FSDPParam._init_sharded_param`), which keeps one DTensor over both meshes instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.errors import UsageError
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.parameter_group import Group, inherit
from shardwise.fsdp.sharded_parameter import SHARDED_ATTRIBUTE, Part, Placement
from shardwise.fsdp.torch_collectives import collectives_for
from shardwise.modules.extended import DTENSOR

AXES: WeakKeyDictionary[dist.ProcessGroup, Collectives] = WeakKeyDictionary()
"""Collectives of the axes of tensor meshes, which all models on them share."""


def local_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter itself or, if it is a DTensor, a plain one over its local tensor, to build units with."""
    if not isinstance(parameter, DTensor):
        return parameter
    plain = nn.Parameter(parameter._local_tensor.detach(), requires_grad=parameter.requires_grad)
    setattr(plain, DTENSOR, parameter)
    return plain


def dtensor_of(parameter: nn.Parameter) -> DTensor:
    """Return the DTensor that the parameter stands in for."""
    dtensor: DTensor = getattr(parameter, DTENSOR)
    return dtensor


def collectives_of(mesh: DeviceMesh, device: torch.device) -> tuple[Collectives, ...]:
    """Return the collectives of each axis of a tensor mesh. Every rank of the mesh must call this."""
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    for group in groups:
        if group not in AXES:
            AXES[group] = collectives_for(group, device)
    return tuple(AXES[group] for group in groups)


@dataclass(frozen=True, eq=False)
class TensorPlacement(Placement):
    """The place of a tensor of which the shard group holds one local tensor."""

    spec: DTensorSpec = field(kw_only=True)
    """The tensor mesh, the placements on it and the global shape."""
    axes: tuple[Collectives, ...] = field(kw_only=True)
    """Of the tensor mesh."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, over both meshes."""
        return tuple(self.spec.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what the shard group holds."""
        return super().shape

    @property
    def groups(self) -> tuple[Collectives, ...]:
        """The shard group, and those axes of the tensor mesh along which the tensor is cut."""
        cut = (axis for axis, how in zip(self.axes, self.spec.placements, strict=True) if not how.is_replicate())
        return (self.shard_group, *cut)

    @property
    def spread(self) -> object:
        """The tensor mesh and the placements on it."""
        return self.spec.mesh, self.spec.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """The data axes and the tensor axes, as the mesh names them of which both are parts."""
        root = self.spec.mesh._get_root_mesh()
        names, own = root.mesh_dim_names or (), self.spec.mesh.mesh_dim_names or ()
        data = [
            dist.get_process_group_ranks(group.process_group)
            for group in (self.replicas, self.shard_group)
            if group is not None and group.process_group is not None
        ]
        of_axis = {name: dist.get_process_group_ranks(root.get_group(name)) for name in names}
        return root[tuple(name for name in names if name in own or of_axis[name] in data)]

    @cached_property
    def part(self) -> Part:
        """The local tensor's part of the whole."""
        return part_of(self.spec)

    @property
    def parts(self) -> list[Part]:
        """The part of each rank of the tensor mesh, which has one axis."""
        return [part_of(self.spec, [rank]) for rank in range(self.axes[0].world_size)]

    def piece(self, full: Tensor) -> Tensor:
        """Return this rank's piece of a plain tensor of the global or the local shape, or of a DTensor on the tensor
        mesh."""
        if isinstance(full, DTensor):
            local = full.redistribute(self.spec.mesh, self.spec.placements).to_local()
        elif full.shape == self.local_shape:
            local = full
        else:
            local = full
            for dim, ranges in enumerate(self.part):
                pieces = [local.narrow(dim, start, stop - start) for start, stop in ranges]
                local = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        own = self.fragment
        return local.reshape(-1)[own.start : own.stop]

    def unsharded(self, flat: Tensor) -> Tensor:
        """Return the DTensor that modules compute with."""
        return around(flat.view(self.local_shape), self.spec)

    def whole(self, flat: Tensor) -> Tensor:
        """Return the whole tensor, gathered over the tensor mesh. Every rank of both meshes must call this."""
        device = self.axes[0].device
        whole: Tensor = around(flat.view(self.local_shape).to(device), self.spec).full_tensor()
        return whole.to(flat.device)


def part_of(spec: DTensorSpec, at: Sequence[int] | None = None) -> Part:
    """Return the part of a tensor that a rank of its mesh holds: the one `at` these places on its axes, or this rank.

    Shard cuts a dim into equal chunks, of which the last ones may be shorter or empty. Strided, it cuts each of several
    equal segments of a dim so: of weights that are packed together, each rank has its chunk of all.
    """
    held: list[list[tuple[int, int]]] = [[(0, size)] for size in spec.shape]
    for axis, how in enumerate(spec.placements):
        if isinstance(how, Shard | _StridedShard):
            segments = int(how.split_factor) if isinstance(how, _StridedShard) else 1
            dim, ranks = how.dim, spec.mesh.size(axis)
            rank = spec.mesh.get_local_rank(axis) if at is None else at[axis]
            total = sum(stop - start for start, stop in held[dim])
            chunk = -(-(total // segments) // ranks)
            ranges = [
                (segment + min(rank * chunk, total // segments), segment + min((rank + 1) * chunk, total // segments))
                for segment in range(0, total, max(1, total // segments))
            ]
            held[dim] = _within(held[dim], ranges)
    return tuple(tuple(ranges) for ranges in held)


def _within(held: Sequence[tuple[int, int]], ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return `ranges` of the elements in `held`, counted one after another, as ranges of the elements themselves."""
    found: list[tuple[int, int]] = []
    for low, high in ranges:
        before = 0
        for start, stop in held:
            first, last = max(low, before), min(high, before + stop - start)
            if first < last:
                found.append((start + first - before, start + last - before))
            before += stop - start
    return found or [(0, 0)]


def around(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor over `local`. No communication."""
    shape, stride = spec.shape, spec.stride
    meta = TensorMeta(shape, stride, local.dtype)
    return DTensor(local, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)


class TensorParallelGroup(Group):
    """A group of parameters on one tensor mesh."""

    def __init__(self, originals: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        """`originals`: plain parameters that stand in for DTensors. Every rank of the tensor mesh must call this."""
        super().__init__(originals, *args, **kwargs)
        self.specs: list[DTensorSpec] = [dtensor_of(parameter)._spec for parameter in self.originals]
        self.axes = collectives_of(self.specs[0].mesh, self.collectives.device)

    def shape_of(self, original: nn.Parameter) -> tuple[int, ...]:
        """Return the local tensor's shape."""
        return tuple(dtensor_of(original)._local_tensor.shape)

    def placement_of(self, index: int) -> Placement:
        """As the base class, with the place in the tensor mesh."""
        return TensorPlacement(self.layout, index, self.collectives, spec=self.specs[index], axes=self.axes)

    def make_leaf(self, original: nn.Parameter, placeholder: Tensor) -> nn.Parameter:
        """Return a DTensor over the placeholder: the user's own one, if it can have that device and dtype."""
        dtensor = dtensor_of(original)
        local: Tensor = dtensor._local_tensor
        original.data = original.new_empty(0)
        if local.device == placeholder.device and local.dtype == placeholder.dtype:
            local.data = placeholder
            dtensor.grad = None
            dtensor.requires_grad_(original.requires_grad)  # some of torch's styles make frozen ones trainable
            return dtensor  # type: ignore[return-value]
        leaf = nn.Parameter(around(placeholder, dtensor._spec), requires_grad=original.requires_grad)
        local.data = local.new_empty(0)
        return inherit(leaf, dtensor)  # type: ignore[arg-type]

    def shard_parameters(self, *args: Any, **kwargs: Any) -> None:
        """As the base class."""
        dtensors = [dtensor_of(parameter) for parameter in self.originals]
        super().shard_parameters(*args, **kwargs)
        for dtensor, sharded in zip(dtensors, self.sharded, strict=True):
            setattr(dtensor, SHARDED_ATTRIBUTE, sharded)  # holders of the original, such as optimizers, find it here

    def point_at(self, views: Sequence[Tensor]) -> None:
        """Point the local tensors of the leaves at `views`."""
        for leaf, view in zip(self.leaves, views, strict=True):
            leaf._local_tensor.data = view  # type: ignore[attr-defined]

    def own_gradient(self, index: int, grad: Tensor) -> Tensor:
        """Return the local tensor of a gradient that is placed as its parameter. Every rank of the tensor mesh must
        call this if the gradient is placed otherwise."""
        if not isinstance(grad, DTensor):
            return grad
        spec = self.specs[index]
        if grad.placements != spec.placements:
            grad = grad.redistribute(spec.mesh, spec.placements)
        local = grad.to_local()
        return local.wait() if hasattr(local, "wait") else local

    def like(self, originals: Sequence[Any]) -> Group:
        """Raise UsageError: the copies of DTensors would share the tensor mesh's groups with these."""
        raise UsageError(
            f"copy.deepcopy of a sharded model with {self.fqns[0]!r}, a DTensor, is not possible: build the model "
            "again, shard it and call load_state_dict(model.state_dict())"
        )


def check_placements(fqn: str, dtensor: DTensor) -> str | None:
    """Return why this DTensor cannot be sharded further, or None."""
    for axis, how in enumerate(dtensor.placements):
        if type(how) not in (Shard, Replicate, _StridedShard):
            return f"{fqn!r} is a DTensor placed {how}, not Shard(dim) or Replicate()"
        ranks = dtensor.device_mesh.size(axis)
        if isinstance(how, _StridedShard) and dtensor.shape[how.dim] % (int(how.split_factor) * ranks):
            return (
                f"{fqn!r} of shape {tuple(dtensor.shape)} packs {how.split_factor} weights in dim {how.dim}, which "
                f"{ranks} ranks do not divide"
            )
    return None
