"""The engines that are asked: each shards a model and does a step, hands its whole weights out, saves and loads."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.gpt import Block, GPTShape

TINY = GPTShape(layers=2, width=32, heads=2, vocab=64, seq=16)
LEARNING_RATE = 1e-3
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's AdamW in its plainest form: the same arithmetic for every number, however parameters are cut."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=False)


class Peer:
    """A model that an engine has sharded, and its optimizer. Every rank must make one and call each method."""

    def __init__(self, model: nn.Module, optimizer: Optimizer = adamw) -> None:
        self.model = self.shard(model)
        self.optimizer = optimizer(self.model.parameters())

    def shard(self, model: nn.Module) -> nn.Module:
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, *batch: Tensor) -> None:
        self.backward(self.model(*batch))
        self.update()

    def weights(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def save(self, directory: Path, step: int) -> None:
        """Save into a directory of the step's own, as the engine's documentation has it: torch's DCP."""
        from torch.distributed.checkpoint import save
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=directory / f"step-{step}")

    def load(self, directory: Path) -> str:
        """Load the newest step that can be loaded, as a script does that tries them in turn. Returns which it was."""
        from torch.distributed.checkpoint import CheckpointException, load
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        for path in sorted(directory.glob("step-*"), reverse=True):
            model, optimizer = get_state_dict(self.model, self.optimizer)
            try:
                load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
            except (Exception, CheckpointException) as error:  # the second, of DCP, is no Exception
                print(f"{path.name} cannot be loaded: {type(error).__name__}", flush=True)
                continue
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            return path.name
        raise FileNotFoundError("no step can be loaded")


class FSDP1(Peer):
    def shard(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({Block})
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu)

    def weights(self) -> dict[str, Tensor]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            named = self.model.named_parameters()
            return {name.replace("_fsdp_wrapped_module.", ""): tensor.detach().clone() for name, tensor in named}


class FSDP2(Peer):
    def shard(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in [module for module in model.modules() if isinstance(module, Block)]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.full_tensor().detach() for name, tensor in self.model.named_parameters()}


class DeepSpeed(Peer):
    """ZeRO-3 over gloo, with the optimizer that it is given."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = adamw, config: Any = None) -> None:
        deepspeed = importlib.import_module("deepspeed")
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; it would be compiled here
        deepspeed.init_distributed(dist_backend="gloo")
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1_000_000_000,
        } | (config or {})
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        given = {"model_parameters": trained} if optimizer is None else {"optimizer": optimizer(trained)}
        self.model, self.optimizer, *_ = deepspeed.initialize(model=model, config=settings, **given)

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def update(self) -> None:
        self.model.step()

    def weights(self) -> dict[str, Tensor]:
        zero = importlib.import_module("deepspeed").zero
        named = dict(self.model.module.named_parameters())
        with zero.GatheredParameters(list(named.values())):
            return {name: tensor.detach().clone() for name, tensor in named.items()}

    def save(self, directory: Path, step: int) -> None:
        self.model.save_checkpoint(directory, tag=f"step-{step}")

    def load(self, directory: Path) -> str:
        path, _ = self.model.load_checkpoint(directory)
        if path is None:
            raise FileNotFoundError("no step can be loaded")
        return Path(path).parent.name


class Megatron(Peer):
    def __init__(self, model: nn.Module, optimizer: Optimizer = adamw) -> None:
        megatron = importlib.import_module("megatron_fsdp")
        self.model, self.optimizer = megatron.fully_shard(
            model, optimizer(model.parameters()), fsdp_unit_modules=[Block]
        )


class Shardwise(Peer):
    def shard(self, model: nn.Module) -> nn.Module:
        return importlib.import_module("shardwise").shard(model, "full_shard", units=[Block])

    def weights(self) -> dict[str, Tensor]:
        sw = importlib.import_module("shardwise")
        found = [sw.full_state_dict(self.model)]
        dist.broadcast_object_list(found)
        return found[0]


PEERS: dict[str, type[Peer]] = {
    "shardwise": Shardwise,
    "fsdp2": FSDP2,
    "fsdp1": FSDP1,
    "deepspeed": DeepSpeed,
    "megatron": Megatron,
}
