"""Scripts before and after their migration: the page shows how they differ, and they train alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.rig import ABORTS_AFTER_DCP, EXAMPLES, assert_shown, losses, torchrun
from tools.run_examples import examples, output_of

HEADINGS = {"migrate_fsdp2": "From FSDP2", "migrate_transformers": "From transformers' own sharding"}
DOORS = {
    "torch.distributed.checkpoint.state_dict import": "shardwise.compat.state_dict import",
    "torch.distributed.fsdp import": "shardwise.compat.fsdp2 import",
    "1.0).full_tensor()": "1.0)",
}


@pytest.mark.parametrize("heading", HEADINGS.values())
def test_the_page_shows_every_line_that_differs(heading: str) -> None:
    [shown] = [example for example in examples()[heading] if example.is_diff]
    assert output_of(shown.commands) == shown.output, f'run: python tools/run_examples.py "{heading}"'


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADINGS)
def test_losses_are_the_same(name: str, tmp_path: Path) -> None:
    if name == "migrate_transformers":
        pytest.importorskip("accelerate", reason="transformers' own sharding needs it")
    forgiven = ABORTS_AFTER_DCP if name == "migrate_fsdp2" else None
    before = torchrun(2, f"examples/{name}_before.py", tmp_path, forgiven)
    after = torchrun(2, f"examples/{name}_after.py", tmp_path)
    assert_shown(HEADINGS[name], before + after)
    assert len(losses(before)) == 20
    assert losses(after) == pytest.approx(losses(before), abs=1e-5), "norms that gradients are clipped by are rounded"


@pytest.mark.slow
def test_scripts_of_fsdp2_go_on_where_they_stopped(tmp_path: Path) -> None:
    """At another number of ranks, which has other batches, neither of them trains any further."""
    for which in ("before", "after"):
        script, forgiven = f"examples/migrate_fsdp2_{which}.py", ABORTS_AFTER_DCP if which == "before" else None
        torchrun(2, script, tmp_path, forgiven)
        assert losses(torchrun(3, script, tmp_path, forgiven)) == {}


@pytest.mark.slow
def test_fsdp2s_names_may_stay(tmp_path: Path) -> None:
    """What changes is where they are imported from, and that a norm is an ordinary tensor."""
    script = (EXAMPLES / "migrate_fsdp2_before.py").read_text(encoding="utf-8")
    for old, new in DOORS.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    (tmp_path / "doors.py").write_text(script.replace("migrate-fsdp2/before", "migrate-fsdp2/doors"), encoding="utf-8")
    expected = torchrun(2, "examples/migrate_fsdp2_before.py", tmp_path, ABORTS_AFTER_DCP)
    assert losses(torchrun(2, "doors.py", tmp_path, ABORTS_AFTER_DCP)) == pytest.approx(losses(expected), abs=1e-5)
