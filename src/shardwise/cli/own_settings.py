"""A training configuration of ours, read as options for `shardwise plan --from`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError
from shardwise.policy.adapters import Adapters
from shardwise.policy.precision import Precision
from shardwise.policy.settings import values_in

if TYPE_CHECKING:
    from shardwise.plan.hardware.devices import Hardware

SUFFIX = ".toml"


def options_of(path: Path, gpu: str | None = None) -> dict[str, Any]:
    """Return what a configuration says about a run, by name of the option; None for what it leaves open.

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
    model, parallel, lora = config.model, config.parallel, config.lora
    if parallel.backend != "torch":
        raise ConfigError(
            f"{path}: parallel.backend = {parallel.backend!r} is planned only with shardwise plan --backend jax"
        )
    compute = parallel.param_dtype or _computed_in(model.dtype, find_device(gpu or parallel.hardware or USUAL_GPU))
    targets = None if lora.targets is None else tuple(lora.targets)
    inline = model.config if model.config is not None and "vocab_size" in model.config else None
    return {
        "model": model.path or model.factory or inline,
        "gpu": parallel.hardware,
        "gpus": parallel.ranks if isinstance(parallel.ranks, int) else None,
        "global_batch": config.train.global_batch,
        "precision": Precision(compute, parallel.reduce_dtype, "fp32" if lora.r else model.dtype),
        "lora": Adapters(lora.r, targets, lora.dropout, model.dtype) if lora.r else None,
        "base": lora.base,
        **values_in(config.model_dump()),
        "offload": config.offload.places,
    }


def _computed_in(stored: str, device: Hardware) -> str | None:
    """Return the compute dtype of a new run on a device, as `train.build.compute_dtype` settles it; None is the one in
    which parameters are stored."""
    if device.kind == "cpu":
        return None
    return "bf16" if stored == "fp32" and "bf16" in device.peak_flops else stored
