"""`shardwise inspect`: the units of a configuration's model, as rank 0 of the configured ranks would hold them."""

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.train.build import auto, compute_dtype
from shardwise.train.build.job import hardware_here
from shardwise.train.build.models import TextShape, build_model
from shardwise.train.build.optimizer import align_of
from shardwise.train.build.sharding import shard_model
from shardwise.train.config.schema import RANDOM, Config
from shardwise.train.config.tasks import DEFAULT
from shardwise.train.data.tokenizer import load_tokenizer
from shardwise.train.output.checkpoints import Checkpoints
from shardwise.train.process.ranks import Ranks, device_here
from shardwise.train.run.directory import RunDirectory
from shardwise.train.tasks.loading import load_task


def table(config: Config) -> str:
    """Return the table of `sw.describe`, from one process: torch's fake process group stands in for the other ranks.

    Weights are not read, and no whole model is built. The strategy "auto" is settled by a plan, and an unset
    `param_dtype` by this machine's device or the checkpoint; lines above the table say what was chosen.

    Args:
        config: fitted to its ranks (`Config.for_ranks`).
    """
    world_size = config.parallel.ranks
    assert world_size != "auto"
    text = _shape(config)
    here = Ranks(0, world_size, device_here())
    saved = Checkpoints(RunDirectory(config.run_directory).checkpoints, config.checkpoint, here)
    config, words = compute_dtype.settle(config, here.device, saved.peek())
    words = f"{words}\n" if words else ""
    if config.parallel.strategy == "auto":
        config, planned = _settled(config, text, here)
        words += planned
    return words + _described(config, text, Ranks(0, world_size, torch.device("cpu")))


def _shape(config: Config) -> TextShape:
    """Return the sizes that the data requires of the model. Where it has labels or pictures, the data is read."""
    if config.model.task not in {None, DEFAULT}:
        return load_task(config).shape
    tokenizer = load_tokenizer(config.data.tokenizer)
    return TextShape(tokenizer.vocab_size, tokenizer.end_id, config.data.seq_len)


def _settled(config: Config, text: TextShape, ranks: Ranks) -> tuple[Config, str]:
    """Replace the strategy "auto" as training does, but without measuring CPUs first; return the configuration and the
    line to print."""
    hardware = hardware_here(config, ranks.device)
    config, outlook = auto.choose(config, text, ranks, hardware)
    measured = ranks.device.type == "cpu" and config.parallel.hardware is None
    hint = "; `shardwise train` measures this machine first and may choose otherwise" if measured else ""
    return config, f"{outlook.words}{hint}\n"


def _described(config: Config, text: TextShape, ranks: Ranks) -> str:
    blank = config.model.model_copy(update={"weights": RANDOM, "init": "meta"})
    dist.init_process_group("fake", rank=ranks.rank, world_size=ranks.world_size)
    try:
        with torch.device("meta"):  # a factory builds its module here too
            model = build_model(blank, text, config.lora)
        shard_model(model, config.parallel, ranks, lora=config.lora, align=align_of(config.train))
        return str(sw.describe(model))
    finally:
        dist.destroy_process_group()
