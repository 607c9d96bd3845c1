"""Configurations with a task in the planner, in `inspect`, in `init` and on JAX: a forecast, or a refusal by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardwise.cli.app import run as command
from shardwise.errors import ConfigError, PlanError
from shardwise.plan.models.source import resolve
from shardwise.train.build.from_plan import check_model
from shardwise.train.config.tasks import KINDS, check_task, class_for, task_for
from tests.train.tasks.rig import BERT, RUN, sentences, train

CONFIG = f"""{BERT}
vocab_size = 320
[model]
task = "{{task}}"
[data]
source = "animals.jsonl"
seq_len = 32
{RUN.format(steps=1, more="")}
[parallel]
ranks = 2
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "animals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sentences(20)))
    (tmp_path / "run.toml").write_text(CONFIG.format(task="sequence-classification"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification", "masked-lm"])
def test_a_configuration_is_planned_with_its_head(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(CONFIG.format(task=task))
    assert command(["plan", "--from", "run.toml", "--gpu", "cpu", "--quick", "--json"]) == 0
    head = 32 * 32 + 32 + 2 * 32 + 320 if task == "masked-lm" else 2 * 32 + 2
    assert json.loads(capsys.readouterr().out)["parameters"] == _trunk(task) + head


def _trunk(task: str) -> int:
    embeddings = (320 + 512 + 2) * 32 + 64
    block = 4 * (32 * 32 + 32) + 2 * 32 * 64 + 64 + 32 + 4 * 32
    pooler = (32 * 32 + 32) * (task == "sequence-classification")
    return embeddings + 2 * block + pooler


def test_a_directory_is_planned_for_another_task_than_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 320, **sizes}
    (tmp_path / "m/config.json").write_text(json.dumps(made))
    Path("run.toml").write_text(
        re.sub(r"(?s)\[model.config\].*?\[model\]", '[model]\npath = "m"', CONFIG.format(task="token-classification"))
    )
    assert command(["plan", "--from", "run.toml", "--gpu", "cpu", "--quick"]) == 0
    assert "bert configuration" in capsys.readouterr().err


def test_the_fastest_strategy_is_chosen_for_a_classifier(tmp_path: Path) -> None:
    printed = train(str(tmp_path), "parallel.strategy=auto", "parallel.hardware=cpu", "data.eval_fraction=0")
    assert "planned: " in printed


def test_inspect_reads_the_labels(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["inspect", "run.toml"]) == 0
    assert "classifier" in capsys.readouterr().out


def test_a_plan_of_a_classifier_becomes_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command(
            [
                "plan",
                "vit-l-16",
                "--gpus",
                "2",
                "--micro-batch",
                "1",
                "--strategy",
                "full_shard",
                "--config",
                "vit.toml",
            ]
        )
        == 0
    )
    text = Path("vit.toml").read_text()
    assert 'task = "image-classification"' in text
    assert 'source = "unset"' in text


def test_jax_and_models_without_a_task_refuse_by_name() -> None:
    with pytest.raises(PlanError, match=r"has no task for it \(it has causal-lm, masked-lm"):
        check_model(resolve("siglip2-base"))
    assert command(["train", "run.toml", "parallel.backend=jax"]) == 2


@pytest.mark.parametrize(
    ("configuration", "task"),
    [
        ({"model_type": "bert", "architectures": ["BertForTokenClassification"]}, "token-classification"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "seq2seq-lm"),
        ({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}, "image-text-to-text"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "image-classification"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "causal-lm"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "causal-lm"),
        ({"model_type": "unheard-of", "architectures": ["Unheard"]}, "causal-lm"),
        ({"model_type": "vit"}, "causal-lm"),
    ],
)
def test_the_architecture_tells_the_task(configuration: dict[str, object], task: str) -> None:
    assert task_for(configuration) == task


def test_every_task_has_its_classes() -> None:
    import transformers

    peft = pytest.importorskip("peft")
    for task, kind in KINDS.items():
        assert hasattr(transformers, kind.auto)
        assert kind.peft is None or kind.peft in peft.TaskType.__members__
        assert class_for(task, "unheard-of") is None
    assert class_for("masked-lm", "bert") == "BertForMaskedLM"
    with pytest.raises(ConfigError, match=r"set model.task to one that it has: image-classification"):
        check_task("causal-lm", "vit")
