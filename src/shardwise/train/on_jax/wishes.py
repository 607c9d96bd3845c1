"""Settings of the torch engine that have no counterpart in JAX: they are refused, not silently ignored."""

from __future__ import annotations

from shardwise.errors import ConfigError
from shardwise.train.config.schema import Config, ParallelConfig

REMAT = {"none": "none", "full": "full", "selective-ops": "dots", "offload": "offload"}
"""The argument `remat` of `train_step`, by `train.activation_checkpointing`."""
_STRATEGIES = ("full_shard", "hybrid_shard", "no_shard")


def check_wishes(config: Config) -> None:
    """Raise ConfigError for the first setting that `backend = "jax"` does not support."""
    train, parallel = config.train, config.parallel
    without = ParallelConfig()
    found = {
        f'train.optimizer = "{train.optimizer}"': train.optimizer != "adamw",
        f'train.on_nonfinite = "{train.on_nonfinite}"': train.on_nonfinite != "stop",
        "train.optimizer_in_backward": train.optimizer_in_backward,
        f'train.activation_checkpointing = "{train.activation_checkpointing}"': train.activation_checkpointing
        not in REMAT,
        f"lora.r = {config.lora.r}": config.lora.r > 0,
        f'offload.params = "{config.offload.params}"': config.offload.params is not None,
        f'offload.optimizer = "{config.offload.optimizer}"': config.offload.optimizer is not None,
        f'offload.gradients = "{config.offload.gradients}"': config.offload.gradients is not None,
        f'parallel.strategy = "{parallel.strategy}"': parallel.strategy not in _STRATEGIES,
        f'parallel.param_dtype = "{parallel.param_dtype}"': parallel.param_dtype == "fp16",
        f'parallel.reduce_dtype = "{parallel.reduce_dtype}"': parallel.reduce_dtype != without.reduce_dtype,
        f"parallel.slots = {parallel.slots}": parallel.slots != without.slots,
        "parallel.units": parallel.units is not None,
        "parallel.reshard_after_forward": parallel.reshard_after_forward is not None,
    }
    wrong = next((setting for setting, asked in found.items() if asked), None)
    if wrong is not None:
        raise ConfigError(
            f'{wrong} is not supported with parallel.backend = "jax", where the optimizer is adamw, the strategies are '
            f"{', '.join(_STRATEGIES)}, and the compiler decides what is gathered when: leave it out"
        )
