"""What a compiled block keeps for backward: decided by the partitioner that torch.compile uses, not by autograd.

AOTAutograd traces forward and backward of a block together and cuts the graph where the fewest bytes cross: what is
cheap to compute again (pointwise operations, casts) is, and only the rest is kept
(torch/_functorch/partitioners.py, arXiv:2304.00487).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import (  # type: ignore[import-untyped]
    aot_function,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

_APART = (
    "native_layer_norm", "native_layer_norm_backward", "silu_backward", "gelu_backward", "_fused_rms_norm",
    "_fused_rms_norm_backward", "native_dropout_backward",
)  # fmt: skip
"""Operations that a compiler takes apart, so that their parts can be computed again one by one."""


def kept_bytes(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> int:
    """Bytes that a compiled block adds to what lives between its forward and its backward: what the partitioner keeps
    and was not the block's input, and its outputs. Under a FakeTensorMode.

    Args:
        block: sharded or not; only shapes of its parameters are used.
        args: of one forward, on whatever device. kwargs: the same.
        dtype: of its parameters when it computes.
    """
    names, flat = _state(block, dtype)
    leaves, spec = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*tensors: Tensor) -> list[Tensor]:
        state, given = tensors[: len(names)], tensors[len(names) :]
        filled = list(leaves)
        for place, tensor in zip(places, given, strict=True):
            filled[place] = tensor
        inner_args, inner_kwargs = tree_unflatten(filled, spec)
        with _reparametrize_module(block, dict(zip(names, state, strict=True))):
            result = type(block).forward(block, *inner_args, **inner_kwargs)
        return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]

    inputs = [_leaf(leaves[place]) for place in places]
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)  # type: ignore[no-any-return]

    packets = [getattr(torch.ops.aten, name) for name in _APART if hasattr(torch.ops.aten, name)]
    compiled = aot_function(
        run,
        fw_compiler=keep,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=get_decompositions(packets),
    )
    compiled(*flat, *inputs)
    return _bytes_of(graphs[0])


def _state(block: nn.Module, dtype: torch.dtype) -> tuple[list[str], list[Tensor]]:
    names, tensors = [], []
    for name, parameter in block.named_parameters():
        as_computed = dtype if parameter.is_floating_point() else parameter.dtype
        names.append(name)
        tensors.append(torch.empty(parameter.shape, dtype=as_computed).requires_grad_(parameter.requires_grad))
    for name, buffer in block.named_buffers():
        names.append(name)
        tensors.append(torch.empty_like(buffer))
    return names, tensors


def _leaf(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu").requires_grad_(tensor.is_floating_point())


def _bytes_of(graph: torch.fx.GraphModule) -> int:
    """Of the storages that the forward graph returns and was not given."""
    nodes = list(graph.graph.nodes)
    given = {_storage(node) for node in nodes if node.op == "placeholder"}
    returned = next(node for node in nodes if node.op == "output").args[0]
    kept = {}
    for node in returned:
        if isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), Tensor):
            key = _storage(node)
            if key not in given:
                kept[key] = node.meta["val"].untyped_storage().nbytes()
    return sum(kept.values())


def _storage(node: torch.fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None
