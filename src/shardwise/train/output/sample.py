"""A little text from the trained model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.train.data.packing import PackedRows
from shardwise.train.data.tokenizer import Tokenizer
from shardwise.train.process.ranks import Ranks
from shardwise.train.run.sample import TEMPERATURE, Sample, lengths


def sample_text(model: nn.Module, rows: PackedRows, tokenizer: Tokenizer, seed: int, ranks: Ranks) -> Sample | None:
    """Let the sharded model go on from the first tokens of `rows`. Every rank must call this; all draw the same tokens.

    Args:
        rows: at least one row.
        seed: of the sampling. The process's random state is left reseeded.

    Returns:
        None where the model has no `generate` (only transformers models do).
    """
    generate: Any = getattr(model, "generate", None)
    if generate is None:
        return None
    prompt_tokens, new_tokens = lengths(rows.ids.shape[1])
    prompt = torch.from_numpy(rows.ids[:1, :prompt_tokens]).long().to(ranks.device)
    torch.manual_seed(seed)
    model.eval()
    with torch.no_grad():
        output = generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=True,
            temperature=TEMPERATURE,
            pad_token_id=tokenizer.end_id,
            eos_token_id=tokenizer.end_id,
        )
    model.train()
    ids = output[0].tolist()
    return Sample.of(ids, prompt_tokens, tokenizer)
