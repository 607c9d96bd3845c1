"""A training configuration of ours, read as options for `shardwise plan --from`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError
from shardwise.policy.adapters import Adapters

if TYPE_CHECKING:
    from shardwise.plan.hardware.devices import Hardware
    from shardwise.train.config.schema import Config

SUFFIX = ".toml"


def options_of(path: Path, gpu: str | None = None) -> dict[str, Any]:
    """Return what a configuration says about a run, by name of the option. What it leaves open is left out.

    An inline model is included only if it sets `vocab_size` itself; otherwise its vocabulary would depend on the data.

    Args:
        path: the file.
        gpu: the device to plan for; None: the file's, or the default one. If the file leaves `param_dtype` open, the
            device decides it, as in training.

    Raises:
        ConfigError: the file cannot be read, or trains on JAX.
        PlanError: there is no such device.
    """
    from shardwise.plan.hardware.devices import find_device
    from shardwise.plan.hardware.machines import USUAL_GPU
    from shardwise.train.config.files import load

    config = load(path)
    model, train, parallel, lora = config.model, config.train, config.parallel, config.lora
    if parallel.backend != "torch":
        raise ConfigError(
            f"{path}: parallel.backend = {parallel.backend!r} is planned only with shardwise plan --backend jax"
        )
    compute = parallel.param_dtype or _computed_in(model.dtype, find_device(gpu or parallel.hardware or USUAL_GPU))
    master = "fp32" if lora.r else model.dtype
    places = config.offload.places
    inline = model.config if model.config is not None and "vocab_size" in model.config else None
    found = {
        "model": model.path or model.factory or inline,
        "gpu": parallel.hardware,
        "gpus": parallel.ranks if isinstance(parallel.ranks, int) else None,
        "strategy": None if parallel.strategy == "auto" else parallel.strategy,
        "shard_group": _text(parallel.shard_group),
        "reshard_after_forward": _text(parallel.reshard_after_forward),
        "slots": _text(parallel.slots),
        "units": units_text(parallel.units),
        "precision": f"{compute}/{parallel.reduce_dtype}/{master}",
        "lora": _adapters(config),
        "base": lora.base,
        "seq_len": _text(config.data.seq_len),
        "micro_batch": _text(train.micro_batch),
        "global_batch": train.global_batch,
        "activation_checkpointing": train.activation_checkpointing,
        "compile": train.compile or None,
        "optimizer": train.optimizer,
        "optimizer_in_backward": train.optimizer_in_backward or None,
        "offload": None if places is None else places.words,
    }
    return {name: value for name, value in found.items() if value is not None}


def _computed_in(stored: str, device: Hardware) -> str:
    """Return the compute dtype of a new run on a device, as `train.build.compute_dtype` settles it."""
    if device.kind == "cpu":
        return "stored"
    return "bf16" if stored == "fp32" and "bf16" in device.peak_flops else stored


def units_text(units: int | Sequence[str] | None) -> str | None:
    """Return units in the form of `--units`; None if they are left open."""
    return _text(units) if units is None or isinstance(units, int) else ",".join(units)


def _adapters(config: Config) -> str | None:
    lora = config.lora
    if not lora.r:
        return None
    targets = None if lora.targets is None else tuple(lora.targets)
    return Adapters(lora.r, targets, lora.dropout, config.model.dtype).words


def _text(value: object) -> str | None:
    return None if value is None else str(value).lower()
