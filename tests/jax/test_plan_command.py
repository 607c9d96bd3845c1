"""`shardwise plan --backend jax`: XLA's programs for devices that are not there, beside the torch engine's forecast."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("shardwise.jax", reason="the extra jax is not installed")
pytest.importorskip("typer")

from shardwise.cli.app import run

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "architectures": ["LlamaForCausalLM"],
}
SEQ_LEN = 16


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command says of a model on 16 devices, of which eight share a copy; and its "page"."""
    path = tmp_path_factory.mktemp("plan") / "config.json"
    path.write_text(json.dumps(CONFIG))
    settings = ["--strategy", "hsdp", "--activation-checkpointing", "full", "--accumulation", "2"]
    where = ["--gpus", "8", "--nodes", "2", "--seq-len", str(SEQ_LEN)]
    page = path.with_name("page.html")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert run(["plan", str(path), "--backend", "jax", "--json", "--html", str(page), *settings, *where]) == 0
    return {**json.loads(said.getvalue()), "page": page.read_text()}


def test_both_backends_in_one_answer(planned: dict[str, Any]) -> None:
    answer = planned
    wide, inner, layers, words = 32, 64, 3, 64
    per_layer = 4 * wide * wide + 3 * wide * inner
    assert answer["parameters"] == 2 * words * wide + layers * (per_layer + 2 * wide) + wide
    of_jax, of_torch = answer["rows"]
    assert (of_jax["backend"], of_torch["backend"]) == ("jax", "torch")
    assert of_jax["setting"] == of_torch["setting"]
    low, high = of_jax["step_time_s"]
    assert 0 < low < high
    # In bf16, two micro-batches gather the layers forward and backward, and reduce-scatter them; tables are gathered
    # once. The two copies of the model add up pieces.
    in_layers, table = 2 * layers * per_layer, 2 * words * wide
    reduced = 2 * in_layers + (2 + 2) * table
    in_copy = 4 * in_layers + 2 * table + reduced
    assert of_jax["bytes_sent"] == pytest.approx(in_copy * 7 / 8 + reduced / 8, rel=0.02)
    assert 12 * answer["parameters"] / 8 < of_jax["needed_bytes"] < of_torch["needed_bytes"]


def test_the_page_has_the_table_and_what_each_program_holds(planned: dict[str, Any]) -> None:
    page = planned["page"]
    for backend in ("jax", "torch"):
        assert len(re.findall(rf'>{backend}</td><td data-name="strategy">hybrid_shard<', page)) == 1
    assert "<h2>hybrid_shard, 1x2, full: memory of a device" in page
    program = page.partition("<pre>")[2].partition("</pre>")[0]
    assert "XLA, a device: arguments" in program
    assert "layers.mlp.down_proj.kernel" in program
    assert "http" not in page
    assert "<script" not in page
    assert planned["compiled_for"] in ("cpu", "gpu")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--strategy", "shard_grad_op"], "--strategy shard_grad_op: must be full_shard"),
        (["--optimizer", "muon"], "--optimizer has no effect with --backend jax"),
        (["--precision", "fp16"], "--precision fp16: must be one of fp32, bf16"),
        (["--activation-checkpointing", "every-2"], "--activation-checkpointing every-2: must be one of none, full"),
        (["--strategy", "hybrid_shard", "--shard-group", "3"], "--shard-group 3 does not divide the 8 devices"),
        (["--backend", "tensorflow"], "--backend tensorflow: must be torch or jax"),
        (["--gpu", "h100"], "unknown device 'h100'"),
        (["--html", "nowhere/page.html"], "cannot write nowhere/page.html: no such directory: nowhere"),
        (["--seq-len", "512,1024"], "--seq-len 512,1024: must be a single length with --backend jax"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["plan", "gpt2", "--backend", "jax", *options]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: {said}")


def test_a_model_that_jax_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found by the process that compiles."""
    assert run(["plan", "mixtral-8x7b", "--backend", "jax"]) == 2
    assert "model_type='mixtral': must be one of the JAX models" in capsys.readouterr().err
