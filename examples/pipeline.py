"""Pipeline stages that are sharded: torchrun --nproc-per-node 4 examples/pipeline.py

torch's pipelining moves micro-batches between two stages, and shardwise shards each stage over two ranks. A stage is
gathered once and its gradients are reduced once in a step, however many micro-batches there are.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import shardwise as sw
from shardwise.model_tools.reduction import reduce_waiting

STAGES, MICRO_BATCHES, ROWS, LENGTH, VOCAB, WIDTH = 2, 4, 8, 16, 64, 32


def build() -> nn.Sequential:
    """The whole model: predicts each token of a counting sequence from the one before. The same on every rank."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(4)
    ]
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB))


def batch_of(step: int, data_rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and the next ones, each (ROWS, LENGTH)."""
    starts = torch.randint(VOCAB, (ROWS, 1), generator=torch.Generator().manual_seed(2 * step + data_rank))
    tokens = (starts + torch.arange(LENGTH + 1)) % VOCAB
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """One micro-batch's part of the mean over the batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / MICRO_BATCHES


def main() -> None:
    """Train this rank's stage for 60 steps."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (STAGES, dist.get_world_size() // STAGES), mesh_dim_names=("pp", "dp_shard"))
    number, data_rank = mesh["pp"].get_local_rank(), mesh["dp_shard"].get_local_rank()
    whole = build()
    each = len(whole) // STAGES
    own = whole[number * each : (number + 1) * each]  # this rank's stage; on the meta device nobody would hold the rest
    sw.shard(own, mesh=mesh["dp_shard"], reshard_after_forward=False)  # gathered until the step ends
    stage = PipelineStage(own, number, STAGES, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)  # loss_of has divided already
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    for step in range(60):
        tokens, targets = batch_of(step, data_rank)
        losses: list[Tensor] = []
        with sw.no_sync(own):  # micro-batches add up their gradients
            if number == 0:
                schedule.step(tokens)
            else:
                schedule.step(target=targets, losses=losses)
        reduce_waiting(own)  # one reduction for the step
        optimizer.step()
        optimizer.zero_grad()
        if number == STAGES - 1 and step % 10 == 0:
            mean = torch.stack(losses).sum().detach()
            dist.all_reduce(mean, group=mesh["dp_shard"].get_group())
            if data_rank == 0:
                print(f"step {step}: loss {mean.item() / mesh['dp_shard'].size():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
