"""Linear layers in 8 bits: which products, at what price, and what travels."""

import pytest

from shardwise.errors import ConfigError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Collective, Kernel, KernelKind, StepPhase
from shardwise.plan.hardware.devices import find_device
from shardwise.plan.simulate.forecast import forecast
from shardwise.plan.simulate.other_engines.float8 import in_float8
from shardwise.plan.simulate.roofline import Roofline

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 320, "max_position_embeddings": 64,
}  # fmt: skip
BLOCK, HEAD = "model.layers.3.mlp.up_proj", "lm_head"


def product(module: str, m: int = 8192, n: int = 4096, k: int = 4096) -> Kernel:
    kind, phase = KernelKind.MATMUL, StepPhase.FORWARD
    return Kernel("mm", kind, 2 * m * n * k, 2 * (m * k + k * n + m * n), "bf16", (1, m, n, k), module, phase)


def gather(unit: str) -> Collective:
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
    events = [gather("model.layers.3"), gather(""), gather("lm_head")]
    assert list(in_float8(events, "compute")) == events
    halved = [event.nbytes for event in in_float8(events, "gathers") if isinstance(event, Collective)]
    assert halved == [500, 1000, 1000]
    assert next(iter(in_float8([product(BLOCK)], "gathers"))) != next(iter(in_float8([product(BLOCK)], "compute")))


def test_a_forecast_of_a_peer_sends_and_gathers_less() -> None:
    def planned(float8: str | None) -> tuple[int, int]:
        job = {"engine": "fsdp2", "gpus_per_node": 2, "strategy": "shard_grad_op", "seq_len": 64}
        found = forecast(LLAMA, float8=float8, **job)
        return found.bytes_sent_per_rank, found.memory["gathered_slots"]

    sent, held = planned(None)
    assert planned("compute") == (sent, held)
    assert planned("gathers")[0] < sent
    assert planned("gathers")[1] < held


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"float8": "compute"}, "engine 'shardwise' does not compute in 8 bits yet; leave it out"),
        (
            {"float8": "gathers", "engine": "deepspeed"},
            "engine 'deepspeed' cannot gather in 8 bits; use float8='compute'",
        ),
        ({"float8": "all", "engine": "fsdp2"}, "float8='all': must be one of compute, gathers, or None"),
        ({"float8": "compute", "engine": "fsdp2", "gpu": "a100-sxm-80gb"}, "A100.* has no 8-bit matrix products"),
    ],
)
def test_what_cannot_be_is_told(arguments: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        Job.of(**arguments)
