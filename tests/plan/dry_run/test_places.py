"""Where a job keeps what, in everybody's words."""

from dataclasses import replace
from typing import Any

import pytest

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.plan.dry_run.job import Job
from shardwise.policy.places import Places


@pytest.mark.parametrize(
    ("asked", "places"),
    [
        (None, None),
        ("none", None),
        (sw.Offload(), None),
        ("cpu", Places("cpu", "cpu")),
        ("nvme", Places("nvme", "nvme")),
        ("optimizer=cpu", Places(None, "cpu")),
        ("params=cpu, optimizer=nvme", Places("cpu", "nvme")),
        ("params=none,optimizer=nvme", Places(None, "nvme")),
        ({"params": "cpu"}, Places("cpu")),
        (sw.Offload(optimizer="nvme", path="x"), Places(None, "nvme")),
        (sw.Offload(optimizer="nvme", path="x", ring_bytes=5), Places(None, "nvme", 5)),
        ("optimizer=nvme,ring_mib=2", Places(None, "nvme", 2**21)),
        ("optimizer=nvme,ring_bytes=2", Places(None, "nvme", 2)),
        ("ring_mib=2", None),
        ("gradients=cpu", Places(gradients="cpu")),
        ("optimizer=nvme,gradients=cpu", Places(None, "nvme", None, "cpu")),
        (sw.Offload(params="cpu", gradients="cpu"), Places("cpu", None, None, "cpu")),
    ],
)
def test_words(asked: Any, places: Places | None) -> None:
    job = Job(gpu="cpu", offload=asked)
    assert job.offload == places
    assert places is None or Places.of(places.words) == places
    assert replace(job, micro_batch=2).offload == places


@pytest.mark.parametrize(
    "asked",
    [
        *(
            "disk",
            "params",
            "params=disk",
            "weights=cpu",
            "gradients=nvme",
            "gradients=cpu,gradients=none",
            "ring_mib=x",
            "ring_mib=0,params=cpu",
        ),
        *(3, {"weights": "cpu"}),
    ],
)
def test_words_that_are_none(asked: Any) -> None:
    with pytest.raises(ConfigError, match="offload"):
        Job(offload=asked)


def test_every_place_is_planned_on_every_device() -> None:
    for gpu in ("h100-sxm-80gb", "cpu"):
        assert Job(gpu=gpu, offload="nvme").offload == Places("nvme", "nvme")  # type: ignore[arg-type]
        assert Job(gpu=gpu, offload="cpu").offload == Places("cpu", "cpu")  # type: ignore[arg-type]
