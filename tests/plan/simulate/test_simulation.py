"""Hand-made steps whose times can be reckoned in the head: one unit of time is a millisecond."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.errors import PlanError
from shardwise.plan.dry_run.recording import (
    ActivationCollective,
    Collective,
    Exchange,
    Fence,
    HostRead,
    Kernel,
    KernelKind,
    StepPhase,
    Wait,
)
from shardwise.plan.hardware.devices import find_interconnect
from shardwise.plan.hardware.host import usual_host
from shardwise.plan.simulate.network import Cluster
from shardwise.plan.simulate.other_engines.model import ordered_as
from shardwise.plan.simulate.other_engines.order import HostWait, gathering_when_called
from shardwise.plan.simulate.roofline import KERNEL_S, Roofline
from shardwise.plan.simulate.simulation import simulate
from shardwise.plan.simulate.timeline import Timeline
from shardwise.plan.simulate.trace import chrome_trace, write_trace
from tests.plan.simulate.rig import HAIR, RATE, WHOLE, compute, device, gather, milliseconds, reduce, release, run

OPERATION_S = usual_host().operation_s.value
COLLECTIVE_S = usual_host().collective_s.value


def spans_of(step: Timeline, name: str) -> list[tuple[float, float]]:
    """When they begin and end, in milliseconds."""
    return [(milliseconds(span.start_s), milliseconds(span.end_s)) for span in step.spans if span.name == name]


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


def test_collectives_of_a_communicator_queue_and_those_of_two_share_the_links() -> None:
    """A gather of 10 ms from 0 on, a reduction of 10 from 5 on: one after another; or each at half the rate from 5 to
    15, and the reduction alone until 20."""
    events = [gather(0, 10), compute(5), reduce(1, 10), Wait(1)]
    in_turn, together = run(*events), run(*events, separate=True)
    assert spans_of(in_turn, "all_gather") == [pytest.approx((0, 10), abs=HAIR)]
    assert spans_of(in_turn, "reduce_scatter") == [pytest.approx((10, 20), abs=HAIR)]
    assert spans_of(together, "all_gather") == [pytest.approx((0, 15), abs=HAIR)]
    assert spans_of(together, "reduce_scatter") == [pytest.approx((5, 20), abs=HAIR)]
    waits = [Wait(0), compute(1)]  # what two communicators are for: a gather need not wait for a sum that is waiting
    late = [compute(10), reduce(1, 5), gather(0, 5), *waits]
    assert spans_of(run(*late), "k")[-1][0] == pytest.approx(20, abs=HAIR)
    assert spans_of(run(*late, separate=True), "k")[-1][0] == pytest.approx(10, abs=HAIR)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_activations_wait_for_the_kernels_before_them_and_are_exposed(op: str) -> None:
    """They take no slot, and hide only behind kernels before their wait."""
    sent = ActivationCollective(1, op, round(4 / 1000 * RATE * 2), 2, "mlp", StepPhase.FORWARD, "tensor")
    at_once = run(compute(10), sent, Wait(1), compute(10))
    assert milliseconds(at_once.step_time_s) == pytest.approx(24, abs=HAIR)
    assert milliseconds(at_once.exposed_comm_s) == pytest.approx(4, abs=HAIR)
    behind = run(compute(10), sent, compute(10), Wait(1))
    assert milliseconds(behind.step_time_s) == pytest.approx(20, abs=HAIR)
    held = run(gather(2, 1, "a"), Wait(2), sent, Wait(1), gather(3, 1, "b"), Wait(3), slots=2)
    assert milliseconds(held.step_time_s) == pytest.approx(6, abs=HAIR)
    on_cpu = run(compute(10), sent, compute(10), Wait(1), kind="cpu")
    assert milliseconds(on_cpu.step_time_s) == pytest.approx(24, abs=HAIR)


def test_groups_have_communicators_of_their_own() -> None:
    """Over the same links they share them; over others they do not."""
    first, second = gather(0, 5), replace(gather(1, 5), group="replicate")
    assert milliseconds(run(first, second, Wait(1)).step_time_s) == pytest.approx(10, abs=HAIR)
    hardware = device()
    apart = Cluster(hardware, find_interconnect("8x1000GBps"), 2, 2)  # replicas are on the other node
    step = simulate([first, second, Wait(1)], Roofline(hardware, WHOLE), apart)
    assert spans_of(step, "all_gather") == [pytest.approx((0, 5), abs=HAIR), pytest.approx((0, 5), abs=HAIR)]


def product(milliseconds: float, waves: int) -> Kernel:
    """That fills an H100's 132 processors so many times."""
    tiles, hardware = 132 * waves, device()
    shape = (tiles, 256, 128, 4096)
    kernel = Kernel("mm", KernelKind.MATMUL, 1, 0, "bf16", shape, "", StepPhase.FORWARD)
    alone = Roofline(hardware, WHOLE).seconds(kernel)
    return replace(kernel, matmul=(tiles, 256, 128, round(4096 * milliseconds / 1000 / alone)))


def test_a_collective_waits_until_a_wave_of_a_large_kernel_is_over() -> None:
    """A kernel of 10 ms in 5 waves from 0 on; at 1 ms the gather before is over, and processors are free again at 2."""
    step = run(gather(0, 1), product(10, 5), gather(1, 1))
    (kernel,) = spans_of(step, "mm")
    assert kernel == pytest.approx((0, 10), abs=HAIR)
    (_, first_end), (start, _) = spans_of(step, "all_gather")
    assert first_end == pytest.approx(1, abs=HAIR)
    assert start == pytest.approx(kernel[0] + (kernel[1] - kernel[0]) / 5)
    short = run(gather(0, 1), compute(10), gather(1, 1))  # blocks of such kernels come and go
    (_, first_end), (start, _) = spans_of(short, "all_gather")
    assert start == pytest.approx(first_end, abs=1e-6)


def test_slices_are_written_while_the_gather_before_is_under_way() -> None:
    cast = replace(compute(2), stream="shard slices")
    step = run(cast, gather(0, 5), cast, gather(1, 5), Wait(1))
    assert spans_of(step, "k") == [pytest.approx((0, 2), abs=HAIR), pytest.approx((2, 4), abs=HAIR)]
    assert spans_of(step, "all_gather") == [pytest.approx((2, 7), abs=HAIR), pytest.approx((7, 12), abs=HAIR)]


def test_what_is_left_to_do_with_a_sum_is_waited_for_and_computes_beside() -> None:
    scale = replace(compute(3), stream="shard sums")
    step = run(compute(1), reduce(0, 5), scale, compute(2), Wait(0), compute(1))
    assert milliseconds(step.step_time_s) == pytest.approx(1 + 5 + 3 + 1, abs=HAIR)
    assert milliseconds(step.exposed_comm_s) == pytest.approx(6, abs=HAIR)


def test_slices_wait_for_writes_of_the_shards_and_writes_for_them() -> None:
    cast = replace(compute(2), stream="shard slices")
    written, settled = (Fence(what, "shard", StepPhase.FORWARD) for what in ("written", "settled"))
    free = run(compute(10), cast, gather(0, 5))
    assert spans_of(free, "all_gather") == [pytest.approx((2, 7), abs=HAIR)]
    ordered = run(compute(10), written, compute(10), cast, gather(0, 5))
    assert spans_of(ordered, "all_gather") == [pytest.approx((12, 17), abs=HAIR)]
    step = run(cast, gather(0, 5), settled, compute(1))
    assert spans_of(step, "k")[-1] == pytest.approx((2, 3), abs=HAIR)  # not for the gather


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


def test_a_late_host_leaves_the_device_idle() -> None:
    """Of 100 small units the host needs longer for each gather than the device for all of it."""
    units = [event for n in range(100) for event in (gather(n, 0.001), Wait(n), compute(0))]
    step = run(*units)
    assert step.step_time_s == pytest.approx(100 * (COLLECTIVE_S + OPERATION_S), rel=0.02)
    assert step.late_s == pytest.approx(step.step_time_s, rel=0.1)
    assert step.idle_s >= step.late_s + step.exposed_comm_s - 1e-9
    assert step.exposed_comm_s < 0.1 * step.late_s
    large = run(compute(100), *units)  # it runs ahead
    assert large.late_s == pytest.approx(OPERATION_S)


def test_a_host_that_waits_for_the_device_does_not_run_ahead() -> None:
    small = [compute(0) for _ in range(1000)]
    ahead = run(compute(10), release("u"), *small)
    behind = run(compute(10), release("u"), HostWait("u"), *small)
    assert ahead.late_s == pytest.approx(OPERATION_S)
    assert behind.step_time_s == pytest.approx(10e-3 + 1000 * OPERATION_S, rel=0.01)
    assert behind.late_s == pytest.approx(1000 * (OPERATION_S - KERNEL_S), rel=0.01)


@pytest.mark.parametrize(("ranks", "hops"), [(2, 2), (8, 2), (9, 2), (10, 4), (64, 4), (4096, 8)])
def test_hosts_exchange_along_a_tree_and_the_device_works_on(ranks: int, hops: int) -> None:
    exchange = Exchange("shard", ranks, StepPhase.FORWARD)
    step = run(exchange, compute(1))
    assert step.late_s == pytest.approx(hops * usual_host().hop_s.value + OPERATION_S)
    assert run(compute(10), exchange, compute(1)).late_s == pytest.approx(OPERATION_S)


def test_a_host_that_reads_from_the_device_launches_late() -> None:
    read = HostRead(StepPhase.FORWARD)
    assert run(compute(10), compute(1)).late_s == pytest.approx(OPERATION_S)
    assert run(compute(10), read, compute(1)).late_s == pytest.approx(2 * OPERATION_S)


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


def backward(milliseconds: float, name: str = "k") -> Kernel:
    return replace(compute(milliseconds, phase=StepPhase.BACKWARD), name=name)


def test_fsdp2_copies_a_units_gradients_together_once_the_reduction_before_is_over() -> None:
    """Ours copies them as they come, and waits before the slot of the last but one is used again."""
    unit = [backward(5), backward(2, "_foreach_copy_"), backward(5), backward(2, "_foreach_copy_")]
    end = compute(1, phase=StepPhase.OPTIMIZER)
    events = [*unit, reduce(0, 20, "b"), *unit, reduce(1, 5, "a"), Wait(0), Wait(1), end]
    ours, theirs = (run(*ordered_as(engine, events)) for engine in ("shardwise", "fsdp2"))
    assert spans_of(ours, "reduce_scatter") == [pytest.approx((14, 34), abs=HAIR), pytest.approx((34, 39), abs=HAIR)]
    assert spans_of(theirs, "chunk_cat_") == [pytest.approx((10, 14), abs=HAIR), pytest.approx((34, 38), abs=HAIR)]
    assert spans_of(theirs, "reduce_scatter") == [pytest.approx((14, 34), abs=HAIR), pytest.approx((38, 43), abs=HAIR)]


def test_fsdp_hands_a_gather_out_when_a_unit_is_called() -> None:
    """A host that is late shows it: ours hands the next gather out before the kernels of this one."""
    cast = replace(compute(0), stream="shard slices")
    slow = [compute(0) for _ in range(1000)]  # the host needs 6 ms for them, the device 2.5
    events = [cast, gather(0, 1, "a"), Wait(0), cast, gather(1, 5, "b"), *slow, release("a"), Wait(1), compute(1)]
    ours, theirs = run(*events), run(*gathering_when_called(events))
    assert spans_of(ours, "all_gather")[1] == pytest.approx((1, 6), abs=HAIR)
    assert spans_of(theirs, "all_gather")[1] == pytest.approx((6, 11), abs=HAIR)
    backwards = [replace(e, phase=StepPhase.BACKWARD) if isinstance(e, Kernel | Collective) else e for e in events]
    later = run(*gathering_when_called([compute(0), *backwards]))  # which it predicts as we do
    assert spans_of(later, "all_gather")[1] == pytest.approx((1, 6), abs=HAIR)


def test_fsdp2s_gathers_wait_for_copies() -> None:
    """In forward for that of the last gather but one (from the fourth gather on); then their slices are copied once
    more, which takes 2 ms."""
    units = "abcd"
    events = [
        event
        for n, unit in enumerate(units)
        for event in (gather(n, 1, unit), Wait(n), compute(20, unit), release(unit))
    ]
    step = run(*ordered_as("fsdp2", events))
    copies, gathers = spans_of(step, "copy_out_"), spans_of(step, "all_gather")
    assert [end - start for start, end in copies] == pytest.approx([4] * 4, abs=0.01)
    assert gathers[2] == pytest.approx((6, 7), abs=HAIR)
    assert copies[1][1] == pytest.approx(31, abs=HAIR)
    assert gathers[3][0] == pytest.approx(copies[1][1] + 2, abs=HAIR)


def test_fsdp2s_hosts_exchange_nothing() -> None:
    fence = Fence("settled", "shard", StepPhase.FORWARD)
    assert list(ordered_as("fsdp2", [compute(1), Exchange("shard", 8, StepPhase.FORWARD), fence])) == [compute(1)]


@pytest.mark.parametrize(("engine", "copied"), [("shardwise", 0), ("fsdp2", 30)])
def test_what_peers_gather_is_copied_to_where_it_is_read(engine: str, copied: int) -> None:
    """10 GB come in 5 ms; to read and to write them takes 20. FSDP2 copies this rank's half of them as well."""
    events = [gather(0, 5, "u"), Wait(0), compute(1), Wait(0)]
    assert milliseconds(run(*ordered_as(engine, events)).step_time_s) == pytest.approx(5 + copied + 1, abs=HAIR)
    fused = run(*ordered_as(engine, events), compiled=True)  # the kernel alone, by half
    assert milliseconds(fused.step_time_s) == pytest.approx(5 + copied + 0.5, abs=HAIR)
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
        "shard gathers",
        *["compute"] * 2,
        "shard sums",
        "waiting for communication",
    ]
    first = next(event for event in complete if event["name"] == "k")
    assert first["ts"] == pytest.approx(5000 + 1e6 * COLLECTIVE_S, abs=50)
    assert first["dur"] == pytest.approx(10_000, abs=50)
    assert first["cat"] == "forward"


def test_traces_are_written(tmp_path: Path) -> None:
    assert json.loads(write_trace(example(), tmp_path / "t.json").read_text())["displayTimeUnit"] == "ms"
    with pytest.raises(PlanError, match=r"t\.png: a trace must be named \.json"):
        write_trace(example(), tmp_path / "t.png")
    with pytest.raises(PlanError, match="cannot be written"):
        write_trace(example(), tmp_path / "missing" / "t.json")
