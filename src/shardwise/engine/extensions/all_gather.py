"""The group of a parameter whose class says how it travels (FSDP2's all-gather extensions; torchao's float8 weights).

It is cut into whole rows, as FSDP2 cuts it, and its numbers are kept, reduced and updated like all others. Before a
gather the class turns this rank's rows into the tensor that travels, and metadata such as a scale. After the gather it
turns these into the tensor that the module computes with: around the gathered bytes, or in a place beside them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.errors import LayoutError, UsageError
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.layout import round_up
from shardwise.fsdp.parameter_group import Dtypes, Group, MakeGradients, Original, Site, Values, placeholder_of
from shardwise.fsdp.sharded_parameter import SHARDED_ATTRIBUTE
from shardwise.fsdp.slots import SLOT_ALIGN_BYTES, Slot, storage_key
from shardwise.modules.extended import EXTENDED, inner_name
from shardwise.sharded.extensions.dtensor_names import mesh_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class ExtendedDtypes(Dtypes):
    """The dtypes of a group whose class says how it travels, cut into whole rows."""

    travels: torch.dtype
    """Dtype of what is gathered."""
    is_beside: bool
    """Whether the tensor that is computed with lies beside what was gathered."""

    @property
    def align(self) -> int:
        """One: rows may have any number of elements."""
        return 1

    @property
    def gathered(self) -> torch.dtype:
        """What the class makes of the parameter for the gather."""
        return self.travels

    def places(self, start_bytes: int, numel: int) -> tuple[int, int]:
        """As the base class; the gathered bytes lie in the place of the numbers, or behind it."""
        gathered_bytes = round_up(numel * self.travels.itemsize, SLOT_ALIGN_BYTES)
        if not self.is_beside:
            return start_bytes, start_bytes + gathered_bytes
        end = start_bytes + round_up(numel * self.compute.itemsize, SLOT_ALIGN_BYTES)
        return end, end + gathered_bytes


class ExtendedGroup(Group):
    """The group of one such parameter."""

    def __init__(
        self,
        item: tuple[str, nn.Parameter, tuple[Site, ...]],
        dtypes: Dtypes,
        collectives: Collectives,
        policy: MixedPrecisionPolicy,
        make_gradients: MakeGradients,
    ) -> None:
        """Every rank must call this: the class may ask all of them for a scale."""
        fqn, plain, sites = item
        original: Any = getattr(plain, EXTENDED)
        self._arguments: tuple[Any, ...] = (
            mesh_of(collectives, fqn),
            original.shape,
            plain.data.contiguous().stride(),
            sites[0].module,
            policy,
        )
        columns = original.shape[1:]
        chunk = -(-original.shape[0] // collectives.world_size) if original.ndim else 1
        rows = max(0, min(chunk, original.shape[0] - collectives.rank * chunk))
        self._rows: Any = original.detach().new_zeros((rows, *columns), device=collectives.device)
        """This rank's rows: a tensor of the parameter's class around its piece of the shard."""
        if len(inspect.signature(self._rows.fsdp_pre_all_gather).parameters) == 1:
            self._arguments = self._arguments[:1]  # FSDP2's first form: the mesh alone
        self._inner = inner_name(self._rows)
        self._beside: Any = None
        """The metadata that the class returned with the tensor that travels."""
        came = torch.empty(original.shape, dtype=self._outgoing(fqn).dtype, device=collectives.device)
        with torch.no_grad():
            whole, _ = self._rows.fsdp_post_all_gather((came,), self._beside, dtypes.compute)
        self._leaf = nn.Parameter(whole, requires_grad=plain.requires_grad)
        self._leaf._backward_hooks = original._backward_hooks
        self._leaf._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks
        self._held, is_beside = _holder(self._leaf, came, fqn)
        self._empty = placeholder_of(original.shape, self._held.dtype, collectives.device)
        dtypes = ExtendedDtypes(dtypes.master, dtypes.compute, dtypes.reduce, came.dtype, is_beside)
        super().__init__([item], dtypes, collectives, math.prod(columns), make_gradients)
        self.point_at_placeholders()

    @property
    def is_whole(self) -> bool:
        """Whether there are no elements: modules never compute with the shard itself."""
        return self.layout.numel == 0

    def shard_parameters(
        self, device: torch.device, storage: Tensor | None = None, values: Values | None = None
    ) -> None:
        """As `Group.shard_parameters`."""
        original = getattr(self.originals[0], EXTENDED)
        super().shard_parameters(device, storage, values)
        setattr(original, SHARDED_ATTRIBUTE, self.sharded[0])

    def make_leaf(self, original: nn.Parameter, placeholder: Tensor) -> nn.Parameter:
        """Return the leaf that the class made."""
        return self._leaf

    @torch.no_grad()
    def pre_all_gather(self, place: Tensor, piece: Tensor) -> None:
        """Write to `place` what the class makes of this rank's rows."""
        rows = getattr(self._rows, self._inner)
        rows.data = piece[: rows.numel()].view(rows.shape)
        place[: rows.numel()].copy_(self._outgoing(self.fqns[0]).reshape(-1)[: rows.numel()])

    def _outgoing(self, fqn: str) -> Tensor:
        with torch.no_grad():
            made, self._beside = self._rows.fsdp_pre_all_gather(*self._arguments)
        made = made if isinstance(made, tuple | list) else (made,)
        if len(made) != 1 or made[0].numel() < self._rows.numel():
            raise LayoutError(
                f"fsdp_pre_all_gather of {fqn!r} returned {[tuple(each.shape) for each in made]} for rows of shape "
                f"{tuple(self._rows.shape)}: it must return one tensor with at least as many elements"
            )
        outgoing: Tensor = made[0]
        return outgoing

    def unsharded_views(self, slot: Slot[Any]) -> list[Tensor]:
        """Return views of the gathered tensor, and of the place of the tensor that is computed with."""
        [entry] = self.layout.entries
        starts = (self.gathered_start, self.dtypes.gathered), (self.unsharded_start, self._held.dtype)
        return [slot.flat(start, entry.numel, dtype).view(entry.shape) for start, dtype in starts]

    def point_at(self, views: Sequence[Tensor]) -> None:
        """Point the leaf, or the tensor inside it, at a slot, and have the class fill it."""
        came, self._held.data = views
        with torch.no_grad():
            self._rows.fsdp_post_all_gather((came,), self._beside, self.dtypes.compute, out=self._leaf)

    def like(self, originals: Sequence[Original]) -> Group:
        """Raise UsageError: the class made its tensors around these parameters."""
        raise UsageError(
            f"copy.deepcopy of a sharded model with {self.fqns[0]!r}, whose class defines its own all_gather, is not "
            "possible: build the model again, shard it and call load_state_dict(model.state_dict())"
        )

    def point_at_placeholders(self) -> None:
        """Point the leaf at one NaN, expanded to the full shape."""
        self._held.data = self._empty


def _holder(leaf: nn.Parameter, came: Tensor, fqn: str) -> tuple[Tensor, bool]:
    """Return the tensor whose memory holds the leaf's numbers, and whether that is other memory than `came`'s."""
    names = leaf.__tensor_flatten__()[0] if hasattr(leaf, "__tensor_flatten__") else []
    wrapped = [inner for inner in (getattr(leaf, name) for name in names) if storage_key(inner) == storage_key(came)]
    if len(wrapped) == 1:
        return wrapped[0], False
    if type(leaf) is not nn.Parameter or leaf.shape != came.shape:
        raise LayoutError(
            f"fsdp_post_all_gather of {fqn!r} returned a {type(leaf).__name__} of shape {tuple(leaf.shape)} with "
            "memory of its own: it must return a plain tensor of the whole shape, or a wrapper around the gathered one"
        )
    return leaf, storage_key(leaf) != storage_key(came)
