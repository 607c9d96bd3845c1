"""What host and disk do beside a step, and how long the step waits for it."""

from dataclasses import replace
from typing import Any

import pytest

import shardwise as sw
from shardwise.fsdp.strategy import Precision
from shardwise.plan.dry_run.recording import StepPhase
from shardwise.plan.hardware.devices import Figure, find_device
from shardwise.plan.hardware.node import node_of
from shardwise.plan.offload.host_work import DISK, DOWN, PROCESSORS, UP, HostTask, HostWork, Rates, StepOnHost
from shardwise.plan.simulate.forecast import Forecast
from shardwise.policy.places import Places
from tests.plan.rig import LLAMA

TASK = HostTask(
    places=Places("cpu", "cpu"),
    rates=Rates(link=10.0, disk=5.0),
    on_cpu=False,
    shard_bytes={"a": 40, "b": 40},
    stepped_bytes=150,
    gathers=True,
    reshards_after_forward=True,
)


def test_copies_of_one_direction_wait_for_one_another() -> None:
    work = HostWork(TASK)
    assert [work.load("a", 0.0), work.load("b", 1.0)] == [4.0, 8.0]
    work.begin_step(6.0)
    assert work.finish(7.0) == 8.0 + 15.0
    assert work.ends_s == {UP: 23.0, DOWN: 21.0}


def test_a_step_that_takes_longer_than_its_copies_hides_them() -> None:
    work = HostWork(replace(TASK, places=Places(None, "cpu")))
    assert work.load("a", 1.0) == 1.0
    assert work.finish(5.0) == 5.0  # no step yet
    work.begin_step(1.0)
    assert work.finish(30.0) == 30.0


def test_disks_read_and_write_in_turn() -> None:
    work = HostWork(replace(TASK, places=Places("nvme", "nvme"), on_cpu=True, disk_share=1.0))
    assert work.load("a", 0.0) == 8.0
    work.begin_step(12.0)
    assert work.finish(0.0) == 12 + 2 * 150 / 5
    assert {span.stream for span in work.spans} == {DISK}


def test_what_is_on_disk_takes_two_hops_to_a_device() -> None:
    task = replace(TASK, places=Places("nvme", "cpu"), disk_share=0.4)
    work = HostWork(task)
    assert [work.load("a", 0.0), work.load("b", 0.0)] == [12.0, 20.0]  # the disk reads b while a comes up
    work.begin_step(20.0)
    assert work.finish(20.0) == 20 + 2 * 60 / 5
    assert work.ends_s == {DISK: 44.0, UP: 35.0, DOWN: 35.0}
    assert HostWork(replace(task, places=Places("cpu", "nvme"))).load("a", 0.0) == 4.0
    work = HostWork(replace(task, unit_stepped_bytes={"a": 50, "b": 100}))
    assert work.load_for_step("b", 0.0) == 40 / 5 + 100 / 10
    work.go_back("b", 20.0)
    assert work.ends_s == {DISK: 38.0, UP: 18.0, DOWN: 30.0}
    assert work.finish(21.0) == 38.0


def test_a_disk_that_is_slower_than_the_link_is_what_a_step_waits_for() -> None:
    on_host, on_disk = forecast("cpu"), forecast("nvme")
    assert {UP, DOWN, DISK} <= set(on_disk.timeline.streams)
    assert on_disk.exposed_offload_s > on_host.exposed_offload_s
    assert on_disk.memory == on_host.memory
    assert on_disk.disk_bytes_per_rank == on_host.host_bytes_per_rank
    assert on_disk.host_bytes_per_rank == on_disk.memory["optimizer"] + on_disk.memory["param_shards"]
    slower = replace(find_device("h100-sxm-80gb"), node={"disk_bytes_per_s": Figure(1e8, "a test")})
    assert forecast("nvme", gpu=slower).step_time_s > 2 * on_disk.step_time_s


def test_a_units_step_in_backward_waits_for_what_it_needs_and_nothing_for_what_goes() -> None:
    work = HostWork(replace(TASK, unit_stepped_bytes={"a": 50, "b": 100}))
    assert work.load_for_step("b", 1.0) == 11.0
    work.go_back("b", 12.0)
    assert work.load_for_step("a", 12.0) == 17.0
    work.go_back("a", 18.0)
    assert work.ends_s == {UP: 17.0, DOWN: 27.0}
    assert work.finish(19.0) == 27.0


def test_steps_in_backward_hide_copies_behind_it() -> None:
    """The same bytes cross the link, and of what the step waited for at its end some are behind the backward."""
    slow = replace(find_device("h100-sxm-80gb"), node={"link_bytes_per_s": Figure(1e8, "a test")})
    usual, in_backward = (forecast("cpu", gpu=slow, optimizer_in_backward=given) for given in (False, True))
    moved = [sum(s.nbytes for s in one.timeline.spans if s.stream == UP) for one in (usual, in_backward)]
    assert moved[1] == pytest.approx(moved[0], rel=1e-3)
    assert in_backward.step_copies_s == 0 < usual.step_copies_s
    assert usual.copies_s < in_backward.copies_s
    assert in_backward.host_bytes_per_rank == usual.host_bytes_per_rank
    whole = in_backward.compute_s + in_backward.exposed_comm_s + in_backward.exposed_offload_s
    assert whole + in_backward.timeline.late_s == pytest.approx(in_backward.step_time_s)


def test_gradients_go_behind_their_sums_and_come_to_be_added_to_and_stepped_with() -> None:
    work = HostWork(
        replace(TASK, places=Places(gradients="cpu"), stepped_bytes=0, unit_gradient_bytes={"a": 10, "b": 20})
    )
    assert work.begin_sum("b", 1.0) == 1.0
    work.end_sum("b", 2.0)
    assert work.begin_sum("a", 3.0) == 3.0
    work.end_sum("a", 3.0)
    assert work.ends_s == {DOWN: 2 + 2.0 + 1.0}
    assert work.begin_sum("b", 3.5) == 5.0  # of another micro-batch: on its way since 3
    work.end_sum("b", 6.0)
    work.begin_step(7.0)
    assert work.finish(7.0) == 8.0 + 2 * 3  # to be scaled and for the step, once the last has gone
    assert work.ends_s == {UP: 14.0, DOWN: 11.0}


@pytest.mark.parametrize("gpus", [1, 2])
def test_gradients_cross_the_link_as_often_as_the_engine_has_them(gpus: int) -> None:
    one = forecast("gradients=cpu", gpus_per_node=gpus, strategy="full_shard")
    three = forecast("gradients=cpu", gpus_per_node=gpus, strategy="full_shard", accumulation=3)
    nbytes = sum(one.recording.facts.unit_trained_bytes.values())
    for found, micro in ((one, 1), (three, 3)):
        moved = [sum(s.nbytes for s in found.timeline.spans if s.stream == way) for way in (UP, DOWN)]
        assert moved == [nbytes * (micro - 1 + 2), nbytes * (micro + 1)]
    slow = replace(find_device("h100-sxm-80gb"), node={"link_bytes_per_s": Figure(1e8, "a test")})
    slower = forecast("gradients=cpu", gpus_per_node=gpus, strategy="full_shard", gpu=slow, accumulation=3)
    assert slower.step_copies_s > 0
    assert slower.exposed_offload_s > slower.step_copies_s
    assert one.host_bytes_per_rank == nbytes
    slices = [size for size in one.recording.facts.unit_trained_bytes.values() if size]
    assert one.memory["grad_shards"] == min(4, len(slices)) * -(-max(slices) // 4096) * 4096


def test_a_step_on_the_host_overlaps_with_its_copies() -> None:
    """The longest of them is what it takes, once the last gradient is there; in backward they follow one another."""
    on_host = StepOnHost(computed=800, down=100, up=50, disk=40)
    task = replace(TASK, rates=Rates(link=10.0, disk=5.0, processors=20.0), on_host=on_host)
    work = HostWork(task)
    work.end_sum("a", 0.0)
    work.begin_step(6.0)
    assert work.finish(7.0) == 6.0 + 800 / 20
    assert work.ends_s == {DOWN: 16.0, UP: 11.0, DISK: 14.0, PROCESSORS: 46.0}
    work = HostWork(replace(task, unit_stepped_bytes={"a": 50, "b": 150}))
    assert work.load_for_step("b", 1.0) == pytest.approx(1.0 + 0.75 * (20 / 5 + 100 / 10 + 800 / 20 + 50 / 10), abs=0.1)
    work.go_back("b", 50.0)
    assert DOWN in work.ends_s
    assert work.ends_s[DOWN] < 50.0


@pytest.mark.parametrize("in_backward", [False, True])
def test_what_rests_on_the_host_does_not_cross_the_link_for_a_step_there(in_backward: bool) -> None:
    more = {"optimizer_in_backward": in_backward}
    trained = sum(forecast(None).recording.facts.unit_trained_bytes.values())
    everything, state = forecast(_ALL_STEP, **more), forecast("optimizer=cpu,step=cpu", **more)
    moved = {
        way: [
            sum(
                s.nbytes
                for s in found.timeline.spans
                if s.stream == way and (s.phase is StepPhase.OPTIMIZER or in_backward)
            )
            for found in (everything, state)
        ]
        for way in (UP, DOWN, PROCESSORS)
    }
    assert moved[DOWN][1] == pytest.approx(2 * trained, rel=1e-3)
    assert moved[UP][1] == pytest.approx(trained, rel=1e-3)
    assert moved[PROCESSORS][1] == pytest.approx(7 * trained, rel=1e-3)
    if not in_backward:
        assert moved[UP][0] == 0
        assert moved[PROCESSORS][0] == pytest.approx(9 * trained, rel=1e-3)  # with clipping
    assert state.memory["optimizer"] == 0
    assert state.host_bytes_per_rank == pytest.approx(2 * trained + 2 * trained, rel=1e-3)
    slower = replace(find_device("h100-sxm-80gb"), node={"processors_bytes_per_s": Figure(1e8, "a test")})
    assert forecast("optimizer=cpu,step=cpu", gpu=slower, **more).step_time_s > 2 * state.step_time_s


_ALL_STEP = "params=cpu,optimizer=cpu,gradients=cpu,step=cpu"


def test_parameters_that_stay_come_once_a_step() -> None:
    work = HostWork(replace(TASK, gathers=False, reshards_after_forward=False))
    assert [work.load("a", 0.0), work.load("a", 9.0)] == [4.0, 9.0]


def forecast(offload: str | None, **more: Any) -> Forecast:
    given = {"gpus_per_node": 2, "seq_len": 64, "precision": Precision("bf16", "fp32", "fp32"), **more}
    return sw.plan.forecast(LLAMA, offload=offload, **given)


def test_a_step_waits_for_copies_and_says_how_long() -> None:
    usual, small = forecast(None), forecast("cpu")
    assert (usual.exposed_offload_s, usual.host_bytes_per_rank, usual.disk_bytes_per_rank) == (0.0, 0, 0)
    assert small.memory["optimizer"] == 64 * 2**20  # the ring
    assert small.memory["param_shards"] == 4 * 2**16  # four times the largest slice
    assert small.exposed_offload_s > 0
    whole = small.compute_s + small.exposed_comm_s + small.exposed_offload_s + small.timeline.late_s
    assert whole == pytest.approx(small.step_time_s)
    assert {UP, DOWN} <= set(small.timeline.streams)
    slower = replace(find_device("h100-sxm-80gb"), node={"link_bytes_per_s": Figure(1e8, "a test")})
    assert forecast("cpu", gpu=slower).step_time_s > 2 * small.step_time_s
    plain = small.to_dict()
    assert plain["job"]["offload"] == {
        "params": "cpu",
        "optimizer": "cpu",
        "ring_bytes": None,
        "gradients": None,
        "step": None,
    }
    assert plain["host_bytes_per_node"] == 2 * plain["host_bytes_per_rank"] > 0


@pytest.mark.parametrize("gpus", [1, 2])
def test_slices_come_as_often_as_they_are_gathered(gpus: int) -> None:
    one = forecast("cpu", gpus_per_node=gpus, strategy="full_shard")
    up = [span for span in one.timeline.spans if span.stream == UP and span.owner]
    assert {span.owner for span in up} == {u for u, n in one.recording.facts.unit_shard_bytes.items() if n and u}
    if gpus > 1:
        assert len(up) == len([s for s in one.timeline.spans if s.name == "all_gather" and s.owner])
    assert {StepPhase.FORWARD, StepPhase.BACKWARD} >= {span.phase for span in up}


def test_a_host_has_so_much() -> None:
    assert forecast("cpu").fits
    tiny = replace(find_device("h100-sxm-80gb"), node={"memory_bytes": Figure(1000.0, "a test")})
    assert not forecast("cpu", gpu=tiny).fits


@pytest.mark.parametrize("name", ["h100-sxm-80gb", "rtx-4090", "cpu"])
def test_every_figure_of_a_node_has_a_source(name: str) -> None:
    node = node_of(find_device(name))
    for field in node.__slots__:
        figure = getattr(node, field)
        assert figure is None or (figure.value > 0 and figure.source)
