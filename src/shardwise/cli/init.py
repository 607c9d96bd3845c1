"""`shardwise init`: a first configuration, from options or from questions in a terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from shardwise.cli.process.exit import Exit
from shardwise.errors import ConfigError, UsageError, UserError
from shardwise.hub import hub_name
from shardwise.train.config.tasks import DEFAULT, KINDS, TaskName

if TYPE_CHECKING:
    from shardwise.train.first_config import Asked, First

_USUAL_RANK = 16
TASKS: tuple[TaskName, ...] = get_args(TaskName)


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, **more)


def init(  # noqa: PLR0913, PLR0917 - one for each option
    model: Annotated[
        str | None, _option("A Hugging Face directory, its config.json, or a hub's org/name[@revision].", "--model")
    ] = None,
    data: Annotated[
        str | None,
        _option("A file, a directory, a glob, a hub's org/name, or builtin:stories.", "--data"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.toml", help="The file to write.")] = Path("run.toml"),
    lora: Annotated[
        int | None, _option("Train adapters of this rank, such as 16, instead of all weights.", "--lora", min=0)
    ] = None,
    ranks: Annotated[
        int | None, _option("Ranks on this machine. [all GPUs, else 2 CPU ranks]", "--ranks", "--gpus", min=1)
    ] = None,
    split: Annotated[str | None, _option("Of a hub's data set. [train]", "--split")] = None,
    subset: Annotated[str | None, _option("Of a hub's data set. [its only one]", "--subset")] = None,
    task: Annotated[
        str | None,
        _option(f"What is learnt: {', '.join(TASKS)}. [by the model's architecture and the rows' columns]", "--task"),
    ] = None,
    seq_len: Annotated[int | None, _option("Tokens per sequence. [by the data]", "--seq-len", min=2)] = None,
    steps: Annotated[int | None, _option("Steps. [3 passes over the data, at least 20]", "--steps", min=1)] = None,
    force: Annotated[bool, _option("Overwrite the file.", "--force")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Also show tracebacks of mistakes.")] = False,
) -> int:
    """Write a configuration that trains a model on data as it is. Looks at both; asks in a terminal for what is
    missing."""
    _check_target(out, force)
    if task is not None:
        _check_task(task)
    missing = [name for name, value in (("--model", model), ("--data", data)) if value is None]
    if missing and not sys.stdin.isatty():
        raise UsageError(f"{' and '.join(missing)} missing, and there is no terminal to ask in: give {missing[0]}")

    if model is not None and hub_name(model) is None:
        _check_model(model)
    if data is not None:
        from shardwise.train.data.sources import check_there

        check_there(data)
    from shardwise.plan.models.transformers_models import quiet_transformers

    quiet_transformers()
    from shardwise.train.first_config import Asked, first_task

    if model is None:
        model = _ask("Model (a directory, or org/name on a hub)", _check_model)
    if data is None:
        data = _ask("Data (a file, directory or glob, or org/name on a hub)", _check_source)
    asked = Asked(model, data, split, subset, 0, ranks, steps, seq_len)
    if missing and task is None:
        task = _ask(f"Task ({', '.join(TASKS)})", _check_task, first_task(asked, _say))
    if missing and lora is None:
        lora = typer.prompt("Rank of LoRA adapters (0 trains all weights)", default=_USUAL_RANK, type=int)
    asked = replace(asked, lora=lora or 0, task=cast("TaskName | None", task))
    made = _made(asked, out)
    _write(out, made.text)
    print("\n".join(_words(asked, made, out)))
    return Exit.DONE


def _made(asked: Asked, out: Path) -> First:
    """Return the configuration, which has passed every check that `shardwise train` makes before it starts."""
    from shardwise import device_tools
    from shardwise.train.first_config import first_config
    from shardwise.train.run.preflight import DEFAULT_CPU_RANKS, check

    gpus = device_tools.count()
    made = first_config(asked, out.stem, gpus or DEFAULT_CPU_RANKS, _say)
    check(made.config, gpus)
    return made


def _words(asked: Asked, made: First, out: Path) -> list[str]:
    """Return what was found, and the commands that come next."""
    model, rows = made.model, made.rows
    start = "from its weights" if model.is_trained else "from random weights"
    trained = f"adapters of rank {asked.lora}" if asked.lora else "all weights"
    count = f"{rows.count:,}" if rows.is_whole else f"more than {rows.count:,}"
    kind = "documents of text" if rows.continues else f"rows {'with' if rows.is_packed else 'for'} {rows.kind}"
    file, run = shlex.quote(str(out)), shlex.quote(str(made.config.run_directory))
    from shardwise import device_tools

    there = "" if device_tools.count() else " --gpus 1"  # on the usual GPU, since this machine has none
    is_chat = rows.is_packed and not rows.continues and rows.kind != "prompt and completion"
    template = "" if made.has_template else " --chat-template plain"
    answer = f"{run} --chat{template}" if is_chat else f"{run} --prompt {shlex.quote(rows.begins or '...')}"
    uses = f"  shardwise generate {answer}"
    if made.task not in {DEFAULT, "seq2seq-lm"}:
        final = str(made.config.run_directory / "final")
        uses = f"  transformers.pipeline({KINDS[made.task].pipeline!r}, {final!r})    # in Python"
    tokens = f", about {rows.tokens:,.0f} tokens" if rows.tokens else ""
    return [
        f"{asked.model}: {model}, {start}; {trained} are trained",
        f"{asked.data}: {count} {kind}{tokens}",
        f"wrote {out}; next:",
        f"  shardwise plan --from {file}{there}    # does it fit, and how fast is it",
        f"  shardwise train {file}",
        uses,
    ]


def _check_target(out: Path, force: bool) -> None:
    """Raise ConfigError if the file exists, cannot be written, or has another suffix."""
    if out.suffix != ".toml":
        raise ConfigError(f"--out {out}: must end in .toml")
    if out.is_dir() or not out.parent.is_dir():
        what = "is a directory" if out.is_dir() else f"there is no directory {out.parent}"
        raise ConfigError(f"--out {out}: {what}")
    if out.exists() and not force:
        raise ConfigError(f"--out {out} exists: name another file, or add --force to overwrite it")


def _write(out: Path, text: str) -> None:
    partial = out.with_name(f"{out.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(out)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror or error}") from None


def _ask(question: str, check: Callable[[str], object], default: str | None = None) -> str:
    """Ask until the answer passes the check."""
    while True:
        answer: str = typer.prompt(question, default=default)
        try:
            check(answer)
        except UserError as error:
            _say(f"  {' '.join(str(error).split())}")
        else:
            return answer


def _check_task(task: str) -> None:
    if task not in TASKS:
        raise UsageError(f"--task {task}: must be one of {', '.join(TASKS)}")


def _check_model(name: str) -> None:
    from shardwise.train.config.files import config_of
    from shardwise.train.data.model_files import model_section, settled

    settled(config_of({"model": model_section(name), "train": {"steps": 1}, "log": {"name": "init"}}, "Model"))


def _check_source(source: str) -> None:
    from shardwise.train.data.sources import each_row

    next(iter(each_row(source)), None)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
