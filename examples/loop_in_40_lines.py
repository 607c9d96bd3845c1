"""A sharded training loop in 40 lines: torchrun --nproc-per-node 2 examples/loop_in_40_lines.py

A small Llama learns to write Python from the source of Python's own argparse. Start it again to resume.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

RUN, STEPS, ROWS, LENGTH = Path("runs/loop-example"), 200, 8, 64
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
torch.manual_seed(0)
model = sw.shard(LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES)), "full_shard")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
step = 0
if (last := sw.checkpoint.latest(RUN)) is not None:
    loaded = sw.checkpoint.load(last, model, optimizer)
    step = loaded.step
    schedule.load_state_dict(loaded["schedule"])

while step < STEPS:
    starts = torch.randint(len(text) - LENGTH, (ROWS, 1), generator=torch.Generator().manual_seed(step * ranks + rank))
    tokens = text[starts + torch.arange(LENGTH)]  # each rank its own: (ROWS, LENGTH)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    step += 1
    if step % 20 == 0 and rank == 0:
        print(f"step {step}: loss {loss.item():.3f}, norm of the gradients {norm.item():.3f}", flush=True)
    if step % 100 == 0:
        sw.checkpoint.save(
            RUN / f"step-{step:06d}", model, optimizer, step=step, extra={"schedule": schedule.state_dict()}
        )

[answer] = sw.generate(model, [list(b"    def add_argument(self")], max_new_tokens=100)  # every rank calls
if rank == 0:
    print(bytes(answer.ids).decode(errors="replace"))
dist.destroy_process_group()
