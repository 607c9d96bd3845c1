"""Commands, configurations and scripts in README and guides, run as printed; and the names that they mention."""

from __future__ import annotations

import functools
import importlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.cli import bench
from shardwise.cli import plan as plan_command
from shardwise.cli.app import run
from shardwise.cli.process import launch
from shardwise.plan.hardware.devices import device_names
from shardwise.train import trainer
from shardwise.train.config.files import load
from tests.engine.rig import on_ranks

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("user-guide", "data", "integrations", "failures", "fsdp1", "fsdp2", "jax")),
]
TOKENIZER = ROOT / "recipes" / "python-tokenizer"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
CONFIG = transformers.LlamaConfig(
    vocab_size=2048, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)


def blocks(page: str, language: str) -> list[str]:
    """Return a page's fenced blocks of a language; those of language "" hold commands."""
    parts = re.split(r"^```(.*)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    opened = zip(parts[1::4], parts[2::4], strict=True)  # text, language, block, the end's nothing, text, ...
    return [block for found, block in opened if found == language]


def commands() -> Iterator[list[str]]:
    """Yield the words of every `shardwise ...` command in a fenced block, without `shardwise` and comments."""
    for page in PAGES:
        for block in blocks(page, ""):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["shardwise"]:
                    yield words[1:]


COMMANDS = list(commands())


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with small versions of all files that the pages name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "recipes", "recipes")
    for place in ("models/my-model", "my-model", "runs/quickstart/final"):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(CONFIG).save_pretrained(place)
        tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(place)
    rows = [
        [{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": f"{2 * n}"}] for n in range(60)
    ]
    Path("instructions.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    Path("ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    Path("texts").mkdir()
    adapter = Path("runs/lora/checkpoints/step-000100")
    adapter.mkdir(parents=True)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{layer}.lora_A.weight": torch.ones(2, 16), f"{layer}.lora_B.weight": torch.ones(16, 2)}
    save_file(factors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return tmp_path


def test_there_are_commands_on_the_pages() -> None:
    named = {"init", "train", "generate", "inspect", "convert", "push", "plan", "bench", "export"}
    assert {words[0] for words in COMMANDS} == named
    assert len(COMMANDS) >= 15


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_are_taken_as_printed(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training, searches, measurements and benchmarks are as far as their beginning; the rest is done."""
    if words[0] == "export":
        pytest.importorskip("onnxruntime")
    begun: list[Any] = []

    def begin(*arguments: Any) -> int:
        begun.append(arguments)
        return 0

    monkeypatch.setattr(launch, "launch", begin)
    monkeypatch.setattr(launch, "launch_task", begin)
    monkeypatch.setattr(bench, "run", begin)
    monkeypatch.setattr("shardwise.plan.planner.plan", begin)
    monkeypatch.setattr("shardwise.cli.on_jax.plan", begin)
    monkeypatch.setattr("shardwise.hub.upload", begin)
    monkeypatch.setattr(plan_command, "_show", lambda answer, options: None)
    if "run.toml" in words and words[0] == "plan":
        assert run(["convert", "ds_config.json", "run.toml"]) == 0
        text = Path("run.toml").read_text()
        Path("run.toml").write_text('[model]\npath = "my-model"\n' + text if "[model]" not in text else text)
    assert run(words) == 0, capsys.readouterr().err
    assert bool(begun) == (words[0] in {"train", "push", "plan", "bench"})


@pytest.mark.slow
@on_ranks(1)
def test_the_fine_tuning_that_the_guide_prints(room: Path) -> None:
    """With fewer steps."""
    whole = next(block for block in blocks("docs/user-guide.md", "toml") if "[data]" in block)
    Path("run.toml").write_text(whole)
    trainer.run(load("run.toml", ["train.steps=2", "checkpoint.every=1", "parallel.param_dtype=fp32"]))
    model = transformers.AutoModelForCausalLM.from_pretrained("runs/run/final")
    assert model.config.hidden_size == 16


def test_the_adapters_that_the_guide_prints() -> None:
    """They are a section more beside what a configuration has."""
    whole, adapters, *_ = blocks("docs/user-guide.md", "toml")
    Path("run.toml").write_text(adapters + whole[whole.index("[data]") :])
    config = load("run.toml")
    assert (config.lora.r, config.lora.base, config.model.dtype) == (16, "nf4", "bf16")


def test_the_task_that_the_guide_prints() -> None:
    *_, task, _ = blocks("docs/user-guide.md", "toml")
    Path("run.toml").write_text(task)
    assert load("run.toml").model.task == "sequence-classification"


def test_the_names_of_a_hub_that_the_guide_prints() -> None:
    """They are sections of a configuration."""
    *_, named = blocks("docs/user-guide.md", "toml")
    Path("run.toml").write_text(f"{named}\n[train]\nsteps = 1\n")
    config = load("run.toml")
    assert (config.model.pretrained, config.data.subset, config.hub.private) == ("org/base", "english", True)


@on_ranks(1)
def test_the_loop_that_the_readme_prints() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG)
    prompts = {"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def loss_of(out: Any, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten())

    names = {
        "build_model": lambda: model,
        "batches": [(torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long))] * 2,
        "loss_of": loss_of,
        "prompts": prompts,
    }
    loop = next(block for block in blocks("README.md", "python"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda backend: None)  # there is one
        patch.setattr(dist, "destroy_process_group", lambda: None)  # and others need it
        exec(compile(loop, "README.md", "exec"), names)
    weights: Any = names["weights"]
    assert weights.keys() == before.keys()
    assert any(not torch.equal(weights[name], before[name]) for name in before)
    assert 3 < names["text"].shape[1] <= 53  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES)
def test_names_on_the_pages_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for short, name in sorted(set(re.findall(r"(?<![\w.])(swj?)\.([\w.]*\w)", text))):
        package = sw if short == "sw" else pytest.importorskip("shardwise.jax")
        functools.reduce(getattr, name.split("."), package)
    for module, names in re.findall(r"from (shardwise[\w.]*) import ([\w, ]+)", text):
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            assert ".integrations." in module  # libraries that people bring
            continue
        for name in names.split(","):
            assert not name.strip() or hasattr(found, name.split()[0]), f"{module}: {name}"


def test_the_guide_names_what_the_planner_has_packaged() -> None:
    guide = (ROOT / "docs" / "user-guide.md").read_text(encoding="utf-8")
    named = re.findall(r"`([^`\s]+)`", guide.split("### Packaged shapes and devices")[1].split("\n### ")[0])
    assert [name for name in named if name in sw.plan.shapes()] == [*sw.plan.shapes()]
    assert {*device_names()} <= {*named}
