"""`final/` and every step, as servers take them: transformers' `serve` for real, the others by what they read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from safetensors import safe_open

import shardwise
from tests.cli.rig import LAUNCHER

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

CONFIG = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 512

[data]
source = "talk.jsonl"
seq_len = 64

[train]
steps = 60
micro_batch = 2
global_batch = 4
lr = 1e-2

[checkpoint]
every = 30

[parallel]
ranks = 2
"""
DIRECTORIES = ("final", "checkpoints/step-000030", "checkpoints/step-000060")
QUESTION = [{"role": "user", "content": "1+2?"}]
TOKENS = 24


def environment() -> dict[str, str]:
    """For processes that find this shardwise, and no hub."""
    source = str(Path(shardwise.__file__).parents[1])
    clean = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE", "MASTER_PORT"}}
    offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**clean, **offline, "PYTHONPATH": os.pathsep.join([source, clean.get("PYTHONPATH", "")])}


def shardwise_command(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-c", LAUNCHER, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `shardwise train` wrote on two ranks: a small model of conversations with bytes for tokens."""
    folder = tmp_path_factory.mktemp("served")
    sums = ((a, b) for a in range(10) for b in range(10))
    with (folder / "talk.jsonl").open("w") as rows:
        for a, b in sums:
            turns = {"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": f"It is {a + b}."}
            rows.write(json.dumps({"messages": turns}) + "\n")
    (folder / "tiny.toml").write_text(CONFIG)
    shardwise_command(folder, "train", "tiny.toml")
    return folder / "runs" / "tiny"


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[str]:
    """The address of transformers' `serve`, which loads a model when it is asked for."""
    for package in ("fastapi", "uvicorn", "openai"):  # the extra transformers[serving]
        pytest.importorskip(package)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "--host", "127.0.0.1"]
    log = run / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--device", "cpu"], env=environment(), stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + 120
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_the_server_of_transformers_answers_as_generate_does(directory: str, run: Path, server: str) -> None:
    import openai

    client = openai.OpenAI(base_url=server, api_key="none")
    options: dict[str, Any] = {"model": str(run / directory), "temperature": 0, "max_tokens": TOKENS}
    said = client.chat.completions.create(messages=QUESTION, **options)
    continued = client.completions.create(prompt="1+", **options)
    prompts, out = run / "prompts.jsonl", run / f"{Path(directory).name}.jsonl"
    prompts.write_text(json.dumps({"messages": QUESTION}) + "\n" + json.dumps({"prompt": "1+"}) + "\n")
    ranks = 2 if directory == "final" else 1
    options = {"--prompts": prompts, "--out": out, "--max-new-tokens": TOKENS, "--batch-size": 1, "--ranks": ranks}
    arguments = [str(text) for option in options.items() for text in option]
    shardwise_command(run, "generate", str(run / directory), *arguments)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [said.choices[0].message.content, continued.choices[0].text] == [row["completion"] for row in rows]
    assert [said.choices[0].finish_reason, continued.choices[0].finish_reason] == [row["finish_reason"] for row in rows]
    if directory == "final":
        assert rows[0]["completion"].startswith("It is ")


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_what_other_servers_read(directory: str, run: Path) -> None:
    path = run / directory
    config = json.loads((path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(path))
    read = list(path.glob("*.safetensors"))  # as vLLM and SGLang do: all, or those of an index
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text())["weight_map"]
        assert names.keys() == model.state_dict().keys()
        read = [file for file in read if file.name in names.values()]
    assert [file.name for file in read] == ["model.safetensors"]  # llama.cpp: the files that begin with "model"
    with safe_open(read[0], "pt") as file:
        assert set(file.keys()) == set(model.state_dict())
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {f"torch.{config['dtype']}"}  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.chat_template == (path / "chat_template.jinja").read_text()
    stop = transformers.GenerationConfig.from_pretrained(path).eos_token_id
    assert stop == tokenizer.eos_token_id == config["eos_token_id"]
