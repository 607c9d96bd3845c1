"""`shardwise plan`: what fits, how fast, with what."""

import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.exit import Exit
from shardwise.cli.foreign import with_settings
from shardwise.cli.searching import Searching
from shardwise.errors import PlanError, UserError
from shardwise.suggest import nearest_path

if TYPE_CHECKING:
    from shardwise.cli.on_jax import Asked
    from shardwise.plan.planner import Plan, Question

CALIBRATED = Path("hardware.toml")
"""Default of a calibration's `--output`."""

Text = str | None
Count = int | None
File = Path | None
_SEARCH = ("search", "auto")
_WORKERS = 8
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""In the environment: keeps progress bars and advice of transformers, if it comes to be needed, off the terminal."""
_BYTES = {"": 2**30, "gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


@dataclass(frozen=True)
class Options:
    """Options of `shardwise plan`. Those of several values, separated by commas, are searched over them."""

    model: Annotated[
        Text,
        typer.Argument(
            metavar="MODEL",
            help="A packaged shape (llama-3-8b), config.json, Hugging Face directory or module:function.",
        ),
    ] = None
    backend: Annotated[
        str, _option("torch, or jax: XLA's own programs, compiled for so many devices and not run. [torch]")
    ] = "torch"
    gpu: Annotated[str, _option("Device: a packaged name or a hardware file. [h100-sxm-80gb]")] = "h100-sxm-80gb"
    gpus: Annotated[Count, _option("Devices of each node. [8]")] = None
    nodes: Annotated[Count, _option("Nodes. [1]")] = None
    interconnect: Annotated[
        Text, _option("Between nodes: a name, a file, or a rate such as 3200gbps (bits) or 400GBps (bytes).")
    ] = None
    strategy: Annotated[Text, _option("One or several, such as full_shard,hybrid_shard. [searched]")] = None
    shard_group: Annotated[Text, _option("Ranks of one copy, for hybrid strategies. [searched]")] = None
    micro_batch: Annotated[Text, _option("Sequences a rank computes at once. [searched]")] = None
    global_batch: Annotated[Count, _option("Sequences of a step; accumulation follows.")] = None
    accumulation: Annotated[Text, _option("Micro-batches of a step. [1, or from --global-batch]")] = None
    activation_checkpointing: Annotated[
        Text, _option("none, full, selective-ops, every-N, offload. [searched, but for offload]")
    ] = None
    precision: Annotated[Text, _option("bf16, fp16, fp32, bf16-true, or param/reduce/master. [bf16]")] = None
    lora: Annotated[Count, _option("Rank of PEFT's adapters beside a frozen base. [none: all is trained]")] = None
    base: Annotated[Text, _option("Of --lora's frozen base: nf4 or int8, else as computed with.")] = None
    autocast: Annotated[
        Text, _option("bf16 or fp16: torch's autocast over fp32 parameters, of other engines. [none]")
    ] = None
    float8: Annotated[Text, _option("compute or gathers: linear layers in 8 bits, of other engines. [none]")] = None
    seq_len: Annotated[Text, _option("Tokens of a sequence. [2048]")] = None
    offload: Annotated[
        Text, _option("params=PLACE,optimizer=PLACE, or one of them; PLACE is cpu or nvme. [none, unless nothing fits]")
    ] = None
    optimizer_in_backward: Annotated[
        bool,
        _option(
            "Each unit's step is taken in backward: gradients of one unit at a time, clipped by no norm of all.",
            "--optimizer-in-backward",
        ),
    ] = False
    reshard_after_forward: Annotated[Text, _option("true, false or a number of ranks.")] = None
    slots: Annotated[Text, _option("Buffers for gathered units per size class. [3]")] = None
    units: Annotated[Count, _option("Fewest parameters of a unit. [the model's blocks]")] = None
    optimizer: Annotated[
        Text, _option("adamw, adamw-bf16, adamw-8bit, adamw-foreach, adam, sgd, momentum, muon. [adamw]")
    ] = None
    attention: Annotated[Text, _option("sdpa (fused) or eager. [sdpa]")] = None
    loss: Annotated[Text, _option("model (its own), fused, chunked. [model]")] = None
    compiled: Annotated[bool, _option("Blocks are compiled.", "--compile")] = False
    compare: Annotated[
        Text, _option("Engines side by side: some of ddp, fsdp1, fsdp2, deepspeed, shardwise, with commas between.")
    ] = None
    engine: Annotated[Text, _option("shardwise, fsdp1, fsdp2 or deepspeed. [shardwise]")] = None
    budget: Annotated[Text, _option("Memory of a device that may be used, such as 70GiB. [all]")] = None
    objective: Annotated[str, _option("tokens_per_s, memory or micro_batch. [tokens_per_s]")] = "tokens_per_s"
    price: Annotated[
        float | None, _option("Of a device for an hour, in any currency: what a step, a day, a million tokens cost.")
    ] = None
    smallest_cluster: Annotated[bool, _option("Say how few devices would do.", "--smallest-cluster")] = False
    largest_batch: Annotated[bool, _option("Say how large a micro-batch would fit.", "--largest-batch")] = False
    json: Annotated[bool, _option("Print the best forecast as JSON.", "--json")] = False
    html: Annotated[File, _option("Write a page.")] = None
    trace: Annotated[File, _option("Write the best one's timeline: .json (Perfetto) or .svg.")] = None
    config: Annotated[File, _option("Write the best one as a configuration to train with.")] = None
    workers: Annotated[Count, _option("Processes that search. [one a core, at most 8]")] = None
    calibrate: Annotated[bool, _option("Measure this machine instead, through torchrun.", "--calibrate")] = False
    quick: Annotated[
        bool, _option("Look at the strategy that shards most alone; calibrate less exactly.", "--quick")
    ] = False
    thorough: Annotated[bool, _option("Forecast the whole grid, bounds aside: minutes.", "--thorough")] = False
    ranks: Annotated[Count, _option("Of a calibration. [all GPUs, else 2]")] = None
    output: Annotated[Path, _option("Hardware file of a calibration. [hardware.toml]")] = CALIBRATED
    foreign: Annotated[
        File,
        _option(
            "What you have now: a configuration to train with (.toml), DeepSpeed's ds_config.json or the file of "
            "accelerate config.",
            "--from",
        ),
    ] = None
    debug: Annotated[bool, _option("Show tracebacks of mistakes too.", "--debug")] = False


def plan(**given: Any) -> int:
    """Plan a training run: what fits, how fast, with what. No GPU is needed.

    Options that take several values, separated by commas, are searched over them.
    """
    options = with_settings(Options(**given))
    _check_counts(options)
    if options.calibrate:
        return _calibrate(options)
    if options.backend != "torch":
        from shardwise.cli.on_jax import plan as plan_on_jax

        asked = _asked_of_jax(options)
        _check_writable(options.html)
        return plan_on_jax(asked, options.json, options.html)
    question = _question(options)

    from shardwise.plan import planner

    os.environ.update(_QUIET)
    _check_outputs(options)
    with Searching(question, wanted=not options.json) as progress:
        answer = planner.plan(question, progress)
    _show(answer, options)
    return Exit.DONE


plan.__signature__ = inspect.signature(Options)  # type: ignore[attr-defined]  # where typer finds the options


_OF_JAX = {
    *("model", "backend", "gpu", "gpus", "nodes", "interconnect", "strategy", "shard_group", "micro_batch"),
    *("accumulation", "activation_checkpointing", "precision", "seq_len", "json", "html", "debug"),
}
"""Options that have a meaning with --backend jax."""


def _asked_of_jax(options: Options) -> "Asked":
    """The options as a question about programs of XLA. Raises UserError for options that it has no use for."""
    from shardwise.cli.on_jax import PRECISIONS, Asked
    from shardwise.plan.dry_run.job import SEQ_LEN
    from shardwise.plan.hardware.devices import find_device, find_interconnect
    from shardwise.plan.simulate.network import Cluster
    from shardwise.plan.simulate.roofline import DEFAULT

    if options.backend != "jax":
        raise PlanError(f"--backend {options.backend}: torch or jax")
    if options.model is None:
        raise UserError("MODEL is missing: shardwise plan llama-3-8b --backend jax (see shardwise plan --help)")
    for field in fields(Options):
        if field.name not in _OF_JAX and getattr(options, field.name) != field.default:
            name = {"foreign": "from", "compiled": "compile"}.get(field.name, field.name.replace("_", "-"))
            raise UserError(f"--{name} says nothing to --backend jax: leave it out")
    precision = options.precision or "bf16"
    if precision not in PRECISIONS:
        raise PlanError(f"--precision {precision}: with --backend jax one of {', '.join(PRECISIONS)}")
    hardware = find_device(options.gpu)
    between = find_interconnect(options.interconnect or hardware.interconnect)
    choices: dict[str, Sequence[Any]] = {
        "strategy": _words("--strategy", options.strategy) or ["full_shard"],
        "shard_group": _numbers("--shard-group", options.shard_group) or [None],
        "micro_batch": _numbers("--micro-batch", options.micro_batch) or [1],
        "accumulation": _numbers("--accumulation", options.accumulation) or [1],
        "activation_checkpointing": _words("--activation-checkpointing", options.activation_checkpointing)
        or ["none", "full"],
    }
    settings = [dict(zip(choices, chosen, strict=True)) for chosen in itertools.product(*choices.values())]
    lengths = _numbers("--seq-len", options.seq_len) or [SEQ_LEN]
    if len(lengths) > 1:
        raise PlanError(f"--seq-len {options.seq_len}: one length with --backend jax")
    cluster = Cluster(hardware, between, options.gpus or 8, options.nodes or 1, DEFAULT.links)
    return Asked(options.model, cluster, settings, precision, lengths[0])


def _question(options: Options) -> "Question":
    """The options as a question to the planner.

    Raises:
        UserError: no model, or an option that is only for a calibration.
        PlanError: an option has a value that cannot be.
    """
    _refuse_for_a_plan(options)
    if options.model is None:
        raise UserError("MODEL is missing: shardwise plan llama-3-8b --gpus 8 (see shardwise plan --help)")

    from shardwise.plan.planner import Effort, Question
    from shardwise.plan.search.exploration import Objective

    effort = Effort.QUICK if options.quick else Effort.THOROUGH if options.thorough else Effort.USUAL
    return Question(
        model=options.model,
        arguments=_arguments(options),
        global_batch=options.global_batch,
        budget_bytes=_bytes(options.budget),
        objective=Objective.parse(options.objective),
        effort=effort,
        compare=tuple(_words("--compare", options.compare) or ()),
        workers=options.workers or min(_WORKERS, os.cpu_count() or 1),
        smallest_cluster=options.smallest_cluster,
        largest_batch=options.largest_batch,
    )


def _arguments(options: Options) -> dict[str, Any]:
    """Those of the job to plan: a value, values to search over, or None to leave them to the search."""
    return {
        "gpu": options.gpu,
        "gpus_per_node": options.gpus,
        "nodes": options.nodes,
        "interconnect": options.interconnect,
        "strategy": _words("--strategy", options.strategy),
        "shard_group": _numbers("--shard-group", options.shard_group),
        "micro_batch": _numbers("--micro-batch", options.micro_batch),
        "accumulation": _numbers("--accumulation", options.accumulation),
        "activation_checkpointing": _words("--activation-checkpointing", options.activation_checkpointing),
        "precision": _precisions(options.precision or ("fp32" if options.autocast else None), options.base),
        "lora": options.lora or 0,
        "autocast": _words("--autocast", options.autocast),
        "float8": _words("--float8", options.float8),
        "seq_len": _numbers("--seq-len", options.seq_len),
        "offload": options.offload,
        "optimizer_in_backward": options.optimizer_in_backward,
        "reshard_after_forward": _resharding(options.reshard_after_forward),
        "slots": _numbers("--slots", options.slots),
        "units": options.units,
        "optimizer": _words("--optimizer", options.optimizer),
        "attention": _words("--attention", options.attention),
        "loss": _words("--loss", options.loss),
        "compile": options.compiled,
        "engine": _words("--engine", options.engine),
        "price_per_hour": options.price,
    }


def _show(answer: "Plan", options: Options) -> None:
    """Print the answer and write the files that were asked for. Raises PlanError where nothing fits."""
    from shardwise.plan.report.rendering import table_text, write_page
    from shardwise.plan.simulate.trace import draw

    print(json.dumps(answer.to_dict(), indent=2) if options.json else table_text(answer.report))
    text, refused = _training_config(answer, options.config) if options.config or options.html else ("", None)
    if options.html is not None:
        timeline = draw(answer.best_whole().timeline) if answer.best is not None else ""
        write_page(replace(answer.report, config=text, timeline=timeline), options.html)
        _say(f"page: {options.html}")
    if answer.best is None and answer.extra.get("smallest_cluster") and not (options.trace or options.config):
        return  # that was the question
    answer.check_fits()
    if options.trace is not None:
        _say(f"timeline: {answer.best_whole().trace(options.trace)}")
    if options.config is not None:
        if refused is not None:
            raise refused
        options.config.write_text(text, encoding="utf-8")
        _say(f"configuration: {options.config}; train with it: shardwise train {options.config}{_still_to_set(text)}")


def _calibrate(options: Options) -> int:
    """Measure this machine, on ranks of its own or as one of torchrun's."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from shardwise.cli.worker import calibrate

        calibrate(options.output, options.quick)
        return Exit.DONE
    from shardwise import accelerators
    from shardwise.cli.launch import launch_task
    from shardwise.train.run.preflight import DEFAULT_CPU_RANKS, check_devices

    gpus = accelerators.count()
    check_devices(options.ranks or 0, gpus)
    _check_writable(options.output)
    task = "calibrate-quick" if options.quick else "calibrate"
    status = launch_task(task, options.output, options.ranks or gpus or DEFAULT_CPU_RANKS, options.debug)
    if status == Exit.DONE:
        print(f"{options.output}: use it with shardwise plan MODEL --gpu {options.output}")
    return status


def _training_config(answer: "Plan", path: Path | None) -> tuple[str, PlanError | None]:
    """The best one as a configuration; or nothing, and why the trainer cannot run it."""
    from shardwise.train.build.from_plan import training_config
    from shardwise.train.config.files import dump_toml

    if answer.best is None:
        return "", None
    try:
        text = dump_toml(training_config(answer.source, answer.best.job, path.stem if path else "planned"))
        hint = "# data.source is to be set: a file, folder or glob of texts, tables or instructions.\n"
        return (hint + text if _still_to_set(text) else text), None
    except PlanError as error:
        return "", error


def _still_to_set(configuration: str) -> str:
    """What the user has to add to a written configuration's command line, or to it."""
    from shardwise.train.config.schema import UNSET

    return " data.source=..., which is not set in it" if f'source = "{UNSET}"' in configuration else ""


def _check_counts(options: Options) -> None:
    for name in ("global_batch", "units", "workers", "ranks"):
        count = getattr(options, name)
        if count is not None and count < 1:
            option = f"--{name.replace('_', '-')}"
            raise PlanError(f"{option} {count}: a whole number from 1 on; leave it out for the usual")


def _check_outputs(options: Options) -> None:
    """Before minutes of work: raise PlanError where something cannot be written that is asked for."""
    _check_writable(options.html, options.trace, options.config)
    if options.trace is not None:
        from shardwise.plan.simulate.trace import check_format

        check_format(options.trace)
    if options.config is not None and options.model is not None:
        from shardwise.plan.models.source import resolve
        from shardwise.train.build.from_plan import check_model

        check_model(resolve(options.model))


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


def _refuse_for_a_plan(options: Options) -> None:
    given = {"--ranks": options.ranks is not None, "--output": options.output != CALIBRATED}
    if options.base is not None and not options.lora:
        raise PlanError(f"--base {options.base} is of a frozen base: add --lora 16, or leave --base out")
    for name, is_given in given.items():
        if is_given:
            raise UserError(f"{name} is for a calibration: add --calibrate, or leave {name} out")
    if options.quick and options.thorough:
        raise UserError("--quick and --thorough: choose one of them")


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


def _precisions(given: str | None, base: str | None) -> list[Any]:
    from shardwise.plan.search.space import precision_of

    words = _words("--precision", given) or ["bf16"]
    return [replace(precision_of(word), frozen=base) for word in words]


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
