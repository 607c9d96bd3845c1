"""What seeing a run costs: steps with and without a profile, and how fast a report opens.

    torchrun --nproc-per-node=2 benchmarks seeing                  # two minutes on an idle machine
    torchrun --nproc-per-node=2 benchmarks seeing --out seeing     # and write the result

Each round takes steps of a GPT in three ways, in an order that alternates: with nothing attached, with the engine's
events recorded, and with torch's profiler beside them, as `shardwise train --profile` does. The reports are of made-up
runs of 10,000 steps, one alone and two beside each other, opened in a headless chromium where there is one.
Steps are told by processor time, over gloo, whose waits take none; pages by the least of several times: other programs
on the machine then count for little.
"""

import argparse
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.common import facts, gpt, report
from benchmarks.common.gpt import GPT, GPTShape
from benchmarks.common.target import Target, paired_ratio
from shardwise.model_tools.event_log import EventLog, recording
from shardwise.train.report.page import write_report
from shardwise.train.report.run_log import RunLog
from tests.browser import CHROMIUM
from tests.train.report.rig import made_up, rows

WAYS = ("nothing attached", "the engine's events", "and torch's profiler")
STEPS = 10_000
OPENS_S = 2.0


def steps_s(shape: GPTShape, rounds: int, each: int) -> dict[str, list[float]]:
    """Seconds of this rank's processor time that a step takes in each way, by round. Every rank must call this."""
    torch.manual_seed(0)
    model = sw.shard(GPT(shape), "full_shard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(number: int) -> None:
        tokens, targets = gpt.batch(shape, 1, dist.get_rank(), number)
        model(tokens, targets).backward()
        sw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(-1, rounds):  # the first one is not counted: it allocates
        for way in WAYS if turn % 2 else reversed(WAYS):
            took_s = _timed(way, model, step, each)
            if turn >= 0:
                found[way].append(took_s)
    return found


def _timed(way: str, model: torch.nn.Module, step: Callable[[int], None], each: int) -> float:
    with ExitStack() as stack:
        if way != WAYS[0]:
            stack.enter_context(recording(model, EventLog()))
        if way == WAYS[2]:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            stack.enter_context(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))
        dist.barrier()
        start_s = time.process_time()
        for number in range(each):
            step(number)
        return (time.process_time() - start_s) / each


def opens_s(page: Path, folder: Path) -> tuple[float, float, float]:
    """Seconds from the start of navigation until the page can be read, and until every chart is drawn; and from when a
    reader points at one until all answer."""
    assert CHROMIUM is not None
    timed = """<script>
      const told = () => { const marks = performance.getEntriesByName("drawn");
        if (!marks.length) return setTimeout(told, 5);
        const pointed = performance.now();
        document.querySelector(".chart").dispatchEvent(new PointerEvent("pointerenter", {pointerType: "mouse"}));
        const answers = performance.getEntriesByName("interactive")[0].startTime - pointed;
        const loaded = performance.getEntriesByType("navigation")[0].loadEventEnd;
        console.log("opened", loaded, marks[0].startTime, answers); };
      told();
    </script>"""
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{timed}</body>"), encoding="utf-8")
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = [CHROMIUM, *words, "--enable-logging=stderr", page.as_uri()]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "HOME": str(folder)}
    ) as browser:
        assert browser.stderr is not None
        try:
            for line in browser.stderr:
                if match := re.search(r"opened ([\d.]+) ([\d.]+) ([\d.]+)", line):
                    return float(match[1]) / 1e3, float(match[2]) / 1e3, float(match[3]) / 1e3
        finally:
            browser.terminate()
    raise RuntimeError("the browser ended before the page was drawn")


def reports(repeats: int) -> dict[str, list[float]]:
    """Seconds until reports are where they should be, by what that is."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one, other = (RunLog.read(made_up(folder / name, rows(STEPS))) for name in ("one", "other"))
        for kind, beside in (("one run", None), ("two runs", other)):
            write_report(folder / f"{kind}.html", one, beside)
            times = [opens_s(folder / f"{kind}.html", folder) for _ in range(repeats)]
            whats = ("can be read", "all charts drawn", "answers the first pointer after")
            found |= {f"{kind}: {what}": list(all_) for what, all_ in zip(whats, zip(*times, strict=True), strict=True)}
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=5, help="turns of each way (%(default)s)")
    p.add_argument("--steps", type=int, default=3, help="steps of a turn (%(default)s)")
    p.add_argument("--layers", type=int, default=4, help="transformer blocks (%(default)s)")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    args = p.parse_args()
    torch.set_num_threads(1)
    os.environ["SHARDWISE_COLLECTIVES"] = "gloo"
    dist.init_process_group("cpu:gloo")
    shape = GPTShape(layers=args.layers, seq=128)
    times = steps_s(shape, args.rounds, args.steps)
    if dist.get_rank() == 0:
        opened = reports(8) if CHROMIUM is not None else {}
        _tell(args, shape, times, opened)
    dist.barrier()
    dist.destroy_process_group()


def _tell(
    args: argparse.Namespace, shape: GPTShape, times: dict[str, list[float]], opened: dict[str, list[float]]
) -> None:
    machine: dict[str, Any] = facts.machine()
    machine["load"] = f"{os.getloadavg()[0]:.0f}"
    plain = times[WAYS[0]]
    targets = [
        paired_ratio("a step with the engine's events, over one with nothing attached", times[WAYS[1]], plain, 1.02),
        paired_ratio("a profiled step, over one with nothing attached", times[WAYS[2]], plain, 1.25),
        *(Target(f"a report of {what}, s, the least", min(all_), OPENS_S) for what, all_ in opened.items()),
    ]
    steps = [[way, f"{median(all_):.3f}", f"{min(all_):.3f}", f"{max(all_):.3f}"] for way, all_ in times.items()]
    pages = [[what, f"{min(all_):.2f}", f"{median(all_):.2f}"] for what, all_ in opened.items()]
    text = "\n\n".join(
        [
            "# What seeing a run costs",
            f"GPT of {shape.layers} blocks, width {shape.width}, fp32, AdamW, full_shard, {dist.get_world_size()} CPU "
            f"ranks; {args.rounds} rounds of {args.steps} steps, the ways in turn. Reports in a headless chromium.",
            report.facts_line(machine),
            report.table(["report", "least s", "median"], pages),
            report.table(["step with", "median s of a processor", "least", "most"], steps),
            "\n".join(f"- {target}" for target in targets),
        ]
    )
    print(text)
    if args.out:
        report.write(args.out, {"machine": machine, "steps_s": times, "reports_s": opened}, text)
