"""Causal language models: packed rows of tokens, each predicted from those before it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shardwise.hub import shown
from shardwise.train.build.models import TextShape
from shardwise.train.config.schema import Config, DataConfig
from shardwise.train.data.batches import Datasets, load_datasets
from shardwise.train.data.tokenizer import in_words
from shardwise.train.output.sample import sample_text
from shardwise.train.tasks.objectives import NextToken
from shardwise.train.tasks.task import Task, shares

_FEW_TARGETS = 0.5
"""Share of tokens that are targets below which the run prints a note."""


def load(config: Config) -> Task:
    """Read the data of a causal language model. Not collective. Raises as `load_datasets`."""
    data = load_datasets(config.data)
    return Task(
        objective=NextToken(),
        train=data.train,
        held_out=data.held_out,
        shape=TextShape(data.tokenizer.vocab_size, data.tokenizer.end_id, config.data.seq_len),
        processor=data.tokenizer,
        reads=in_words(config.data.tokenizer, data.tokenizer),
        says=tuple(_says(config.data, data)),
        words=str(data),
        sample=partial(sample_text, rows=data.sample, tokenizer=data.tokenizer, seed=config.train.seed),
    )


def _says(config: DataConfig, data: Datasets) -> Iterator[str]:
    length = f"up to {config.block_mib} MiB" if config.streaming else f"{config.seq_len} tokens"
    yield f"{shown(config.named)}: {data.size} of {length} to train on, {len(data.held_out):,} sequences held out"
    yield from shares(config, data.train)
    their, of = ("the first block's", " of the first block") if config.streaming else ("their", "")
    if data.learnt < _FEW_TARGETS:
        yield f"{data.learnt:.0%} of {their} tokens are learnt, the rest is padding or prompts; all of them take time"
    if data.truncated:
        yield f"{data.truncated} examples{of} are longer than seq_len={config.seq_len} and are cut at the end"
