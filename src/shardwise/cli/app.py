"""The commands."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shardwise import __version__, hub
from shardwise.cli import bench as bench_script
from shardwise.cli import doctor as doctor_command
from shardwise.cli import generate as generate_command
from shardwise.cli import init as init_command
from shardwise.cli import plan as plan_command
from shardwise.cli import report as report_command
from shardwise.cli.foreign import convert as convert_configuration
from shardwise.cli.foreign import is_configuration
from shardwise.cli.process.exit import Exit, full_traceback, mistake
from shardwise.errors import UserError

app = typer.Typer(
    name="shardwise",
    help="Fully sharded data parallel training for PyTorch.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_PROFILED = 3
"""Steps that `--profile` records without a number."""

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG.toml", help="The run's configuration, or a recipe's name: quickstart.")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values that override the configuration's, such as train.lr=1e-4."),
]


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
        arguments: the command line without the program's name.

    Returns:
        The exit status. A user's mistake has been printed as one line.
    """
    debug = "--debug" in arguments
    try:
        status = app(args=_with_steps(arguments), standalone_mode=False)
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
        print(f"shardwise {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    backend: Annotated[
        str | None, typer.Option("--backend", help="torch or jax; overrides parallel.backend of the configuration.")
    ] = None,
    profile: Annotated[
        int | None,
        typer.Option(
            "--profile",
            metavar="[STEPS]",
            help=f"Profile so many steps from the third on ({_PROFILED} without a number): writes one trace of all "
            "ranks, and prints where the time goes; overrides log.profile.",
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Also show tracebacks of mistakes.")] = False,
) -> int:
    """Train a model on all GPUs, or on 2 CPU ranks without GPUs; resume from the newest intact checkpoint."""
    from shardwise.train.config.files import load
    from shardwise.train.run.preflight import check_supported

    overrides = [*(overrides or ()), *([f"parallel.backend={backend}"] if backend else [])]
    overrides += [f"log.profile={profile}"] if profile is not None else []
    loaded = load(config, overrides)
    if loaded.parallel.backend == "jax":
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(
                'parallel.backend = "jax" under torchrun: with JAX one process has all devices of a machine; '
                "start one process per machine, and with several machines set JAX_COORDINATOR_ADDRESS, "
                "JAX_NUM_PROCESSES and JAX_PROCESS_ID"
            )
        from shardwise.cli.on_jax import train as train_on_jax

        return train_on_jax(loaded)
    check_supported(loaded)  # before torch is loaded, and before torchrun's ranks meet
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from shardwise.cli.process.worker import run_under_torchrun

        return run_under_torchrun(config, overrides, debug)

    from shardwise import device_tools
    from shardwise.cli.process.launch import launch
    from shardwise.train.run.preflight import check

    return launch(check(loaded, device_tools.count()), debug)


@app.command()
def inspect(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG.toml|CHECKPOINT",
            help="A configuration, a checkpoint, the directory of a run, or a hub's org/name[@revision].",
        ),
    ],
    overrides: OverridesArgument = None,
    quick: Annotated[bool, typer.Option("--quick", help="Checkpoints: check only sizes and headers.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="Checkpoints: list every tensor.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Also show tracebacks of mistakes.")] = False,
) -> int:
    """Show the units of a model and the memory of each rank; or what a checkpoint holds and whether it is intact."""
    from shardwise.train.config.files import load, recipe_named

    if not what.endswith(".toml") and (recipe_named(Path(what)) is None or Path(what).is_dir()):
        return _inspect_checkpoint(what, overrides or (), quick, tensors)
    config = load(Path(what), overrides or ())
    from shardwise import device_tools
    from shardwise.cli.inspect import table
    from shardwise.train.run.preflight import check

    print(table(check(config, device_tools.count())))
    return Exit.DONE


def _inspect_checkpoint(what: str, overrides: Sequence[str], quick: bool, tensors: bool) -> int:
    """Print what a checkpoint or a run holds; return exit status 1 if it is damaged."""
    if overrides:
        raise UserError(f"{overrides[0]!r}: overrides are for configurations (.toml), and {what} is not one")
    hub.check_there(what)
    from shardwise import checkpoint
    from shardwise.cli.inspect_checkpoint import reading, report
    from shardwise.cli.progress import Progress

    progress = Progress(reading)
    try:
        found = checkpoint.inspect(what, quick, progress)
    finally:
        progress.end()
    print(report(found, tensors))
    return Exit.FAILED if getattr(found, "damage", ()) else Exit.DONE


@app.command()
def convert(  # noqa: PLR0913, PLR0917 - one for each option
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A checkpoint of any kind, which is recognised; or a configuration: DeepSpeed's ds_config.json, or "
            "the file of accelerate config.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="What to write; must not exist. For a configuration it may be left out: standard output.",
        ),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="dcp, pt, shardwise or hf; needed if TARGET does not show the kind.")
    ] = None,
    flat: Annotated[
        bool, typer.Option("--flat", help="dcp: write the model at the top level, as torchtitan does.")
    ] = False,
    model_only: Annotated[bool, typer.Option("--model-only", help="Leave the optimizer out.")] = False,
    files_from: Annotated[
        Path | None,
        typer.Option("--files-from", help="A directory whose config.json and tokenizer are copied to TARGET."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", help="For a LoRA adapter: the base to merge it into, a directory or a hub's org/name[@revision]."
        ),
    ] = None,
    max_file_bytes: Annotated[
        int | None,
        typer.Option(
            "--max-file-bytes", min=1, help="Largest size of one safetensors file. [5 GB]", show_default=False
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Also show tracebacks of mistakes.")] = False,
) -> int:
    """Convert a checkpoint between torch DCP (FSDP2, torchtitan), full .pt files, Hugging Face and shardwise, or merge
    a PEFT adapter into its base; needs no ranks. Or convert DeepSpeed's or Accelerate's configuration to ours."""
    if is_configuration(source):
        given = {
            "--to": to,
            "--flat": flat,
            "--model-only": model_only,
            "--files-from": files_from,
            "--base": base,
            "--max-file-bytes": max_file_bytes,
        }
        convert_configuration(source, target, given)
        return Exit.DONE
    if target is None:
        raise UserError(f"TARGET is missing: shardwise convert {source} TARGET (see shardwise convert --help)")
    hub.check_there(source, takes_names=False)
    from shardwise import checkpoint
    from shardwise.cli.convert import report

    sizes = {} if max_file_bytes is None else {"max_file_bytes": max_file_bytes}
    converted = checkpoint.convert(
        source, target, to, flat=flat, model_only=model_only, files_from=files_from, base=base, **sizes
    )
    print(report(target, converted))
    return Exit.DONE


@app.command()
def export(  # noqa: PLR0913, PLR0917 - one for each option
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="final/, a step's directory, a run, a PEFT adapter, any Hugging Face directory, or a hub's "
            "org/name[@revision].",
        ),
    ],
    onnx: Annotated[Path, typer.Option("--onnx", metavar="DIR", help="What to write; must be empty or absent.")],
    opset: Annotated[int, typer.Option("--opset", help="The version of ONNX's operators, from 18 to 23.")] = 20,
    quantize: Annotated[
        str | None, typer.Option("--quantize", help="int8: write graphs with weights of 8 bits as well.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="Greatest difference from PyTorch that counts as equal.")
    ] = 1e-3,
    base: Annotated[
        str | None,
        typer.Option("--base", help="For an adapter: the base to merge it into, a directory or a hub's name."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", help="A file whose perplexity is measured. [a built-in paragraph]")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Also show tracebacks of mistakes.")] = False,
) -> int:
    """Write a model as ONNX files, and check in onnxruntime that they answer as PyTorch does."""
    checkpoint = hub.settled(checkpoint)
    from shardwise.cli.export import lines, quieten, say
    from shardwise.export.onnx import export_onnx

    quieten()
    exported = export_onnx(checkpoint, onnx, opset=opset, quantize=quantize, base=base, text=text, say=say)
    print("\n".join(lines(exported, tolerance)))
    return Exit.DONE if exported.checked.passes(tolerance) else Exit.FAILED


@app.command()
def push(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="The directory of a finished run, a checkpoint, or a model.")
    ],
    name: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository; it is created if necessary.")],
    public: Annotated[bool, typer.Option("--public", help="Create a public repository. [private]")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Also show tracebacks of mistakes.")] = False,
) -> int:
    """Upload a model to a hub, with a model card: base, data, settings, losses, how to load it."""
    from shardwise.train.output.push import push

    print(f"uploaded: {push(checkpoint, name, private=not public)}")
    return Exit.DONE


app.command()(doctor_command.doctor)
app.command()(init_command.init)
app.command()(generate_command.generate)
app.command()(plan_command.plan)
app.command()(report_command.report)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> int:
    """Time this engine beside DDP, FSDP1, FSDP2 and DeepSpeed, with the options of `python benchmarks peers`."""
    return bench_script.run(context.args)


def _with_steps(arguments: Sequence[str]) -> list[str]:
    """Return the command line with the number of steps behind a `--profile` of `train` that is given without one, which
    the parser cannot leave out."""
    if not arguments or arguments[0] != "train":
        return [*arguments]
    after = [*arguments[1:], ""]
    bare = [
        one == "--profile" and not then.lstrip("-").isdecimal() for one, then in zip(arguments, after, strict=False)
    ]
    return [f"{one}={_PROFILED}" if is_bare else one for one, is_bare in zip(arguments, bare, strict=True)]


def _usage_line(error: Exception) -> str | None:
    """Return the message if the error is that the command line could not be parsed; else None."""
    usage_error = typer.BadParameter.__mro__[1]  # the base class of the parser's errors, which typer does not export
    if not isinstance(error, usage_error):
        return None
    message = getattr(error, "format_message", error.__str__)()
    return f"{' '.join(message.split())} (see shardwise --help)"
