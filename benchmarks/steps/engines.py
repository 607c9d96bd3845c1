"""The engines under comparison, each reduced to one training step."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.gpt import GPT, Block
from benchmarks.common.job import LEARNING_RATE, Job
from benchmarks.steps.wire import python_all_reduce_hook


@dataclass
class Trainer:
    """One prepared engine: `step` trains on (tokens, targets) and returns this rank's loss."""

    step: Callable[[Tensor, Tensor], Tensor]
    settings: dict[str, Any] = field(default_factory=dict)


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _ordinary(model: nn.Module, settings: dict[str, Any]) -> Trainer:
    """The plain PyTorch step, for every engine that leaves it as it is."""
    optimizer = _adamw(model)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainer(step, {**settings, "optimizer": "torch AdamW, fused", "backend": dist.get_backend()})


def _alone(model: GPT, job: Job) -> Trainer:
    return _ordinary(model, {"communication": "none: every rank trains a replica of its own, on its own data"})


def _ddp(model: GPT, job: Job) -> Trainer:
    settings: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 25}
    wrapped = nn.parallel.DistributedDataParallel(model, **settings)
    if job.count_bytes:
        # The reducer calls all_reduce from C++, where a Python wrapper sees nothing.
        wrapped.register_comm_hook(dist.group.WORLD, python_all_reduce_hook)
    return _ordinary(wrapped, settings)


def _fsdp1(model: GPT, job: Job) -> Trainer:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    settings = {
        "auto_wrap_policy": "each block",
        "sharding_strategy": "FULL_SHARD",
        "use_orig_params": True,
        "backward_prefetch": str(wrapped.backward_prefetch),
        "forward_prefetch": wrapped.forward_prefetch,
        "limit_all_gathers": wrapped.limit_all_gathers,
    }
    return _ordinary(wrapped, settings)


def _fsdp2(model: GPT, job: Job) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (job.ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    settings = {
        "fully_shard": "each block, then the root",
        "reshard_after_forward": "default: True, root False",
    }
    return _ordinary(model, settings)


def _deepspeed(model: GPT, job: Job) -> Trainer:
    deepspeed = importlib.import_module("deepspeed")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3},
        # The client's own fused AdamW; DeepSpeed's CPU Adam would have to be compiled here.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    deepspeed.init_distributed(dist_backend=dist.get_backend())
    engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    settings = {
        "config": config,
        "stage3_param_persistence_threshold": engine.zero_param_persistence_threshold(),
        "stage3_prefetch_bucket_size": engine.zero_prefetch_bucket_size(),
        "reduce_bucket_size": engine.zero_reduce_bucket_size(),
        "stage3_max_live_parameters": engine.zero_max_live_parameters(),
        "stage3_max_reuse_distance": engine.zero_max_reuse_distance(),
        "overlap_comm": engine.zero_overlap_comm(),
        "optimizer": f"torch AdamW, fused, inside {type(engine.optimizer).__name__}",
        "backend": dist.get_backend(),
    }
    return Trainer(step, settings)


def _shardwise(model: GPT, job: Job) -> Trainer:
    sw = importlib.import_module("shardwise")
    source = Path(str(sw.__file__)).parents[1]
    if job.checkout is not None and source != Path(job.checkout).resolve() / "src":
        raise ImportError(f"shardwise comes from {source}, not from {job.checkout}")
    model = sw.shard(model, job.strategy)
    collectives = "gloo, pairwise" if job.count_bytes else "default: shared memory on one host"
    return _ordinary(model, {"strategy": job.strategy, "units": "automatic", "collectives": collectives})


ALONE = "alone"
"""What the arithmetic takes with the other ranks at theirs, forward and backward, and AdamW on all parameters."""
_BUILDERS: dict[str, Callable[[GPT, Job], Trainer]] = {
    ALONE: _alone,
    "ddp": _ddp,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
    "shardwise": _shardwise,
}
ENGINES = tuple(_BUILDERS)
BEFORE = "before"
"""shardwise as another checkout has it, in alternation with this one's."""
_BUILDERS[BEFORE] = _shardwise
_EXTRAS = {"deepspeed": "shardwise[bench]", "shardwise": "shardwise"}


def missing(engine: str) -> str | None:
    """Say why an engine cannot run here, in one line; None if it can."""
    if engine not in _EXTRAS:
        return None
    found = importlib.util.find_spec(engine)
    if found is not None and found.origin is not None:
        return None
    return f"{engine} is skipped: it is not installed (pip install '{_EXTRAS[engine]}')"


def build(job: Job) -> Trainer:
    """Build the seeded GPT and hand it to the job's engine. Every rank must call this."""
    torch.manual_seed(job.seed)
    return _BUILDERS[job.engine](GPT(job.shape, job.seed), job)
