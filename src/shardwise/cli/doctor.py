"""`shardwise doctor`: its options, where its ranks run, and how the diagnosis is printed."""

import json as json_module
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli.process.exit import Exit
from shardwise.errors import MeshError, UserError, one_line
from shardwise.policy.strategies import strategy_of

if TYPE_CHECKING:
    from shardwise.diagnosis.result import Diagnosis
    from shardwise.train.config.schema import Config, ModelConfig

_LAYERS = 2
_STEPS = 3
_DECODERS_OWN = ("num_decoder_layers", "decoder_layers")
"""Names that families with an encoder have for the number of their decoder's layers."""
_STYLES = {"passed": ("✓", "green"), "failed": ("✗", "bold red"), "skipped": ("-", "yellow")}


def doctor(  # noqa: PLR0913, PLR0917 - one for each option
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.toml]",
            help="A run's configuration, or a recipe's name, whose model and data are tried. [a small model]",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that override the configuration's.")
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option("--strategies", help="Names, by commas. [the configuration's, or full_shard]", show_default=False),
    ] = None,
    layers: Annotated[
        int, typer.Option("--layers", help="Layers that are left of the configuration's model; 0 = all.")
    ] = _LAYERS,
    steps: Annotated[int, typer.Option("--steps", help="Steps to compare.")] = _STEPS,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Number of ranks. [as shardwise train]", show_default=False)
    ] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option("--expect", metavar="CHECK:FQN", help="A finding that is meant to be so; * stands for any name."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Also show tracebacks of mistakes.")] = False,
) -> int:
    """Look for what would fail silently in machines, links between ranks, and a model that trains sharded beside one
    that trains whole. Exit status 1 if something is wrong."""
    for option, value, least in (("layers", layers, 0), ("steps", steps, 1), ("ranks", ranks, 1)):
        if value is not None and value < least:
            raise UserError(f"--{option} {value}: must be at least {least}")
    named = [strategy_of(word.strip()).value for word in (strategies or "").split(",") if word.strip()]
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if config is not None:
        from shardwise.train.config.files import dump_toml, load

        fixed = _whole_number("WORLD_SIZE") if launched else ranks
        loaded = load(config, [*(overrides or ()), *([f"parallel.ranks={fixed}"] if fixed else [])])
    from shardwise import device_tools
    from shardwise.cli.process.diagnosing import Request, run
    from shardwise.train.run.preflight import DEFAULT_CPU_RANKS, check_devices

    gpus = device_tools.count()
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        place = Path(name)
        written, count = None, ranks or gpus or DEFAULT_CPU_RANKS
        if config is not None:
            loaded = _settled(loaded, gpus)
            loaded = loaded.model_copy(update={"model": _shrunk(loaded.model, layers, place)})
            count, written = loaded.parallel.ranks, place / "config.toml"  # type: ignore[assignment]
            written.write_text(dump_toml(loaded), encoding="utf-8")
            named = named or [word for word in [loaded.parallel.strategy] if word != "auto"]
        out = place / "diagnosis.json"
        path = None if written is None else str(written)
        request = Request(path, named or ["full_shard"], steps, expect or [], str(out))
        if launched:
            from shardwise.cli.process.worker import end_as_rank

            status = end_as_rank(lambda: run(request), debug)
        else:
            from shardwise.cli.process.launch import launch_task

            check_devices(count, gpus)
            request.write(place / "request.json")
            status = launch_task("doctor", place / "request.json", count, debug)
        if status != Exit.DONE:
            return status
        return _show(out, json) if out.exists() else Exit.DONE  # of torchrun's ranks, the first has it


def _settled(loaded: "Config", gpus: int) -> "Config":
    """Return a configuration as `shardwise train` would check it, as far as it is diagnosed: from random weights, and
    with tensor and context axes if the ranks allow them."""
    from shardwise.train.run.preflight import DEFAULT_CPU_RANKS, check

    if loaded.parallel.backend == "jax":
        raise UserError('parallel.backend = "jax": the doctor looks at torch; add parallel.backend=torch to try that')
    try:
        settled = check(loaded, gpus)
    except MeshError as error:
        ranks = (gpus or DEFAULT_CPU_RANKS) if loaded.parallel.ranks == "auto" else loaded.parallel.ranks
        if ranks % loaded.parallel.ranks_per_batch == 0:
            raise
        alone = loaded.parallel.model_copy(update={"tp": 1, "cp": 1})
        settled = check(loaded.model_copy(update={"parallel": alone}), gpus)
        _say(f"{error}: parallel.tp and parallel.cp are left out, and the data axes alone are compared")
    train = settled.train.model_copy(update={"optimizer_in_backward": False})
    model = settled.model.model_copy(update={"weights": "random"})
    return settled.model_copy(update={"train": train, "model": model})


def _whole_number(variable: str) -> int:
    """Return an environment variable of torchrun's. Raises UserError if it is no number."""
    value = os.environ[variable]
    if not value.isdecimal():
        raise UserError(f"{variable}={value!r} is no number of ranks: torchrun sets it")
    return int(value)


def _shrunk(model: "ModelConfig", layers: int, place: Path) -> "ModelConfig":
    """Return a transformers model with at most so many layers; 0 leaves it as it is, as any other model.

    place: a directory for its config.json.
    """
    if not layers or model.factory is not None:
        return model
    from transformers import CONFIG_MAPPING, AutoConfig

    from shardwise.hub import local

    if model.path is not None:
        found: Any = AutoConfig.from_pretrained(str(local(model.path)), local_files_only=True)
        text = found.get_text_config()
        keys = [key for key in ("num_hidden_layers", *_DECODERS_OWN) if (getattr(text, key, None) or 0) > layers]
        if not keys:
            return model
        try:
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:layers]
            for key in keys:
                setattr(text, key, layers)
            found.save_pretrained(place)
        except Exception as error:
            raise UserError(
                f"{model.path} cannot be shortened to {layers} layers ({one_line(error, with_type=True)}): take all of "
                "them with --layers 0"
            ) from None
        _say(f"{model.path}: {layers} layers of it, with random weights (--layers 0 for all)")
        return model.model_copy(update={"path": str(place / "config.json")})
    values = dict(model.config or {})
    if values["model_type"] not in CONFIG_MAPPING:
        return model  # an error where it is built
    kind: Any = CONFIG_MAPPING[values["model_type"]]
    keys = [kind.attribute_map.get("num_hidden_layers", "num_hidden_layers"), *_DECODERS_OWN]
    made = kind(**{key: values[key] for key in keys if key in values})  # a decoder's may follow from the encoder's
    shorter = {key: layers for key in keys if (getattr(made, key, None) or 0) > layers}
    if not shorter:
        return model
    _say(f"{layers} layers of the model (--layers 0 for all)")
    types = {"layer_types": values["layer_types"][:layers]} if "layer_types" in values else {}
    return model.model_copy(update={"config": {**values, **shorter, **types}})


def _show(path: Path, as_json: bool) -> Exit:
    """Print the diagnosis in a file; return the exit status."""
    from shardwise.diagnosis.result import Diagnosis

    values = json_module.loads(path.read_text(encoding="utf-8"))
    found = Diagnosis.from_dict(values)
    console = Console(highlight=False)
    if as_json:
        print(json_module.dumps(values, indent=2))
    elif not console.is_terminal:
        print(found)
    else:
        console.print(_table(found))
        console.print(Text(found.summary, "green" if found.ok else "bold red"))
        if found.way_out:
            console.print(Text(found.way_out, "dim"))
    return Exit.DONE if found.ok else Exit.FAILED


def _table(found: "Diagnosis") -> Table:
    table = Table.grid(padding=(0, 1))
    strategy = None
    for check in found.checks:
        if check.strategy != strategy:
            strategy = check.strategy
            table.add_row("", "", Text(f"{strategy}, beside the whole model", "bold"))
        mark, style = _STYLES[check.status]
        name = Text(check.name, no_wrap=True)
        table.add_row(Text(mark, style), name, Text(check.reason, "" if check.status == "failed" else "dim"))
    return table


def _say(line: str) -> None:
    """Print a line on standard error, because the answer on standard output may be JSON."""
    print(line, file=sys.stderr, flush=True)
