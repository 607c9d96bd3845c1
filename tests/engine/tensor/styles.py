"""Styles by which a user cuts layers that torch has none for."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


class Conv1DStyle(ParallelStyle):
    """How a user cuts GPT-2's layers, whose weights are (inputs, outputs): by outputs or by inputs. Of uneven layers
    outputs stay DTensors, which know the sizes."""

    def __init__(self, by_outputs: bool, use_local_output: bool = True) -> None:
        super().__init__()
        self.by_outputs, self.use_local_output = by_outputs, use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight, bias = (Shard(1), Shard(0)) if self.by_outputs else (Shard(0), Replicate())
        before = Replicate() if self.by_outputs else Shard(-1)

        def cut(_name: str, own: nn.Module, mesh: DeviceMesh) -> None:
            for key, placement in (("weight", weight), ("bias", bias)):
                own.register_parameter(key, nn.Parameter(distribute_tensor(getattr(own, key), mesh, [placement])))

        def enter(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            given = inputs[0]
            return given if isinstance(given, DTensor) else DTensor.from_local(given, mesh, [before], run_check=False)

        def leave(_module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            placed = output if self.by_outputs else output.redistribute(mesh, [Replicate()])
            return placed.to_local() if self.use_local_output else placed

        return distribute_module(module, device_mesh, cut, enter, leave)
