"""`shardwise plan`: what fits, how fast, with what."""

from __future__ import annotations

import json as json_format
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.exit import Exit
from shardwise.cli.progress import Progress
from shardwise.errors import PlanError, UserError
from shardwise.suggest import nearest_path

if TYPE_CHECKING:
    from shardwise.plan.planner import Plan

CALIBRATED = Path("hardware.toml")
"""Where a calibration goes if nothing else is said."""

Text = str | None
Count = int | None
File = Path | None
_SEARCH = ("search", "auto")
_WORKERS = 8
_BYTES = {"": 2**30, "gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}


_HELP = {
    "model": "A packaged shape (llama-3-8b), config.json, Hugging Face directory or module:function.",
    "gpu": "Device: a packaged name or a hardware file. [h100-sxm-80gb]",
    "gpus": "Devices of each node. [8]",
    "nodes": "Nodes. [1]",
    "interconnect": "Between nodes: a name, a file, or a rate such as 3200gbps (bits) or 400GBps (bytes).",
    "strategy": "One or several, such as full_shard,hybrid_shard. [searched]",
    "shard_group": "Ranks of one copy, for hybrid strategies. [searched]",
    "micro_batch": "Sequences a rank computes at once. [searched]",
    "global_batch": "Sequences of a step; accumulation follows.",
    "accumulation": "Micro-batches of a step. [1, or from --global-batch]",
    "activation_checkpointing": "none, full, selective-ops, every-N. [searched]",
    "precision": "bf16, fp16, fp32, bf16-true, or param/reduce/master. [bf16]",
    "seq_len": "Tokens of a sequence. [2048]",
    "offload": "none; the engine has no other yet. [none]",
    "reshard_after_forward": "true, false or a number of ranks.",
    "slots": "Buffers for gathered units per size class. [3]",
    "units": "Fewest parameters of a unit. [the model's blocks]",
    "optimizer": "adamw, adamw-foreach, adam, sgd, momentum. [adamw]",
    "attention": "sdpa (fused) or eager. [sdpa]",
    "loss": "model (its own), fused, chunked. [model]",
    "compiled": "Blocks are compiled.",
    "engine": "shardwise, fsdp1, fsdp2 or deepspeed. [shardwise]",
    "budget": "Memory of a device that may be used, such as 70GiB. [all]",
    "objective": "tokens_per_s, memory or micro_batch. [tokens_per_s]",
    "price": "Of a device for an hour, in any currency: what a step, a day, a million tokens cost.",
    "smallest_cluster": "Say how few devices would do.",
    "largest_batch": "Say how large a micro-batch would fit.",
    "json": "Print the best forecast as JSON.",
    "html": "Write a page.",
    "trace": "Write the best one's timeline: .json (Perfetto) or .svg.",
    "config": "Write the best one as a configuration to train with.",
    "workers": "Processes that search. [one a core, at most 8]",
    "calibrate": "Measure this machine instead, through torchrun.",
    "quick": "Calibrate in seconds, less exactly.",
    "ranks": "Of a calibration. [all GPUs, else 2]",
    "output": "Hardware file of a calibration. [hardware.toml]",
    "debug": "Show tracebacks of mistakes too.",
}


def _option(name: str) -> Any:
    parameter = "compiled" if name == "--compile" else name.removeprefix("--").replace("-", "_")
    return typer.Option(name, help=_HELP[parameter], show_default=False)


def plan(  # noqa: PLR0913, PLR0917 - one parameter for each option
    model: Annotated[Text, typer.Argument(metavar="MODEL", help=_HELP["model"])] = None,
    gpu: Annotated[str, _option("--gpu")] = "h100-sxm-80gb",
    gpus: Annotated[int, _option("--gpus")] = 8,
    nodes: Annotated[int, _option("--nodes")] = 1,
    interconnect: Annotated[Text, _option("--interconnect")] = None,
    strategy: Annotated[Text, _option("--strategy")] = None,
    shard_group: Annotated[Text, _option("--shard-group")] = None,
    micro_batch: Annotated[Text, _option("--micro-batch")] = None,
    global_batch: Annotated[Count, _option("--global-batch")] = None,
    accumulation: Annotated[Text, _option("--accumulation")] = None,
    activation_checkpointing: Annotated[Text, _option("--activation-checkpointing")] = None,
    precision: Annotated[Text, _option("--precision")] = None,
    seq_len: Annotated[Text, _option("--seq-len")] = None,
    offload: Annotated[str, _option("--offload")] = "none",
    reshard_after_forward: Annotated[Text, _option("--reshard-after-forward")] = None,
    slots: Annotated[Text, _option("--slots")] = None,
    units: Annotated[Count, _option("--units")] = None,
    optimizer: Annotated[Text, _option("--optimizer")] = None,
    attention: Annotated[Text, _option("--attention")] = None,
    loss: Annotated[Text, _option("--loss")] = None,
    compiled: Annotated[bool, _option("--compile")] = False,
    engine: Annotated[Text, _option("--engine")] = None,
    budget: Annotated[Text, _option("--budget")] = None,
    objective: Annotated[str, _option("--objective")] = "tokens_per_s",
    price: Annotated[float | None, _option("--price")] = None,
    smallest_cluster: Annotated[bool, _option("--smallest-cluster")] = False,
    largest_batch: Annotated[bool, _option("--largest-batch")] = False,
    json: Annotated[bool, _option("--json")] = False,
    html: Annotated[File, _option("--html")] = None,
    trace: Annotated[File, _option("--trace")] = None,
    config: Annotated[File, _option("--config")] = None,
    workers: Annotated[Count, _option("--workers")] = None,
    calibrate: Annotated[bool, _option("--calibrate")] = False,
    quick: Annotated[bool, _option("--quick")] = False,
    ranks: Annotated[Count, _option("--ranks")] = None,
    output: Annotated[Path, _option("--output")] = CALIBRATED,
    debug: Annotated[bool, _option("--debug")] = False,
) -> int:
    """Plan a training run: what fits, how fast, with what. No GPU is needed.

    Options that take several values, separated by commas, are searched over them.
    """
    _check_counts({"--global-batch": global_batch, "--units": units, "--workers": workers, "--ranks": ranks})
    if calibrate:
        return _calibrate(ranks or 0, output, quick, debug)
    _refuse_for_a_plan({"--quick": quick, "--ranks": ranks is not None, "--output": output != CALIBRATED})
    if model is None:
        raise UserError("MODEL is missing: shardwise plan llama-3-8b --gpus 8 (see shardwise plan --help)")
    if offload != "none":
        raise PlanError(f"--offload {offload}: the engine has no offload yet; leave it out")
    from shardwise.plan.search.exploration import Objective

    arguments = {
        "gpu": gpu,
        "gpus_per_node": gpus,
        "nodes": nodes,
        "interconnect": interconnect,
        "strategy": _words("--strategy", strategy),
        "shard_group": _numbers("--shard-group", shard_group),
        "micro_batch": _numbers("--micro-batch", micro_batch),
        "accumulation": _numbers("--accumulation", accumulation),
        "activation_checkpointing": _words("--activation-checkpointing", activation_checkpointing),
        "precision": _precisions(precision),
        "seq_len": _numbers("--seq-len", seq_len),
        "reshard_after_forward": _resharding(reshard_after_forward),
        "slots": _numbers("--slots", slots),
        "units": units,
        "optimizer": _words("--optimizer", optimizer),
        "attention": _words("--attention", attention),
        "loss": _words("--loss", loss),
        "compile": compiled,
        "engine": _words("--engine", engine),
        "price_per_hour": price,
    }
    from shardwise.plan import planner
    from shardwise.plan.models.transformers_models import quiet_transformers

    question = planner.Question(
        model=model,
        arguments=arguments,
        global_batch=global_batch,
        budget_bytes=_bytes(budget),
        objective=Objective.parse(objective),
        workers=workers or min(_WORKERS, os.cpu_count() or 1),
        smallest_cluster=smallest_cluster,
        largest_batch=largest_batch,
    )
    quiet_transformers()
    _check_outputs(model, html, trace, config)
    progress = Progress("planning: {:,} of {:,} configurations".format, wanted=not json)
    try:
        answer = planner.plan(question, progress)
    finally:
        progress.end()
    text, refused = _training_config(answer, config)
    if json:
        print(json_format.dumps(answer.to_dict(), indent=2))
    else:
        from shardwise.plan.report.rendering import table_text

        print(table_text(answer.report))
    if html is not None:
        from shardwise.plan.report.rendering import write_page

        write_page(replace(answer.report, config=text), html)
        _say(f"page: {html}")
    answer.check_fits()
    assert answer.best is not None
    if trace is not None:
        _say(f"timeline: {answer.best.trace(trace)}")
    if config is not None:
        if refused is not None:
            raise refused
        config.write_text(text, encoding="utf-8")
        _say(f"configuration: {config}; train with it: shardwise train {config}")
    return Exit.DONE


def _calibrate(ranks: int, output: Path, quick: bool, debug: bool) -> int:
    """Measure this machine, on ranks of its own or as one of torchrun's."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from shardwise.cli.worker import calibrate

        calibrate(output, quick)
        return Exit.DONE
    import torch

    from shardwise.cli.launch import launch_task
    from shardwise.train.run.preflight import DEFAULT_CPU_RANKS, check_devices

    gpus = torch.cuda.device_count()
    check_devices(ranks, gpus)
    _check_writable(output)
    task = "calibrate-quick" if quick else "calibrate"
    status = launch_task(task, output, ranks or gpus or DEFAULT_CPU_RANKS, debug)
    if status == Exit.DONE:
        print(f"{output}: use it with shardwise plan MODEL --gpu {output}")
    return status


def _training_config(answer: Plan, path: Path | None) -> tuple[str, PlanError | None]:
    """The best one as a configuration; or nothing, and why the trainer cannot run it."""
    from shardwise.train.build.from_plan import training_config
    from shardwise.train.config.files import dump_toml

    if answer.best is None:
        return "", None
    try:
        return dump_toml(training_config(answer.source, answer.best.job, path.stem if path else "planned")), None
    except PlanError as error:
        return "", error


def _check_counts(options: Mapping[str, int | None]) -> None:
    for option, count in options.items():
        if count is not None and count < 1:
            raise PlanError(f"{option} {count}: a whole number from 1 on; leave it out for the usual")


def _check_outputs(model: str, html: Path | None, trace: Path | None, config: Path | None) -> None:
    """Before minutes of work: raise PlanError where something cannot be written that is asked for."""
    from shardwise.plan.models.source import resolve
    from shardwise.plan.simulate.trace import check_format
    from shardwise.train.build.from_plan import check_model

    _check_writable(html, trace, config)
    if trace is not None:
        check_format(trace)
    if config is not None:
        check_model(resolve(model))


def _check_writable(*paths: Path | None) -> None:
    for path in paths:
        if path is None:
            continue
        folder = path.absolute().parent
        if not folder.is_dir():
            raise PlanError(f"cannot write {path}: there is no directory {path.parent}{nearest_path(path.parent)}")
        if path.is_dir():
            raise PlanError(f"cannot write {path}: it is a directory; name a file")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise PlanError(f"cannot write {path}: it may not be written to; name another file")


def _refuse_for_a_plan(given: Mapping[str, bool]) -> None:
    for name, is_given in given.items():
        if is_given:
            raise UserError(f"{name} is for a calibration: add --calibrate, or leave {name} out")


def _words(option: str, given: str | None) -> list[str] | None:
    """Values separated by commas; None leaves them to the search."""
    if given is None or given in _SEARCH:
        return None
    words = [word.strip() for word in given.split(",") if word.strip()]
    if not words:
        raise PlanError(f"{option} {given!r} names nothing: give a value, several with commas between, or leave it out")
    return words


def _numbers(option: str, given: str | None) -> list[int] | None:
    words = _words(option, given)
    if words is None:
        return None
    if any(not word.isdecimal() or not int(word) for word in words):
        raise PlanError(f"{option} {given}: whole numbers from 1 on, separated by commas, or search")
    return [int(word) for word in words]


def _precisions(given: str | None) -> list[Any]:
    from shardwise.plan.search.space import precision_of

    return [precision_of(word) for word in _words("--precision", given) or ["bf16"]]


def _resharding(given: str | None) -> list[bool | int] | None:
    words = _words("--reshard-after-forward", given)
    if words is None:
        return None
    named: dict[str, bool] = {"true": True, "false": False}
    return [named[word] if word in named else (_numbers("--reshard-after-forward", word) or [1])[0] for word in words]


def _bytes(given: str | None) -> int | None:
    """70, 70GiB or 75GB; a number alone counts GiB."""
    if given is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", given.strip().lower())
    if match is None or match[2] not in _BYTES or not 0 < float(match[1]) < inf:
        raise PlanError(f"--budget {given}: an amount of memory, such as 70GiB or 75GB")
    return int(float(match[1]) * _BYTES[match[2]])


def _say(line: str) -> None:
    """Beside the answer, which may be JSON on standard output."""
    print(line, file=sys.stderr)
