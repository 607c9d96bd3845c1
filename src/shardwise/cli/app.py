"""The commands."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli import bench as bench_script
from shardwise.cli.exit import Exit, full_traceback, mistake
from shardwise.errors import UserError

app = typer.Typer(
    name="shardwise",
    help="Fully sharded data parallel training for PyTorch.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The run's configuration.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as train.lr=1e-4.")
]


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
        arguments: the command line without the program's name.

    Returns:
        The exit status. A mistake of the user's has been printed as one line.
    """
    debug = "--debug" in arguments
    try:
        status = app(args=list(arguments), standalone_mode=False)
    except typer.Abort:
        return Exit.INTERRUPTED
    except Exception as error:
        line = _usage_line(error) or mistake(error)
        print(full_traceback(error) if line is None else f"error: {line}", file=sys.stderr)
        if line is not None and debug:
            print(full_traceback(error), file=sys.stderr)
        return Exit.FAILED if line is None else Exit.USER_MISTAKE
    return status or Exit.DONE


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        print(f"shardwise {version('shardwise')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of configuration errors too.")] = False,
) -> int:
    """Train a model, on all GPUs or else on 2 CPU ranks; resume from the newest good checkpoint."""
    from shardwise.train.config import load

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from shardwise.cli.worker import run_under_torchrun

        return run_under_torchrun(config, overrides or (), debug)

    from shardwise.cli.launch import launch
    from shardwise.train.preflight import check

    return launch(check(load(config, overrides or ())), debug)


@app.command()
def inspect(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of configuration errors too.")] = False,
) -> int:
    """Show the units of a model and what each rank would hold, without training and without memory for it."""
    if config.is_dir():
        raise UserError(f"{config} is a directory: this version inspects configurations (.toml) only, not checkpoints")
    from shardwise.cli.inspect import table
    from shardwise.train.config import load
    from shardwise.train.preflight import check

    print(table(check(load(config, overrides or ()))))
    return Exit.DONE


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> int:
    """Time this engine beside DDP, FSDP1, FSDP2 and DeepSpeed on this machine; options are benchmarks/peers.py's."""
    return bench_script.run(context.args)


def _usage_line(error: Exception) -> str | None:
    """The message of a command line that does not parse."""
    usage_error = typer.BadParameter.__mro__[1]  # the parser's own class, which typer does not export
    if not isinstance(error, usage_error):
        return None
    message = getattr(error, "format_message", error.__str__)()
    return f"{' '.join(message.split())} (see shardwise --help)"
