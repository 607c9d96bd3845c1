"""The options of `shardwise plan`, and the parsing of their values."""

import re
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.errors import PlanError
from shardwise.policy.strategy import Strategy

CALIBRATED = Path("hardware.toml")
"""Default of `--output` of a calibration."""

Text = str | None
Count = int | None
File = Path | None
_SEARCH = ("search", "auto")
_BYTES = {"": 2**30, "gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


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


@dataclass(frozen=True)
class _RunOptions:
    """Options about the training. If an option has several values, the search tries all of them."""

    strategy: Annotated[
        Text, _option("One or several strategies, such as full_shard,hybrid_shard or zero3,hsdp. [searched]")
    ] = None
    shard_group: Annotated[Text, _option("Number of ranks that share one copy, for hybrid strategies. [searched]")] = (
        None
    )
    micro_batch: Annotated[Text, _option("Number of sequences that a rank computes at once. [searched]")] = None
    accumulation: Annotated[Text, _option("Number of micro-batches per step. [1, or from --global-batch]")] = None
    activation_checkpointing: Annotated[
        Text, _option("none, full, selective-ops, every-N, offload. [searched, except offload]")
    ] = None
    precision: Annotated[Text, _option("bf16, fp16, fp32, bf16-true, or param/reduce/master. [bf16]")] = None
    lora: Annotated[
        Text,
        _option(
            "Rank of PEFT's adapters beside a frozen base, or r=16 and some of targets=q_proj+v_proj, "
            "dropout=0.1, dtype=fp32 (of the base). [none: all weights are trained]"
        ),
    ] = None
    base: Annotated[Text, _option("Format of --lora's frozen base: nf4 or int8. [the compute dtype]")] = None
    autocast: Annotated[
        Text, _option("bf16 or fp16: torch's autocast over fp32 parameters, for other engines. [none]")
    ] = None
    float8: Annotated[Text, _option("compute or gathers: linear layers in 8 bits, for other engines. [none]")] = None
    seq_len: Annotated[Text, _option("Number of tokens per sequence. [2048]")] = None
    offload: Annotated[
        Text,
        _option(
            "Some of params=PLACE, optimizer=PLACE, gradients=cpu and step=cpu, separated by commas; PLACE is cpu or "
            "nvme. [none]"
        ),
    ] = None
    optimizer_in_backward: Annotated[
        bool,
        _option(
            "Take each unit's step in backward: only one unit's gradients are held at a time, and the norm of "
            "all gradients cannot be clipped.",
            "--optimizer-in-backward",
        ),
    ] = False
    reshard_after_forward: Annotated[Text, _option("true, false or a number of ranks.")] = None
    slots: Annotated[Text, _option("Number of buffers for gathered units per size class. [3]")] = None
    units: Annotated[
        Text, _option("Least number of parameters of a unit, or class names of the units. [the model's blocks]")
    ] = None
    optimizer: Annotated[
        Text, _option("adamw, adamw-bf16, adamw-8bit, adamw-foreach, adam, sgd, momentum, muon. [adamw]")
    ] = None
    attention: Annotated[Text, _option("sdpa (fused) or eager. [sdpa]")] = None
    loss: Annotated[Text, _option("model (its own), fused, chunked. [model]")] = None
    compiled: Annotated[bool, _option("Compile blocks.", "--compile")] = False
    engine: Annotated[Text, _option("shardwise, fsdp1, fsdp2 or deepspeed. [shardwise]")] = None


@dataclass(frozen=True)
class Options(_RunOptions, _ClusterOptions):
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
    global_batch: Annotated[Count, _option("Number of sequences per step; the accumulation follows from it.")] = None
    compare: Annotated[
        Text, _option("Compare engines: some of ddp, fsdp1, fsdp2, deepspeed, shardwise, separated by commas.")
    ] = None
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
    trace: Annotated[File, _option("Write the best configuration's timeline: .json (Perfetto) or .svg.")] = None
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
        return {
            "gpu": self.gpu,
            "gpus_per_node": self.gpus,
            "nodes": self.nodes,
            "interconnect": self.interconnect,
            "strategy": strategies_of(self.strategy),
            "shard_group": numbers_of("--shard-group", self.shard_group),
            "micro_batch": numbers_of("--micro-batch", self.micro_batch),
            "accumulation": numbers_of("--accumulation", self.accumulation),
            "activation_checkpointing": words_of("--activation-checkpointing", self.activation_checkpointing),
            "precision": _precisions(self.precision or ("fp32" if self.autocast else None), self.base),
            "lora": self.lora,
            "autocast": words_of("--autocast", self.autocast),
            "float8": words_of("--float8", self.float8),
            "seq_len": numbers_of("--seq-len", self.seq_len),
            "offload": self.offload,
            "optimizer_in_backward": self.optimizer_in_backward,
            "reshard_after_forward": _resharding(self.reshard_after_forward),
            "slots": numbers_of("--slots", self.slots),
            "units": _units(self.units),
            "optimizer": words_of("--optimizer", self.optimizer),
            "attention": words_of("--attention", self.attention),
            "loss": words_of("--loss", self.loss),
            "compile": self.compiled,
            "engine": words_of("--engine", self.engine),
            "price_per_hour": self.price,
        }

    @property
    def budget_bytes(self) -> int | None:
        """Memory of a device that may be used, by `--budget`; None if it is not given."""
        return _bytes(self.budget)


def words_of(option: str, given: str | None) -> list[str] | None:
    """Split values at commas; None leaves the option to the search. Raises PlanError if there are no values."""
    if given is None or given in _SEARCH:
        return None
    words = [word.strip() for word in given.split(",") if word.strip()]
    if not words:
        raise PlanError(f"{option} {given!r} has no values: give one or several, separated by commas, or leave it out")
    return words


def strategies_of(given: str | None) -> list[str] | None:
    """Read `--strategy` as `words_of` does, in our names. Raises ConfigError for a name that no strategy has."""
    words = words_of("--strategy", given)
    return None if words is None else list(dict.fromkeys(Strategy.parse(word).value for word in words))


def numbers_of(option: str, given: str | None) -> list[int] | None:
    """Read whole numbers separated by commas; None leaves the option to the search. Raises PlanError for anything that
    is not a whole number from 1 on."""
    found = words_of(option, given)
    if found is None:
        return None
    if any(not word.isdecimal() or not int(word) for word in found):
        raise PlanError(f"{option} {given}: must be whole numbers of at least 1, separated by commas, or search")
    return [int(word) for word in found]


def _precisions(given: str | None, base: str | None) -> list[Any]:
    from shardwise.plan.search.space import precision_of

    words = words_of("--precision", given) or ["bf16"]
    return [replace(precision_of(word), frozen=base) for word in words]


def _resharding(given: str | None) -> list[bool | int] | None:
    words = words_of("--reshard-after-forward", given)
    if words is None:
        return None
    named: dict[str, bool] = {"true": True, "false": False}
    return [named[word] if word in named else (numbers_of("--reshard-after-forward", word) or [1])[0] for word in words]


def _units(given: str | None) -> int | frozenset[str] | None:
    words = words_of("--units", given)
    if words is None:
        return None
    if len(words) > 1 or not words[0].isdecimal():
        return frozenset(words)
    if not int(words[0]):
        raise PlanError("--units 0: must be a whole number of at least 1, or class names; leave it out for the default")
    return int(words[0])


def _bytes(given: str | None) -> int | None:
    """Parse an amount of memory such as 70, 70GiB or 75GB; a number without a unit is in GiB."""
    if given is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", given.strip().lower())
    if match is None or match[2] not in _BYTES or not 0 < float(match[1]) < inf:
        raise PlanError(f"--budget {given}: must be an amount of memory, such as 70GiB or 75GB")
    return int(float(match[1]) * _BYTES[match[2]])
