"""Models of engines that published runs used: FSDP1 and DeepSpeed, autocast, and linear layers in 8 bits."""

from typing import Any

import pytest

import shardwise as sw
from benchmarks.plans.published.other_engines.float8 import gathered_in_float8, in_float8
from benchmarks.plans.published.other_engines.job import PublishedJob
from shardwise.errors import ConfigError
from shardwise.plan.dry_run.recording import (
    Collective,
    Exchange,
    Fence,
    Kernel,
    KernelKind,
    Recording,
    StepPhase,
    Wait,
)
from shardwise.plan.hardware.devices import find_device
from shardwise.plan.simulate.forecast import forecast_of
from shardwise.plan.simulate.other_engines.model import ordered_as
from shardwise.plan.simulate.roofline import Roofline
from tests.plan.rig import check as check_activations
from tests.plan.simulate.other_engines import rig as memory
from tests.plan.simulate.other_engines.rig import LLAMA, RANKS, held, live_after_forward
from tests.plan.simulate.rig import HAIR, compute, gather, milliseconds, reduce, release, run
from tests.ranks import RankPools


def recorded(engine: str, **more: Any) -> Recording:
    return memory.recorded(engine, kind=PublishedJob, **more)


@pytest.mark.parametrize("engine", ["fsdp1", "deepspeed"])
def test_a_step_ends_as_it_began(engine: str) -> None:
    memory.ends_as_it_began(recorded(engine))


def test_what_is_asked_for_on_other_streams() -> None:
    """FSDP1's gathers, casts and reduced gradients."""
    memory.check_streams("fsdp1", {"gathered_slots": 1, "grad_shards": 2})
    memory.check_streams("deepspeed", {})
    late = memory.kinds_on("fsdp1", lambda replayed, block: block in replayed.late)
    assert late == {"gathered_slots", "reduce_slots"}


def test_forecasts_differ() -> None:
    engines = ("shardwise", "fsdp1", "fsdp2", "deepspeed")
    assert len({forecast_of(recorded(engine)).peak_memory_bytes for engine in engines}) == len(engines)


def test_fsdp1() -> None:
    """One buffer a block, and the next one's in backward; no reduction waits."""
    assert held(recorded("fsdp1"), 2, StepPhase.FORWARD)["gathered_slots"] == pytest.approx(1, abs=0.01)
    backward = held(recorded("fsdp1"), 2, StepPhase.BACKWARD)
    assert backward["gathered_slots"] == pytest.approx(2, abs=0.01)
    assert backward.get("reduce_slots", 0) == 0


def test_deepspeed() -> None:
    """A bf16 part of everything beside the masters, bf16 gradients that stay; weights that activations hold."""
    recording = recorded("deepspeed")
    everything = sum(recording.facts.unit_bytes.values())
    forward = held(recording, 2, StepPhase.FORWARD)
    unit = recording.facts.unit_bytes["model.layers.2"]
    assert forward["param_shards"] * unit == pytest.approx(3 * everything / RANKS, rel=0.01)
    assert forward["grad_shards"] * unit == pytest.approx(everything / RANKS, rel=0.01)
    assert forward["gathered_slots"] == pytest.approx(3, abs=0.01)


def test_deepspeed_s_own_linear_layer_keeps_no_weights() -> None:
    """Where activations are kept; what is soon used again stays gathered with either (all of this little model)."""
    kept, let_go = (
        live_after_forward(recorded("deepspeed", keeps_gathered_weights=kept), "gathered_slots")
        for kept in (True, False)
    )
    assert kept == let_go
    large = {**LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
    kept, let_go = (
        live_after_forward(
            recorded("deepspeed", keeps_gathered_weights=kept, model=tuple(large.items())), "gathered_slots"
        )
        for kept in (True, False)
    )
    assert kept > let_go


@pytest.mark.slow
def test_autocast_keeps_a_cast_copy_of_every_weight() -> None:
    """From forward to backward, at any world size, unless blocks recompute."""
    settings: dict[str, Any] = {"precision": sw.Precision(), "seq_len": 1}
    weights = 6 * (4 * 64 * 64 + 3 * 64 * 172) + 128 * 64
    for nodes in (1, 8):
        plain, cast = (
            live_after_forward(recorded("fsdp1", **settings, nodes=nodes, autocast=dtype), "activations")
            for dtype in (None, "bf16")
        )
        assert cast - plain == pytest.approx(2 * weights, rel=0.03)  # what else is kept halves
    recomputing = {**settings, "activation_checkpointing": "full"}
    plain, cast = (
        live_after_forward(recorded("fsdp1", **recomputing, autocast=dtype), "activations") for dtype in (None, "bf16")
    )
    assert cast - plain < 2 * 128 * 64 * 1.1  # the head's


def test_fsdp1_and_deepspeed_wait_for_reductions_once_at_the_end_of_backward() -> None:
    backward = [compute(10, phase=StepPhase.BACKWARD), reduce(0, 30), compute(10, phase=StepPhase.BACKWARD)]
    events = [*backward, Wait(0), compute(50, phase=StepPhase.BACKWARD), compute(5, phase=StepPhase.OPTIMIZER)]
    ours, theirs = (run(*ordered_as(engine, events)) for engine in ("shardwise", "fsdp1"))
    assert milliseconds(ours.step_time_s) == pytest.approx(10 + 30 + 50 + 5, abs=HAIR)
    assert milliseconds(ours.exposed_comm_s) == pytest.approx(20, abs=HAIR)
    assert milliseconds(theirs.step_time_s) == pytest.approx(10 + 10 + 50 + 5, abs=HAIR)
    assert theirs.exposed_comm_s == 0.0
    late = [*backward, Wait(0), compute(5, phase=StepPhase.OPTIMIZER)]  # the optimizer needs it
    assert milliseconds(run(*ordered_as("deepspeed", late)).exposed_comm_s) == pytest.approx(20, abs=HAIR)


def test_fsdp1s_host_waits_for_the_release_before_the_last() -> None:
    events = [
        event for n in range(4) for event in (gather(n, 1, f"u{n}"), Wait(n), compute(20, f"u{n}"), release(f"u{n}"))
    ]
    assert run(*ordered_as("fsdp1", events)).host_s >= 41e-3, "of the second unit"
    assert run(*ordered_as("fsdp2", events)).host_s < 1e-3


@pytest.mark.parametrize("engine", ["fsdp1", "deepspeed"])
def test_peers_hosts_exchange_nothing(engine: str) -> None:
    fence = Fence("settled", "shard", StepPhase.FORWARD)
    assert list(ordered_as(engine, [compute(1), Exchange("shard", 8, StepPhase.FORWARD), fence])) == [compute(1)]


@pytest.mark.parametrize(("engine", "copied"), [("fsdp1", 0), ("deepspeed", 20)])
def test_what_peers_gather_is_copied_to_where_it_is_read(engine: str, copied: int) -> None:
    """10 GB come in 5 ms; to read and to write them takes 20."""
    events = [gather(0, 5, "u"), Wait(0), compute(1), Wait(0)]
    assert milliseconds(run(*ordered_as(engine, events)).step_time_s) == pytest.approx(5 + copied + 1, abs=HAIR)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_activations_under_autocast(ranks: RankPools, name: str) -> None:
    """Of the plain model, alone with DistributedDataParallel's memory: casts of weights are kept until backward."""
    check_activations(ranks, name, "none", kind=PublishedJob, autocast="bf16", engine="fsdp1", strategy="no_shard")


BLOCK, HEAD = "model.layers.3.mlp.up_proj", "lm_head"


def product(module: str, m: int = 8192, n: int = 4096, k: int = 4096) -> Kernel:
    kind, phase = KernelKind.MATMUL, StepPhase.FORWARD
    return Kernel("mm", kind, 2 * m * n * k, 2 * (m * k + k * n + m * n), "bf16", (1, m, n, k), module, phase)


def gathered(unit: str) -> Collective:
    return Collective(1, "all_gather", "shard", 1000, 8, unit, StepPhase.FORWARD)


def test_a_blocks_products_are_cast_and_computed_in_8_bits() -> None:
    cast, computed = in_float8([product(BLOCK)], "compute")
    assert isinstance(cast, Kernel)
    assert (cast.kind, cast.bytes_moved) == (KernelKind.MEMORY, 5 * (8192 * 4096 + 4096 * 4096))
    assert isinstance(computed, Kernel)
    assert computed.dtype == "fp8"
    roofline = Roofline(find_device("h100-sxm-80gb"), compiled=True)
    in_bf16 = roofline.seconds(product(BLOCK))
    assert roofline.seconds(computed) == pytest.approx(in_bf16 / 2, rel=0.05)
    assert roofline.seconds(cast) + roofline.seconds(computed) < in_bf16


@pytest.mark.parametrize("kernel", [product(HEAD), product(BLOCK, k=4100), product("router")])
def test_the_head_and_odd_sizes_stay_as_they_are(kernel: Kernel) -> None:
    assert list(in_float8([kernel], "compute")) == [kernel]


def test_gathers_of_blocks_alone_travel_in_8_bits() -> None:
    events = [gathered("model.layers.3"), gathered(""), gathered("lm_head")]
    assert list(in_float8(events, "compute")) == events
    halved = [event.nbytes for event in in_float8(events, "gathers") if isinstance(event, Collective)]
    assert halved == [500, 1000, 1000]
    assert next(iter(in_float8([product(BLOCK)], "gathers"))) != next(iter(in_float8([product(BLOCK)], "compute")))


def test_blocks_gathered_in_8_bits_hold_half_of_their_bytes() -> None:
    recording = recorded("fsdp2", float8="gathers")
    held_bytes = [forecast_of(one).memory["gathered_slots"] for one in (recording, gathered_in_float8(recording))]
    assert held_bytes[1] < held_bytes[0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"autocast": "bf16"}, "neither shardwise nor compile=True can be forecast with it"),
        ({"autocast": "fp32", "engine": "fsdp1"}, "autocast='fp32': must be one of bf16, fp16, or None"),
        ({"float8": "compute"}, "engine 'shardwise' does not compute in 8 bits"),
        ({"float8": "gathers", "engine": "deepspeed"}, "engine 'deepspeed' cannot gather in 8 bits"),
        ({"float8": "all", "engine": "fsdp2"}, "float8='all': must be one of compute, gathers, or None"),
        ({"float8": "compute", "engine": "fsdp2", "gpu": "a100-sxm-80gb"}, "A100.* has no 8-bit matrix products"),
        ({"engine": "fsdp3"}, "engine='fsdp3': must be one of shardwise, fsdp2, fsdp1, deepspeed; did you mean"),
    ],
)
def test_what_cannot_be_is_told(arguments: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        PublishedJob.of(**arguments)
