from dataclasses import replace

import pytest

from shardwise.plan.dry_run.recording import Kernel, KernelKind, StepPhase
from shardwise.plan.hardware.devices import Measured, find_device
from shardwise.plan.simulate.roofline import KERNEL_S, Efficiency, Roofline, interpolated, tiled_flops

H100 = find_device("h100-sxm-80gb")
WHOLE = Efficiency(matmul=1.0, attention=1.0, memory=1.0, links=1.0, fusion=0.5)


def kernel(kind: KernelKind, flops: int = 0, nbytes: int = 0, shape: tuple[int, int, int, int] | None = None) -> Kernel:
    return Kernel("k", kind, flops, nbytes, "bf16", shape, "", StepPhase.FORWARD)


def test_a_large_product_runs_at_the_sustained_rate() -> None:
    n = 16384
    seconds = Roofline(H100, WHOLE).seconds(kernel(KernelKind.MATMUL, 2 * n**3, 6 * n * n, (1, n, n, n)))
    assert seconds == pytest.approx(2 * n**3 / 720e12, rel=0.05)


def test_a_pointwise_kernel_runs_at_memory_bandwidth() -> None:
    assert Roofline(H100, WHOLE).seconds(kernel(KernelKind.MEMORY, 10**6, 335 * 10**9)) == pytest.approx(0.1, rel=1e-3)


def test_a_thin_product_is_bound_by_memory() -> None:
    shape = (1, 8, 8192, 8192)
    nbytes = 2 * 8192 * 8192
    seconds = Roofline(H100, WHOLE).seconds(kernel(KernelKind.MATMUL, 2 * 8 * 8192**2, nbytes, shape))
    assert seconds == pytest.approx(nbytes / 3.35e12 + KERNEL_S, rel=0.01)


def test_fusion_spares_pointwise_kernels_bytes_and_products_none() -> None:
    eager, fused = Roofline(H100, WHOLE), Roofline(H100, WHOLE, compiled=True)
    pointwise = kernel(KernelKind.MEMORY, 0, 10**9)
    assert fused.seconds(pointwise) == pytest.approx(eager.seconds(pointwise) / 2)
    for outside in (replace(pointwise, phase=StepPhase.OPTIMIZER), replace(pointwise, name="copy_")):
        assert fused.seconds(outside) == eager.seconds(outside)
    product = kernel(KernelKind.MATMUL, 2 * 4096**3, 6 * 4096**2, (1, 4096, 4096, 4096))
    assert fused.seconds(product) == eager.seconds(product)


def test_waves_and_tiles_cost_what_they_leave_empty() -> None:
    full = (1, 256 * 11, 128 * 12, 4096)  # 132 tiles
    assert tiled_flops(full, 132) == pytest.approx(2 * 256 * 11 * 128 * 12 * (4096 + 128))
    one_more_row = (1, 256 * 11 + 1, 128 * 12, 4096)
    assert tiled_flops(one_more_row, 132) > 1.15 * tiled_flops(full, 132)
    assert tiled_flops((1, 1, 1, 4096), 132) >= 2 * 64 * 64 * 4096


def test_attention_runs_at_its_published_rate_and_short_sequences_waste_some() -> None:
    roofline = Roofline(H100, WHOLE)
    long = roofline.seconds(kernel(KernelKind.ATTENTION, 3 * 10**13, 0, (64, 65536, 65536, 128)))
    assert long == pytest.approx(0.1, rel=0.01)
    assert roofline.seconds(kernel(KernelKind.ATTENTION, 3 * 10**13, 0, (64, 256, 256, 128))) == pytest.approx(
        0.2, rel=0.01
    )
    assert replace(roofline, attention="flash1").seconds(kernel(KernelKind.ATTENTION, 16 * 10**12)) == pytest.approx(
        0.1, rel=1e-3
    )


def test_measured_rates_replace_data_sheets() -> None:
    measured = Measured(
        matmul={"bf16": ((1e6, 1e9), (1e8, 3e9))},
        memory=((1e3, 1e8), (1e6, 1e9)),
        operation_s=1e-3,
        attention=((1, 2e9),),
    )
    roofline = Roofline(replace(H100, measured=measured), WHOLE)
    assert roofline.seconds(kernel(KernelKind.MEMORY, 0, 10**9)) == pytest.approx(1.001)
    gelu, in_place = (replace(kernel(KernelKind.MEMORY, 0, 10**9), name=name) for name in ("gelu", "_foreach_mul_"))
    named = replace(measured, operations={"gelu": ((1, 5e8),), "mul_": ((1, 2e9),)})
    own = Roofline(replace(H100, measured=named), WHOLE)
    assert [own.seconds(each) for each in (gelu, in_place)] == pytest.approx([2.001, 0.501])
    assert roofline.seconds(kernel(KernelKind.MATMUL, 3 * 10**9, 8)) == pytest.approx(1.001)
    assert roofline.seconds(kernel(KernelKind.ATTENTION, 2 * 10**9, 8)) == pytest.approx(1.001)


def test_rates_between_measured_sizes() -> None:
    points = ((1.0, 10.0), (100.0, 30.0))
    assert [interpolated(points, size) for size in (0.1, 1, 10, 100, 1e9)] == pytest.approx([10, 10, 20, 30, 30])
