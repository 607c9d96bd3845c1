"""A complete sharded training script: torchrun --nproc-per-node 2 examples/train_with_torchrun.py

Runs on the available GPUs, otherwise on the CPU. Stop it at any time and start it again, also with another number of
ranks: it resumes from its last checkpoint. Lines that a script for one device would not have end in `# shardwise`.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw

VOCAB, WIDTH, LENGTH, ROWS, STEPS = 256, 128, 32, 16, 60
RUN = Path("runs/torchrun-example")


class Block(nn.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: (rows, length, width)."""
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, 4, WIDTH // 4))  # (rows, length, 3, heads, head width)
        q, k, v = qkv.movedim(2, 0).transpose(2, 3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Model(nn.Module):
    """Predicts a token from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (rows, length); logits are (rows, length, vocabulary)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of a step, numbers that grow by three: inputs and targets, each (rows, length)."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(VOCAB, (ROWS, 1), generator=generator)
    tokens = ((starts + 3 * torch.arange(LENGTH + 1)) % VOCAB).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    """Train for STEPS steps, with a checkpoint every 20 steps."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)  # the initial numbers of a build on one device, at any number of ranks
    with torch.device("meta"):  # no rank ever holds the whole model  # shardwise
        model = Model()
    precision = sw.Precision(param="bf16", reduce="fp32") if on_gpu else None  # shardwise
    sw.shard(model, "full_shard", precision=precision)  # blocks become units  # shardwise
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    step = 0
    if (last := sw.checkpoint.latest(RUN)) is not None:  # shardwise
        step = sw.checkpoint.load(last, model, optimizer).step  # shardwise
    held = sw.memory(model)  # every rank must call it: it allocates what a step needs  # shardwise
    if dist.get_rank() == 0:
        print(f"from step {step}\n{held}")
    while step < STEPS:
        tokens, targets = batch(step, device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all ranks
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, norm of the gradients {norm.item():.3f}", flush=True)
        if step % 20 == 0:
            sw.checkpoint.save(RUN / f"step-{step:06d}", model, optimizer, step=step)  # shardwise

    weights = sw.full_state_dict(model)  # every rank must call it; rank 0 gets them  # shardwise
    if dist.get_rank() == 0:
        torch.save(weights, RUN / "weights.pt")
        print(f"weights for one device: {RUN / 'weights.pt'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
