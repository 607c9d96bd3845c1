"""The tensors that a compiled block saves for backward: chosen by torch.compile's partitioner, not by autograd.

AOTAutograd traces forward and backward of a block together and cuts the graph where the fewest bytes cross: cheap
operations (pointwise ones, casts) are computed again, and only the rest is saved
(torch/_functorch/partitioners.py, arXiv:2304.00487). If a block recomputes all but some operations, the same graph
tells which of their outputs backward reads: eager mode saves all of those outputs, a compiler only those that are read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
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

from shardwise.model_tools.activation_checkpointing import AlternatingPolicy

_APART = (
    "native_layer_norm", "native_layer_norm_backward", "silu_backward", "gelu_backward", "_fused_rms_norm",
    "_fused_rms_norm_backward", "native_dropout_backward",
)  # fmt: skip
"""Operations that a compiler decomposes, so that their parts can be recomputed one by one."""


def kept_bytes(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, selective: bool = False
) -> int:
    """Return the bytes that a compiled block adds to what lives between its forward and its backward: its outputs, and
    what the partitioner saves except the block's inputs. Call it under a FakeTensorMode.

    Args:
        block: sharded or not; only the shapes of its parameters are used.
        args: positional arguments of one forward, on any device.
        kwargs: its keyword arguments.
        dtype: the dtype of its parameters in computation.
        selective: whether all but attention and every second matmul is recomputed.
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
    saved: list[int] = []

    def partition(joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        if selective:
            saved.append(_bytes_of(_read_of_kept(joint, num_fwd_outputs), joint))
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)  # type: ignore[no-any-return]

    packets = [getattr(torch.ops.aten, name) for name in _APART if hasattr(torch.ops.aten, name)]
    compiled = aot_function(
        run,
        fw_compiler=keep,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=partition,
        decompositions=get_decompositions(packets),
    )
    compiled(*flat, *inputs)
    returned = next(node for node in graphs[0].graph.nodes if node.op == "output").args[0]
    return saved[0] if selective else _bytes_of(returned, graphs[0])


def _read_of_kept(joint: torch.fx.GraphModule, outputs: int) -> list[torch.fx.Node]:
    """Return nodes of a joint graph of forward and backward: the block's outputs, and those of the kept outputs that
    backward reads, directly or to recompute the others."""
    nodes = list(joint.graph.nodes)
    returned = next(node for node in nodes if node.op == "output").args[0]
    ours, theirs = returned[:outputs], returned[outputs:]
    policy = AlternatingPolicy()
    backward: set[torch.fx.Node] = set()
    kept: set[torch.fx.Node] = set()
    for node in nodes:
        arrives = node.op == "placeholder" and "tangents" in str(node.target)
        if arrives or any(argument in backward for argument in node.all_input_nodes):
            backward.add(node)
            continue
        part = node.target is operator.getitem and node.all_input_nodes[0] in kept
        if part or (node.op == "call_function" and policy.keeps(node.target)):
            kept.add(node)
    read: dict[torch.fx.Node, None] = {}
    waiting = [node for node in theirs if isinstance(node, torch.fx.Node)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node in kept:
            read[node] = None
            continue
        new = [argument for argument in node.all_input_nodes if argument not in seen]
        seen.update(new)
        waiting += new
    return [*(node for node in ours if isinstance(node, torch.fx.Node)), *read]


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


def _bytes_of(nodes: Iterable[Any], graph: torch.fx.GraphModule) -> int:
    """Return the bytes of the storages of `nodes`, without those of the graph's inputs."""
    given = {_storage(node) for node in graph.graph.nodes if node.op == "placeholder"}
    kept = {}
    for node in nodes:
        if isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), Tensor):
            key = _storage(node)
            if key not in given:
                kept[key] = node.meta["val"].untyped_storage().nbytes()
    return sum(kept.values())


def _storage(node: torch.fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None
