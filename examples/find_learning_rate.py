"""Pre-training that finds its learning rate first: torchrun --nproc-per-node 2 examples/find_learning_rate.py

A sharded copy of the model is trained for some steps on the run's own data, with a rate that grows from step to step,
until its loss explodes; then it is thrown away. The rate is where the loss fell fastest (Smith, arXiv:1506.01186). The
model itself, its optimizer and its data are as they were before.
"""

import argparse
import copy
import math
import os
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

ROWS, LENGTH = 8, 64
LOWEST, HIGHEST, TRIED = 1e-5, 1.0, 60
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def batch(step: int) -> Tensor:
    """Return this rank's tokens of a step: (ROWS, LENGTH)."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    return TEXT[torch.randint(len(TEXT) - LENGTH, (ROWS, 1), generator=generator) + torch.arange(LENGTH)].to(DEVICE)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Take a step. Returns the mean loss of all ranks, the same number on each."""
    tokens = batch(step)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def find_learning_rate(model: nn.Module) -> float:
    """Return the learning rate at which the smoothed loss of a copy falls fastest. Every rank must call this."""
    trial = copy.deepcopy(model)  # sharded as well: each rank copies its own shards
    optimizer = torch.optim.AdamW(trial.parameters(), lr=LOWEST)
    rates, losses, smooth = [], [], 0.0
    for number in range(TRIED):
        rate = LOWEST * (HIGHEST / LOWEST) ** (number / (TRIED - 1))
        optimizer.param_groups[0]["lr"] = rate
        smooth = 0.7 * smooth + 0.3 * train_step(trial, optimizer, number)
        rates.append(rate)
        losses.append(smooth / (1 - 0.7 ** (number + 1)))
        if not math.isfinite(losses[-1]) or losses[-1] > 1.5 * min(losses):
            break
    lowest = losses.index(min(losses))
    falls = [before - after for before, after in pairwise(losses[: lowest + 1])]
    return rates[falls.index(max(falls)) + 1]


def main() -> None:
    """Find the rate, then train with it, and with a tenth and ten times of it for comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = sw.shard(LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)), "full_shard")
    before = [parameter.local.clone() for parameter in model.parameters()]
    found = find_learning_rate(model)
    untouched = all(torch.equal(p.local, old) for p, old in zip(model.parameters(), before, strict=True))
    if dist.get_rank() == 0:
        print(f"found {found:.1e}; the model is {'as it was' if untouched else 'CHANGED'}", flush=True)
    for rate in (found / 10, found, 10 * found):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=rate)
        losses = [train_step(trained, optimizer, step) for step in range(steps)]
        if dist.get_rank() == 0:
            print(f"rate {rate:.1e}: loss {sum(losses[-10:]) / len(losses[-10:]):.3f} after {steps} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
