"""Hand-made steps whose times can be reckoned in the head: one unit of time is a millisecond."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.errors import PlanError
from shardwise.plan.dry_run.recording import Collective, Kernel, KernelKind, StepEvent, StepPhase, UnitMark, Wait
from shardwise.plan.hardware.devices import Figure, Hardware, find_device, find_interconnect
from shardwise.plan.simulate.network import Cluster
from shardwise.plan.simulate.other_engines.order import ordered_as
from shardwise.plan.simulate.roofline import KERNEL_S, Efficiency, Roofline
from shardwise.plan.simulate.timeline import OPERATION_S, Timeline, simulate
from shardwise.plan.simulate.trace import chrome_trace, draw, write_trace

WHOLE = Efficiency(matmul=1.0, attention=1.0, memory=1.0, links=1.0, fusion=0.5)
RATE = 10**12


def device(kind: str = "gpu") -> Hardware:
    """Moves 1 GB a millisecond within and between devices, and waits for nothing."""
    rate, hair = Figure(float(RATE), "test"), Figure(1e-15, "test")
    return replace(
        find_device("h100-sxm-80gb"), kind=kind, memory_bytes_per_s=rate, link_bytes_per_s=rate, link_latency_s=hair
    )


def compute(milliseconds: float, module: str = "", phase: StepPhase = StepPhase.FORWARD) -> Kernel:
    return Kernel("k", KernelKind.MEMORY, 7, round(milliseconds * RATE / 1000), "bf16", None, module, phase)


def gather(number: int, milliseconds: float, unit: str = "") -> Collective:
    return Collective(number, "all_gather", "shard", round(milliseconds * RATE / 1000 * 2), 2, unit, StepPhase.FORWARD)


def reduce(number: int, milliseconds: float, unit: str = "") -> Collective:
    nbytes = round(milliseconds * RATE / 1000 * 2)
    return Collective(number, "reduce_scatter", "shard", nbytes, 2, unit, StepPhase.BACKWARD)


def release(unit: str) -> UnitMark:
    return UnitMark("release", unit, StepPhase.FORWARD)


def run(*events: StepEvent, slots: int = 3, kind: str = "gpu", compiled: bool = False) -> Timeline:
    hardware = device(kind)
    cluster = Cluster(hardware, find_interconnect("8x400gbps"), 2, 1)
    return simulate(events, Roofline(hardware, WHOLE, compiled), cluster, slots)


def milliseconds(seconds: float) -> float:
    return seconds * 1000


HAIR = 0.05  # launches


def test_a_gather_that_nothing_hides_is_exposed() -> None:
    step = run(gather(0, 5), Wait(0), compute(10))
    assert milliseconds(step.step_time_s) == pytest.approx(15, abs=HAIR)
    assert milliseconds(step.exposed_comm_s) == pytest.approx(5, abs=HAIR)
    assert step.flops == 7
    assert step.bytes_sent == pytest.approx(5e9)


def test_the_next_gather_hides_behind_computation() -> None:
    step = run(gather(0, 5), gather(1, 5), Wait(0), compute(10), Wait(1), compute(10))
    assert milliseconds(step.step_time_s) == pytest.approx(25, abs=HAIR)
    assert milliseconds(step.exposed_comm_s) == pytest.approx(5, abs=HAIR)


def test_a_slow_gather_hides_in_part() -> None:
    step = run(compute(4), gather(0, 10), Wait(0), compute(1))
    assert milliseconds(step.exposed_comm_s) == pytest.approx(6, abs=HAIR)
    assert [stall.unit for stall in step.stalls] == [""]


def test_collectives_of_a_communicator_queue_and_others_do_not() -> None:
    first, second = gather(0, 5), gather(1, 5)
    assert milliseconds(run(first, second, Wait(1)).step_time_s) == pytest.approx(10, abs=HAIR)
    other = replace(second, group="replicate")
    assert milliseconds(run(first, other, Wait(1)).step_time_s) == pytest.approx(5, abs=HAIR)


def test_a_reduction_begins_when_its_gradients_are_there_and_ends_the_step() -> None:
    step = run(compute(10), reduce(0, 5))
    assert milliseconds(step.step_time_s) == pytest.approx(15, abs=HAIR)
    assert step.exposed_comm_s == 0.0  # nobody waits for it
    waited = run(compute(10), reduce(0, 5), Wait(0), compute(1))
    assert milliseconds(waited.exposed_comm_s) == pytest.approx(5, abs=HAIR)


def test_a_gather_waits_for_a_buffer() -> None:
    gathers = [gather(n, 1, f"u{n}") for n in range(3)]
    events = [*gathers, Wait(0), compute(10), release("u0"), Wait(1), compute(10), release("u1"), Wait(2), compute(10)]
    # Handed out before anything was released: the recording's order says that there is room for all three.
    assert milliseconds(run(*events, slots=2).step_time_s) == pytest.approx(31, abs=HAIR)
    late = [gathers[0], Wait(0), gathers[1], compute(10), release("u0"), gathers[2], Wait(1), Wait(2), compute(1)]
    roomy, tight = run(*late, slots=3), run(*late, slots=2)
    assert milliseconds(roomy.step_time_s) == pytest.approx(12, abs=HAIR)
    assert milliseconds(tight.step_time_s) == pytest.approx(13, abs=HAIR)  # its buffer is u0's


def test_the_host_bounds_a_step_of_small_kernels() -> None:
    kernels = [compute(0) for _ in range(100)]
    assert run(*kernels).step_time_s == pytest.approx(100 * OPERATION_S + KERNEL_S)
    assert run(*kernels, compiled=True).step_time_s < 60 * OPERATION_S


def test_a_cpu_does_everything_itself() -> None:
    step = run(gather(0, 5), gather(1, 5), Wait(0), compute(10), Wait(1), reduce(2, 5), kind="cpu")
    assert milliseconds(step.step_time_s) == pytest.approx(25, abs=HAIR)
    assert milliseconds(step.exposed_comm_s) == pytest.approx(15, abs=HAIR)


def test_a_wait_for_an_earlier_steps_collective_is_over() -> None:
    assert milliseconds(run(Wait(99), compute(1)).step_time_s) == pytest.approx(1, abs=HAIR)


def test_a_unit_is_reduced_over_replicas_when_it_is_scattered_and_not_before_kernels_handed_out_earlier() -> None:
    over = Collective(1, "all_reduce", "replicate", 0, 2, "u", StepPhase.BACKWARD)
    before, after = [compute(10), reduce(0, 5, "u")], compute(40)
    for order, start in ((*before, over, after), 15), ((*before, after, over), 50):
        spans = [span for span in run(*order).spans if span.name == "all_reduce"]
        assert [milliseconds(span.start_s) for span in spans] == pytest.approx([start], abs=HAIR)


def test_peers_wait_for_reductions_once_at_the_end_of_backward() -> None:
    backward = [compute(10, phase=StepPhase.BACKWARD), reduce(0, 30), compute(10, phase=StepPhase.BACKWARD)]
    events = [*backward, Wait(0), compute(50, phase=StepPhase.BACKWARD), compute(5, phase=StepPhase.OPTIMIZER)]
    ours, theirs = (run(*ordered_as(engine, events)) for engine in ("shardwise", "fsdp2"))
    assert milliseconds(ours.step_time_s) == pytest.approx(10 + 30 + 50 + 5, abs=HAIR)
    assert milliseconds(ours.exposed_comm_s) == pytest.approx(20, abs=HAIR)
    assert milliseconds(theirs.step_time_s) == pytest.approx(10 + 10 + 50 + 5, abs=HAIR)
    assert theirs.exposed_comm_s == 0.0
    late = [*backward, Wait(0), compute(5, phase=StepPhase.OPTIMIZER)]  # the optimizer needs it
    assert milliseconds(run(*ordered_as("fsdp1", late)).exposed_comm_s) == pytest.approx(20, abs=HAIR)


@pytest.mark.parametrize(("engine", "copied"), [("shardwise", 0), ("fsdp1", 0), ("fsdp2", 20), ("deepspeed", 20)])
def test_what_peers_gather_is_copied_to_where_it_is_read(engine: str, copied: int) -> None:
    """10 GB come in 5 ms; to read and to write them takes 20."""
    step = run(*ordered_as(engine, [gather(0, 5, "u"), Wait(0), compute(1), Wait(0)]))
    assert milliseconds(step.step_time_s) == pytest.approx(5 + copied + 1, abs=HAIR)
    alone = replace(gather(0, 5, "u"), ranks=1)
    assert list(ordered_as(engine, [alone, Wait(0)])) == [alone, Wait(0)]


def example() -> Timeline:
    return run(
        gather(0, 5, "block.0"), Wait(0), compute(10, "block.0.<x>"), compute(20, "", StepPhase.BACKWARD), reduce(1, 5)
    )


def test_the_trace_is_chromes_and_says_when_and_on_which_stream() -> None:
    trace = json.loads(json.dumps(chrome_trace(example())))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    complete = [event for event in trace if event["ph"] == "X"]
    assert [names[event["tid"]] for event in complete] == [
        "shard",
        *["compute"] * 2,
        "shard",
        "waiting for communication",
    ]
    first = next(event for event in complete if event["name"] == "k")
    assert first["ts"] == pytest.approx(5000, abs=50)
    assert first["dur"] == pytest.approx(10_000, abs=50)
    assert first["cat"] == "forward"


def test_the_drawing_is_an_svg_with_a_lane_for_each_stream() -> None:
    root = ElementTree.fromstring(draw(example()))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"compute", "shard", "waiting"} <= set(texts)
    widths = [
        float(node.get("width") or 0) for node in root.iter("{http://www.w3.org/2000/svg}rect") if node.get("y") != "12"
    ]
    assert max(widths) == pytest.approx(850 / 2, abs=2)  # the backward kernel: 20 of 40 ms
    *_, last = (node for node in root.iter("{http://www.w3.org/2000/svg}text") if (node.text or "").endswith(" ms"))
    assert last.get("text-anchor") == "end"
    assert float(last.get("x") or 0) <= 960, "it is not cut off at the picture's edge"


def test_traces_are_written_by_suffix(tmp_path: Path) -> None:
    assert json.loads(write_trace(example(), tmp_path / "t.json").read_text())["displayTimeUnit"] == "ms"
    assert write_trace(example(), tmp_path / "t.svg").read_text().startswith("<svg")
    with pytest.raises(PlanError, match=r"t\.png: a trace is written as \.json"):
        write_trace(example(), tmp_path / "t.png")
    with pytest.raises(PlanError, match="cannot be written"):
        write_trace(example(), tmp_path / "missing" / "t.json")
