"""Evaluation by generation: the sharded model answers held-out prompts, and its answers are compared with others."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from shardwise.generation.generate import Generator
from shardwise.generation.options import SAMPLING
from shardwise.train.config.schema import ANSWER_METRICS, Config
from shardwise.train.data.questions import read_questions
from shardwise.train.data.tokenizer import PLAIN_TEMPLATE, Saved
from shardwise.train.process.interruption import Interruption
from shardwise.train.process.ranks import Ranks
from shardwise.train.tasks.objectives import f1
from shardwise.train.tasks.task import Task


class Answers(NamedTuple):
    """What a model answered, the same on every rank."""

    metrics: Mapping[str, float]
    """The mean of each of `ANSWER_METRICS` over all prompts."""
    rows: Sequence[Mapping[str, Any]]
    """By prompt: `prompt` or `messages`, `reference`, `completion`, `finish_reason` and its own metrics."""


class Answering:
    """The prompts of `eval.generate`, and how the model answers them. Random numbers of training stay as they are."""

    def __init__(self, config: Config, task: Task, model: nn.Module, ranks: Ranks) -> None:
        """Read the prompts on rank 0. Every rank must call this.

        Raises:
            UserError: there are no prompts, the model cannot answer one of them, or an option cannot be used. Every
                rank raises.
        """
        self._config, self._ranks = config, ranks
        self._questions = ranks.on_first(lambda: read_questions(config))
        settings = config.eval
        options = {"max_new_tokens": settings.max_new_tokens, **settings.options}
        if not {"do_sample", *SAMPLING} & options.keys():
            options["do_sample"] = False  # whatever the model's own configuration says
        with ranks.together():
            self._generator = Generator(model, _tokenizer(task.processor), options, settings.seed)
            prompts = [question.prompt for question in self._questions]
            self._batches = self._generator.batches(prompts, settings.micro_batch)

    def __len__(self) -> int:
        return len(self._questions)

    def is_due(self, step: int) -> bool:
        """Return whether the evaluation after `step` steps is one that generates."""
        train = self._config.train
        return step == train.steps or step // max(train.eval_every, 1) % self._config.eval.every == 0

    def answer(self, interruption: Interruption) -> Answers | None:
        """Let the model answer all prompts, of which each rank takes its part. The answers do not depend on the number
        of ranks. Every rank must call this.

        Returns:
            None if a rank has been asked to end; all ranks then stop after the same batch.
        """
        rows: list[dict[str, Any]] = []
        with self._generator.evaluating():
            for answers in self._generator.in_turns(self._batches, self._ranks, self._ranks.per_batch):
                for one in answers:
                    question = self._questions[one.prompt]
                    said = {"completion": one.text, "finish_reason": one.finish_reason}
                    rows.append({**question.fields, **said, **compared(one.text or "", question.reference)})
                interruption.agreed = self._ranks.count(interruption.asked) > 0
                if interruption.agreed:
                    return None
        return Answers({name: sum(row[name] for row in rows) / len(rows) for name in ANSWER_METRICS}, rows)


def compared(answer: str, reference: str) -> dict[str, float]:
    """Return the metrics of an answer: `exact_match`, 1 if it has the same words; and `token_f1`, the harmonic mean of
    precision and recall of its words (SQuAD, arXiv:1606.05250), for which case, punctuation and order do not count."""
    exact = float(answer.split() == reference.split())
    ours, theirs = (Counter(re.findall(r"\w+", text.lower())) for text in (answer, reference))
    overlap = f1((ours & theirs).total(), ours.total(), theirs.total()) if ours or theirs else exact
    return dict(zip(ANSWER_METRICS, (exact, overlap), strict=True))


def _tokenizer(processor: Saved) -> Any:
    """Return the tokenizer of transformers that whatever loads the trained model gets."""
    from transformers import AutoTokenizer

    auto: Any = AutoTokenizer  # untyped
    with tempfile.TemporaryDirectory(prefix="shardwise-") as directory:
        processor.save(Path(directory))
        tokenizer = auto.from_pretrained(directory, local_files_only=True)
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEMPLATE
    return tokenizer
