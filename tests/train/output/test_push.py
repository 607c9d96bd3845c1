"""What `shardwise push` uploads: which files, and the card. Uploads themselves are tested in tests/test_hub.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import hub
from shardwise.checkpoint import convert
from shardwise.errors import CheckpointError, HubError
from shardwise.train.output.push import card, push

CONFIG = """
[model]
path = "org/base@0123456789012345678901234567890123456789"
[data]
source = "org/talk"
seq_len = 64
[train]
steps = 2
lr = 1e-3
[log]
name = "run"
"""


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Mapping[str, Any], bool]]:
    """What was given to `hub.upload`."""
    found: list[tuple[str, Mapping[str, Any], bool]] = []

    def upload(name: str, files: Mapping[str, Any], private: bool, message: str) -> str:
        found.append((name, files, private))
        return f"http://hub/{name}"

    monkeypatch.setattr(hub, "upload", upload)
    return found


def test_a_run_s_model_and_its_card(tmp_path: Path, uploads: list[tuple[str, Mapping[str, Any], bool]]) -> None:
    """The optimizer and what only shardwise reads stay here."""
    model = sw.shard(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text(CONFIG)
    lines = [{"step": step, "loss": loss} for step, loss in ((1, 3.0), (2, 2.5))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "evaluations.jsonl").write_text(json.dumps({"step": 2, "loss": 2.75}) + "\n")
    files = {"config.json": b"{}", "tokenizer_config.json": b"{}"}
    sw.checkpoint.save(run / "checkpoints" / "step-000002", model, optimizer, files=files)
    sw.checkpoint.save(run / "final", model, files=files)
    assert push(run, "me/mine") == "http://hub/me/mine"
    push(run / "checkpoints" / "step-000002", "me/mine", private=False)
    (name, whole, private), (_, of_checkpoint, public) = uploads
    assert (name, private, public) == ("me/mine", True, False)
    assert set(whole) == {"README.md", "model.safetensors", *files}
    assert set(of_checkpoint) == {*whole, "model.safetensors.index.json"}
    assert whole["model.safetensors"] == run / "final" / "model.safetensors"
    card = whole["README.md"].decode()
    assert card.startswith("---\nbase_model: org/base\n")
    for said in (
        "base_model_relation: finetune", "datasets: [org/talk]", "library_name: transformers",
        "from org/base@0123456789012345678901234567890123456789.", "Data: `org/talk`.",
        "| `train.lr` | `0.001` |", "| 1 | 3.0000 | training |", "| 2 | 2.5000 | training |",
        "| 2 | 2.7500 | held out |",
        'AutoModelForCausalLM.from_pretrained("me/mine")', 'AutoTokenizer.from_pretrained("me/mine")',
    ):  # fmt: skip
        assert said in card, card
    assert "lora" not in card


def test_the_card_of_a_classifier_of_pictures(tmp_path: Path) -> None:
    final = tmp_path / "run" / "final"
    final.mkdir(parents=True)
    (tmp_path / "run/config.toml").write_text('[model]\npath = "org/base"\ntask = "image-classification"\n')
    (tmp_path / "run/evaluations.jsonl").write_text('{"step": 2, "loss": 0.25, "rows": 8, "accuracy": 0.875}\n')
    (final / "config.json").write_text('{"model_type": "vit"}')
    (final / "preprocessor_config.json").write_text("{}")
    text = card(final, "me/mine")
    for said in (
        "pipeline_tag: image-classification", "| 2 | 0.2500 | held out (accuracy 0.875) |",
        "from transformers import AutoImageProcessor, AutoModelForImageClassification",
        'AutoModelForImageClassification.from_pretrained("me/mine")', 'AutoImageProcessor.from_pretrained("me/mine")',
    ):  # fmt: skip
        assert said in text, text


def test_a_directory_that_no_run_wrote(tmp_path: Path, uploads: list[tuple[str, Mapping[str, Any], bool]]) -> None:
    """Its shards have any names; its own card is kept."""
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "part-a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "part-a.safetensors"}}))
    for other in ("README.md", "notes.bin", "stale.safetensors", "config.json"):
        (tmp_path / other).write_text("{}")
    push(tmp_path, "me/mine")
    ((_, files, _),) = uploads
    assert set(files) == {"part-a.safetensors", "model.safetensors.index.json", "README.md", "config.json"}
    assert files["README.md"] == tmp_path / "README.md"


def test_what_cannot_be_pushed(tmp_path: Path, uploads: list[tuple[str, Mapping[str, Any], bool]]) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        push(tmp_path / "nowhere", "me/mine")
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"has no model.safetensors .*convert it first"):
        push(tmp_path, "me/mine")
    convert(tmp_path / "w.pt", tmp_path / "made")
    (tmp_path / "made" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="it is not uploaded"):
        push(tmp_path / "made", "me/mine")
    assert uploads == []


def test_without_a_network_or_a_name() -> None:
    """Tests set HF_HUB_OFFLINE."""
    with pytest.raises(HubError, match=r"^'mine' is not the name of a repository: give org/name"):
        hub.upload("mine", {}, True, "")
    with pytest.raises(HubError, match=r"^me/mine: HF_HUB_OFFLINE=1 forbids to upload"):
        hub.upload("me/mine", {}, True, "")
