"""An FSDP engine to learn from, in torch.distributed alone: torchrun --nproc-per-node 2 examples/fsdp_in_100_lines.py

Each rank keeps 1/N of every parameter, of its gradient and of its optimizer state. A unit's parameters are gathered
when it computes, and freed afterwards. The script trains one model with this engine and with DDP, and compares both.

Left out: communication beside computation, memory that is used again instead of allocated again, mixed precision,
units inside units, parameters that get no gradient, several backwards a step, and any check of what ranks do.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VOCAB, WIDTH, LENGTH, ROWS, STEPS = 256, 64, 32, 16, 30


class Unit:
    """A module whose parameters are gathered together, into one flat buffer. Each rank keeps one slice of it."""

    def __init__(self, module: nn.Module) -> None:
        rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.params = list(module.parameters())
        self.full = self.flatten([p.detach() for p in self.params])
        self.shard = nn.Parameter(self.full.chunk(self.ranks)[rank].clone())  # what is left, and what is optimized
        start = 0
        for p in self.params:  # become views of the buffer: what arrives there need not be copied out
            p.data = self.full[start : start + p.numel()].view_as(p)
            start += p.numel()
        self.free()

        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(self.after_forward)
        self.missing = len(self.params)
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.after_gradient)

    def flatten(self, tensors: list[Tensor]) -> Tensor:
        """Return a buffer with the elements of all tensors, padded so that it can be cut into equal slices."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % self.ranks))

    def gather(self) -> None:
        """Allocate the buffer again and fill it with the slices of all ranks. Views of it are whole again, also those
        that autograd saved in forward."""
        self.full.untyped_storage().resize_(self.full.nbytes)
        dist.all_gather_single(self.full, self.shard.detach())

    def free(self) -> None:
        """Give the buffer's memory back. Views of it stay, without memory behind them."""
        self.full.untyped_storage().resize_(0)

    def after_forward(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        """Free the unit until the gradient of its output arrives: its backward comes next."""
        self.free()
        output.register_hook(lambda _: self.gather())

    def after_gradient(self, _: Tensor) -> None:
        """Count gradients. After the last one nothing needs the parameters any more, and every rank has a gradient of
        its own batch: reduce_scatter leaves each rank their mean, for its slice."""
        self.missing -= 1
        if self.missing == 0:
            self.missing = len(self.params)
            self.free()
            grads = self.flatten([p.grad for p in self.params]) / self.ranks
            self.shard.grad = torch.empty_like(self.shard)
            dist.reduce_scatter_single(self.shard.grad, grads)
            for p in self.params:
                p.grad = None


def build_model() -> nn.Sequential:
    """Return a small transformer. Each of its modules will be a unit."""
    blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(4)]
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train on numbers n whose targets are 3 n + 1, each rank with its own; return the mean loss of every step."""
    losses = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), ((3 * tokens + 1) % VOCAB).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(mean.item())
    return losses


def main() -> None:
    """Train twice, and compare."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build_model()
    replica = DistributedDataParallel(copy.deepcopy(model))
    units = [Unit(module) for module in model]
    optimizer = torch.optim.AdamW([unit.shard for unit in units], lr=1e-3)  # elementwise, so a slice is enough for it
    losses = train(model, optimizer)
    expected = train(replica, torch.optim.AdamW(replica.parameters(), lr=1e-3))

    whole = sum(p.nbytes for p in model.parameters())
    held = sum(unit.shard.nbytes + unit.full.untyped_storage().nbytes() for unit in units)
    for unit in units:
        unit.gather()
    pairs = zip(model.parameters(), replica.parameters(), strict=True)
    difference = max((mine - theirs).abs().max().item() for mine, theirs in pairs)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    if dist.get_rank() == 0:
        for step in range(4, STEPS, 5):
            print(f"step {step + 1}: loss {losses[step]:.6f}, with DDP {expected[step]:.6f}")
        print(f"bytes of parameters on a rank between steps: {held:,}, with DDP {whole:,}")
        print(f"greatest difference of a weight from DDP's: {difference}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
