"""`shardwise plan`: which settings fit, and how fast they are."""

import gc
import inspect
import itertools
import json
import os
import re
import sys
import textwrap
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.foreign import with_settings
from shardwise.cli.plan_options import CALIBRATED, Options
from shardwise.cli.process.exit import Exit
from shardwise.cli.searching import Searching
from shardwise.errors import PlanError, UserError
from shardwise.hub import pinned
from shardwise.policy.adapters import Adapters
from shardwise.policy.settings import RUN, SEQ_LEN
from shardwise.policy.words import words_of
from shardwise.suggest import nearest_path

if TYPE_CHECKING:
    from shardwise.cli.on_jax import Asked
    from shardwise.plan.planner import Plan
    from shardwise.plan.search.search import Question


_WORKERS = 8
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Environment variables that keep transformers, if it is needed, from printing progress bars and advice."""
_INDENTED: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "    ", "break_on_hyphens": False}


def plan(**given: Any) -> int:
    """Plan a training run: which settings fit, and how fast they are. No GPU is needed.

    If an option has several values, separated by commas, the search tries all of them.
    """
    options = with_settings(Options(**given))
    _check_counts(options)
    if options.calibrate:
        return _calibrate(options)
    if options.model is not None:
        options = replace(options, model=pinned(options.model, f"MODEL {options.model!r}"))
    if options.backend != "torch":
        from shardwise.cli.on_jax import plan as plan_on_jax

        asked = _asked_of_jax(options)
        _check_writable(options.html)
        return plan_on_jax(asked, options.json, options.html)
    question = _question(options)

    from shardwise.plan import planner

    os.environ.update(_QUIET)
    gc.set_threshold(100_000, 20, 20)  # or it runs a thousand times while torch is imported, and frees nothing
    _check_outputs(options)
    with Searching(question, wanted=not options.json) as progress:
        answer = planner.plan(question, progress)
    _show(answer, options)
    return Exit.DONE


plan.__signature__ = inspect.signature(Options)  # type: ignore[attr-defined]  # typer reads the options from it


_OF_JAX = {
    *("model", "backend", "gpu", "gpus", "nodes", "interconnect", "strategy", "shard_group", "micro_batch"),
    *("accumulation", "activation_checkpointing", "precision", "seq_len", "json", "html", "debug"),
}
"""Options that have an effect with --backend jax."""


def _asked_of_jax(options: Options) -> "Asked":
    """Turn the options into a question about XLA programs. Raises UserError for options that have no effect on it."""
    from shardwise.cli.on_jax import PRECISIONS, Asked
    from shardwise.plan.hardware.devices import find_device, find_interconnect
    from shardwise.plan.hardware.machines import USUAL_GPU
    from shardwise.plan.simulate.network import Cluster
    from shardwise.plan.simulate.roofline import DEFAULT

    if options.backend != "jax":
        raise PlanError(f"--backend {options.backend}: must be torch or jax")
    if options.model is None:
        raise UserError("MODEL is missing: shardwise plan llama-3-8b --backend jax (see shardwise plan --help)")
    for field in fields(Options):
        if field.name not in _OF_JAX and getattr(options, field.name) != field.default:
            name = "from" if field.name == "foreign" else field.name.replace("_", "-")
            raise UserError(f"--{name} has no effect with --backend jax: leave it out")
    precision = options.precision or "bf16"
    if precision not in PRECISIONS:
        raise PlanError(f"--precision {precision}: must be one of {', '.join(PRECISIONS)} with --backend jax")
    hardware = find_device(options.gpu or USUAL_GPU)
    hardware.check_computes(precision.removesuffix("-true"))
    between = find_interconnect(options.interconnect or hardware.interconnect)
    usual: dict[str, list[Any]] = {
        "strategy": ["full_shard"],
        "shard_group": [None],
        "micro_batch": [1],
        "accumulation": [1],
        "activation_checkpointing": ["none", "full"],
    }
    choices = {name: RUN[name].values(getattr(options, name)) or values for name, values in usual.items()}
    settings = [dict(zip(choices, chosen, strict=True)) for chosen in itertools.product(*choices.values())]
    lengths = RUN["seq_len"].values(options.seq_len) or [SEQ_LEN]
    if len(lengths) > 1:
        raise PlanError(f"--seq-len {options.seq_len}: must be a single length with --backend jax")
    cluster = Cluster(hardware, between, options.gpus or 8, options.nodes or 1, DEFAULT.links)
    return Asked(options.model, cluster, settings, precision, lengths[0])


def _question(options: Options) -> "Question":
    """Turn the options into a question for the planner.

    Raises:
        UserError: no model is given, or an option is only for a calibration.
        PlanError: an option has an invalid value.
    """
    _refuse_for_a_plan(options)
    if options.model is None:
        print(_packaged())
        raise UserError("MODEL is missing: shardwise plan llama-3.1-8b --gpus 8 (see shardwise plan --help)")

    from shardwise.plan.search.exploration import Objective
    from shardwise.plan.search.search import Effort, Question

    effort = Effort.QUICK if options.quick else Effort.THOROUGH if options.thorough else Effort.USUAL
    return Question(
        model=options.model,
        arguments=options.arguments(),
        global_batch=options.global_batch,
        budget_bytes=options.budget_bytes,
        objective=Objective.parse(options.objective),
        effort=effort,
        compare=tuple(words_of("--compare", options.compare) or ()),
        workers=options.workers or min(_WORKERS, os.cpu_count() or 1),
        smallest_cluster=options.smallest_cluster,
        largest_batch=options.largest_batch,
    )


def _packaged() -> str:
    """Return the names of the packaged shapes, those of a family on lines of their own, and of the packaged devices."""
    from shardwise.plan.hardware.devices import device_names
    from shardwise.plan.models.source import shapes

    families = (list(names) for _, names in itertools.groupby(shapes(), lambda name: re.split(r"[\d-]", name)[0]))
    blocks = [("Packaged shapes (MODEL):", families), ("Packaged devices (--gpu):", [device_names()])]
    return "\n".join(
        line
        for title, groups in blocks
        for line in (title, *(line for names in groups for line in textwrap.wrap(", ".join(names), 100, **_INDENTED)))
    )


def _show(answer: "Plan", options: Options) -> None:
    """Print the answer and write the requested files. Raises PlanError if nothing fits."""
    from shardwise.pages import write_page
    from shardwise.plan.report.rendering import page_html, table_text

    print(json.dumps(answer.to_dict(), indent=2) if options.json else table_text(answer.report))
    text, refused = _training_config(answer, options.config) if options.config or options.html else ("", None)
    if options.html is not None:
        timeline = answer.best_whole().timeline if answer.best is not None else None
        write_page(page_html(replace(answer.report, config=text, timeline=timeline)), options.html)
        _say(f"page: {options.html}")
    if answer.best is None and answer.extra.get("smallest_cluster") and not (options.trace or options.config):
        return  # the smallest cluster was asked for, and it was found
    answer.check_fits()
    if options.trace is not None:
        _say(f"timeline: {answer.best_whole().trace(options.trace)}")
    if options.config is not None:
        if refused is not None:
            raise refused
        options.config.write_text(text, encoding="utf-8")
        _say(f"configuration: {options.config}; train with it: shardwise train {options.config}{_still_to_set(text)}")


def _calibrate(options: Options) -> int:
    """Measure this machine, on ranks started here or as one rank of a torchrun that the user started."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from shardwise.cli.process.worker import calibrate

        calibrate(options.output, options.quick)
        return Exit.DONE
    from shardwise import device_tools
    from shardwise.cli.process.launch import launch_task
    from shardwise.train.run.preflight import DEFAULT_CPU_RANKS, check_devices

    gpus = device_tools.count()
    check_devices(options.ranks or 0, gpus)
    _check_writable(options.output)
    task = "calibrate-quick" if options.quick else "calibrate"
    status = launch_task(task, options.output, options.ranks or gpus or DEFAULT_CPU_RANKS, options.debug)
    if status == Exit.DONE:
        print(f"{options.output}: use it with shardwise plan MODEL --gpu {options.output}")
    return status


def _training_config(answer: "Plan", path: Path | None) -> tuple[str, PlanError | None]:
    """Return the best job as the text of a training configuration; or an empty text and the reason why the trainer
    cannot run it."""
    from shardwise.train.build.from_plan import training_config
    from shardwise.train.config.files import dump_toml

    if answer.best is None:
        return "", None
    try:
        text = dump_toml(training_config(answer.source, answer.best.job, path.stem if path else "planned"))
        hint = "# Set data.source to a file, folder, glob or hub's data set of texts, tables or instructions.\n"
        return (hint + text if _still_to_set(text) else text), None
    except PlanError as error:
        return "", error


def _still_to_set(configuration: str) -> str:
    """Return what the user must still add to the command that trains a written configuration; empty if nothing."""
    from shardwise.train.config.schema import UNSET

    return " data.source=... (which the file does not set)" if f'source = "{UNSET}"' in configuration else ""


def _check_counts(options: Options) -> None:
    for name in ("global_batch", "workers", "ranks"):
        count = getattr(options, name)
        if count is not None and count < 1:
            option = f"--{name.replace('_', '-')}"
            raise PlanError(f"{option} {count}: must be a whole number of at least 1; leave it out for the default")


def _check_outputs(options: Options) -> None:
    """Raise PlanError if a requested file cannot be written, before minutes of work are spent."""
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
            raise PlanError(f"cannot write {path}: no such directory: {path.parent}{nearest_path(path.parent)}")
        if path.is_dir():
            raise PlanError(f"cannot write {path}: it is a directory; name a file")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise PlanError(f"cannot write {path}: no permission to write it; name another file")


def _refuse_for_a_plan(options: Options) -> None:
    given = {"--ranks": options.ranks is not None, "--output": options.output != CALIBRATED}
    if options.base is not None and Adapters.of(options.lora) is None:
        raise PlanError(f"--base {options.base} needs a frozen base: add --lora 16, or leave --base out")
    for name, is_given in given.items():
        if is_given:
            raise UserError(f"{name} is only for a calibration: add --calibrate, or leave {name} out")
    if options.quick and options.thorough:
        raise UserError("--quick and --thorough cannot be combined: choose one of them")


def _say(line: str) -> None:
    """Print a line on standard error, because the answer on standard output may be JSON."""
    print(line, file=sys.stderr)
