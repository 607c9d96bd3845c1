"""What the tests of tasks share: tables of `datasets`, small models, runs on ranks, and unsharded runs beside them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.train import trainer
from shardwise.train.build.models import build_model
from shardwise.train.build.optimizer import build_optimizer
from shardwise.train.config.files import load
from shardwise.train.config.schedule import LearningRateSchedule
from shardwise.train.config.schema import Config
from shardwise.train.data.batches import Batches, EvaluationBatches, Share
from shardwise.train.data.model_files import settled
from shardwise.train.data.tokenizer import byte_tokenizer
from shardwise.train.loss import DeviceBatch, Evaluation, LossFunction, StepWeights, evaluate
from shardwise.train.process.interruption import Interruption
from shardwise.train.process.ranks import Ranks
from shardwise.train.tasks.loading import load_task

BERT = """
[model.config]
model_type = "bert"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
hidden_dropout_prob = 0.0
attention_probs_dropout_prob = 0.0
"""
RUN = """
[train]
steps = {steps}
micro_batch = 2
global_batch = 8
lr = 1e-2
{more}
"""
ALONE = Ranks(0, 1, torch.device("cpu"))


def train(folder: str, *overrides: str) -> str:
    """Train `run.toml` of a folder on this rank and its peers. Returns what is printed."""
    printed, before = io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            trainer.run(load("run.toml", overrides))
    finally:
        os.chdir(before)
    return printed.getvalue()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in lines(run / "metrics.jsonl")]


def configured(folder: Path, *overrides: str) -> Config:
    """Return `run.toml` of a folder, which is the working directory, as one rank sees it."""
    return settled(load(folder / "run.toml", overrides)).for_ranks(1)


def unsharded(config: Config) -> tuple[nn.Module, list[float], Evaluation]:
    """Train without the engine on the same data in the same order: return the model, each step's loss, and the
    evaluation at the end."""
    train, task = config.train, load_task(config)
    assert train.global_batch is not None
    torch.manual_seed(train.seed)
    model: nn.Module = build_model(config.model.model_copy(update={"init": "cpu"}), task.shape)
    loss_function = LossFunction(model, task.objective)
    optimizer = build_optimizer(model, train)
    schedule = LearningRateSchedule.of(train)
    share = Share(0, 1, train.global_batch)
    batches = Batches(task.train, share, train.global_batch, config.data.seed)
    found = []
    for step in range(train.steps):
        (batch,) = batches.batch(step)
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        loss = loss_function(model, DeviceBatch.of(batch, ALONE.device))
        StepWeights(batch.targets, 1, 1).scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.nll_sum.detach()) / batch.targets)
    evaluation = evaluate(model, loss_function, EvaluationBatches(task.held_out, share), ALONE, Interruption())
    assert evaluation is not None
    return model.eval(), found, evaluation


def sentences(rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return texts of different lengths, each about one of three animals, with the animal as the label."""
    chosen = random.Random(seed)
    kinds = {"cat": "purrs mews", "dog": "barks digs", "owl": "hoots flies"}
    made = []
    for _ in range(rows):
        label = chosen.choice(list(kinds))
        words = [chosen.choice(kinds[label].split()) for _ in range(chosen.randint(1, 6))]
        made.append({"text": " ".join([*words, "at night"]), "label": label})
    return made


COLOURS = {"red": (200, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 200)}


def picture(number: int) -> tuple[bytes, str]:
    """Return a PNG of one colour with some noise, of its own size, and the colour's name."""
    from PIL import Image

    name = list(COLOURS)[number % 3]
    noise = np.random.default_rng(number).integers(0, 40, (10 + number % 7, 12, 3))
    file = io.BytesIO()
    Image.fromarray((np.array(COLOURS[name]) + noise).astype(np.uint8)).save(file, "PNG")
    return file.getvalue(), name


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def save_llava(folder: str) -> None:
    """Write the configuration of a small Llava, and its processor with a chat template; no weights."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaProcessor

    size: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    vision = CLIPVisionConfig(**size, num_attention_heads=2, image_size=16, patch_size=8, projection_dim=32)
    text = LlamaConfig(**size, num_attention_heads=2, vocab_size=320)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=image_id, image_seq_length=4, vision_feature_layer=-1
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(folder)
    shape = {"height": 16, "width": 16}
    pictures = CLIPImageProcessor(size=shape, crop_size=shape)
    LlavaProcessor(
        pictures, tokenizer, patch_size=8, vision_feature_select_strategy="default", chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
