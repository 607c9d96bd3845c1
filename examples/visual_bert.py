"""Questions about pictures, answered by a sharded VisualBERT: torchrun --nproc-per-node 2 examples/visual_bert.py

The script draws its data: four coloured shapes in a picture, and questions whose answer is only in the picture ("what
colour is the circle?"), between questions without a picture ("how many corners has a square?"). It trains with the
tower for pictures frozen at first, then trains all, evaluates beside a model that reads the text alone, exports to
ONNX, and evaluates once more in onnxruntime. Stop it at any time and start it again, also with another number of
ranks: it resumes from its last checkpoint. Needs: pip install 'shardwise[onnx]'
"""

import argparse
import logging
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import onnxruntime
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import VisualBertConfig, VisualBertForQuestionAnswering
from transformers.models.visual_bert.modeling_visual_bert import VisualBertLayer

import shardwise as sw

# The data -------------------------------------------------------------------------------------------------------------

CELL, NOISE, LENGTH, ROWS, HELD_OUT, WIDTH = 16, 0.1, 9, 96, 960, 64
SHAPES, COLOURS, NUMBERS = ["square", "circle", "triangle", "cross"], ["red", "green", "blue", "yellow"], "0 3 4 12"
QUESTIONS = ["what colour is the {} ?", "which shape is {} ?", "how many corners has a {} ?"]
ANSWERS = [*COLOURS, *SHAPES, *NUMBERS.split()]
CORNERS = torch.tensor([10, 8, 9, 11])  # the answers for a square, a circle, a triangle and a cross
WORDS = {word: n for n, word in enumerate(dict.fromkeys(f"[PAD] [CLS] [SEP] {' '.join(QUESTIONS + ANSWERS)}".split()))}
PALETTE = torch.tensor([[0.9, 0.1, 0.1], [0.1, 0.8, 0.2], [0.1, 0.2, 0.9], [0.9, 0.9, 0.1]])


class Rows(NamedTuple):
    """Questions, some with a picture."""

    words: Tensor
    """Ids of words: (rows, LENGTH)."""
    mask: Tensor
    """1 for words and 0 for padding: (rows, LENGTH)."""
    pictures: Tensor
    """Those that there are: (pictures, 3, 2 * CELL, 2 * CELL)."""
    seen_by: Tensor
    """The row that each picture belongs to: (pictures,)."""
    answers: Tensor
    """Indices into ANSWERS: (rows,)."""

    def part(self, start: int, stop: int) -> "Rows":
        """Return some of the rows with their pictures, of which there may be none."""
        chosen = (self.seen_by >= start) & (self.seen_by < stop)
        texts = (self.words[start:stop], self.mask[start:stop])
        return Rows(*texts, self.pictures[chosen], self.seen_by[chosen] - start, self.answers[start:stop])


def outlines() -> Tensor:
    """Return the four shapes as masks: (4, CELL, CELL)."""
    y, x = torch.meshgrid(*[torch.linspace(-1.2, 1.2, CELL)] * 2, indexing="ij")
    inside = (x.abs() < 1) & (y.abs() < 1)
    cross = inside & ((x.abs() < 0.4) | (y.abs() < 0.4))
    return torch.stack([inside, x**2 + y**2 < 1, inside & (2 * x.abs() < 1 + y), cross]).float()


def encode(question: str) -> list[int]:
    """Return the ids of a question's words, padded to LENGTH."""
    ids = [WORDS[word] for word in f"[CLS] {question} [SEP]".split()]
    return ids + [WORDS["[PAD]"]] * (LENGTH - len(ids))


def draw(count: int, seed: int, first_without: int = 0) -> Rows:
    """Return rows that depend on the arguments alone; the first so many of them are without a picture."""
    generator = torch.Generator().manual_seed(seed)
    shapes, colours = (torch.rand(count, 4, generator=generator).argsort(1) for _ in range(2))  # of the four cells
    asked, kinds = (torch.randint(high, (count,), generator=generator) for high in (4, len(QUESTIONS)))
    drawn = torch.rand(count, 4, generator=generator) < 0.25  # besides the one that is asked about
    drawn[torch.arange(count), asked] = True
    kinds[:first_without] = 2
    shape, colour = shapes[torch.arange(count), asked], colours[torch.arange(count), asked]
    names = [COLOURS[c] if kind == 1 else SHAPES[s] for kind, s, c in zip(kinds, shape, colour, strict=True)]
    words = torch.tensor([encode(QUESTIONS[k].format(name)) for k, name in zip(kinds, names, strict=True)])
    answers = torch.stack([colour, 4 + shape, CORNERS[shape]])[kinds, torch.arange(count)]

    seen_by = (kinds < 2).nonzero()[:, 0]
    cells = (outlines()[shapes] * drawn[..., None, None])[seen_by, :, None] * PALETTE[colours[seen_by]][..., None, None]
    rows = cells.unflatten(1, (2, 2)).permute(0, 3, 1, 4, 2, 5)  # (pictures, 3, 2, CELL, 2, CELL)
    pictures = rows.reshape(-1, 3, 2 * CELL, 2 * CELL)
    pictures = pictures + NOISE * torch.randn(pictures.shape, generator=generator)
    return Rows(words, (words != WORDS["[PAD]"]).long(), pictures, seen_by, answers)


# The model ------------------------------------------------------------------------------------------------------------


class PictureTower(nn.Module):
    """Turns each quarter of a picture into an embedding, as a detector does with each object."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.quarters = nn.Conv2d(3, WIDTH, 4, stride=4), nn.Conv2d(WIDTH, WIDTH, CELL // 4, CELL // 4)

    def forward(self, pictures: Tensor) -> Tensor:
        """pictures: (pictures, 3, 2 * CELL, 2 * CELL); embeddings are (pictures, 4, WIDTH)."""
        return self.quarters(F.gelu(self.patches(pictures))).flatten(2).transpose(1, 2)


def visual_bert() -> VisualBertForQuestionAnswering:
    """Return a VisualBERT with random weights, without dropout: its random numbers would differ with the ranks."""
    config = VisualBertConfig(
        vocab_size=len(WORDS),
        pad_token_id=WORDS["[PAD]"],
        hidden_size=WIDTH,
        visual_embedding_dim=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=len(ANSWERS),
    )
    return VisualBertForQuestionAnswering(config)


class Answerer(nn.Module):
    """VisualBERT behind a tower for pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.bert = PictureTower(), visual_bert()

    def forward(self, words: Tensor, mask: Tensor, pictures: Tensor, seen_by: Tensor) -> Tensor:
        """Takes what `Rows` has; logits are (rows, answers).

        A rank without a picture calls the tower all the same, with none: every rank gathers the same units.
        """
        found = self.tower(pictures)
        embeddings = found.new_zeros(words.shape[0], *found.shape[1:]).index_put((seen_by,), found)
        has_picture = mask.new_zeros(words.shape[0]).index_fill(0, seen_by, 1)
        attended = has_picture[:, None].expand(-1, found.shape[1])
        return self.bert(words, mask, visual_embeds=embeddings, visual_attention_mask=attended).logits


class Reader(nn.Module):
    """The same BERT, which is never shown a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = visual_bert()

    def forward(self, words: Tensor, mask: Tensor, *_: Tensor) -> Tensor:
        """Takes what `Rows` has; logits are (rows, answers)."""
        return self.bert(words, mask).logits


# Training and evaluation ----------------------------------------------------------------------------------------------


def fit(model: nn.Module, run: Path, settings: argparse.Namespace) -> None:
    """Shard a model and train it, from the last checkpoint of its run on."""
    tower = model.tower if isinstance(model, Answerer) else None
    if tower is not None:
        tower.requires_grad_(False)  # before sw.shard: frozen parameters get groups of their own
    sw.shard(model, "full_shard", units={PictureTower, VisualBertLayer})
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step = 0
    if (last := sw.checkpoint.latest(run)) is not None:
        step = sw.checkpoint.load(last, model, optimizer).step
    say(f"{type(model).__name__}: {sum(p.numel() for p in model.parameters()):,} parameters, from step {step}")

    rank, ranks = dist.get_rank(), dist.get_world_size()
    while step < settings.steps:
        if tower is not None:
            tower.requires_grad_(step >= settings.steps // 3)
        rows = draw(ROWS, step, first_without=ROWS // 2 if step % 4 == 3 else 0)  # so some ranks have no picture
        mine = rows.part(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
        logits = model(*(value.to(settings.device) for value in mine[:-1]))
        # Gradients are averaged over ranks: sums over their rows, times ranks / ROWS, become the mean over all rows.
        loss = F.cross_entropy(logits, mine.answers.to(settings.device), reduction="sum") * ranks / ROWS
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % settings.log_every == 0 or step == settings.steps:
            dist.all_reduce(over_all := loss.detach() / ranks)
            say(f"  step {step}: loss {over_all.item():.6f}")
        if step % settings.save_every == 0 or step == settings.steps:
            sw.checkpoint.save(run / f"step-{step:06d}", model, optimizer, step=step)


def count(answer: Callable[[Rows], Tensor], rank: int = 0, ranks: int = 1) -> Tensor:
    """Let a model answer this rank's held-out questions.

    All ranks call the model equally often, and never without rows, which transformers does not take.

    Returns: right answers and all answers (2), to questions with a picture and without (2): (2, 2).
    """
    rows, counts = draw(HELD_OUT, seed=2**40), torch.zeros(2, 2)
    batches = ranks * math.ceil(HELD_OUT / ROWS / ranks)
    for batch in range(rank, batches, ranks):
        mine = rows.part(batch * HELD_OUT // batches, (batch + 1) * HELD_OUT // batches)
        with torch.no_grad():
            right = answer(mine).argmax(1).cpu() == mine.answers
        with_picture = mine.answers < len(COLOURS) + len(SHAPES)
        kinds = torch.stack([with_picture, ~with_picture])
        counts += torch.stack([(right & kinds).sum(1), kinds.sum(1)])
    return counts


def count_sharded(model: nn.Module, device: torch.device) -> Tensor:
    """Return what `count` does, of all ranks together."""
    model.eval()
    counts = count(
        lambda rows: model(*(value.to(device) for value in rows[:-1])), dist.get_rank(), dist.get_world_size()
    ).to(device)
    dist.all_reduce(counts)
    return counts.cpu()


def export(model: nn.Module, file: Path) -> None:
    """Write an unsharded model as an ONNX graph that takes any number of rows and of pictures."""
    any_number = {0: torch.export.Dim.DYNAMIC}
    logging.disable(logging.WARNING)  # the exporter's, about packages that it could use
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            model.eval(),
            draw(8, seed=0)[:-1],
            file,
            input_names=list(Rows._fields[:-1]),
            output_names=["logits"],
            dynamic_shapes=(any_number,) * 4,
            verbose=False,
        )
    logging.disable(logging.NOTSET)


def count_in_onnxruntime(file: Path) -> Tensor:
    """Return what `count` does, of the exported model."""
    session = onnxruntime.InferenceSession(file)
    names = [value.name for value in session.get_inputs()]

    def answer(rows: Rows) -> Tensor:
        return torch.from_numpy(session.run(None, {name: getattr(rows, name).numpy() for name in names})[0])

    return count(answer)


def say(text: str) -> None:
    """Print on one rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    """Train and evaluate both models, then export the one that sees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--run", type=Path, default=Path("runs/visual-bert"), help="directory of checkpoints")
    settings = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    settings.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(settings.device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    counts = {}
    for build in (Reader, Answerer):
        torch.manual_seed(0)
        model = build()
        fit(model, settings.run / build.__name__.lower(), settings)
        counts[build.__name__] = count_sharded(model, settings.device)
    with sw.unsharded(model, rank0_only=True, cpu=True):
        if dist.get_rank() == 0:
            export(model, settings.run / "model.onnx")
            counts["onnxruntime"] = count_in_onnxruntime(settings.run / "model.onnx")

    say("right answers to held-out questions  with a picture  without")
    for name, (right, of_all) in counts.items():
        with_picture, without = right / of_all
        say(f"{name:35}  {with_picture:14.1%}  {without:7.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
