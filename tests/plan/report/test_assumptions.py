"""What a forecast is said to rest on, by device."""

import re

from shardwise.fsdp.strategy import Precision
from shardwise.plan.dry_run.job import Job
from shardwise.plan.report.assumptions import Assumption, assumptions, range_words
from tests.plan.doubles import formula


def told(**arguments: object) -> dict[str, Assumption]:
    job = Job.of(precision=Precision("bf16"), **arguments)  # type: ignore[arg-type]
    beside = {} if job.context_bytes is None else {"context_bytes": job.context_bytes}
    return {one.what: one for one in assumptions(formula(job, **beside))}


def test_what_was_published_does_not_move_the_answer() -> None:
    known = told(gpu="h100-sxm-80gb", nodes=2)
    assert {name for name, one in known.items() if one.moves} == {"context", "NCCL"}
    assert known["large products"].value.startswith("720 TFLOP/s in bf16 (https://")
    assert "46 published runs on this device" in known["range of tokens/s"].value
    assert any(name.startswith("between nodes") for name in known)


def test_what_nobody_published_is_said_to_move_it() -> None:
    known = told(gpu="l40s")
    assert known["large products"].moves == "other devices reach 47% to 82%, which is 40% slower to 5% faster"
    assert known["fused attention"].moves == "attention may take up to 43% less time"
    assert "on other devices (too few were published for this one)" in known["range of tokens/s"].value


def test_what_was_asked_for_moves_nothing() -> None:
    known = told(context_bytes=2**30, nccl_bytes=0)
    assert known["context"] == Assumption("context", "1.0 GiB outside the allocator (as given)")
    assert not known["NCCL"].moves


def test_a_cpu_has_no_range() -> None:
    known = told(gpu="cpu")
    assert known["range of tokens/s"].value == "none: no runs were published for such a device"
    assert range_words(Job.of(gpu="cpu").hardware) == ""
    assert re.match(r"0\.\d+ TFLOP/s in bf16", known["large products"].value)
    assert not known["context"].moves
