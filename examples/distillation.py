"""A small student learns from a larger teacher, both sharded: torchrun --nproc-per-node 2 examples/distillation.py

The teacher is trained first, then frozen: it keeps its shards but no gradients, and its forwards run without autograd,
so that each of its units is freed as soon as it has computed. The student learns the teacher's distribution of every
next token of a few rows, and is compared with a student that has the same rows and no teacher.
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

VOCAB, LENGTH, ROWS, STEPS, FEW = 32, 32, 16, 150, 2
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
CHANCES = (2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))).softmax(1)
"""How likely each token is after each other one: what there is to learn, (VOCAB, VOCAB)."""


def draw(index: int) -> Tensor:
    """Return this rank's rows of a batch: (ROWS, LENGTH)."""
    generator = torch.Generator().manual_seed(index * dist.get_world_size() + dist.get_rank())
    tokens = [torch.randint(VOCAB, (ROWS,), generator=generator)]
    while len(tokens) < LENGTH:
        tokens.append(torch.multinomial(CHANCES[tokens[-1]], 1, generator=generator)[:, 0])
    return torch.stack(tokens, 1).to(DEVICE)


def build(width: int, layers: int) -> LlamaForCausalLM:
    """Return a sharded Llama with random weights."""
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_attention_heads=4, **sizes))
    return sw.shard(model, "full_shard")


def train(model: LlamaForCausalLM, loss_of: Callable[[Tensor], Tensor], batches: int) -> None:
    """Train for STEPS steps on so many batches, again and again."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        loss_of(draw(step % batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def surprise(logits_of: Callable[[Tensor], Tensor]) -> float:
    """Return the mean loss of the next token on rows that nobody was trained on, over all ranks."""
    losses = []
    for index in range(10):
        tokens = draw(10**6 + index)
        losses.append(F.cross_entropy(logits_of(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
    dist.all_reduce(mean := torch.stack(losses).mean() / dist.get_world_size())
    return mean.item()


def main() -> None:
    """Train a teacher, a student of it and one without, and print what the three have learned."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")

    teacher = build(width=128, layers=2)
    train(teacher, lambda tokens: teacher(tokens, labels=tokens).loss, batches=STEPS)
    teacher.requires_grad_(False).eval()

    alone = build(width=32, layers=1)
    train(alone, lambda tokens: alone(tokens, labels=tokens).loss, batches=FEW)

    student = build(width=32, layers=1)

    def divergence(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            aim = teacher(tokens).logits.log_softmax(-1)
        found = student(tokens).logits.log_softmax(-1)
        return F.kl_div(found.flatten(0, 1), aim.flatten(0, 1), reduction="batchmean", log_target=True)

    train(student, divergence, batches=FEW)

    scores = {
        "teacher": surprise(lambda tokens: teacher(tokens).logits),
        "student": surprise(lambda tokens: student(tokens).logits),
        "student without a teacher": surprise(lambda tokens: alone(tokens).logits),
        "the data's own chances": surprise(lambda tokens: CHANCES.log().to(DEVICE)[tokens]),
    }
    if dist.get_rank() == 0:
        for name, model in {"teacher": teacher, "student": student}.items():
            print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters")
        for name, score in scores.items():
            print(f"{name}: loss {score:.3f} on rows that it has not seen")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
