"""The assumptions of a forecast, their sources, and how much they may change the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardwise.plan.dry_run.job import Job
from shardwise.plan.hardware.devices import LIKE_BF16, USUAL_SHARE, Figure, Hardware
from shardwise.plan.hardware.node import Node, node_of
from shardwise.plan.hardware.spread import spread_of
from shardwise.plan.search.exploration import gib
from shardwise.plan.simulate.forecast import CONTEXT_RANGE_BYTES, CONTEXT_SOURCE, NCCL_SOURCE, Forecast
from shardwise.plan.simulate.roofline import ATTENTION_SHARE

_SHARES = (0.47, 0.82)
"""The least and the most of a device's peak that a large product reached, on devices where it was measured."""
_ATTENTION_SHARES = (0.42, 0.74)
"""The same for fused attention, as parts of the rate of a large product."""


class Assumption(NamedTuple):
    """One assumption of a forecast."""

    what: str
    value: str
    """The value and its source."""
    moves: str = ""
    """How much the answer changes if the assumption is wrong. "" for what was published or asked for."""


def assumptions(forecast: Forecast) -> Iterator[Assumption]:
    """Yield all assumptions of a forecast."""
    job = forecast.job
    hardware = job.hardware
    yield Assumption("device", hardware.title)
    for name, (figure, words) in _figures(job).items():
        yield Assumption(name, f"{words} ({_source(figure)})")
    if hardware.measured is not None:
        yield Assumption("rates", f"measured on this machine with {hardware.measured.ranks} ranks")
    else:
        yield _products(hardware, job.compute_dtype)
        yield _attention(hardware)
        yield Assumption("range of tokens/s", _range(hardware))
    if job.offload is not None:
        yield from _of_the_host(node_of(hardware), job)
    yield from _beside(forecast)
    if job.price_per_hour is None and hardware.price is not None:
        price = hardware.price.per_hour
        yield Assumption("price", f"{price.value:g} per device and hour ({_source(price)})")
    if unused := forecast.recording.facts.unused:
        yield Assumption("inputs", f"those of one kind alone: {unused / 1e6:,.0f} M parameters are held but not used")
    if forecast.recording.facts.package_kernels:
        kernels = f"{forecast.recording.facts.package_kernels}, as installed where it trains"
        yield Assumption("kernels of packages", kernels, "without them transformers runs many slow kernels instead")
    if job.ep > 1:
        yield Assumption(
            "experts",
            "routing is balanced: each rank sends as many tokens to every rank as it receives from it",
            "ranks whose experts get more tokens compute longer, hold more, and others wait for them",
        )
    yield Assumption("optimizer", f"{job.optimizer}, states in the master dtype")
    yield Assumption("loss", {"model": "the model's own, with its logits in memory"}.get(job.loss, job.loss))
    weights = "6 N" if job.lora is None else "4 N (6 of the adapters)"
    yield Assumption(
        "MFU", f"{weights} + 12 L d s operations per token, divided by the peak rate; recomputation does not count"
    )


def _of_the_host(node: Node, job: Job) -> Iterator[Assumption]:
    """Yield the assumptions about a host's link and disk, as far as the job uses them."""
    half = "half the rate takes twice as long"
    if not job.on_cpu:
        link = f"{node.copied_bytes_per_s / 1e9:,.0f} GB/s one way ({_source(node.link_bytes_per_s)}; "
        yield Assumption("host and device", f"{link}{_source(node.link_share)})", half)
    if job.steps_on_host:
        processors = node.processors_bytes_per_s
        rate = f"{processors.value / 1e9:,.0f} GB/s of memory per node ({_source(processors)})"
        yield Assumption("step on the host", rate, half)
    if job.offload is not None and "nvme" in {job.offload.params, job.offload.optimizer}:
        disk = node.disk_bytes_per_s
        yield Assumption("disk", f"{disk.value / 1e9:,.0f} GB/s per node ({_source(disk)})", half)


def range_words(hardware: Hardware) -> str:
    """Return the source of the range of a throughput, as a sentence without its full stop; "" if there is no range."""
    spread = spread_of(hardware)
    if spread is None:
        return ""
    whose = "on this device" if spread.own else "on other devices (too few were published for this one)"
    return (
        f"{spread.share:.0%} of {spread.runs} published runs {whose} were between {1 - spread.low:.0%} slower and "
        f"{spread.high - 1:.0%} faster than forecast"
    )


def _range(hardware: Hardware) -> str:
    spread = spread_of(hardware)
    return f"{range_words(hardware)} ({spread.source})" if spread else "none: no runs were published for such a device"


def _figures(job: Job) -> dict[str, tuple[Figure, str]]:
    """Return, by name, figures from the data files, and their values in words."""
    hardware, interconnect, dtype = job.hardware, job.node_interconnect, job.compute_dtype
    figures = {
        "usable memory": (hardware.memory.usable_bytes, f"{gib(hardware.memory.usable_bytes.value)} GiB"),
        f"peak rate in {dtype}": (
            hardware.peak_flops.get(dtype, hardware.peak_flops["fp32"]),
            f"{_teras(hardware.peak(dtype))} TFLOP/s dense",
        ),
        "memory bandwidth": (hardware.memory.bytes_per_s, f"{hardware.memory.bytes_per_s.value / 1e9:,.0f} GB/s"),
        "link in a node": (hardware.link.bytes_per_s, f"{hardware.link.bytes_per_s.value / 1e9:,.0f} GB/s one way"),
    }
    if job.nodes > 1:
        rate = interconnect.node.bytes_per_s
        figures[f"between nodes ({interconnect.title})"] = (rate, f"{rate.value / 1e9:,.1f} GB/s one way per node")
    return figures


def _teras(rate: float) -> str:
    """Format a rate in units of 1e12 per second. That of a CPU may be less than 1."""
    return f"{rate / 1e12:,.0f}" if rate >= 10e12 else f"{rate / 1e12:.2g}"


def _source(figure: Figure) -> str:
    return f"{figure.source}; {figure.note}" if figure.note else figure.source


def _products(hardware: Hardware, dtype: str) -> Assumption:
    """Return the assumption about the rate of a large product."""
    words = f"{_teras(hardware.sustained(dtype))} TFLOP/s in {dtype}"
    figure = hardware.matmul_flops.get(dtype)
    if figure is not None:
        return Assumption("large products", f"{words} ({_source(figure)})")
    if dtype in LIKE_BF16 and "bf16" in hardware.matmul_flops:
        return Assumption("large products", f"{words}, in proportion to what was measured in bf16")
    low, high = (share / USUAL_SHARE for share in _SHARES)
    moves = (
        f"other devices reach {_SHARES[0]:.0%} to {_SHARES[1]:.0%}, which is {1 - low:.0%} slower to {high - 1:.0%} "
        "faster"
    )
    return Assumption(
        "large products", f"{words}: {USUAL_SHARE:.0%} of the peak, because no measurement was published", moves
    )


def _attention(hardware: Hardware) -> Assumption:
    """Return the assumption about the rate of fused attention."""
    figure = hardware.attention_flops.get("flash2")
    if figure is not None:
        return Assumption("fused attention", f"{_teras(figure.value)} TFLOP/s ({_source(figure)})")
    share = f"{ATTENTION_SHARE:.0%} of a large product's rate, because no measurement was published"
    most = _ATTENTION_SHARES[1] / ATTENTION_SHARE
    return Assumption("fused attention", share, f"attention may take up to {1 - 1 / most:.0%} less time")


def _beside(forecast: Forecast) -> Iterator[Assumption]:
    """Yield the assumptions about memory outside the allocator."""
    low, high = (gib(nbytes) for nbytes in CONTEXT_RANGE_BYTES)
    usual = {
        "context": (forecast.job.context_bytes, CONTEXT_SOURCE, f"{low} to {high} GiB were reported"),
        "NCCL": (forecast.job.nccl_bytes, NCCL_SOURCE, "other machines and releases may take more or less"),
    }
    words = {
        "context": f"{gib(forecast.context_bytes)} GiB outside the allocator",
        "NCCL": f"{gib(forecast.nccl_bytes)} GiB of buffers outside the allocator",
    }
    for name, (given, source, moves) in usual.items():
        if given is not None:
            yield Assumption(name, f"{words[name]} (as given)")
        else:
            yield Assumption(name, f"{words[name]} ({source})", "" if forecast.job.on_cpu else moves)
