"""A model from a hub and back: planned, trained, resumed, merged and uploaded, with requests and bytes counted.

    python benchmarks hub                 # two minutes; needs PEFT
    python benchmarks hub --out hub       # and write results/DATE-hub.*

The hub is the mock of the tests (`tests/hub/mock.py`) on loopback, which huggingface_hub, transformers and datasets
accept as one. Each line of the transcript is a command of its own, with one cache for all of them. While the first
training downloads, the hub breaks the connection once. At the end transformers and PEFT load from the hub what was
uploaded, and compare it with what was merged here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import ROOT
from benchmarks.common import facts, report
from tests.hub import mock

TIMEOUT_S = 300.0
BASE, ROWS, ADAPTER, MERGED = "org/base", "org/talk", "org/adapter", "org/merged"
CONFIG = f"""
[model]
path = "{BASE}"

[lora]
r = 8

[data]
source = "{ROWS}"
seq_len = 64
eval_fraction = 0.1

[train]
steps = 4
micro_batch = 2
lr = 1e-3

[checkpoint]
every = 2

[log]
name = "talk"
"""
SAME = f"""
import torch, transformers
from peft import AutoPeftModelForCausalLM
ids = torch.arange(32)[None]
adapted = AutoPeftModelForCausalLM.from_pretrained("{ADAPTER}").eval()
uploaded = transformers.AutoModelForCausalLM.from_pretrained("{MERGED}").eval()
here = transformers.AutoModelForCausalLM.from_pretrained("merged").eval()
with torch.no_grad():
    left, middle, right = (model(ids).logits for model in (adapted, uploaded, here))
assert torch.equal(middle, right)
print("largest difference", float((left - right).abs().max()))
"""


@dataclass(frozen=True)
class Row:
    """A command of the transcript."""

    command: str
    status: int
    took_s: float
    requests: int
    received_bytes: int
    """Bytes of files and answers that the hub sent."""
    weights_bytes: int
    """Those of them that are of files of weights."""
    uploaded_bytes: int
    out: str
    """What the command printed."""


def base_in(folder: Path) -> Path:
    """Write a Llama of 7.5 M parameters in three files, with a tokenizer that has a chat template."""
    import torch
    import transformers

    from shardwise.train.data.tokenizer import pretrained_tokenizer

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=4
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="12MB")
    tokenizer = pretrained_tokenizer("builtin:stories")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def rows() -> dict[str, bytes]:
    """Return the files of a data set of conversations."""
    talks = [
        [{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": f"{2 * n}"}] for n in range(200)
    ]
    lines = [json.dumps({"messages": talk}).encode() + b"\n" for talk in talks]
    return {"train.jsonl": b"".join(lines), "README.md": b"---\nlicense: mit\n---\n"}


def transcript(hub: mock.Hub, folder: Path) -> Iterator[Row]:
    """Run the commands in a folder, one after another, and yield what each did."""
    hub.add(BASE, base_in(folder / "model"))
    hub.add(ROWS, rows(), kind="dataset")
    (folder / "talk.toml").write_text(CONFIG)
    largest = max((folder / "model").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    train, offline = "shardwise train talk.toml", {"HF_HUB_OFFLINE": "1"}
    plan = f"shardwise plan {BASE} --lora 8 --gpu cpu --gpus 2 --precision fp32 --seq-len 64 --micro-batch 2"
    yield run(hub, folder, f"{plan} --strategy full_shard --config plan.toml")
    yield run(hub, folder, f"shardwise inspect {BASE}")
    yield run(hub, folder, "shardwise inspect talk.toml")
    hub.cut[largest.name] = 11 * 2**20
    yield run(hub, folder, train)
    yield run(hub, folder, f"{train} train.steps=6")
    yield run(hub, folder, f"{train} log.name=alone", offline)
    yield run(hub, folder, "shardwise convert runs/talk/final merged")
    yield run(hub, folder, f"shardwise push runs/talk {ADAPTER}", token=mock.WRITER)
    yield run(hub, folder, f"shardwise push merged {MERGED} --public", token=mock.WRITER)
    yield run(hub, folder, f"shardwise inspect {ADAPTER}", token=mock.WRITER)
    yield run(hub, folder, f"shardwise inspect {BASE}", offline)
    (folder / "same.py").write_text(SAME)
    yield run(hub, folder, "python same.py", token=mock.WRITER)


def run(
    hub: mock.Hub, folder: Path, command: str, environment: dict[str, str] | None = None, token: str | None = None
) -> Row:
    """Run a command as a client of the hub."""
    variables = {**os.environ, **hub.environment(folder / "home", token), **(environment or {})}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    program, *words = command.split()
    words = ["-m", "shardwise", *words] if program == "shardwise" else words
    before, start_s = len(hub.requests), time.monotonic()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    asked = hub.requests[before:]
    words = [f"{name}={value}" for name, value in (environment or {}).items()]
    return Row(
        " ".join([*words, command]),
        done.returncode,
        time.monotonic() - start_s,
        len(asked),
        sum(request.sent_bytes for request in asked),
        sum(request.sent_bytes for request in asked if request.path.endswith(".safetensors")),
        sum(request.received_bytes for request in asked),
        done.stdout,
    )


def markdown(found: list[Row]) -> str:
    header = ["command", "status", "s", "requests", "bytes received", "of weights", "bytes uploaded"]
    cells = [
        [
            f"`{row.command}`",
            str(row.status),
            f"{row.took_s:.1f}",
            str(row.requests),
            f"{row.received_bytes:,}",
            f"{row.weights_bytes:,}",
            f"{row.uploaded_bytes:,}",
        ]
        for row in found
    ]
    printed = "\n".join(f"$ {row.command}\n{row.out.strip()}\n" for row in found)
    text = " ".join((__doc__ or "").split("\n\n")[2].split())
    return (
        f"# A hub's names, from plan to push\n\n{text}\n\n{report.table(header, cells)}\n\n"
        f"{report.facts_line(facts.machine())}\n\n## What was printed\n\n```\n{printed}```\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardwise-hub-") as name, mock.running() as hub:
        found = []
        for row in transcript(hub, Path(name)):
            out = row.out.replace(name, "/tmp/hub").replace(hub.url, "http://hub").replace(f"{ROOT}/", "")
            found.append(replace(row, out=out))
            print(f"$ {row.command}\n{out}status {row.status}, {row.requests} requests\n", flush=True)
    text = markdown(found)
    print(text.partition("## What was printed")[0])
    if options.out:
        report.write(options.out, {"rows": [asdict(row) for row in found], "facts": facts.machine()}, text)
    return int(any(row.status for row in found))
