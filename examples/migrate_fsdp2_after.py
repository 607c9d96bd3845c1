"""The script of torch's FSDP2, migrated: torchrun --nproc-per-node 2 examples/migrate_fsdp2_after.py"""

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardwise as sw

VOCAB, WIDTH, LENGTH, ROWS, STEPS, MICRO_BATCHES = 256, 64, 32, 8, 20, 2
RUN = Path("runs/migrate-fsdp2/after")

dist.init_process_group("gloo")
torch.manual_seed(0)
blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(4)]
model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB))

policy = sw.Precision(param="bf16", reduce="fp32")
sw.shard(model, units={nn.TransformerEncoderLayer}, precision=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

step = 0
if RUN.exists():
    step = sw.checkpoint.load(RUN, model, optimizer).step

while step < STEPS:
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    for micro_batch in range(MICRO_BATCHES):
        tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
        targets = (3 * tokens + 1) % VOCAB
        with nullcontext() if micro_batch == MICRO_BATCHES - 1 else sw.no_sync(model):
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
            (loss / MICRO_BATCHES).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.6f}, norm of the gradients {norm.item():.6f}")

sw.checkpoint.save(RUN, model, optimizer, step=step, overwrite=True)
dist.destroy_process_group()
