"""A sharded vision transformer that tells shapes apart: torchrun --nproc-per-node 2 examples/vision_transformer.py

The pictures are made here: a ring, a square or a cross of random size, place and brightness, in noise. Evaluation is
sharded as well: each rank has pictures of its own, and the accuracy is over all of them.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

import shardwise as sw

SIZE, ROWS = 32, 16
LABELS = ("ring", "square", "cross")
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def pictures(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return pictures, (rows, 1, SIZE, SIZE) fp32, and their labels, (rows,)."""
    labels = torch.randint(len(LABELS), (rows,), generator=generator)
    radius = 6 + 6 * torch.rand(rows, 1, 1, generator=generator)
    centre = 12 + (SIZE - 24) * torch.rand(2, rows, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    down, right = (y - centre[0]).abs(), (x - centre[1]).abs()
    largest = torch.maximum(down, right)
    ring = ((down.square() + right.square()).sqrt() - radius).abs() < 1.5
    square = (largest - radius).abs() < 1.5
    cross = (torch.minimum(down, right) < 1.5) & (largest < radius)
    shapes = torch.stack([ring, square, cross])[labels, torch.arange(rows)].float()
    brightness = 1 + torch.rand(rows, 1, 1, generator=generator)
    noise = 0.25 * torch.randn(rows, SIZE, SIZE, generator=generator)
    return (shapes * brightness + noise).unsqueeze(1).to(DEVICE), labels.to(DEVICE)


def main() -> None:
    """Train, and print the accuracy on pictures that were not seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = ViTConfig(image_size=SIZE, patch_size=4, num_channels=1, num_labels=len(LABELS), **sizes)
    model = sw.shard(ViTForImageClassification(config), "full_shard", units="transformers")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)

    for step in range(1, steps + 1):
        images, labels = pictures(ROWS, torch.Generator().manual_seed(step * ranks + rank))  # each rank its own
        loss = model(pixel_values=images, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    model.eval()
    images, labels = pictures(256 // ranks, torch.Generator().manual_seed(rank))
    with torch.no_grad():
        right = (model(pixel_values=images).logits.argmax(-1) == labels).sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"accuracy on 256 new pictures: {right.item() / 256:.2f}, by chance {1 / len(LABELS):.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
