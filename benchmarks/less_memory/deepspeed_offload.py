"""DeepSpeed's ZeRO-3 with AdamW's state in memory or on disk, as a peer of the offload benchmark.

Its operators `cpu_adam` and `async_io` are compiled here at their first use, which takes minutes: that needs a C++
compiler, ninja, Python's headers and libaio's (`libaio-dev`).
"""

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import launch
from benchmarks.steps.engines import missing

PEERS = ("deepspeed memory", "deepspeed nvme", "deepspeed ring")
"""State in memory; on disk as DeepSpeed does by default; on disk with little memory."""
ABOUT = """\
DeepSpeed's ZeRO-3 trains the same model from the same weights on the same batches, on one thread a rank as well, with
an AdamW of its own (`cpu_adam`, compiled here). It sends through gloo; shardwise sends through shared memory.

- On disk, DeepSpeed keeps the weights and gradients that it updates beside AdamW's two moments, except tensors of less
  than 1 MiB, and writes gradients in backward, outside `engine.step()`. shardwise keeps the moments there.
- Both go past the page cache (O_DIRECT). DeepSpeed has a file for each tensor of a group of parameters and one thread
  (two in `deepspeed ring`) with up to 8 requests of 1 MiB under way; shardwise one unnamed file a rank, three threads.
- DeepSpeed's buffers are locked in memory (`mlock`), shardwise's are not; they use huge pages if the kernel has some.
- `deepspeed nvme` has DeepSpeed's defaults, meant for far larger models: one group of parameters, so buffers for all
  of a rank's state, up to 1e9 numbers gathered and 5e8 reduced at once. `deepspeed ring` is set for little memory:
  buffers for three groups (one is read, one updated, one written: `pipeline_read`, `pipeline_write`), each a third of
  shardwise's ring and the rest of the parameter that exceeds it, and at most 1e7 numbers gathered or reduced at once.
- DeepSpeed forms the gradients' norm in each step, shardwise only for clipping. `engine.step()` also copies the updated
  weights into those that DeepSpeed gathers."""
GROUP_BUFFERS = 4
"""Buffers that a group of parameters takes: weights, gradients and AdamW's two moments."""
PIPELINE_GROUPS = 3
"""Groups in its buffers at once: one is read, one updated, one written."""
_BUILD = (
    "from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder\n"
    "CPUAdamBuilder().load(verbose=True)\n"
    "AsyncIOBuilder().load(verbose=True)\n"
)


def environment() -> dict[str, str]:
    """Return the environment of a measuring process, in which torch finds the ninja of this Python's packages."""
    found = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return launch.environment(PATH=found)


def unavailable(timeout_s: float = 1800.0) -> str | None:
    """Return in one line why DeepSpeed's offload cannot run here, None if it can. Compiles its operators if needed."""
    if reason := missing("deepspeed"):
        return reason
    try:
        launch.run(["-c", _BUILD], environment(), timeout_s)
    except launch.JobFailed as error:
        return f"deepspeed is skipped: its operators cannot be built here ({reason_of(error)})"
    return None


def reason_of(error: launch.JobFailed) -> str:
    """Return the line of a failed job's output that names the error: a rank's or the compiler's, not the launcher's."""
    named: list[str] = re.findall(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception): .*)$", error.output, re.MULTILINE)
    own = [line for line in named if "ChildFailedError" not in line]
    if not own:
        return str(error)
    compilers = re.findall(r"^.*\berror: .*$", error.output, re.MULTILINE)
    if "building extension" in own[-1] and compilers:
        return f"{own[-1].partition(': [')[0]}: {compilers[0]}"  # what is cut off is the compiler's command line
    return own[-1]


def configuration(peer: str, path: str, ring_bytes: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a peer. Everything that is not named keeps DeepSpeed's default."""
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    if peer != "deepspeed memory":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": path}
    if peer == "deepspeed ring":
        buffers = GROUP_BUFFERS * PIPELINE_GROUPS
        zero["sub_group_size"] = ring_bytes // (4 * buffers)
        zero |= dict.fromkeys(
            (
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "stage3_prefetch_bucket_size",
                "reduce_bucket_size",
            ),
            10_000_000,
        )
        zero["offload_optimizer"] |= {"buffer_count": buffers, "pipeline_read": True, "pipeline_write": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},  # torch's defaults
        },
        "zero_optimization": zero,
        "steps_per_print": 1_000_000_000,
    }


class Trainer:
    """One rank's engine. Every rank must make one, in an initialised gloo group."""

    def __init__(self, model: nn.Module, peer: str, path: str, ring_bytes: int) -> None:
        deepspeed = importlib.import_module("deepspeed")
        deepspeed.init_distributed(dist_backend="gloo")
        config = configuration(peer, path, ring_bytes)
        self._path = Path(path)
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.update: Callable[[], None] = self._engine.step

    def backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward and return the loss."""
        loss: Tensor = self._engine(tokens, targets)
        self._engine.backward(loss)
        return loss

    def facts(self) -> dict[str, int]:
        """Return the bytes of this rank's files and of the buffers that they go through."""
        swapper = self._engine.optimizer.optimizer_swapper
        if swapper is None:
            return {"file_bytes": 0, "ring_bytes": 0}
        buffers = swapper.swap_buffer_manager.all_buffers
        files = self._path.glob(f"zero_stage_3/optimizer/rank{dist.get_rank()}/*")
        return {
            "file_bytes": sum(file.stat().st_size for file in files),
            "ring_bytes": sum(buffer.nbytes for buffer in buffers),
        }
