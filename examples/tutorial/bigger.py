"""Step 3 of the tutorial: more than a rank's memory: torchrun --nproc-per-node 2 examples/tutorial/bigger.py"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

dist.init_process_group("gloo")
config = LlamaConfig(
    vocab_size=320, hidden_size=512, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=8
)
with torch.device("meta"):  # nothing is allocated yet
    model = LlamaForCausalLM(config)
numel = sum(p.numel() for p in model.parameters())
sw.shard(model, offload=sw.Offload(params="nvme", optimizer="nvme", path="."))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sw.optimizer_in_backward(model, optimizer)  # each unit's gradient is used and freed at once

tokens = torch.randint(320, (4, 64))
for _ in range(2):
    model(input_ids=tokens, labels=tokens).loss.backward()

memory = sw.memory(model)
if dist.get_rank() == 0:
    print(f"{numel:,} parameters: weights, gradients and AdamW's state are {16 * numel / 2**20:.0f} MiB in fp32")
    print(memory, flush=True)
dist.destroy_process_group()
