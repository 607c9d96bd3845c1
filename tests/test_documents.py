"""Commands, configurations and scripts in README and guides, run as printed; and the names that they mention."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import re
import shlex
import shutil
import tomllib
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
from shardwise.train.data.tokenizer import pretrained_tokenizer
from tests.documents import PAGES, ROOT, Block, blocks, names_of_the_pages, small_llama
from tests.engine.rig import on_ranks
from tests.ranks import RankPools
from tests.train.report.rig import made_up
from tests.train.report.rig import rows as metrics

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def commands() -> Iterator[list[str]]:
    """Yield the words of every `shardwise ...` command in a fenced block, without `shardwise` and comments."""
    for page in PAGES:
        for block in blocks(page, ""):
            for line in [] if block.marks else block.text.splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["shardwise"]:
                    yield words[1:]


COMMANDS = list(commands())


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with small versions of all files that the pages name; not to be changed."""
    place = tmp_path_factory.mktemp("furnished")
    with contextlib.chdir(place):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(small_llama()).save_pretrained("my-model")
        tokenizer = pretrained_tokenizer("builtin:stories")
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained("my-model")
        for name in ("models/my-model", "runs/quickstart/final", "runs/talk/final", "org/model", "org/name@revision"):
            shutil.copytree("my-model", name)
        for name in ("quickstart", "short"):
            made_up(Path("runs", name), metrics(9))
        rows = [
            [{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": f"{2 * n}"}]
            for n in range(60)
        ]
        Path("instructions.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        Path("questions.jsonl").write_text("".join(json.dumps({"messages": row[:1]}) + "\n" for row in rows[:2]))
        Path("ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
        Path("held-out.txt").write_text("import os\nimport sys\n" * 20)
        Path("texts").mkdir()
        layer = "base_model.model.model.layers.0.self_attn.q_proj"
        factors = {f"{layer}.lora_A.weight": torch.ones(2, 16), f"{layer}.lora_B.weight": torch.ones(16, 2)}
        for adapter in map(Path, ("runs/lora/checkpoints/step-000100", "runs/lora/final")):
            adapter.mkdir(parents=True)
            save_file(factors, adapter / "adapter_model.safetensors")
            (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return place


@pytest.fixture(autouse=True)
def room(furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a copy of those files."""
    shutil.copytree(furnished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_lines_that_install_name_extras_that_exist() -> None:
    assert installs_extras_that_exist("pip install shardwise")
    assert installs_extras_that_exist("pip install 'shardwise[onnx,train]'   # to export")
    assert not installs_extras_that_exist("pip install 'shardwise[onxx]'")
    assert not installs_extras_that_exist("pip install shardwize")


def test_there_are_commands_on_the_pages() -> None:
    named = {"init", "train", "generate", "inspect", "convert", "push", "plan", "bench", "export", "report", "doctor"}
    assert {words[0] for words in COMMANDS} == named
    assert len(COMMANDS) >= 15


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=[pytest.mark.slow] * (words[0] == "export"), id=" ".join(words)) for words in COMMANDS],
)
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
    monkeypatch.setattr("sys.stdin", io.StringIO())
    if "run.toml" in words and words[0] == "plan":
        assert run(["convert", "ds_config.json", "run.toml"]) == 0
        text = Path("run.toml").read_text()
        Path("run.toml").write_text('[model]\npath = "my-model"\n' + text if "[model]" not in text else text)
    assert run(words) == 0, capsys.readouterr().err
    assert bool(begun) == (words[0] in {"train", "push", "plan", "bench", "doctor"} or "--ranks" in words)


@pytest.mark.slow
@on_ranks(1)
def test_the_fine_tuning_that_the_guide_prints(room: Path) -> None:
    """With fewer steps."""
    whole = blocks("docs/configs.md", "toml")[0].text
    Path("run.toml").write_text(whole)
    trainer.run(load("run.toml", ["train.steps=2", "checkpoint.every=1", "parallel.param_dtype=fp32"]))
    model = transformers.AutoModelForCausalLM.from_pretrained("runs/run/final")
    assert model.config.hidden_size == 16


@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in blocks(page, "toml")], ids=lambda block: block.name
)
def test_configurations_are_taken_as_printed(block: Block) -> None:
    """A block is a configuration, or some of its sections; the others are a small run's."""
    printed = tomllib.loads(block.text)
    others = {
        "model": '[model]\npath = "models/my-model"\n',
        "data": '[data]\nsource = "instructions.jsonl"\n',
        "train": "[train]\nsteps = 1\n",
    }
    Path("run.toml").write_text(block.text + "".join(text for name, text in others.items() if name not in printed))
    config = load("run.toml", [] if "steps" in printed.get("train", {"steps": 1}) else ["train.steps=1"])
    sections = [(section, key, value) for section, keys in printed.items() for key, value in keys.items()]
    assert sections
    for section, key, value in sections:
        taken = getattr(getattr(config, section), {"path": "pretrained"}.get(key, key))
        assert isinstance(value, list | dict) or taken == value, f"{section}.{key}"


@on_ranks(1)
def test_the_loop_that_the_readme_prints() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_llama())
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
    loop = blocks("README.md", "python")[0].text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda backend: None)  # there is one
        patch.setattr(dist, "destroy_process_group", lambda: None)  # and others need it
        exec(compile(loop, "README.md", "exec"), names)
    weights: Any = names["weights"]
    assert weights.keys() == before.keys()
    assert any(not torch.equal(weights[name], before[name]) for name in before)
    assert 3 < names["text"].shape[1] <= 53  # type: ignore[attr-defined]


def _run_page(page: str) -> None:
    """Run a page's blocks of Python one after another, each with the names that those before it left."""
    names = names_of_the_pages()
    if page == "docs/generate.md":
        tokenizer = pretrained_tokenizer("builtin:stories")
        tokenizer.chat_template = TEMPLATE
        names |= {"model": sw.shard(names["build_model"]()), "tokenizer": tokenizer}
    for block in blocks(page, "python"):
        if {"not run", "run by"} & block.marks.keys():
            continue
        exec(compile("\n" * block.line + block.text, block.page, "exec"), names)


RUN_HERE = [
    (page, max(int(block.marks.get("ranks", 1)) for block in found))
    for page in PAGES
    if page != "README.md"
    and (found := [block for block in blocks(page, "python") if not {"not run", "run by"} & block.marks.keys()])
]


@pytest.mark.parametrize(("page", "number"), RUN_HERE)
def test_the_python_of_a_page_runs(page: str, number: int, ranks: RankPools, tmp_path: Path) -> None:
    ranks(number).run(_run_page, page, timeout_s=200)  # a search of the planner takes 15 s of a processor


def installs_extras_that_exist(line: str) -> bool:
    """Whether a line installs the package with pip and names only extras that it has."""
    match = re.fullmatch(r"pip install shardwise(?:\[([\w,-]+)\])?", " ".join(shlex.split(line, comments=True)))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return match is not None and {*(match[1] or "").split(",")} - {""} <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_or_says_why_not(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for block in blocks(page):
        if "run by" in block.marks:
            test = ROOT / block.marks["run by"]
            assert page in test.read_text(encoding="utf-8"), f"{block.name}: {test} does not name this page"
            continue
        if "not run" in block.marks or block.language in {"text", "diff", "toml", "python"}:
            continue  # a reason; output; or run above
        assert block.language in {"", "json"}, f"{block.name}: say `not run` or `run by` above it"
        for line in block.text.splitlines() if block.language == "" else []:
            words = shlex.split(line, comments=True)[:2]
            known = not words or words[0] == "shardwise" or (words[0] == "make" and f"\n{words[1]}:" in makefile)
            known = known or words == [".ci/run"] or page == "docs/examples.md"  # tests/examples runs those
            known = known or installs_extras_that_exist(line)
            assert known, f"{block.name}: {line}"


def test_the_readme_is_short_and_the_pages_that_it_leads_to_link_every_guide() -> None:
    """It has one screen and a half; what it leaves out stands on the pages where the others begin."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split("## Where to go", 1)[0].split()) < 500
    assert len(re.findall(r"^\| ", readme.split("## Where to go", 1)[1], re.MULTILINE)) <= 8  # with its heading
    linked = readme
    for page in ("docs/index.md", "docs/user-guide.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        linked += text.replace("](", "](docs/") if page.startswith("docs") else text
    guides = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")}
    assert {guide for guide in guides if f"]({guide}" not in linked} == set()


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


def test_a_page_names_what_the_planner_has_packaged() -> None:
    guide = (ROOT / "docs" / "shapes.md").read_text(encoding="utf-8")
    named = re.findall(r"`([^`\s]+)`", guide)
    assert [name for name in named if name in sw.plan.shapes()] == [*sw.plan.shapes()]
    assert {*device_names()} <= {*named}
