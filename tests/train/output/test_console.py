import io
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.text import Text
from torch import nn

import shardwise as sw
from shardwise.model_tools.memory import replicated
from shardwise.policy.kinds import STATE_KINDS
from shardwise.tables import format_bytes
from shardwise.train.output.console import Footprint, RunConsole, compared_with_ddp, memory_key
from shardwise.train.output.sparkline import History, sparkline
from shardwise.train.run.metrics import StepMetrics
from shardwise.train.run.sample import Sample, lengths


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step, loss=2.5, lr=1e-3, grad_norm=0.7, tokens=1024, tokens_per_s=512.0, step_time_s=2.0,
        memory={"param_shards": 1024, "optimizer": 2048, "buffers": 0}, world_size=2,
    )  # fmt: skip


def plain(steps: int, clock: Clock, every: int = 1) -> tuple[RunConsole, io.StringIO]:
    out = io.StringIO()
    return RunConsole(steps, every, console=Console(file=out, width=200), clock=clock), out


def test_without_a_terminal_there_is_a_line_every_few_seconds_and_one_for_the_last_step() -> None:
    clock = Clock()
    console, out = plain(20, clock)
    with console:
        for step in range(1, 21):
            clock.now_s += 2.0
            console.step(metrics(step))
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/20", "4/20", "7/20", "10/20", "13/20", "16/20", "19/20", "20/20"]
    assert "loss 2.5000" in lines[0]
    assert "512 tokens/s" in lines[0]
    assert "rank 0: 3.0 KiB" in lines[0]
    assert lines[0].endswith("left 0:38")


def test_what_is_left_of_a_resumed_run() -> None:
    clock = Clock()
    console, out = plain(20, clock)
    with console:
        for step in range(16, 21):
            clock.now_s += 2.0
            console.step(metrics(step))
    first = out.getvalue().splitlines()[0]
    assert first.startswith("step 16/20 ")
    assert first.endswith("left 0:08")


def test_steps_between_lines() -> None:
    clock = Clock()
    console, out = plain(20, clock, every=8)
    for step in range(1, 21):
        clock.now_s += 10.0
        console.step(metrics(step))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["8/20", "16/20", "20/20"]


def test_a_terminal_shows_progress_and_memory_by_kind() -> None:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=200)
    with RunConsole(3, console=terminal) as console:
        for step in (1, 2):
            console.step(replace(metrics(step), loss=4.0 / step))
        console._live.refresh()  # type: ignore[union-attr]
    shown = Text.from_ansi(out.getvalue()).plain
    assert "2/3" in shown
    assert re.search(r"loss +█▁ +2\.0000   lr ", shown)
    assert re.search(r"tokens/s +▁▁ ", shown)
    assert re.search(rf"memory +{'█' * 48} +3\.0 KiB on rank 0", shown)
    assert "optimizer state 2.0 KiB, parameter shards 1.0 KiB" in shown


def test_curves_of_many_values_take_little_memory_and_keep_their_shape() -> None:
    history = History()
    for number in range(10_000):
        history.add(math.nan if number % 7 == 0 else number)
    assert history.line(8) == "▁▂▃▄▅▆▇█"
    assert len(history._means) < 2048
    assert [sparkline(values, 4) for values in ([], [5.0], [1.0, 0.0], [0.0, 1.0] * 4)] == ["", "▁", "█▁", "▁▁▁▁"]


def test_other_ranks_say_nothing(capsys: object) -> None:
    console = RunConsole(1, quiet=True)
    with console:
        console.step(metrics(1))
        console.say("hello")
    assert capsys.readouterr().out == ""  # type: ignore[attr-defined]


def test_text_that_looks_like_markup_or_moves_the_cursor_is_shown_as_it_is() -> None:
    console, out = plain(1, Clock())
    console.say("[bold]x[/bold] [data]")
    console.sample(Sample("a[/dim]", "b\x1b[2J"))
    assert "[bold]x[/bold] [data]" in out.getvalue()
    assert "a[/dim] » b\N{REPLACEMENT CHARACTER}[2J" in out.getvalue()


@pytest.mark.parametrize(
    ("targets", "prompt", "new"),
    [("0111111111", 5, 5), ("1111111111", 5, 5), ("0000001111", 6, 4), ("0000000000", 5, 5), ("0011100011", 2, 8)],
)
def test_a_row_that_begins_with_a_prompt_is_asked_that(targets: str, prompt: int, new: int) -> None:
    assert lengths(np.array([each == "1" for each in targets])) == (prompt, new)


def test_the_table_at_the_end() -> None:
    console, out = plain(1, Clock())
    largest = dict.fromkeys(STATE_KINDS, 1024)
    footprint = Footprint(largest=largest, replicated={**dict.fromkeys(STATE_KINDS, 0), "param_shards": 10240})
    console.summary("full_shard", 2, footprint, step_time_s=0.25)
    assert "5.0 KiB" in out.getvalue()
    assert "10.0 KiB" in out.getvalue()
    assert "full_shard, counted" in out.getvalue()
    assert "DDP, computed" in out.getvalue()
    assert (
        "0.50 of DDP's bytes per rank (DDP keeps all of them on every rank); median step 0.250 s, measured"
        in out.getvalue()
    )
    console.offloaded("on disk", {"param_shards": 1024, "optimizer": 2048})
    console.offloaded("in host memory", {})
    assert out.getvalue().splitlines()[-1] == "rank 0 also has 3.0 KiB on disk: param_shards 1.0 KiB, optimizer 2.0 KiB"


def test_sizes() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1536, 3 * 2**40)] == ["0 B", "1023 B", "1.5 KiB", "3.0 TiB"]
    assert memory_key({"buffers": 0, "other": 1, "activations": None}).plain == "other memory 1 B"


def test_ddp_is_computed_from_the_tensors_and_ranks_by_their_largest() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).bfloat16())
    model[1].requires_grad_(False)
    sw.shard(model)
    optimizer = torch.optim.AdamW(model[0].parameters())
    model[0](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    ranks = [dict.fromkeys(STATE_KINDS, 10), {**dict.fromkeys(STATE_KINDS, 10), "optimizer": 30}]
    footprint = compared_with_ddp(ranks, replicated(model))
    assert footprint.replicated["param_shards"] == 64 + 32
    assert footprint.replicated["grad_shards"] == 64
    assert footprint.replicated["optimizer"] == 2 * 64 + 4  # two moments and the step count
    assert footprint.largest["optimizer"] == 30
    assert footprint.largest_bytes == 70
    assert footprint.replicated_bytes == 96 + 64 + 132
