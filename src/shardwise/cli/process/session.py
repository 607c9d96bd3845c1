"""What every rank of `shardwise generate` runs: a file of prompts, prompts in the terminal, or a conversation."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.fsdp.strategy import dtype_name
from shardwise.generation.generate import Answer, Batch, Generator
from shardwise.generation.loading import load_model, load_tokenizer
from shardwise.generation.rows import AnswerFile, Row
from shardwise.generation.source import Source
from shardwise.plan.models.transformers_models import quiet_transformers
from shardwise.train.process.ranks import Ranks, started

_LINE_S = 10.0
"""Seconds between lines about the progress where it is shown on no terminal."""
_YOU = "> "


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that a rank needs to know, in values that JSON can hold."""

    weights: str
    tokenizer: str
    adapter: str | None = None
    chat_template: str | None = None
    dtype: str | None = None
    rows: Sequence[Mapping[str, Any]] = ()
    out: str | None = None
    """None = the terminal."""
    resumes: bool = False
    batch_size: int = 8
    chats: bool = False
    system: str | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Request:
        """Return the request in a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Write the request to a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def run(request: Request) -> None:
    """Answer as a request says. Every rank must call this, under torchrun's environment or alone.

    A CPU rank computes with the number of threads that OMP_NUM_THREADS says, else with one: kernels for CPUs round
    differently with other numbers of threads, and answers must not depend on the number of ranks.

    Raises:
        UserError: the model cannot be loaded, a prompt cannot be answered, or the answers cannot be written. Every rank
            raises.
    """
    quiet_transformers()
    with started() as ranks:
        if ranks.device.type == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        with ranks.together():
            adapter = None if request.adapter is None else Path(request.adapter)
            source = Source(Path(request.weights), adapter, Path(request.tokenizer), request.chat_template)
            tokenizer = load_tokenizer(source)
        dtype = None if request.dtype is None else getattr(torch, dtype_name(request.dtype, "--dtype"))
        model = load_model(source, dtype, ranks)
        with ranks.together():
            generator = Generator(model, tokenizer, dict(request.options), request.seed)
        with generator.evaluating():
            if request.chats:
                _converse(request, generator, ranks)
            elif request.out is None:
                _answer_here(request, generator, ranks)
            else:
                _answer_to_file(request, Path(request.out), generator, ranks)


def _answer_to_file(request: Request, path: Path, generator: Generator, ranks: Ranks) -> None:
    """Answer all rows, in batches that do not depend on the number of ranks, of which each rank takes its turn."""
    rows = [Row(fields) for fields in request.rows]
    each = generator.answers_per_prompt
    with ranks.together():
        size = request.batch_size
        batches = generator.batches([row.prompt for row in rows], size)
    file = AnswerFile(path, rows, each, len(batches[0].prompts))
    done = ranks.on_first(lambda: file.begin(request.resumes))
    first = next((number for number, batch in enumerate(batches) if batch.first >= done), len(batches))
    with _Meter(len(rows), done, ranks.is_first) as meter:
        for answers in generator.in_turns(batches, ranks, first=first, streamer=meter.streamer):
            with ranks.together():
                if ranks.is_first:
                    file.append([_line(rows[one.prompt], one) for one in answers])
                    meter.add(len(answers) // each, sum(len(one.ids) for one in answers))
    if ranks.is_first:
        print(f"{path}: {meter.words}", file=sys.stderr)


def _line(row: Row, answer: Answer) -> dict[str, Any]:
    return {**row.fields, "completion": answer.text, "finish_reason": answer.finish_reason}


def _answer_here(request: Request, generator: Generator, ranks: Ranks) -> None:
    """Print answers to standard output as they are generated, one prompt after another."""
    rows = [Row(fields) for fields in request.rows]
    with ranks.together():
        batches = generator.batches([row.prompt for row in rows], 1)
    for number, (row, batch) in enumerate(zip(rows, batches, strict=True)):
        if len(rows) > 1 and ranks.is_first:
            print(f"{_YOU}{_last_words(row)}", flush=True)
        _say(generator, batch if ranks.is_first else None, number)
        if len(rows) > 1 and ranks.is_first:
            print()


def _last_words(row: Row) -> str:
    said = row.prompt
    return said if isinstance(said, str) else str(said[-1]["content"])


def _say(generator: Generator, batch: Batch | None, number: int) -> str:
    """Print the answer to a batch of one prompt, and return it; the rank that prints has the batch, and all others
    None."""
    if batch is None:
        generator.stand_in()
        return ""
    from transformers import TextStreamer

    streams = generator.beams == 1 and generator.answers_per_prompt == 1
    make: Any = TextStreamer  # untyped
    streamer = make(generator.tokenizer, skip_prompt=True, skip_special_tokens=True) if streams else None
    answers = generator.answer(batch, number, streamer)
    if not streams:
        print("\n\n".join(answer.text or "" for answer in answers), flush=True)
    return answers[0].text or ""


def _converse(request: Request, generator: Generator, ranks: Ranks) -> None:
    """Hold a conversation with standard input, until its end."""
    messages = [] if request.system is None else [{"role": "system", "content": request.system}]
    shows = sys.stdin is not None and sys.stdin.isatty()
    if shows and ranks.is_first:
        print("Ctrl-D ends the conversation", file=sys.stderr)
    turn = 0
    while True:
        line = ranks.from_first(ranks.work(lambda: _read_line(shows) if ranks.is_first else None))
        if line is None:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        with ranks.together():
            batch = None
            if ranks.is_first:
                batch = Batch(0, [generator.encode(messages, "the conversation")])
        reply = ranks.from_first(_say(generator, batch, turn))
        messages.append({"role": "assistant", "content": reply})
        turn += 1


def _read_line(shows: bool) -> str | None:
    """Return the next line of standard input; None at its end."""
    if shows:
        print(_YOU, end="", flush=True)
    line = sys.stdin.readline()
    if not line and shows:
        print()
    return line.removesuffix("\n") if line else None


class _Meter:
    """Prompts that are answered and tokens a second: a bar if standard error is a terminal, else lines."""

    def __init__(self, total: int, done: int, wanted: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._done, self._before, self._tokens = total, done, done, 0
        self._clock = clock
        self._begun_s = self._printed_s = clock()
        console = Console(stderr=True, highlight=False)
        self._wanted = wanted
        self._bar: Progress | None = None
        self.streamer = _Counter(self) if wanted else None
        if wanted and console.is_terminal:
            columns = (TextColumn("prompts"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[speed]}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
            self._task = self._bar.add_task("prompts", total=total, completed=done, speed="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._bar.console.show_cursor(True)  # an interrupt ends the process at once
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def _speed(self) -> str:
        counter = 0 if self.streamer is None else self.streamer.tokens
        return f"{(self._tokens + counter) / max(self._clock() - self._begun_s, 1e-9):,.1f} tokens/s"

    @property
    def words(self) -> str:
        """What was done, in words."""
        took_s = self._clock() - self._begun_s
        continued = f" after {self._before:,} that were there" if self._before else ""
        new = self._done - self._before
        return f"{new:,} prompts{continued}, {self._tokens:,} tokens in {took_s:.1f} s, {self._speed}"

    def add(self, prompts: int, tokens: int) -> None:
        """Count prompts that were answered on all ranks, with so many tokens."""
        self._done += prompts
        self._tokens += tokens
        if self.streamer is not None:
            self.streamer.tokens = 0
        now = self._clock()
        if self._bar is None and self._wanted and now - self._printed_s > _LINE_S:
            self._printed_s = now
            print(f"{self._done:,} of {self._total:,} prompts, {self._speed}", file=sys.stderr, flush=True)
        self.show()

    def show(self) -> None:
        """Draw the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, speed=self._speed)


class _Counter:
    """A streamer of transformers that counts this rank's new tokens of the batch at hand."""

    def __init__(self, meter: _Meter) -> None:
        self.tokens = 0
        self._meter = meter
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Count tokens; the first call brings the prompts."""
        if self._has_prompt:
            self.tokens += value.numel()
            self._meter.show()
        self._has_prompt = True

    def end(self) -> None:
        """The batch is done."""
        self._has_prompt = False
