"""Step 4 of the tutorial: with checkpoints: torchrun --nproc-per-node 2 examples/tutorial/resumed.py STEPS"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

ROWS, LENGTH, STEPS = 12, 64, int(sys.argv[1])

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
text = torch.tensor([*Path(torch.serialization.__file__).read_bytes()])  # some Python, as bytes
config = LlamaConfig(vocab_size=320, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
model = LlamaForCausalLM(config)
sw.shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

newest = sw.checkpoint.latest("runs/tutorial")
done = sw.checkpoint.load(newest, model, optimizer).step if newest else 0
for step in range(done + 1, STEPS + 1):
    starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=torch.Generator().manual_seed(step))
    tokens = torch.stack([text[start : start + LENGTH] for start in starts[rank::ranks]])
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        dist.all_reduce(mean := loss.detach() / ranks)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.3f}", flush=True)
        sw.checkpoint.save(f"runs/tutorial/step-{step:06d}", model, optimizer, step=step)

dist.destroy_process_group()
