"""Two sharded models with an optimizer each, against one another: torchrun --nproc-per-node 2 examples/gan.py

A generator learns to draw points of a ring from noise; a critic learns to tell them from the ring's own points. Each
step has two backwards: one updates the critic, the other goes through the critic and updates the generator alone.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw

WIDTH, NOISE, ROWS, STEPS = 128, 8, 128, 600
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Return a sharded MLP, whose layers are units."""
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(inputs, WIDTH), nn.LeakyReLU(0.2), *hidden, nn.Linear(WIDTH, outputs))
    return sw.shard(model.to(DEVICE), "full_shard", units={nn.Sequential})


def ring(count: int) -> Tensor:
    """Return points near the circle of radius 2: (count, 2)."""
    angles, radii = 2 * torch.pi * torch.rand(count), 2 + 0.1 * torch.randn(count)
    return (radii * torch.stack([angles.cos(), angles.sin()])).T.to(DEVICE)


def noise(count: int) -> Tensor:
    """Return what the generator draws from: (count, NOISE)."""
    return torch.randn(count, NOISE).to(DEVICE)


def main() -> None:
    """Train both, and print how far the generator's points are from the ring and how they spread around it."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    torch.manual_seed(0)
    generator, critic = network(NOISE, 2), network(2, 1)
    torch.manual_seed(1 + dist.get_rank())  # each rank has points of its own
    update_generator, update_critic = (
        torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9)) for model in (generator, critic)
    )

    for step in range(1, STEPS + 1):
        critic.requires_grad_(True)
        with torch.no_grad():
            drawn = generator(noise(ROWS))
        critic_loss = F.softplus(-critic(ring(ROWS))).mean() + F.softplus(critic(drawn)).mean()
        critic_loss.backward()
        update_critic.step()
        update_critic.zero_grad()

        critic.requires_grad_(False)  # nothing of it is reduced; the generator's gradients come through it
        generator_loss = F.softplus(-critic(generator(noise(ROWS)))).mean()
        generator_loss.backward()
        update_generator.step()
        update_generator.zero_grad()
        if step % 100 == 0:
            with torch.no_grad():
                drawn = generator(noise(512))
            sums = torch.stack([(drawn.norm(dim=1) - 2).abs().mean(), *drawn.mean(0)])
            dist.all_reduce(sums)
            distance, x, y = (sums / dist.get_world_size()).tolist()
            if dist.get_rank() == 0:
                off = (x * x + y * y) ** 0.5
                print(f"step {step}: losses {critic_loss:.3f} (critic) and {generator_loss:.3f} (generator)", end="; ")
                print(f"points are {distance:.2f} from the ring, their centre {off:.2f} from its centre", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
