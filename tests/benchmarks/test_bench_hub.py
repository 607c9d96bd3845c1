"""The transcript against the mock hub: every command ends well, and asks for no more than it needs."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.hub import mock

pytest.importorskip("peft")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_from_a_hub_and_back(tmp_path: Path) -> None:
    from benchmarks.doors.hub import ADAPTER, BASE, MERGED, transcript

    with mock.running() as hub:
        found = list(transcript(hub, tmp_path))
        hub_files = {name: repository for (_, name), repository in hub.repositories.items()}
    for row in found:
        assert row.status == 0, row
    plan, inspect, of_config, train, resume, alone, convert, push, public, _, offline, same = found
    weights = {path.name: path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")}

    assert plan.weights_bytes == 0
    assert plan.received_bytes < 10_000  # a configuration and a list of files
    assert inspect.weights_bytes <= 100_001 * len(weights)  # the headers
    assert "7,475,456" in inspect.out
    assert of_config.weights_bytes == 0

    cut = [r for r in hub.requests if r.path.startswith("/cdn") and r.status in {200, 206} and r.method == "GET"]
    largest = max(weights, key=lambda name: weights[name])
    first, rest = [r for r in cut if r.path.endswith(f"/{largest}") and r.sent_bytes != 100_001][:2]
    assert (first.status, first.sent_bytes, rest.status) == (200, 11 * 2**20, 206)
    assert train.weights_bytes == sum(weights.values()) + 2**20  # once on two ranks; clients keep chunks of ten MiB
    assert "weights: org/base@" in train.out
    assert "chat template: the tokenizer's" in train.out
    config = tomllib.loads((tmp_path / "runs/talk/config.toml").read_text())
    assert config["model"]["path"] == f"{BASE}@{hub_files[BASE].refs['main']}"

    assert "step 5 is next" in resume.out
    assert (resume.weights_bytes, resume.requests) == (0, 2)  # the commits of the model and of the data
    assert (alone.requests, convert.requests, offline.requests) == (0, 0, 0)

    adapter = hub_files[ADAPTER].commits[hub_files[ADAPTER].refs["main"]]
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= adapter.keys()
    assert not {"manifest.json", "training.json"} & adapter.keys()
    assert json.loads(adapter["adapter_config.json"])["base_model_name_or_path"] == BASE
    card = adapter["README.md"].decode()
    for said in (f"base_model: {BASE}", "datasets: [org/talk]", "| `lora.r` | `8` |", "| training |", "| held out |"):
        assert said in card
    assert f'AutoPeftModelForCausalLM.from_pretrained("{ADAPTER}")' in card
    assert push.uploaded_bytes > len(adapter["adapter_model.safetensors"])
    assert (hub_files[ADAPTER].private, hub_files[MERGED].private) == (True, False)
    assert public.uploaded_bytes > sum(weights.values())
    assert float(same.out.split()[-1]) < 1e-4
