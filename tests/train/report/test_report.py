"""Reports of made-up runs: what they say, and how a browser shows them."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from shardwise.cli.app import run
from shardwise.errors import UserError
from shardwise.train import trainer
from shardwise.train.config.files import load
from shardwise.train.report.curves import chart, thinned
from shardwise.train.report.drawing import picture
from shardwise.train.report.findings import findings
from shardwise.train.report.page import INSTALL, leave_report, page_html
from shardwise.train.report.run_log import RunLog
from shardwise.train.run.directory import RunDirectory
from shardwise.train.run.facts import Facts, Planned
from shardwise.train.run.launches import LaunchLog
from tests.browser import in_browser, opened
from tests.train.report.rig import made_up, rows
from tests.train.rig import furnish, run_alone

PLANNED = Planned("full_shard on two GPUs", {"param_shards": 4 * 2**20, "optimizer": 4 * 2**20}, 0.4, 0.1)


# Curves ---------------------------------------------------------------------------------------------------------------


@given(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 8))
def test_a_thinned_curve_keeps_its_ends_its_extremes_and_its_gaps(y: list[float | None], bins: int) -> None:
    x, kept = thinned(range(len(y)), y, bins)
    assert x == sorted(set(x))
    assert kept == [y[at] for at in x]
    assert x[0] == 0
    assert x[-1] == len(y) - 1
    assert len(x) <= max(2 * bins, 3 * bins + 2)
    values = [value for value in y if value is not None]
    if values:
        assert {min(values), max(values)} <= set(kept)
    assert (None in kept) == (None in y)


# Where the time went --------------------------------------------------------------------------------------------------


def test_a_launch_is_told_by_its_last_line(tmp_path: Path) -> None:
    now = iter([100.0, 100.0, 110.0, 110.0, 130.0, 200.0, 200.0, 205.0, 205.0])
    for first in (0, 25):
        log = LaunchLog(print, clock=lambda: next(now))
        log.open(tmp_path / "launches.jsonl", first, 2, "CPU")
        if first == 0:  # the second one is killed in its first step
            log.add("steps", 15.0)
            log.write(30)
    made = made_up(tmp_path / "run", rows(30))
    (tmp_path / "launches.jsonl").rename(made / "launches.jsonl")
    found = RunLog.read(made).launches
    assert [(one.first_step, one.step, one.now_s - one.began_s) for one in found] == [(0, 30, 30.0), (25, 25, 5.0)]
    assert found[0].spent_s == {"setup": 10.0, "steps": 15.0}


def test_goodput_is_the_part_of_the_time_in_steps_that_count(tmp_path: Path) -> None:
    now = iter([1.0, 1.0, 11.0, 11.0, 61.0])
    log = LaunchLog(print, clock=lambda: next(now))
    log.open(tmp_path / "launches.jsonl", 0, 2, "CPU")
    for what, seconds in (("steps", 40.0), ("saves", 6.0)):
        log.add(what, seconds)
    log.write(60)
    made = made_up(tmp_path / "run", rows(60))  # 30 s of steps, so that 10 s were spent on steps that were lost
    (tmp_path / "launches.jsonl").rename(made / "launches.jsonl")
    found = RunLog.read(made)
    assert found.time_spent == {"steps": 30.0, "steps taken again": 10.0, "setup": 10.0, "saves": 6.0, "other": 4.0}
    assert found.goodput == 0.5
    words = [one.what for one in findings(found)]
    assert "saves took 10% of the time" in words
    assert "steps that were lost and taken again took 17% of the time" in words


def test_steps_after_the_last_line_of_a_launch_count(tmp_path: Path) -> None:
    """A launch of 40 steps is killed after its half-minute's line, and resumed from step 30; the second one was killed
    after step 50, of which only `metrics.jsonl` knows, while it wrote a line."""
    now = iter([0.0, 0.0, 10.0, 10.0, 39.0, 41.0, 41.0, 100.0, 100.0, 110.0, 110.0])
    file, said = tmp_path / "launches.jsonl", list[str]()
    for first in (0, 30):
        log = LaunchLog(said.append, clock=lambda: next(now))
        log.open(file, first, 2, "CPU")
        if not first:
            log.add("steps", 20.0)
            log.keep_up(38)  # too early
            log.keep_up(40)
    file.write_text(file.read_text() + '{"began_s": 1')
    made = made_up(tmp_path / "run", rows(50))
    file.rename(made / "launches.jsonl")
    found = RunLog.read(made)
    assert found.time_spent == {"steps": 25.0, "steps taken again": 5.0, "setup": 20.0, "other": 11.0}
    assert found.goodput == 25 / 61
    assert said == []


def test_a_run_goes_on_if_its_launches_or_facts_cannot_be_written(tmp_path: Path) -> None:
    made, said = made_up(tmp_path / "run", rows(3)), list[str]()
    log = LaunchLog(said.append)
    log.open(tmp_path / "nowhere" / "launches.jsonl", 0, 2, "CPU")
    log.write(3)

    def facts() -> Facts:
        raise ValueError("no facts")

    leave_report(RunDirectory(made), facts, said.append)
    assert said == [
        f"{tmp_path}/nowhere/launches.jsonl cannot be written: No such file or directory; the run goes on without it",
        "no report: ValueError: no facts",
    ]


def test_a_finished_run_that_is_continued_has_not_finished(tmp_path: Path) -> None:
    made = made_up(tmp_path / "run", rows(30))
    assert RunLog.read(made).is_finished
    config = (made / "config.toml").read_text().replace("steps = 30", "steps = 60")
    (made / "config.toml").write_text(config)
    assert RunLog.read(made).is_finished  # one that stopped early
    RunDirectory(made).begin(load(made / "config.toml"), 30)
    assert not RunLog.read(made).is_finished


# What stands out ------------------------------------------------------------------------------------------------------


def test_nothing_stands_out_in_a_good_run(tmp_path: Path) -> None:
    assert findings(RunLog.read(made_up(tmp_path / "run", rows(100), ((50, 2.5), (100, 2.2))))) == []


def _rising(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        line["loss"] = line["step"]


def _slower(lines: list[dict[str, Any]]) -> None:
    for line in lines[80:]:
        line["step_time_s"] = 0.8


def _uneven(lines: list[dict[str, Any]]) -> None:
    for line in lines[::8]:
        line["step_time_s"] = 2.0


def _skipping(lines: list[dict[str, Any]]) -> None:
    lines[-1]["skipped_steps"] = 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_rising, "the loss did not fall: 5.5 in the first tenth of the steps, 95.5 in the last"),
        (_slower, "steps became slower: 0.5 s at first, 0.8 s at the end"),
        (_uneven, "steps are uneven: one in twenty took more than 2 s, the median is 0.5 s"),
        (_skipping, "3 steps were skipped because the loss or the gradient norm was not finite"),
    ],
)
def test_what_stands_out_comes_with_advice(change: Any, words: str, tmp_path: Path) -> None:
    lines = rows(100)
    change(lines)
    found = findings(RunLog.read(made_up(tmp_path / "run", lines)))
    assert words in [one.what for one in found]
    assert all(one.advice for one in found)


def test_held_out_losses_memory_and_an_end_that_stand_out(tmp_path: Path) -> None:
    made = made_up(tmp_path / "run", rows(100), ((50, 2.0), (100, 2.2)), planned=PLANNED)
    (made / "final").rmdir()
    found = [one.what for one in findings(RunLog.read(made))]
    assert found == [
        "the run has not finished: 100 of 100 steps",
        "the held-out loss was lowest after step 50 (2) and rose to 2.2",
        "parameters, gradients and optimizer state took 88% more memory than planned",
    ]


# The page -------------------------------------------------------------------------------------------------------------

TRY = """
  while (!performance.getEntriesByName("drawn").length) await new Promise(done => setTimeout(done, 20));
  const stills = [...document.querySelectorAll(".chart .still")].map(e => e.parentElement.id);
  document.getElementById("lr").dispatchEvent(new PointerEvent("pointerenter", {pointerType: "mouse"}));
  for (const one of document.querySelectorAll("details")) if (!one.open) one.querySelector("summary").click();
  await new Promise(done => setTimeout(done, 100));
  const loss = document.getElementById("loss");
  loss.querySelector(".legendtoggle").dispatchEvent(new MouseEvent("mousedown"));
  loss.querySelector(".legendtoggle").dispatchEvent(new MouseEvent("mouseup"));
  await new Promise(done => setTimeout(done, 600));
  const wide = [...document.querySelectorAll("main *")].filter(e => !e.closest(".wide, pre, .chart") &&
    e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(e => e.tagName + " " + e.className);
  return {wide, stills, scroll: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType("resource").filter(e => !e.name.startsWith("data:")).length,
    charts: [...document.querySelectorAll(".chart")].filter(e => e.querySelector(".scatterlayer path")).map(e => e.id),
    hidden: loss.data[0].visible,
    points: loss.data[0].x.length, open: document.querySelectorAll("details[open]").length,
    paper: getComputedStyle(document.querySelector("section")).backgroundColor,
    ink: getComputedStyle(loss.querySelector(".xtick text")).fill};
"""


@in_browser
def test_a_report_of_two_long_runs_in_a_browser(tmp_path: Path) -> None:
    """On a phone, in the dark: sections open, curves can be hidden, nothing is fetched, and the console is empty."""
    one = made_up(tmp_path / "one", rows(10_000), ((5000, 2.4), (10_000, 2.1)), planned=PLANNED)
    other = made_up(tmp_path / "other", rows(300), lr=1e-2)
    page = page_html(RunLog.read(one), RunLog.read(other))
    assert "<td>train.lr</td><td>0.001</td><td>0.01</td>" in page
    found = opened(page, TRY, tmp_path, width=390, dark=True)
    assert found["console"] == []
    assert found["requests"] == 0
    assert found["wide"] == []
    assert found["scroll"] <= 390
    assert found["stills"] == found["charts"] == ["loss", "lr", "grad-norm", "throughput", "memory-0", "memory-1"]
    assert 500 < found["points"] <= 1002
    assert found["hidden"] == "legendonly"
    assert found["open"] == 4
    assert found["paper"] == "rgb(27, 32, 38)"
    assert found["ink"] == "rgb(154, 165, 177)"


def trace(x: list[int], y: list[float | None]) -> dict[str, Any]:
    return {"x": x, "y": y, "mode": "lines", "name": "x", "line": {"color": "#123456", "width": 1.5}}


def test_a_picture_has_every_value_where_it_belongs() -> None:
    """Of a curve with a gap, on either kind of axis, and of two areas one on the other."""
    steps, values = [1, 2, 3, 4, 5], [1.0, 10.0, None, 100.0, 10.0]
    for log in (False, True):
        shown = chart("a", "A <b>", "nats", [trace(steps, values)], log)
        assert shown is not None
        drawn = picture(shown)
        assert 'aria-label="A &lt;b&gt;"' in drawn
        (path,) = re.findall(r'class="line" d="([^"]+)"', drawn)
        assert re.sub(r"[\d. ]+", "", path) == "MLML"
        (_, low), (_, next_), (_, high), (_, last) = [
            tuple(map(float, place.split())) for place in re.findall(r"[\d.]+ [\d.]+", path)
        ]
        assert next_ == last
        assert (low - next_) / (low - high) == pytest.approx(0.5 if log else 9 / 99, abs=0.01)
    area = {"stackgroup": "kinds", "fillcolor": "#000"}
    both = [trace([1, 2], [1.0, 2.0]) | area] * 2
    stacked = chart("m", "M", "MiB", both)
    assert stacked is not None
    upper, lower = (
        [float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)", path)[:2]]
        for path in re.findall(r'<path d="([^"]+)" fill="#000"', picture(stacked))
    )
    ground = float(re.findall(r'<path d="M[\d.]+ ([\d.]+)L', picture(stacked))[0])
    assert [ground - y for y in upper] == pytest.approx([2 * (ground - y) for y in lower], abs=0.3)


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.booleans())
@example(2.3451, 0.0004, False)
@example(1.0, 0.003, True)
@example(0.9, 12.0, True)
@example(0.03, 4.0, True)
@example(1e-6, 1e6, True)
def test_ticks_have_different_numbers_that_lie_where_they_say(low: float, more: float, log: bool) -> None:
    assume(more > 1e-5 * low)  # what six digits tell apart
    shown = chart("a", "A", "", [trace([1, 2], [low, low + more])], log)
    assert shown is not None
    drawn = picture(shown)
    ends = [float(place.split()[1]) for place in re.findall(r"[\d.]+ [\d.]+", drawn.split('class="line" d="')[1])[:2]]
    told = re.findall(r'class="end" x="[\d.]+" y="([\d.]+)">([^<]+)<', drawn)
    assert len({text for _, text in told}) == len(told) >= 2, told
    scale = math.log10 if log else float
    for y, text in told:
        value = float(text.replace(",", ""))
        share = (scale(value) - scale(low)) / (scale(low + more) - scale(low)) if value > 0 or not log else 0
        assert float(y) - 4 == pytest.approx(ends[0] + share * (ends[1] - ends[0]), abs=0.3)


def test_names_of_curves_stay_in_the_picture() -> None:
    names = [
        f"{run}, {what}"
        for run in ("a-long-name-of-a-run", "another-name-of-a-run")
        for what in ("training", "held out")
    ]
    shown = chart("a", "A", "", [trace([1, 2], [1.0, 2.0]) | {"name": name} for name in names])
    assert shown is not None
    drawn = picture(shown)
    placed = re.findall(r'class="name" x="(\d+)" y="(\d+)">([^<]+)<', drawn)
    assert [name for _, _, name in placed] == names
    assert [y for _, y, _ in placed] == ["16", "16", "32", "32"]
    assert all(float(x) + 6.5 * len(name) <= 500 for x, _, name in placed)
    highest = min(float(y) for y in re.findall(r'class="grid" d="M[\d.]+ ([\d.]+)', drawn))
    assert highest > 32  # below the names


def test_names_of_curves_have_their_marks() -> None:
    """A dotted line with a dot, beside that of the curve without."""
    held_out = trace([1, 2], [1.0, 2.0]) | {"name": "held out", "mode": "lines+markers"}
    held_out["line"] = {**held_out["line"], "dash": "dot"}
    shown = chart("a", "A", "", [trace([1, 2], [1.0, 2.0]), held_out])
    assert shown is not None
    plain, dotted = picture(shown).split('class="name"')[:2]
    assert plain.count("stroke-dasharray") == 1  # the curve's
    assert dotted.count("stroke-dasharray") == dotted.count("<circle") == 1


def test_the_table_of_memory_has_what_was_planned_and_what_the_fullest_rank_held(tmp_path: Path) -> None:
    page = page_html(RunLog.read(made_up(tmp_path / "run", rows(30), planned=PLANNED)))
    row = page.split("optimizer state</td>")[1].split("</tr>")[0]
    assert row == '<td class="n">4.0 MiB</td><td class="n">10.0 MiB</td>'
    assert "a step takes 0.5 s, and was planned to take 0.4 s, 25% of it waiting for communication" in page


WIDTHS = """
  const table = document.querySelector("#memory .wide");
  return {cut: table.scrollWidth - table.clientWidth, width: table.clientWidth, of: table.parentElement.clientWidth};
"""


@in_browser
@pytest.mark.parametrize("several", [False, True])
def test_the_table_of_memory_is_not_cut_where_there_is_room(several: bool, tmp_path: Path) -> None:
    """Of one run it is as wide as a chart, of two, with what was planned, as the page."""
    run, other = (RunLog.read(made_up(tmp_path / name, rows(30), planned=PLANNED)) for name in ("run", "other"))
    found = opened(page_html(run, other if several else None), WIDTHS, tmp_path, width=1180)
    assert found["cut"] == 0
    assert (found["width"] == found["of"]) == several


def test_throughput_is_in_the_unit_of_the_run(tmp_path: Path) -> None:
    made = made_up(tmp_path / "run", rows(3))
    config = (made / "config.toml").read_text()
    assert "rows/s" not in page_html(RunLog.read(made)).split("</script>")[-2]
    (made / "config.toml").write_text(f'[model]\ntask = "image-classification"\n{config}')
    assert '"rows/s"' in page_html(RunLog.read(made)).split("</script>")[-2]


def test_a_long_run_is_compared_with_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainer, "_PLANS_FROM_S", 0.0)
    run_alone("train.eval_every=0")
    found = RunLog.read(tmp_path / "runs" / "tiny")
    planned = found.facts.planned
    assert planned is not None
    assert planned.words.startswith("full_shard, micro-batch 2x4, recompute none; ")
    assert planned.words.endswith("s per step (A server processor's core)")
    assert planned.memory["param_shards"] == found.peak["param_shards"]
    assert planned.memory["optimizer"] == pytest.approx(found.peak["optimizer"], rel=0.01)
    page = (tmp_path / "runs" / "tiny" / "report.html").read_text()
    assert "Planned: full_shard, micro-batch 2x4" in page
    assert "was planned to take" not in page  # that processor is not this one


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_writes_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = made_up(tmp_path / "one", rows(30)), made_up(tmp_path / "two", rows(30))
    assert run(["report", str(one)]) == 0
    assert run(["report", str(one), "--against", str(other)]) == 0
    pages = [one / "report.html", one / "report-against-two.html"]
    assert capsys.readouterr().out == "".join(f"page: {page}\n" for page in pages)
    assert "<h1>one</h1>" in pages[0].read_text()
    assert "<h1>one and two</h1>" in pages[1].read_text()


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = made_up(tmp_path / "empty", [])
    damaged = made_up(tmp_path / "damaged", rows(3))
    (damaged / "facts.json").write_text("{")
    torn = made_up(tmp_path / "torn", rows(3))
    (torn / "metrics.jsonl").write_text('{"step": 1\n')
    lines = {
        tmp_path / "emty": "no such run; did you mean",
        tmp_path: "is not the directory of a run: it has no config.toml",
        empty: "the run has not taken a step yet, so there is nothing to report",
        damaged: "a file of the run is damaged: JSONDecodeError: ",
        torn: "metrics.jsonl, line 1: is damaged: ",
    }
    for path, line in lines.items():
        assert run(["report", str(path)]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith(f"error: {path}")
        assert line in shown.err
        assert shown.err.count("\n") == 1


def test_without_plotly_a_report_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_up(tmp_path / "run", rows(3))
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match="a report needs plotly, which is not installed: ") as caught:
        page_html(RunLog.read(made))
    assert INSTALL in str(caught.value)
