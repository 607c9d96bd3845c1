"""A configuration to train with, as options of `shardwise plan --from`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.policy.places import Places

SUFFIX = ".toml"


def options_of(path: Path) -> dict[str, Any]:
    """What a configuration says of a run, by name of the option; what it leaves open is left out.

    An inline model is taken where it says its vocabulary itself: else that is the data's.

    Raises ConfigError: the file cannot be read, or trains on JAX.
    """
    from shardwise.train.config.files import load

    config = load(path)
    model, train, parallel, lora = config.model, config.train, config.parallel, config.lora
    if parallel.backend != "torch":
        raise ConfigError(
            f"{path}: parallel.backend = {parallel.backend!r} is planned with shardwise plan --backend jax"
        )
    compute = parallel.param_dtype or ("bf16" if model.dtype == "fp32" else model.dtype)
    master = "fp32" if lora.r else model.dtype
    places = Places.of({"params": config.offload.params, "optimizer": config.offload.optimizer})
    inline = model.config if model.config is not None and "vocab_size" in model.config else None
    found = {
        "model": model.path or model.factory or inline,
        "gpus": parallel.ranks if isinstance(parallel.ranks, int) else None,
        "strategy": None if parallel.strategy == "auto" else parallel.strategy,
        "shard_group": _text(parallel.shard_group),
        "reshard_after_forward": _text(parallel.reshard_after_forward),
        "slots": _text(parallel.slots),
        "units": parallel.units if isinstance(parallel.units, int) else None,
        "precision": f"{compute}/{parallel.reduce_dtype}/{master}",
        "lora": lora.r or None,
        "base": lora.base,
        "seq_len": _text(config.data.seq_len),
        "micro_batch": _text(train.micro_batch),
        "global_batch": train.global_batch,
        "activation_checkpointing": train.activation_checkpointing,
        "compiled": train.compile or None,
        "optimizer": train.optimizer,
        "optimizer_in_backward": train.optimizer_in_backward or None,
        "offload": None if places is None else places.words,
    }
    return {name: value for name, value in found.items() if value is not None}


def _text(value: object) -> str | None:
    return None if value is None else str(value).lower()
