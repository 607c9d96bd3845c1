"""`shardwise inspect`: the units of a configuration's model, as rank 0 of the asked number of ranks would hold them."""

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.train.config import Config
from shardwise.train.models import TextShape, build_model
from shardwise.train.ranks import Ranks
from shardwise.train.sharding import shard_model
from shardwise.train.tokenizer import load_tokenizer


def table(config: Config) -> str:
    """The table of `sw.describe`, from one process: torch's fake process group stands for the other ranks.

    Args:
        config: fitted to its ranks (`Config.for_ranks`). Weights are not read, and no whole model is built.
    """
    assert config.parallel.ranks != "auto"
    tokenizer = load_tokenizer(config.data.tokenizer)
    text = TextShape(tokenizer.vocab_size, tokenizer.end_id, config.data.seq_len)
    blank = config.model.model_copy(update={"weights": None, "init": "meta"})
    dist.init_process_group("fake", rank=0, world_size=config.parallel.ranks)
    try:
        with torch.device("meta"):  # a factory builds its module here too
            model = build_model(blank, text)
        shard_model(model, config.parallel, Ranks(0, config.parallel.ranks, torch.device("cpu")))
        return str(sw.describe(model))
    finally:
        dist.destroy_process_group()
