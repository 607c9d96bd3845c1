"""The mock hub is checked by those who use the real one: huggingface_hub, transformers and datasets."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from shardwise.train.data.tokenizer import pretrained_tokenizer
from tests.hub import mock


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a small model in three files, with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path, max_shard_size="100KB")
    pretrained_tokenizer("builtin:stories").save_pretrained(path)
    return path


@pytest.fixture
def hub() -> Iterator[mock.Hub]:
    with mock.running() as hub:
        yield hub


def run(hub: mock.Hub, home: Path, code: str, token: str | None = None, **more: str) -> str:
    """Run code in a client of the hub. Returns what it prints."""
    environment = {**os.environ, **hub.environment(home, token), **more}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_transformers_and_datasets_read_from_it(hub: mock.Hub, model: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", model)
    rows = b"".join(json.dumps({"text": f"row {n}"}).encode() + b"\n" for n in range(50))
    hub.add("org/rows", {"train.jsonl": rows, "README.md": b"---\nlicense: mit\n---\n"}, kind="dataset")
    code = """
import datasets, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("org/tiny")
print(float(sum(p.detach().double().sum() for p in model.parameters())))
print(len(transformers.AutoTokenizer.from_pretrained("org/tiny")))
print(datasets.load_dataset("org/rows", split="train")[3]["text"])
"""
    total, size, row = run(hub, tmp_path, code).splitlines()
    own = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert float(total) == float(sum(p.detach().double().sum() for p in own.parameters()))
    assert (size, row) == ("1536", "row 3")
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert sum(r.sent_bytes for r in hub.recorded(".safetensors")) == weights  # each once
    asked = len(hub.requests)
    assert run(hub, tmp_path, code, HF_HUB_OFFLINE="1").splitlines() == [total, size, row]
    assert len(hub.requests) == asked


def test_a_connection_that_is_cut_is_continued_by_a_range(hub: mock.Hub, tmp_path: Path) -> None:
    data = os.urandom(24 * 2**20)
    hub.add("org/big", {"model.safetensors": data})
    hub.cut["model.safetensors"] = 13 * 2**20
    code = "import huggingface_hub as h; print(h.hf_hub_download('org/big', 'model.safetensors'))"
    path = Path(run(hub, tmp_path, code).strip())
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(data).digest()
    first, second = [r for r in hub.recorded("model.safetensors") if r.path.startswith("/cdn") and r.method == "GET"]
    assert (first.status, first.sent_bytes) == (200, 13 * 2**20)
    assert (second.status, second.sent_bytes) == (206, 14 * 2**20)  # clients keep whole chunks of ten MiB


def test_what_is_refused_is_refused_as_the_hub_does_it(hub: mock.Hub, tmp_path: Path) -> None:
    hub.add("org/gated", {"config.json": b"{}"}, gated=True)
    hub.add("org/private", {"config.json": b"{}"}, private=True)
    hub.add("org/open", {"config.json": b"{}"})
    code = """
import huggingface_hub as h
for repo, file, revision in [("org/gated", "config.json", None), ("org/private", "config.json", None),
                             ("org/none", "config.json", None), ("org/open", "config.json", "v9"),
                             ("org/open", "other.json", None), ("org/open", "config.json", None)]:
    try:
        h.hf_hub_download(repo, file, revision=revision)
        print("had")
    except Exception as error:
        print(type(error).__name__)
"""
    missing = ["RevisionNotFoundError", "RemoteEntryNotFoundError", "had"]
    lost = ["RepositoryNotFoundError", "RepositoryNotFoundError"]
    assert run(hub, tmp_path / "nobody", code).split() == ["GatedRepoError", *lost, *missing]
    assert run(hub, tmp_path / "reader", code, mock.READER).split() == ["GatedRepoError", *lost, *missing]
    assert run(hub, tmp_path / "writer", code, mock.WRITER).split() == ["had", "had", lost[0], *missing]


def test_a_folder_is_uploaded_and_downloaded(hub: mock.Hub, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"x" * 1000)
    code = f"""
import huggingface_hub as h
api = h.HfApi()
api.create_repo("org/new", private=True, exist_ok=True)
api.create_repo("org/new", private=True, exist_ok=True)
api.upload_folder(repo_id="org/new", folder_path={str(tmp_path / "out")!r})
print(h.snapshot_download("org/new"))
"""
    path = Path(run(hub, tmp_path / "home", code, mock.WRITER).strip().splitlines()[-1])
    assert (path / "model.safetensors").read_bytes() == b"x" * 1000
    assert hub.repositories["model", "org/new"].private
    assert sum(r.received_bytes for r in hub.requests if r.method == "PUT") == 1000
