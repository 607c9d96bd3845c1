"""The options of `shardwise plan`, and the parsing of their values."""

import re
from dataclasses import dataclass, field, make_dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.errors import PlanError
from shardwise.policy.precision import precision_of
from shardwise.policy.settings import RUN, Setting

CALIBRATED = Path("hardware.toml")
"""Default of `--output` of a calibration."""

Text = str | None
Count = int | None
File = Path | None
_BYTES = {"": 2**30, "gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


def _help(setting: Setting) -> str:
    return setting.help if setting.is_flag else f"{setting.help} [{setting.usual or setting.otherwise}]"


@dataclass(frozen=True)
class _ClusterOptions:
    """Options about the devices that a run is planned for."""

    gpu: Annotated[Text, _option("The device: a packaged name or a hardware file. [h100-sxm-80gb]")] = None
    gpus: Annotated[Count, _option("Number of devices per node. [8]")] = None
    nodes: Annotated[Count, _option("Number of nodes. [1]")] = None
    interconnect: Annotated[
        Text,
        _option("The network between nodes: a name, a file, or a rate such as 3200gbps (bits) or 400GBps (bytes)."),
    ] = None
    price: Annotated[
        float | None,
        _option("Price of one device per hour, in any currency; adds the cost of a step, a day and a million tokens."),
    ] = None


_RunOptions = make_dataclass(
    "_RunOptions",
    [
        (
            name,
            Annotated[bool if one.is_flag else Text, _option(_help(one), one.option)],
            field(default=False if one.is_flag else None),
        )
        for name, one in RUN.items()
    ],
    frozen=True,
)
"""Options about the training, one for each setting of a run."""


@dataclass(frozen=True)
class Options(_RunOptions, _ClusterOptions):  # type: ignore[misc, valid-type]  # made from the settings
    """Options of `shardwise plan`. If an option has several values, separated by commas, the search tries all of
    them."""

    model: Annotated[
        Text,
        typer.Argument(
            metavar="MODEL",
            help="A packaged shape (llama-3.1-8b; left out, they are listed), config.json, Hugging Face directory, "
            "a hub's name (org/name, org/name@revision) or module:function.",
        ),
    ] = None
    backend: Annotated[
        str,
        _option("torch, or jax: compile XLA's own programs for this number of devices, without running them. [torch]"),
    ] = "torch"
    base: Annotated[Text, _option("Format of --lora's frozen base: nf4 or int8. [the compute dtype]")] = None
    global_batch: Annotated[Count, _option("Number of sequences per step; the accumulation follows from it.")] = None
    compare: Annotated[Text, _option("Compare engines: some of ddp, fsdp2, shardwise, separated by commas.")] = None
    budget: Annotated[Text, _option("Memory of a device that may be used, such as 70GiB. [all]")] = None
    objective: Annotated[str, _option("What is best: tokens_per_s, memory or micro_batch. [tokens_per_s]")] = (
        "tokens_per_s"
    )
    smallest_cluster: Annotated[
        bool, _option("Also find the fewest devices on which the model fits.", "--smallest-cluster")
    ] = False
    largest_batch: Annotated[bool, _option("Also find the largest micro-batch that fits.", "--largest-batch")] = False
    quick: Annotated[
        bool, _option("Search only the strategy that shards most. With --calibrate: measure less exactly.", "--quick")
    ] = False
    thorough: Annotated[
        bool, _option("Forecast the whole grid, without the shortcuts of bounds; takes minutes.", "--thorough")
    ] = False
    workers: Annotated[Count, _option("Number of processes that search. [one per core, at most 8]")] = None
    foreign: Annotated[
        File,
        _option(
            "Plan with the settings of a file: a training configuration (.toml), DeepSpeed's ds_config.json or "
            "the file of accelerate config.",
            "--from",
        ),
    ] = None
    json: Annotated[bool, _option("Print the best forecast as JSON.", "--json")] = False
    html: Annotated[File, _option("Write the answer as an HTML page.")] = None
    trace: Annotated[File, _option("Write the best configuration's timeline, for Perfetto (.json).")] = None
    config: Annotated[File, _option("Write the best configuration as a training configuration.")] = None
    calibrate: Annotated[
        bool,
        _option(
            "Measure this machine instead of planning, on ranks that are started here or by torchrun.", "--calibrate"
        ),
    ] = False
    ranks: Annotated[Count, _option("Number of ranks for a calibration. [all GPUs, else 2]")] = None
    output: Annotated[Path, _option("Hardware file that a calibration writes. [hardware.toml]")] = CALIBRATED
    debug: Annotated[bool, _option("Also show tracebacks of mistakes.", "--debug")] = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the job to plan: a value, values to search over, or None to leave it to the
        search."""
        run = {name: one.values(getattr(self, name)) for name, one in RUN.items()}
        precisions = run["precision"] or [precision_of("bf16")]
        return {
            **run,
            "precision": [replace(precision, frozen=self.base) for precision in precisions],
            "gpu": self.gpu,
            "gpus_per_node": self.gpus,
            "nodes": self.nodes,
            "interconnect": self.interconnect,
            "price_per_hour": self.price,
        }

    @property
    def budget_bytes(self) -> int | None:
        """Memory of a device that may be used, by `--budget`; None if it is not given."""
        return _bytes(self.budget)


def _bytes(given: str | None) -> int | None:
    """Parse an amount of memory such as 70, 70GiB or 75GB; a number without a unit is in GiB."""
    if given is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", given.strip().lower())
    if match is None or match[2] not in _BYTES or not 0 < float(match[1]) < inf:
        raise PlanError(f"--budget {given}: must be an amount of memory, such as 70GiB or 75GB")
    return int(float(match[1]) * _BYTES[match[2]])
