"""Profiles: clocks, arithmetic, what a step's time is said to go into, and a profiled run of two ranks."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli.app import run
from shardwise.errors import ConfigError
from shardwise.fsdp.collectives import FINISHED, Finished, Work
from shardwise.model_tools.event_log import CollectiveCall, EventLog, HostSpan, _called
from shardwise.train.config.files import load
from shardwise.train.profile.advice import advise
from shardwise.train.profile.clocks import bounded
from shardwise.train.profile.intervals import length, union, within, without
from shardwise.train.profile.rank_file import DeviceSpan, RankFile
from shardwise.train.profile.summary import innermost, summarised
from shardwise.train.run.preflight import check_supported
from shardwise.train.run.profiles import Profile
from tests.ranks import RankPools
from tests.train.rig import furnish, losses, run_alone

MS = 1_000_000


# Clocks ---------------------------------------------------------------------------------------------------------------


OWN = {"SHARDWISE_TESTS": "profiles"}
"""Ranks of their own: torch's profiler, once it has failed in a process, gives later profiles there wrong stacks."""


@given(st.integers(-(10**12), 10**12), st.lists(st.tuples(*[st.integers(1, 500)] * 4), min_size=1, max_size=9))
def test_an_offset_lies_within_its_bounds_however_long_messages_take(behind: int, delays: Any) -> None:
    """The other rank's clock is `behind`. Both hear from each other after delays that differ both ways."""
    first, other, now = [], [], 0
    for one_starts, other_starts, there, back in delays:
        sent, their_sent = now + one_starts, now + other_starts
        heard, their_heard = max(sent, their_sent + back), max(their_sent, sent + there)
        first.append((sent, heard))
        other.append((their_sent - behind, their_heard - behind))
        now = max(heard, their_heard)
    found = bounded(first, other)
    assert abs(found.offset_ns - behind) <= found.within_ns + 1
    assert found.within_ns <= 501


# Intervals ------------------------------------------------------------------------------------------------------------

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def _points(intervals: Any) -> set[int]:
    return {point for start, end in intervals for point in range(start, end)}


@given(INTERVALS, INTERVALS, st.integers(0, 30), st.integers(0, 30))
def test_arithmetic_of_intervals(one: Any, other: Any, start: int, end: int) -> None:
    left, right = union(one), union(other)
    assert _points(left) == _points(one)
    assert length(left) == len(_points(one))
    assert _points(without(left, right)) == _points(one) - _points(other)
    assert _points(within(left, start, end)) == _points(one) & set(range(start, end))


def test_collectives_get_the_works_that_they_made() -> None:
    """On streams they order themselves after those, which they know by their class."""
    made, seen, log = Finished(), [], EventLog()

    def all_reduce(tensor: object, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        seen.append(after)
        return made

    called = _called(all_reduce, "all_reduce", log, lambda args, kwargs: ("a", (0, 1)))
    first = called(None)
    called(None, after=first).wait()
    called(None, "sum", first)
    assert seen == [FINISHED, made, made]
    assert [(call.number, len(call.waits)) for call in log.calls] == [(0, 0), (1, 1), (2, 0)]


def test_each_moment_belongs_to_the_unit_that_began_last() -> None:
    spans = [("forward", "", 0, 10), ("forward", "a", 2, 5), ("forward", "b", 5, 7), ("copy", "", 0, 99)]
    assert list(innermost(spans)) == [
        ("forward", "", (0, 2)),
        ("forward", "a", (2, 5)),
        ("forward", "b", (5, 7)),
        ("forward", "", (7, 10)),
    ]


# Sums -----------------------------------------------------------------------------------------------------------------


def _call(start: float, issued: float, *waits: tuple[float, float]) -> CollectiveCall:
    spans = [(int(a * MS), int(b * MS)) for a, b in waits]
    return CollectiveCall("all_gather", "a", (0, 1), 0, int(start * MS), int(issued * MS), spans)


def _rank(rank: int, spans: list[tuple[str, str, float, float]], call: CollectiveCall, **more: Any) -> RankFile:
    log = EventLog([HostSpan(what, name, int(a * MS), int(b * MS)) for what, name, a, b in spans], [call])
    return RankFile(rank, log, {"traceEvents": []}, **more)


STEP = [("step", "", 0, 100), ("data loading", "", 0, 5), ("compute", "", 5, 80), ("optimizer", "", 80, 90)]


def test_a_wait_is_for_a_peer_until_the_last_rank_has_come() -> None:
    """Rank 0 waits from 10 to 40 ms; rank 1 comes after 30 ms, and its slice takes until 40 ms."""
    files = [
        _rank(0, [*STEP, ("forward", "a", 8, 60)], _call(9, 10, (10, 40))),
        _rank(1, [*STEP, ("forward", "a", 8, 60)], _call(30, 31, (38, 40))),
    ]
    found = summarised(files, 3, 1000, [])
    first, second = found.shares
    assert first["waiting for a peer"] == pytest.approx(0.21)
    assert first["transfer"] == pytest.approx(0.10)
    assert second["waiting for a peer"] == 0
    assert second["transfer"] == pytest.approx(0.03)
    for shares in found.shares:
        assert sum(shares.values()) == pytest.approx(1)
        assert shares["optimizer"] == pytest.approx(0.10)
        assert shares["data loading"] == pytest.approx(0.05)
        assert shares["other"] == pytest.approx(0.10)
    assert first["compute"] == pytest.approx(0.44)
    assert found.waited_for_s == [0, pytest.approx(0.021)]
    assert found.slowest_rank == 1
    (unit,) = found.units
    assert (unit.name, unit.compute_s) == ("a", pytest.approx((0.021 + 0.049) / 2))
    assert unit.waiting_s == pytest.approx((0.031 + 0.003) / 2)
    assert (found.first_step, found.last_step, found.step_time_s) == (3, 3, pytest.approx(0.1))
    assert [len(found.lanes[lane]) for lane in found.lanes] == [3, 1, 2, 3, 1, 2]


def test_on_a_device_kernels_tell_what_is_hidden_behind_computation() -> None:
    """The collective runs from 10 to 40 ms, and computation from 5 to 20: half an overlap. Rank 1's begins at 25 ms."""

    def kernels(began: int) -> list[DeviceSpan]:
        spans = [
            ("gemm", 5, 20, 8, False),
            ("ncclDevKernel_AllGather", began, 40, 9, False),
            ("copy", 85, 95, 85, True),
        ]
        spans += [("adamw", 60, 70, 81, False)]
        return [DeviceSpan(name, a * MS, b * MS, c * MS, copies) for name, a, b, c, copies in spans]

    files = [
        _rank(rank, [*STEP, ("forward", "a", 8, 60)], _call(8.5, 9.5), on_device=kernels(began))
        for rank, began in ((0, 10), (1, 25))
    ]
    first, second = summarised(files, 3, 0, []).shares
    assert first["compute"] == pytest.approx(0.15)
    assert first["optimizer"] == pytest.approx(0.10 + 0.10)  # and the copy that the step launched
    assert first["waiting for a peer"] == pytest.approx(0.05)
    assert (first["transfer"], second["transfer"]) == (pytest.approx(0.15), pytest.approx(0.15))
    assert second["waiting for a peer"] == 0
    assert first["data loading"] == pytest.approx(0.05)


def _profile(waited_for_s: tuple[float, ...] = (0.0, 0.0), **shares: float) -> Profile:
    whole = {"compute": 1 - sum(shares.values()), "waiting for a peer": 0.0, "transfer": 0.0}
    whole |= {name.replace("_", " "): share for name, share in shares.items()}
    return Profile(3, 5, 1.0, 0.0, [whole, whole], waited_for_s, [], {})


def test_advice_for_what_is_out_of_bounds() -> None:
    assert list(advise(_profile(transfer=0.29, optimizer=0.2), lambda: "never")) == []
    (found,) = advise(_profile(transfer=0.35), lambda: "parallel.slots = 5: 4% more")
    assert found.what == "communication takes 35% of a step"
    assert found.advice == "parallel.slots = 5: 4% more"
    (peer,) = advise(_profile((0.0, 0.4), waiting_for_a_peer=0.2), lambda: "never")
    assert (
        peer.what
        == "ranks wait for one another for 20% of a step, mostly for rank 1, which takes 40% of the others' time"
    )
    (skew,) = advise(_profile((0.2, 0.2), waiting_for_a_peer=0.2), lambda: "never")
    assert "now for this one and now for that" in skew.what
    whats = [one.what for one in advise(_profile(data_loading=0.1, saves=0.1, optimizer=0.3), lambda: "never")]
    assert whats == [
        "data loading takes 10% of a step",
        "the optimizer takes 30% of a step",
        "saves take 10% of a step",
    ]


# Runs -----------------------------------------------------------------------------------------------------------------


def profiled(folder: str) -> str:
    """Train on this rank with a profile. Returns what it prints."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        run_alone("log.profile=2", "train.eval_every=0", "checkpoint.every=3")
    return printed.getvalue()


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """A run's directory and what was printed."""
    folder = tmp_path_factory.mktemp("profiled")
    furnish(folder)
    ranks: RankPools = request.getfixturevalue("ranks")
    printed = ranks(2, **OWN).run(profiled, str(folder))[0]
    return folder / "runs" / "tiny", printed


def _events(directory: Path) -> list[dict[str, Any]]:
    trace = json.loads(gzip.decompress((directory / "profile" / "trace.json.gz").read_bytes()))
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_events_of_one_collective_overlap_on_the_common_clock(of_two_ranks: tuple[Path, str]) -> None:
    """No rank can be done with a collective before all have come to it."""
    directory, _ = of_two_ranks
    found: defaultdict[Any, dict[int, tuple[float, float]]] = defaultdict(dict)
    for event in _events(directory):
        if "number" in event.get("args", {}):
            key = event["name"], event["args"]["number"]
            found[key][event["pid"]] = event["ts"], event["ts"] + event["dur"]
    within_us = 1e6 * _summary(directory).clock_s
    names = {name for name, _ in found}
    assert {"all_gather model.layers.0", "reduce_scatter model.layers.1", "all_gather"} <= names
    assert len(found) > 40
    for key, by_rank in found.items():
        assert set(by_rank) == {0, 1000}, key
        assert max(start for start, _ in by_rank.values()) <= min(end for _, end in by_rank.values()) + within_us, key


def test_spans_of_one_lane_do_not_cross(of_two_ranks: tuple[Path, str]) -> None:
    """Else a viewer cannot draw them."""
    directory, _ = of_two_ranks
    lanes: defaultdict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in _events(directory):
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(lanes) > 12
    for lane, spans in lanes.items():
        under_way: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            under_way = [other for other in under_way if other > start + 1e-3]
            assert all(end <= other + 1e-3 for other in under_way), lane
            under_way.append(end)


def _summary(directory: Path) -> Profile:
    found = Profile.read(directory / "profile")
    assert found is not None
    return found


def test_the_trace_has_what_torch_saw_on_the_same_clock(of_two_ranks: tuple[Path, str]) -> None:
    directory, _ = of_two_ranks
    events = _events(directory)
    for rank in (0, 1):
        steps = [one for one in events if one["pid"] == 1000 * rank and one["name"] == "step"]
        assert len(steps) == 2
        kernels = [one for one in events if one["pid"] == 1000 * rank + 1 and one["name"] == "aten::mm"]
        inside = [any(s["ts"] <= one["ts"] <= s["ts"] + s["dur"] for s in steps) for one in kernels]
        assert len(inside) > 20
        assert all(inside)


def test_the_summary_of_a_run(of_two_ranks: tuple[Path, str]) -> None:
    directory, printed = of_two_ranks
    found = _summary(directory)
    assert (found.first_step, found.last_step) == (3, 4)
    assert {unit.name for unit in found.units} == {"", "model.layers.0", "model.layers.1"}
    for shares in found.shares:
        assert sum(shares.values()) == pytest.approx(1)
        assert min(shares[name] for name in ("compute", "optimizer", "data loading", "saves")) > 0
        assert shares["transfer"] + shares["waiting for a peer"] > 0
    assert found.clock_s < 0.1
    lines = printed.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("profile of steps 3 to 4: "))
    assert any(line.startswith("slowest unit: ") for line in lines[start:])
    assert any(line.startswith("slowest rank: ") for line in lines[start:])
    assert "trace: runs/tiny/profile/trace.json.gz (open it in https://ui.perfetto.dev)" in lines
    assert sorted(path.name for path in (directory / "profile").iterdir()) == ["summary.json", "trace.json.gz"]
    page = (directory / "report.html").read_text()
    assert '<section id="profile-1">' in page
    assert page.count('<div class="lane">') == 2 * 3 + 1


def test_a_profile_leaves_nothing_attached_and_the_losses_as_they_are(
    of_two_ranks: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwise.train import profiled as module

    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    left: list[Any] = []
    original: Callable[..., Any] = module.ProfiledTrainer._conclude

    def conclude(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        engine = self.model.__dict__["_shardwise_engine"]
        owners = [engine.reducer, self.batches, *engine.mesh.groups]
        left.extend(set(vars(owner)) & {"open", "reduce", "batch", "all_gather", "claim"} for owner in owners)
        left.append({hook for hook in engine.hooks.end_forward if "_Phases" in repr(hook)})

    monkeypatch.setattr(module.ProfiledTrainer, "_conclude", conclude)
    run_alone("log.profile=2", "log.name=with", "train.eval_every=0")
    run_alone("log.name=without", "train.eval_every=0")
    assert left
    assert not any(left)
    assert losses("with") == losses("without")


def without_profiles(folder: str) -> list[str]:
    """Train with profiles of which, on the last rank, none can be made. Returns what is printed about them."""
    import torch

    from shardwise.train import profiled as module

    def cut(self: object, path: str) -> None:
        Path(path).write_text('{"traceEvents": [')

    def broken(*_: object) -> None:
        raise RuntimeError("no such counter")

    printed = io.StringIO()
    patches = ((torch.profiler.profile, "export_chrome_trace", cut), (torch.profiler.profile, "start", broken))
    patches += ((module, "advise", broken),)
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        for number, (owner, name, put) in enumerate(patches):
            with pytest.MonkeyPatch.context() as patch:
                if torch.distributed.get_rank() == 1 or name == "advise":
                    patch.setattr(owner, name, put)
                run_alone("log.profile=2", "train.eval_every=0", f"log.name=run{number}")
    return [line for line in printed.getvalue().splitlines() if "profile" in line]


def test_a_run_goes_on_without_a_profile_that_cannot_be_made(tmp_path: Path, ranks: RankPools) -> None:
    furnish(tmp_path)
    told, others = ranks(2, **OWN).run(without_profiles, str(tmp_path))
    assert others == []
    assert told == [
        "no profile: runs/run0/profile/rank-00001.json was cut short: is the disk full?",
        "no profile: RuntimeError: no such counter",
        "no profile: RuntimeError: no such counter",
    ]
    for number in range(3):
        assert (tmp_path / "runs" / f"run{number}" / "final").is_dir()
        assert not [*(tmp_path / "runs" / f"run{number}").glob("profile/rank-*")]


def test_too_many_steps_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    furnish(tmp_path)
    with contextlib.chdir(tmp_path):
        with pytest.raises(ConfigError, match=r"log.profile=5: with train.steps=6 at most 4 steps can be profiled"):
            check_supported(load("tiny.toml", ["log.profile=5"]))
        assert run(["train", "tiny.toml", "--profile", "5"]) == 2
        assert run(["train", "tiny.toml", "--profile", "-1"]) == 2
        assert run(["train", "tiny.toml", "train.steps=4", "--profile"]) == 2
        assert run(["report", "--profile"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert "--profile=3" not in lines[3]
    assert "--profile" in lines[3]
    assert lines[0].startswith("error: log.profile=5: with train.steps=6")
    assert lines[1].startswith("error: tiny.toml: log.profile = -1: ")
    assert lines[2].startswith("error: log.profile=3: with train.steps=4 at most 2 steps can be profiled")
