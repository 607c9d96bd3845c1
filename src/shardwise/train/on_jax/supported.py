"""Settings of the torch engine that have no counterpart in JAX: they are refused, not silently ignored."""

from __future__ import annotations

from shardwise.errors import ConfigError
from shardwise.policy.offload import PLACES
from shardwise.policy.settings import SHARD
from shardwise.train.config.schema import Config
from shardwise.train.config.tasks import DEFAULT

REMAT = {"none": "none", "full": "full", "selective-ops": "dots", "offload": "offload"}
"""The argument `remat` of `train_step`, by `train.activation_checkpointing`."""
_STRATEGIES = ("full_shard", "hybrid_shard", "no_shard")


def check_supported(config: Config) -> None:
    """Raise ConfigError for the first setting that `backend = "jax"` does not support."""
    train, parallel = config.train, config.parallel
    found = {
        f'model.task = "{config.model.task}"': config.model.task not in {None, DEFAULT},
        f"model.freeze = {config.model.freeze}": bool(config.model.freeze),
        f'train.optimizer = "{train.optimizer}"': train.optimizer != "adamw",
        f'train.on_nonfinite = "{train.on_nonfinite}"': train.on_nonfinite != "stop",
        "train.skip_spikes_above": train.skip_spikes_above > 0,
        f"train.roll_back = {train.roll_back}": train.roll_back > 0,
        "train.optimizer_in_backward": train.optimizer_in_backward,
        f'train.activation_checkpointing = "{train.activation_checkpointing}"': train.activation_checkpointing
        not in REMAT,
        "data.document_mask": config.data.document_mask,
        f'eval.generate = "{config.eval.generate}"': config.eval.generate is not None,
        f"train.patience = {train.patience}": train.patience > 0,
        f"checkpoint.memory_every = {config.checkpoint.memory_every}": config.checkpoint.memory_every > 0,
        "checkpoint.keep_best": config.checkpoint.keep_best,
        f"log.profile = {config.log.profile}": config.log.profile > 0,
        f"lora.r = {config.lora.r}": config.lora.r > 0,
        f'parallel.strategy = "{parallel.strategy}"': parallel.strategy not in _STRATEGIES,
        f'parallel.param_dtype = "{parallel.param_dtype}"': parallel.param_dtype == "fp16",
        f'parallel.reduce_dtype = "{parallel.reduce_dtype}"': parallel.reduce_dtype != "fp32",
    }
    found |= {f'offload.{kind} = "{place}"': place is not None for kind, place in config.offload if kind in PLACES}
    for name, one in SHARD.items():
        if one.key and name != "strategy":
            value = getattr(parallel, name)
            found[f"{one.key} = {value}"] = value != one.default
    wrong = next((setting for setting, asked in found.items() if asked), None)
    if wrong is not None:
        raise ConfigError(
            f'{wrong} is not supported with parallel.backend = "jax", which trains all weights of causal language '
            f"models with the optimizer adamw and the strategies {', '.join(_STRATEGIES)}, and whose compiler decides "
            "what is gathered when: leave it out"
        )
