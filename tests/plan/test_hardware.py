from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.errors import PlanError
from shardwise.plan.hardware import (
    Figure,
    Hardware,
    Measured,
    device_names,
    find_device,
    find_interconnect,
    interconnect_names,
    write_device,
)


def figures_of(hardware: Hardware) -> list[Figure]:
    tables = (hardware.peak_flops, hardware.matmul_flops, hardware.attention_flops)
    single = [getattr(hardware, name) for name in hardware.__dataclass_fields__]
    return [figure for table in tables for figure in table.values()] + [f for f in single if isinstance(f, Figure)]


def is_sourced(figure: Figure) -> bool:
    """By an address, by what anyone sees on the device, by its own name; or said to be an assumption, and why."""
    known = ("torch's out-of-memory messages on this device", "as it is named", "one core a rank")
    return figure.source.startswith("https://") or figure.source in known or figure.source == "assumed"


@pytest.mark.parametrize("name", device_names())
def test_every_figure_of_a_packaged_device_has_a_source_and_hangs_together(name: str) -> None:
    device = find_device(name)
    assert all(map(is_sourced, figures_of(device)))
    assumed = [figure for figure in figures_of(device) if figure.source == "assumed"]
    assert all(figure.note for figure in assumed)
    if device.kind == "gpu":
        sheet = (*device.peak_flops.values(), device.memory_bytes, device.memory_bytes_per_s, device.link_bytes_per_s)
        assert not [figure for figure in sheet if figure in assumed]
    assert device.usable_bytes.value < device.memory_bytes.value * 1.08  # a marketed GB is sometimes a GiB
    assert device.peak("bf16") >= device.peak("fp32")
    for dtype, measured in device.matmul_flops.items():
        assert measured.value < device.peak(dtype)
    assert find_interconnect(device.interconnect).bytes_per_s.value > 0


def test_the_devices_asked_for_are_there() -> None:
    wanted = {"a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm-80gb", "h100-sxm-96gb-500w", "h200-sxm", "b200-sxm"}
    assert wanted | {"mi300x", "l40s", "rtx-4090", "cpu"} <= set(device_names())


@pytest.mark.parametrize("name", interconnect_names())
def test_packaged_interconnects(name: str) -> None:
    found = find_interconnect(name)
    assert is_sourced(found.bytes_per_s)
    assert is_sourced(found.latency_s)
    assert found.bytes_per_s.source != "assumed"


@pytest.mark.parametrize(("asked", "bytes_per_s"), [("800Gbps", 100e9), ("8x400gbps", 400e9), ("2 x 25 gbps", 6.25e9)])
def test_an_interconnect_is_a_rate_or_a_name(asked: str, bytes_per_s: float) -> None:
    assert find_interconnect(asked).bytes_per_s.value == bytes_per_s


def test_a_written_device_reads_back_equal(tmp_path: Path) -> None:
    measured = Measured(
        matmul={"fp32": ((1e6, 2e9), (1e9, 4.5e10))},
        attention=((1e6, 1e9),),
        memory=((4096.0, 1e9), (1e8, 8e9)),
        operations={"gelu": ((4096.0, 5e8),), "mul_": ((4096.0, 2e9),)},
        collectives={"all_gather": ((1e3, 1e-6), (1e6, 2e-4))},
        ranks=2,
        operation_s=3.25e-6,
    )
    device = replace(
        find_device("h100-sxm-80gb"), title='a "quoted" title', measured=measured, price_per_hour=Figure(2.5, "a bill")
    )
    write_device(device, tmp_path / "mine.toml")
    again = find_device(tmp_path / "mine.toml")
    assert replace(again, name=device.name) == device
    assert again.name == str(tmp_path / "mine.toml")


def test_the_users_own_interconnect(tmp_path: Path) -> None:
    path = tmp_path / "net.toml"
    path.write_text(
        '[node]\nbytes_per_s = { value = 5e9, source = "measured" }\n'
        'latency_s = { value = 2e-5, source = "measured" }\n'
    )
    assert find_interconnect(path).bytes_per_s == Figure(5e9, "measured")


def test_a_dtype_nobody_measured_sustains_what_a_measured_one_does() -> None:
    device = find_device("h100-sxm-80gb")
    assert device.sustained("fp16") == pytest.approx(720e12)
    assert device.sustained("fp32") == pytest.approx(0.78 * 67e12)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("h100-sxm-80", "unknown device 'h100-sxm-80'; did you mean h100-sxm-80gb"),
        ("toaster", r"packaged are a100-sxm-40gb, .* --calibrate"),
        ("missing.toml", "no file 'missing.toml'"),
    ],
)
def test_an_unknown_device_is_named_with_the_way_out(asked: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        find_device(asked)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "gpu"', 'kind = "tpu"', "neither 'gpu' nor 'cpu'"),
        ("[memory]", "[memories]", r"the table \[memory\] is missing"),
        ("usable_bytes", "bytes_usable", "memory.usable_bytes must be"),
        ("value = 3.35e+12", "value = -1", "memory.bytes_per_s.value = -1 is not a positive number"),
        ("fp32 =", "fp33 =", "peak_flops.fp32 is missing"),
        ("title =", "title", "not TOML"),
    ],
)
def test_a_file_that_lacks_something_says_what(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    write_device(find_device("h100-sxm-80gb"), path)
    text = path.read_text().replace("3350000000000.0", "3.35e+12")
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(PlanError, match=message) as caught:
        find_device(path)
    assert str(path) in str(caught.value)


def test_an_unknown_interconnect_is_named_with_the_way_out() -> None:
    with pytest.raises(PlanError, match="unknown interconnect '8x40gbp'; did you mean"):
        find_interconnect("8x40gbp")
