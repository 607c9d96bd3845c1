"""The default of `parallel.param_dtype`: bf16 on accelerators that compute in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise import device_tools
from shardwise.train.config.schema import Config


def settle(config: Config, device: torch.device, saved: Mapping[str, Any] | None) -> tuple[Config, str]:
    """Fill in `parallel.param_dtype` if it is unset. Not collective; the answer depends on this rank's device.

    A resumed run keeps the dtype of its checkpoint. A new run computes in bf16 if its device computes in bf16 and its
    parameters are stored in fp32; else, and always on CPUs, in the dtype that parameters are stored in.

    Args:
        device: the device of a rank.
        saved: `extra` of the checkpoint from which the run resumes, if any.

    Returns:
        The configuration, and a line that says what was chosen. The given configuration and an empty line if it names a
        dtype, or if a CPU computes in the stored dtype.
    """
    if config.parallel.param_dtype is not None:
        return config, ""
    stored = config.model.dtype
    if saved is not None:
        chosen, why = saved.get("param_dtype") or stored, "as in the checkpoint"
    elif stored == "fp32" and device_tools.computes_in_bf16(device):
        chosen, why = "bf16", "the fastest dtype of this device"
    else:
        chosen, why = stored, "the dtype in which they are stored"
    if chosen == stored and device.type == "cpu":
        return config, ""
    words = f"parameters are gathered and computed with in {chosen}, {why}, and updated in {stored}"
    parallel = config.parallel.model_copy(update={"param_dtype": chosen})
    return config.model_copy(update={"parallel": parallel}), f"{words}; to change it, set parallel.param_dtype"
