"""A script of torch's FSDP2, to be migrated: torchrun --nproc-per-node 2 examples/migrate_fsdp2_before.py"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

VOCAB, WIDTH, LENGTH, ROWS, STEPS, MICRO_BATCHES = 256, 64, 32, 8, 20, 2
RUN = Path("runs/migrate-fsdp2/before")

dist.init_process_group("gloo")
torch.manual_seed(0)
blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(4)]
model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB))

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

step = 0
if RUN.exists():
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)) | {"step": 0}
    dcp.load(state, checkpoint_id=RUN)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step = state["step"]

while step < STEPS:
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    for micro_batch in range(MICRO_BATCHES):
        tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
        targets = (3 * tokens + 1) % VOCAB
        model.set_requires_gradient_sync(micro_batch == MICRO_BATCHES - 1)
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        (loss / MICRO_BATCHES).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.6f}, norm of the gradients {norm.item():.6f}")

state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)) | {"step": step}
dcp.save(state, checkpoint_id=RUN)
dist.destroy_process_group()
