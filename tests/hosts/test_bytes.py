"""What strategies send from host to host, counted at the interface: ../shared/DESIGN.md's table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.steps.expected import gpt_units
from tests.hosts.job import SHAPE
from tests.hosts.rig import Host, across_bytes

STRATEGIES = ("full_shard", "hybrid_shard", "hybrid_shard_zero2")
STEPS = 3


@pytest.mark.slow
def test_bytes_between_hosts_are_those_of_the_table(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    job = (str(Path(__file__).with_name("job.py")), ",".join(STRATEGIES), str(STEPS), str(out))
    jobs = [host.start(host.torchrun(*job, first=hosts[0]), tmp_path / host.name) for host in hosts]
    assert [one.wait(120) for one in jobs] == [0, 0], "\n".join((tmp_path / host.name).read_text() for host in hosts)
    units = gpt_units(SHAPE)
    for found in json.loads(out.read_text()):
        wanted = across_bytes(units, found["strategy"])
        assert found["sent"] == pytest.approx(wanted, rel=0.05), found
        assert found["received"] == pytest.approx(wanted, rel=0.05), found
