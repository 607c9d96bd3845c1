"""Copies of sharded parameters, and their conversion to other things, which is refused with the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from shardwise.fsdp.sharded_parameter import LOOK, ShardedParameter, add_methods

_REFUSED = {
    "__reduce_ex__": (
        "pickling (torch.save)",
        "call sw.checkpoint.save, or save sw.full_state_dict(model, cpu=True, rank0_only=True) (collective)",
    ),
    "numpy": ("numpy()", LOOK),
    "tolist": ("tolist()", LOOK),
    "__array__": ("conversion to a numpy array", LOOK),
    "__dlpack__": ("conversion by DLPack", LOOK),
    # The next two would reach for memory that the wrapper does not have.
    "apply_": ("apply_()", ".local.apply_() writes this rank's piece (on every rank)"),
    "share_memory_": ("share_memory_()", "share the tensors that sw.full_state_dict(model) returns"),
    "data_ptr": (
        "data_ptr()",
        ".local.data_ptr() is the address of this rank's piece. torch.distributed.checkpoint.async_save, which asks "
        "for it, cannot copy pieces: call torch.distributed.checkpoint.save, or "
        "sw.checkpoint.save(asynchronous=True)",
    ),
    "storage": (  # asked for by safetensors and whatever saves with it
        "storage()",
        "each rank holds only a piece. To save, make state = sw.full_state_dict(model) on every rank, then call "
        "safetensors.torch.save_file(state, file) or model.save_pretrained(directory, state_dict=state), PEFT's too, "
        "on rank 0; or call sw.checkpoint.save on every rank, whose files are safetensors",
    ),
}
"""By method: how the error names the operation, and the way out."""


def attach() -> None:
    """Let `copy.deepcopy` copy pieces, and let the other methods raise UsageError."""
    add_methods(__deepcopy__=_deepcopy, **{name: _refused(*words) for name, words in _REFUSED.items()})


def _refused(operation: str, way_out: str) -> Callable[..., NoReturn]:
    def method(sharded: ShardedParameter, *_: Any, **__: Any) -> NoReturn:
        """Raises UsageError."""
        sharded.refuse(operation, way_out)

    return method


def _deepcopy(sharded: ShardedParameter, memo: dict[int, Any]) -> ShardedParameter:
    """Copy this rank's piece of a gradient, of optimizer state or of a state_dict's handle; the copy has the same
    placement. No communication. Raises UsageError for a model's parameter: no unit would gather the copy."""
    if sharded.unit is not None:
        sharded.refuse(
            "copy.deepcopy",
            "copy.deepcopy the whole sharded model or its state_dict(), or clone() this rank's piece",
        )
    copied = ShardedParameter(sharded.peek().detach().clone(), sharded.placement, sharded.requires_grad)
    if isinstance(sharded, torch.nn.Parameter):
        copied._is_param = True
    memo[id(sharded)] = copied
    return copied
