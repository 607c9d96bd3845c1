"""A script of transformers' own sharding: torchrun --nproc-per-node 2 examples/migrate_transformers_before.py"""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

BASE, RUN = Path("runs/migrate-transformers/base"), Path("runs/migrate-transformers/before")
VOCAB, LENGTH, ROWS, STEPS = 256, 32, 8, 20
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if rank == 0 and not BASE.exists():  # in place of a model that you have
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **SIZES)).save_pretrained(BASE)
dist.barrier()

model = AutoModelForCausalLM.from_pretrained(BASE, distributed_config=DistributedConfig(fsdp_size=ranks))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(STEPS):
    starts = torch.randint(VOCAB, (ROWS, 1), generator=torch.Generator().manual_seed(step * ranks + rank))
    tokens = (starts + 3 * torch.arange(LENGTH)) % VOCAB
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1}: loss {loss.item():.6f}, norm of the gradients {norm.item():.6f}")

model.save_pretrained(RUN)
dist.destroy_process_group()
