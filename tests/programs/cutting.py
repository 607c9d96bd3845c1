"""Parts of a program's model made tensor-parallel, with torch's styles and with DTensors made by hand.

| cut | of | parameters | activations |
|---|---|---|---|
| column | dense, lookup | Shard by outputs; uneven if ranks do not divide the width | gathered after it |
| row | dense, lookup | Shard by inputs, of a lookup by tokens | summed after it |
| pair | wide | Shard(0) of the first layer, Shard(1) of the second; always uneven | cut between them |
| rows | norm | Replicate, with Partial gradients | cut by rows inside it |
| whole | dense, norm | Replicate | whole |

Between nodes activations are plain tensors, equal on the ranks of the tensor axis.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

CUTS: dict[str, tuple[str, ...]] = {
    "dense": ("column", "row", "whole"),
    "wide": ("pair",),
    "norm": ("rows", "whole"),
    "lookup": ("column", "row"),
}
"""By kind of node."""


class _WholeParameters(ParallelStyle):
    """Replicated parameters, whose module computes with its input placed as `inside`."""

    def __init__(self, inside: Placement) -> None:
        super().__init__()
        self._inside = inside

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            whole = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
            return (whole.redistribute(mesh, [self._inside]),)

        def leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.redistribute(mesh, [Replicate()]).to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


def styles(kind: str, cut: str) -> dict[str, ParallelStyle]:
    """The styles of a node's modules, by name."""
    if kind == "wide":
        return {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    name = {"dense": "linear", "norm": "norm", "lookup": "table"}[kind]
    by_cut = {
        "column": ColwiseParallel(output_layouts=Replicate()),
        "row": RowwiseParallel(input_layouts=Replicate()),
        "rows": _WholeParameters(Shard(0)),
        "whole": _WholeParameters(Replicate()),
    }
    return {name: by_cut[cut]}


def cut_part(part: nn.Module, kind: str, cut: str, mesh: DeviceMesh) -> None:
    """Make one node's module tensor-parallel over `mesh`. Every rank of it must call this."""
    trained = {name: parameter.requires_grad for name, parameter in part.named_parameters()}
    parallelize_module(part, mesh, styles(kind, cut))
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(trained[name])
