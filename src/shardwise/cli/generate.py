"""`shardwise generate`: its options, and where its ranks run."""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise import hub
from shardwise.cli.process.exit import Exit
from shardwise.errors import ConfigError, UsageError, UserError

_PLAIN = "plain"
"""Value of `--chat-template` for the template of `shardwise train`."""
_FILLED = 0.8
"""Greatest share of a device's memory that weights may take: the rest is for the cache of keys and values."""

Text = str | None


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


@dataclass(frozen=True)
class Asked:
    """Where prompts come from, where answers go, and how the model is loaded."""

    checkpoint: str
    prompt: list[str]
    prompts: Path | None
    out: Path | None
    resume: bool
    chat: bool
    system: str | None
    chat_template: str | None
    as_messages: bool
    ranks: int | None
    base: str | None
    tokenizer: str | None
    dtype: str | None
    batch_size: int
    seed: int


def generate(  # noqa: PLR0913, PLR0917 - one for each option
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="final/, a step's directory, a run, a PEFT adapter, any Hugging Face directory, or a hub's "
            "org/name[@revision].",
        ),
    ],
    prompt: Annotated[list[str] | None, _option("A text to continue. May be repeated.", "--prompt", "-p")] = None,
    prompts: Annotated[
        Path | None, _option("A file: text, one prompt a line; or .jsonl, rows with prompt or messages.")
    ] = None,
    out: Annotated[
        Path | None, _option("A .jsonl file to write: each row with completion and finish_reason. [the terminal]")
    ] = None,
    resume: Annotated[bool, _option("Continue the file of --out, begun by an earlier start.", "--resume")] = False,
    chat: Annotated[bool, _option("Hold a conversation in the terminal.", "--chat")] = False,
    system: Annotated[Text, _option("The system's message; makes a conversation of each prompt.")] = None,
    as_messages: Annotated[
        bool, _option("Put each prompt into the chat template, as a user's message.", "--as-messages")
    ] = False,
    chat_template: Annotated[
        Text, _option('A Jinja file, or "plain" for that of `shardwise train`. [the tokenizer\'s]')
    ] = None,
    max_new_tokens: Annotated[int | None, _option("Greatest length of an answer. [the model's, or 256]")] = None,
    do_sample: Annotated[
        bool | None,
        _option(
            "Sample, or take the most probable token. [the model's; sample with an option of sampling]",
            "--do-sample/--no-do-sample",
        ),
    ] = None,
    temperature: Annotated[float | None, _option("Of the sampling.")] = None,
    top_p: Annotated[float | None, _option("Sample from the most probable tokens that have this share.")] = None,
    top_k: Annotated[int | None, _option("Sample from this number of most probable tokens.")] = None,
    min_p: Annotated[float | None, _option("Least probability, as a share of the most probable token's.")] = None,
    repetition_penalty: Annotated[float | None, _option("Above 1: tokens that were there are less probable.")] = None,
    num_beams: Annotated[int | None, _option("Number of beams. [1]")] = None,
    num_return_sequences: Annotated[int | None, _option("Answers to each prompt. [1]")] = None,
    set_: Annotated[
        list[str] | None,
        _option(
            "NAME=VALUE: any other option of transformers' GenerationConfig, the value as JSON or text. May be "
            "repeated.",
            "--set",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampling.")] = 0,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Prompts that are computed together, on one rank.")
    ] = 8,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            show_default=False,
            help="Ranks that share the model. [1 if it fits, else all GPUs]",
        ),
    ] = None,
    dtype: Annotated[Text, _option("Of the weights: fp32, bf16 or fp16. [as stored]")] = None,
    tokenizer: Annotated[Text, _option("A directory or a hub's name. [beside the weights]")] = None,
    base: Annotated[Text, _option("For an adapter: its base, a directory or a hub's name. [as it says]")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Also show tracebacks of mistakes.")] = False,
) -> int:
    """Generate answers with a model that is sharded over ranks, or on one process where it fits."""
    named = {
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "num_beams": num_beams,
        "num_return_sequences": num_return_sequences,
    }
    asked = Asked(
        checkpoint, prompt or [], prompts, out, resume, chat, system, chat_template, as_messages, ranks, base,
        tokenizer, dtype, batch_size, seed,
    )  # fmt: skip
    return _run(asked, {**named, **_settings(set_ or [], named)}, debug)


def _settings(texts: list[str], named: dict[str, Any]) -> dict[str, Any]:
    """Parse the values of `--set`. Raises UsageError if one has no name, or is given twice."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise UsageError(f"--set {text}: must be NAME=VALUE, such as --set no_repeat_ngram_size=3")
        if name in found or named.get(name) is not None:
            raise UsageError(f"--set {text}: {name} is given twice")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _run(asked: Asked, options: dict[str, Any], debug: bool) -> int:
    _check_ways(asked)
    template = _template(asked.chat_template)
    rows = _rows(asked)
    checkpoint = hub.settled(asked.checkpoint)
    from shardwise import device_tools
    from shardwise.cli.process.session import Request, run
    from shardwise.fsdp.strategy import dtype_name
    from shardwise.generation.source import find_source
    from shardwise.plan.models.transformers_models import quiet_transformers

    dtype_name(asked.dtype, "--dtype")
    quiet_transformers()
    source = find_source(checkpoint, asked.base, asked.tokenizer, template, _say)
    given = _checked(options, source.weights)
    request = Request(
        weights=str(source.weights),
        tokenizer=str(source.tokenizer),
        adapter=None if source.adapter is None else str(source.adapter),
        chat_template=template,
        dtype=asked.dtype,
        rows=rows,
        out=None if asked.out is None else str(asked.out),
        resumes=asked.resume,
        batch_size=asked.batch_size,
        chats=asked.chat,
        system=asked.system,
        seed=asked.seed,
        options=given,
    )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from shardwise.cli.process.worker import end_as_rank

        return end_as_rank(lambda: run(request), debug)
    number = _number_of_ranks(asked.ranks, source.nbytes, device_tools.count())
    if number == 1:
        run(request)
        return Exit.DONE
    from shardwise.cli.process.launch import launch_task

    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        path = Path(name) / "request.json"
        request.write(path)
        return launch_task("generate", path, number, debug)


def _check_ways(asked: Asked) -> None:
    """Raise UsageError for options that contradict each other, and ConfigError for a file that cannot be written."""
    ways = {"--prompt": bool(asked.prompt), "--prompts": asked.prompts is not None, "--chat": asked.chat}
    given = [name for name, is_given in ways.items() if is_given]
    if not given:
        raise UsageError("nothing to answer: give --prompt TEXT, --prompts FILE or --chat")
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: give one of them")
    if asked.chat and asked.out is not None:
        raise UsageError("--out is for --prompt and --prompts, and --chat answers in the terminal: leave one out")
    if asked.resume and asked.out is None:
        raise UsageError("--resume continues the file of --out: give --out FILE too")
    if asked.out is not None:
        from shardwise.generation.rows import check_writable

        check_writable(asked.out)
        if asked.out.exists() and not asked.resume:
            raise ConfigError(f"--out {asked.out} exists: add --resume to continue it, or name another file")


def _template(given: str | None) -> str | None:
    """Return the text of `--chat-template`."""
    from shardwise.train.data.tokenizer import PLAIN_TEMPLATE

    if given is None or given == _PLAIN:
        return None if given is None else PLAIN_TEMPLATE
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'--chat-template {given}: must be a Jinja file, or "{_PLAIN}": {error}') from None


def _rows(asked: Asked) -> list[dict[str, Any]]:
    from shardwise.generation.rows import read_rows, row_of

    as_messages = asked.as_messages or asked.system is not None
    if asked.prompts is not None:
        rows = read_rows(asked.prompts, as_messages, asked.system)
    else:
        for number, text in enumerate(asked.prompt, 1):
            if not text:
                raise UsageError(f"prompt {number} is empty: --prompt needs a text")
        rows = [row_of(text, as_messages, asked.system) for text in asked.prompt]
    return [dict(row.fields) for row in rows]


def _checked(options: dict[str, Any], weights: Path) -> dict[str, Any]:
    """Return the options, checked beside the model's own before any rank is started."""
    from transformers import GenerationConfig

    from shardwise.generation.options import checked_options

    configuration: Any = GenerationConfig  # untyped
    own = configuration()
    if (weights / "generation_config.json").is_file():
        try:
            own = configuration.from_pretrained(weights, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{weights}/generation_config.json: {' '.join(str(error).split())[:200]}") from None
    return checked_options(options, own)


def _number_of_ranks(asked: int | None, weights_bytes: int, devices: int) -> int:
    """Return the number of ranks: as asked for, else one if the weights fit on a device, else as many as devices.

    Raises:
        UserError: there are fewer devices, or the weights fit neither on one nor on all of them.
    """
    if not devices:
        return asked or 1
    import torch

    from shardwise import accelerators, device_tools

    if asked is not None and asked > devices:
        raise UserError(f"--ranks {asked}: this machine has {devices} devices")
    kind = accelerators.accelerator()
    assert kind is not None
    room = _FILLED * device_tools.total_bytes(torch.device(kind.type, 0))
    number = asked or (1 if weights_bytes <= room else devices)
    if weights_bytes > room * number:
        raise UserError(
            f"the weights take {weights_bytes / 2**30:.1f} GiB, and {number} devices of this machine have room for "
            f"{room * number / 2**30:.1f}: start it with torchrun on several machines, or with --dtype bf16 if they "
            "are stored in fp32"
        )
    return number


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
