import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from shardwise.errors import PlanError
from shardwise.plan.hardware.devices import (
    Figure,
    Hardware,
    Measured,
    Price,
    device_names,
    find_device,
    find_interconnect,
    interconnect_names,
    write_device,
)

FP32 = {"fp32": Figure(1e12, "made for a test")}


def figures_of(hardware: Hardware) -> list[Figure]:
    tables = (hardware.peak_flops, hardware.matmul_flops, hardware.attention_flops, hardware.node)
    records = (hardware.memory, hardware.processor, hardware.link)
    single = [getattr(record, known.name) for record in records for known in fields(record)]
    return [figure for table in tables for figure in table.values()] + single


def is_sourced(figure: Figure) -> bool:
    """By an address, by what anyone sees on the device, by its own name; or said to be an assumption, and why."""
    torch = ("torch's out-of-memory messages on this device", "torch's properties of this device")
    known = (*torch, "as it is named", "one core a rank")
    return figure.source.startswith("https://") or figure.source in known or figure.source == "assumed"


@pytest.mark.parametrize("name", device_names())
def test_every_figure_of_a_packaged_device_has_a_source_and_hangs_together(name: str) -> None:
    device = find_device(name)
    assert all(map(is_sourced, figures_of(device)))
    assumed = [figure for figure in figures_of(device) if figure.source == "assumed"]
    assert all(figure.note for figure in assumed)
    if device.kind == "gpu":
        sheet = (*device.peak_flops.values(), device.memory.bytes, device.memory.bytes_per_s, device.link.bytes_per_s)
        assert not [figure for figure in sheet if figure in assumed]
    assert device.memory.usable_bytes.value < device.memory.bytes.value * 1.08  # a marketed GB is sometimes a GiB
    assert device.peak("bf16") >= device.peak("fp32")
    for dtype, measured in device.matmul_flops.items():
        assert measured.value < device.peak(dtype)
    assert find_interconnect(device.interconnect).node.bytes_per_s.value > 0


def test_the_devices_asked_for_are_there() -> None:
    wanted = {"a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm-80gb", "h100-sxm-96gb-500w", "h200-sxm", "b200-sxm"}
    newer = {"v100-sxm-16gb", "v100-sxm-32gb", "t4", "a10g", "l4", "rtx-3090", "rtx-5090", "rtx-pro-6000", "h20"}
    newest = {"h100-pcie", "h100-nvl", "gb200", "b300-sxm", "mi325x", "mi355x"}
    assert wanted | newer | newest | {"mi300x", "l40s", "rtx-4090", "cpu"} <= set(device_names())


@pytest.mark.parametrize("name", device_names())
def test_a_gpu_computes_in_what_its_sheet_has(name: str) -> None:
    device = find_device(name)
    lacks_bf16 = name in ("v100-sxm-16gb", "v100-sxm-32gb", "t4")
    assert ("bf16" not in device.peak_flops) == lacks_bf16
    device.check_computes("fp32")
    device.check_computes("fp16")
    if lacks_bf16:
        line = rf"precision bf16: {device.title} has no matrix products in bf16; use precision fp16 or fp32"
        with pytest.raises(PlanError, match=line):
            device.check_computes("bf16")
        replace(device, matmul_flops={"bf16": Figure(1e12, "measured")}).check_computes("bf16")
    else:
        device.check_computes("bf16")


@pytest.mark.parametrize("name", interconnect_names())
def test_packaged_interconnects(name: str) -> None:
    found = find_interconnect(name).node
    assert is_sourced(found.bytes_per_s)
    assert is_sourced(found.latency_s)
    assert found.bytes_per_s.source != "assumed"


@pytest.mark.parametrize(("asked", "bytes_per_s"), [
    ("800Gbps", 100e9), ("8x400gbps", 400e9), ("2 x 25 gbps", 6.25e9), ("100gbps", 12.5e9), ("8 Gbit/s", 1e9),
    ("100GBps", 100e9), ("2x25GB/s", 50e9),
])  # fmt: skip
def test_an_interconnect_is_a_rate_or_a_name(asked: str, bytes_per_s: float) -> None:
    assert find_interconnect(asked).node.bytes_per_s.value == bytes_per_s


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
        find_device("h100-sxm-80gb"), title='a "quoted" title', measured=measured, price=Price(Figure(2.5, "a bill"))
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
    assert find_interconnect(path).node.bytes_per_s == Figure(5e9, "measured")


def test_a_dtype_nobody_measured_sustains_what_a_measured_one_does() -> None:
    device = find_device("h100-sxm-80gb")
    assert device.sustained("fp16") == pytest.approx(720e12)
    assert device.sustained("fp32") == pytest.approx(0.78 * 67e12)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("h100-sxm-80", "unknown device 'h100-sxm-80'; did you mean h100-sxm-80gb"),
        ("toaster", r"the packaged ones are a100-sxm-40gb, .* --calibrate"),
        ("missing.toml", "no such file: 'missing.toml'"),
        ("x" * 256, "unknown device 'x*'; the packaged ones are"),
        ("x" * 256 + ".toml", "cannot be read: File name too long"),
    ],
)
def test_an_unknown_device_is_named_with_the_way_out(asked: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        find_device(asked)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "gpu"', 'kind = "tpu"', "kind = 'tpu': must be 'gpu' or 'cpu'"),
        ("[memory]", "[memories]", "unknown key memories; did you mean memory"),
        ("usable_bytes", "useable_bytes", "unknown key memory.useable_bytes; did you mean usable_bytes"),
        ("usable_bytes", "# usable_bytes", "memory.usable_bytes is missing"),
        ("title =", "colour = 'red'\ntitle =", "unknown key colour; the keys are title, kind"),
        ("[peak_flops]", "[link.peak_flops]", "unknown key link.peak_flops"),
        ("[matmul_flops]", "[ignored]", "unknown key ignored"),
        ("value = 132.0", "value = 0.5", "processor.count.value = 0.5 is less than 1"),
        ("value = 132.0", "value = true", "processor.count.value = True: must be a finite number above 0"),
        ("value = 3.35e+12", "value = -1", "memory.bytes_per_s.value = -1: must be a finite number above 0"),
        ("value = 3.35e+12", "value = nan", "memory.bytes_per_s.value = nan: must be a finite number above 0"),
        ("value = 3.35e+12", "value = inf", "memory.bytes_per_s.value = inf: must be a finite number above 0"),
        ("value = 3.35e+12", "value = 1" + 400 * "0", "must be a finite number above 0"),
        ("value = 3.35e+12", "valeu = 1", "unknown key memory.bytes_per_s.valeu; did you mean value"),
        ("value = 3.35e+12", "unit = 'B/s', value = 1", "unknown key memory.bytes_per_s.unit"),
        ("fp32 =", "fp33 =", "unknown key peak_flops.fp33; did you mean fp32"),
        ("fp32 =", "# fp32 =", "peak_flops.fp32 is missing"),
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


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("peak_flops = 3", "peak_flops = 3: must be a table"),
        ('matmul_flops = "abc"', "matmul_flops = 'abc': must be a table"),
        ("measured = 3", "measured = 3: must be a table"),
        ("measured = { ranks = 2 }", "measured.memory is missing"),
        ("measured = { memory = [] }", "measured.memory must be a list of"),
        ("measured = { memory = [[0, 1e9]] }", "measured.memory must be a list of"),
        ("measured = { memory = [[1e6, nan]] }", "measured.memory must be a list of"),
        ("measured = { memory = [[1e6, 1e9, 1]] }", "measured.memory must be a list of"),
        ("measured = { memory = [[1, 1]], matmul = { fp32 = [[1e6, -1]] } }", "measured.matmul.fp32 must be a list of"),
        ("measured = { memory = [[1, 1]], matmul = 3 }", "measured.matmul = 3: must be a table"),
        ("measured = { memory = [[1, 1]], ranks = 0 }", "measured.ranks = 0: must be a whole number of at least 1"),
        (
            "measured = { memory = [[1, 1]], operation_s = inf }",
            "measured.operation_s = inf: must be a finite number above 0",
        ),
        ("measured = { memory = [[1, 1]], colectives = {} }", "measured.colectives; did you mean collectives"),
        (
            "measured = { memory = [[1, 1]], collectives = { all_gather = [[1, 1]] } }",
            "measured.collectives needs at least 2 ranks",
        ),
    ],
)
def test_a_value_that_cannot_be_is_named(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    write_device(replace(find_device("cpu"), peak_flops=FP32), path)
    text = path.read_text()
    if "peak" in lines:
        text = re.sub(r"\[peak_flops\]\n.*\n", "", text)
    path.write_text(f"{lines}\n{text}")
    with pytest.raises(PlanError, match=message):
        find_device(path)


@pytest.mark.parametrize("asked", ["0gbps", "0x100gbps", "9" * 400 + "gbps"])
def test_a_rate_of_nothing_or_everything(asked: str) -> None:
    with pytest.raises(PlanError, match="the rate of a node must be above 0 and finite"):
        find_interconnect(asked)


@pytest.mark.parametrize("asked", ["100GBPS", "efa-400GBps"])
def test_bytes_are_not_taken_for_bits(asked: str) -> None:
    with pytest.raises(PlanError, match=r"unknown interconnect .*800gbps \(bits\) or 100GBps \(bytes\)"):
        find_interconnect(asked)


def test_an_unknown_interconnect_is_named_with_the_way_out() -> None:
    with pytest.raises(PlanError, match="unknown interconnect '8x40gbp'; did you mean"):
        find_interconnect("8x40gbp")
