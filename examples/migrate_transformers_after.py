"""Migrated from transformers' own sharding: torchrun --nproc-per-node 2 examples/migrate_transformers_after.py"""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import shardwise as sw

BASE, RUN = Path("runs/migrate-transformers/base"), Path("runs/migrate-transformers/after")
VOCAB, LENGTH, ROWS, STEPS = 256, 32, 8, 20
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if rank == 0 and not BASE.exists():  # in place of a model that you have
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **SIZES)).save_pretrained(BASE)
dist.barrier()

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE))
sw.shard(model)
sw.checkpoint.load_pretrained(BASE, model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(STEPS):
    starts = torch.randint(VOCAB, (ROWS, 1), generator=torch.Generator().manual_seed(step * ranks + rank))
    tokens = (starts + 3 * torch.arange(LENGTH)) % VOCAB
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1}: loss {loss.item():.6f}, norm of the gradients {norm.item():.6f}")

sw.checkpoint.save(RUN, model, optimizer, step=STEPS, overwrite=True)
dist.destroy_process_group()
