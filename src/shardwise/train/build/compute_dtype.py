"""`parallel.param_dtype` where the configuration leaves it open: bf16 on accelerators that compute in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise import accelerators
from shardwise.train.config.schema import Config


def settle(config: Config, device: torch.device, saved: Mapping[str, Any] | None) -> tuple[Config, str]:
    """Give a configuration the dtype that its run computes in. Not collective; the answer is this rank's.

    A run that goes on keeps its checkpoint's. A new one computes in bf16 if its device does and its parameters are
    stored in fp32; on CPUs, and elsewhere, in the dtype that they are stored in.

    Args:
        device: of a rank.
        saved: `extra` of the checkpoint from which the run goes on, if any.

    Returns:
        The configuration, and a line that says what was chosen; the given one and no line where it names a dtype, or
        nothing had to be chosen.
    """
    if config.parallel.param_dtype is not None:
        return config, ""
    stored = config.model.dtype
    if saved is not None:
        chosen, why = saved.get("param_dtype") or stored, "as in the checkpoint"
    elif stored == "fp32" and accelerators.computes_in_bf16(device):
        chosen, why = "bf16", "which this device computes in fastest"
    else:
        chosen, why = stored, "in which they are stored"
    if chosen == stored and device.type == "cpu":
        return config, ""
    words = f"parameters are gathered and computed with in {chosen}, {why}, and updated in {stored}"
    parallel = config.parallel.model_copy(update={"param_dtype": chosen})
    return config.model_copy(update={"parallel": parallel}), f"{words}; parallel.param_dtype names another"
