"""What a calibration measures, and under which name a GPU goes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.errors import PlanError
from shardwise.plan.hardware.calibration import QUICK, calibrate, packaged_name
from shardwise.plan.hardware.devices import Hardware, find_device, write_device
from tests.ranks import RankPools


def measure() -> Hardware:
    return calibrate(torch.device("cpu"), replace(QUICK, call_s=0.005))


def test_ranks_measure_together_and_agree(ranks: RankPools, tmp_path: Path) -> None:
    first, second = ranks(2).run(measure, timeout_s=60)
    assert first == second
    measured = first.measured
    assert measured is not None
    assert measured.ranks == 2
    assert set(measured.matmul) == {"fp32", "bf16", "fp16"}
    assert set(measured.collectives) == {"all_gather", "reduce_scatter", "all_reduce"}
    for points in (*measured.matmul.values(), measured.memory, measured.attention, *measured.collectives.values()):
        sizes = [size for size, _ in points]
        assert sizes == sorted(set(sizes))
        assert len(points) >= 2
        assert all(value > 0 for _, value in points)
    assert 1e-7 < measured.operation_s < 1e-3
    assert 1e8 < first.peak("fp32") < 1e14
    write_device(first, tmp_path / "here.toml")
    assert replace(find_device(tmp_path / "here.toml"), name=first.name) == first


def test_alone_there_is_nothing_to_send() -> None:
    alone = measure()
    assert alone.measured is not None
    assert alone.measured.collectives == {}
    assert alone.memory.usable_bytes.value > 2**28


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI355X", "mi355x"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
    ],
)
def test_the_packaged_device_that_a_name_means(said: str, name: str) -> None:
    assert packaged_name(said) == name


@pytest.mark.parametrize("said", ["Tesla P100-PCIE-16GB", "NVIDIA RTX A6000", "NVIDIA A10", "NVIDIA GeForce RTX 3060"])
def test_a_gpu_that_is_not_packaged_keeps_its_name(said: str) -> None:
    with pytest.raises(PlanError, match=f"unknown device '{said}'"):
        find_device(packaged_name(said))
