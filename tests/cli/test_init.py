"""`shardwise init`, as its user calls it: the file that it writes trains as it is."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.app import run
from shardwise.train import trainer
from shardwise.train.config.files import load
from shardwise.train.data.tokenizer import byte_tokenizer
from tests.generation.rig import save_llama
from tests.train.tasks.rig import picture, save_llava

REPO = Path(__file__).parents[2]
USER, REPLY = {"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, REPLY]},
    "conversations": {"conversations": [{"from": "human", "value": "1 + 1 ="}, {"from": "gpt", "value": "2"}]},
    "instruction": {"instruction": "add", "input": "1 + 1", "output": "2"},
    "prompt and completion": {"prompt": "1 + 1 =", "completion": " 2"},
    "text": {"text": "1 + 1 = 2. " * 5},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_llama(path, max_position_embeddings=128)
    return path


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.chdir(tmp_path)


def write(name: str, row: dict[str, Any], count: int = 20) -> str:
    Path(name).write_text("".join(f"{json.dumps({**row, 'id': index})}\n" for index in range(count)))
    return name


def init(*words: object) -> int:
    return run(["init", *map(str, words)])


@pytest.mark.parametrize("kind", ROWS)
def test_the_file_trains_as_it_is(model: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert init("--model", model, "--data", write("rows.jsonl", ROWS[kind]), "--steps", 2) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM" in said
    assert "from its weights; all weights are trained" in said
    assert "shardwise train run.toml" in said
    assert f"# {'texts' if kind == 'text' else f'rows of {kind[:5]}'}" in Path("run.toml").read_text()
    trainer.run(load("run.toml"))
    rows = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert Path("runs/run/final/model.safetensors").is_file()
    assert Path("runs/run/evaluations.jsonl").is_file()


TWO_LABELS = [{"text": "it barks", "label": "dog"}, {"text": "it mews", "label": "cat"}] * 9
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
BERT = {"model_type": "bert", **SIZES, "vocab_size": 320, "max_position_embeddings": 66}
VIT = {"model_type": "vit", **SIZES, "image_size": 16, "patch_size": 8}
T5 = {"model_type": "t5", "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 320}


def save(name: str, config: dict[str, Any], architecture: str | None, tokenizer: Any = None) -> str:
    """Write a model's configuration, without weights, and a tokenizer."""
    Path(name).mkdir()
    described = {**config, **({} if architecture is None else {"architectures": [architecture]})}
    Path(name, "config.json").write_text(json.dumps(described))
    if tokenizer is not None:
        tokenizer.save_pretrained(name)
    return name


@pytest.mark.parametrize(
    ("config", "architecture", "rows", "task"),
    [
        (BERT, "BertForMaskedLM", [{"text": "it barks and digs"}] * 9, "masked-lm"),
        (BERT, "BertForMaskedLM", TWO_LABELS, "sequence-classification"),
        (BERT, "BertModel", [{"tokens": ["it", " mews"], "tags": ["O", "B-X"]}] * 9, "token-classification"),
        (
            BERT,
            "BertForSequenceClassification",
            TWO_LABELS,
            "sequence-classification",
        ),
        (T5, "T5ForConditionalGeneration", [{"prompt": "it barks", "completion": "dog"}] * 9, "seq2seq-lm"),
        (T5, None, [{"source": "it barks", "target": "dog"}] * 9, "seq2seq-lm"),
        (VIT, "ViTForImageClassification", "pictures", "image-classification"),
        (VIT, "ViTModel", "folder", "image-classification"),
    ],
)
def test_each_task_is_recognised_and_trains(
    config: dict[str, Any], architecture: str | None, rows: Any, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if isinstance(rows, str):
        pytest.importorskip("PIL.Image")
        for number in range(8):
            data, name = picture(number)
            file = Path("pictures", name, f"{number}.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        source = "pictures"
        if rows == "pictures":
            source = "rows.jsonl"
            found = [{"image": str(file), "label": file.parent.name} for file in sorted(Path("pictures").glob("*/*"))]
            Path(source).write_text("".join(f"{json.dumps(row)}\n" for row in found))
    else:
        source = "rows.jsonl"
        Path(source).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert init("--model", save("model", config, architecture, byte_tokenizer()), "--data", source, "--steps", 1) == 0
    assert load("run.toml").model.task == task
    said = capsys.readouterr().out
    assert ("shardwise generate" in said) == (task == "seq2seq-lm")
    assert f"rows for {task}" in said
    trainer.run(load("run.toml"))
    assert Path("runs/run/final/model.safetensors").is_file()
    assert Path("runs/run/evaluations.jsonl").is_file()


def test_pictures_with_conversations_train(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    save_llava("llava")
    Path("a.png").write_bytes(picture(0)[0])
    source = write("rows.jsonl", {"image": "a.png", "prompt": "which colour?", "completion": "red"}, 8)
    assert init("--model", "llava", "--data", source, "--steps", 1) == 0
    assert load("run.toml").model.task == "image-text-to-text"
    trainer.run(load("run.toml"))
    assert Path("runs/run/final/model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore:.*was written by another class")
def test_a_task_may_be_given(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = TWO_LABELS
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert init("--model", model, "--data", "rows.jsonl") == 0
    assert load("run.toml").model.task is None  # as before: a causal language model's own task
    assert init("--model", model, "--data", "rows.jsonl", "--task", "sequence-classification", "--force") == 0
    config = load("run.toml")
    assert (config.model.task, config.data.seq_len) == ("sequence-classification", 64)
    assert "texts with a label" in Path("run.toml").read_text()
    trainer.run(load("run.toml", ["train.steps=1"]))
    assert "transformers.pipeline('text-classification', 'runs/run/final')" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.ranks
def test_adapters_on_two_ranks_and_what_comes_next(model: Path) -> None:
    pytest.importorskip("peft")
    clean = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    environment = {**clean, "PYTHONPATH": str(REPO / "src"), "CUDA_VISIBLE_DEVICES": ""}

    def shardwise(*words: object) -> str:
        command = [sys.executable, "-c", "from shardwise.cli.main import main; main()", *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        return done.stdout

    source = write("rows.jsonl", ROWS["messages"])
    said = shardwise("init", "--model", model, "--data", source, "--lora", 4, "--ranks", 2, "--steps", 2)
    commands = [line.split("#")[0].split()[1:] for line in said.splitlines() if line.startswith("  shardwise")]
    assert [words[0] for words in commands] == ["plan", "train", "generate"]
    assert "tokens/s" in shardwise(*commands[0])
    shardwise(*commands[1])
    assert Path("runs/run/final/adapter_model.safetensors").is_file()
    assert json.loads(Path("runs/run/metrics.jsonl").read_text().splitlines()[-1])["world_size"] == 2
    answer = [word for word in commands[2] if word != "--chat"]
    shardwise(*answer, "--prompt", "1 + 1 =", "--as-messages", "--max-new-tokens", 2)


def test_a_text_is_cut_into_rows(model: Path) -> None:
    Path("book.txt").write_text("the quick brown fox. " * 40)
    assert init("--model", model, "--data", "book.txt", "--steps", 1) == 0
    trainer.run(load("run.toml"))
    assert Path("runs/run/final").is_dir()


def test_a_configuration_without_weights_trains_from_random_ones(model: Path) -> None:
    Path("shape").mkdir()
    Path("shape/config.json").write_text((model / "config.json").read_text())
    assert init("--model", "shape", "--data", write("rows.jsonl", ROWS["text"])) == 0
    assert load("run.toml").model.weights == "random"
    assert load("run.toml").train.lr == 1e-3


def test_one_example_is_not_held_out(model: Path) -> None:
    assert init("--model", model, "--data", write("rows.jsonl", ROWS["messages"], 1), "--steps", 1) == 0
    assert load("run.toml").data.eval_fraction == 0
    trainer.run(load("run.toml"))


def test_long_examples_make_long_rows_within_the_models_positions(model: Path) -> None:
    row = {"prompt": "x" * 70, "completion": "y"}
    init("--model", model, "--data", write("rows.jsonl", row))
    assert load("run.toml").data.seq_len == 128
    row = {"prompt": "x" * 700, "completion": "y"}
    init("--model", model, "--data", write("longer.jsonl", row), "--force")
    assert load("run.toml").data.seq_len == 128


def test_a_file_is_overwritten_only_by_force(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write("rows.jsonl", ROWS["text"])
    Path("run.toml").write_text("mine")
    assert init("--model", model, "--data", source) == 2
    assert "--out run.toml exists: name another file, or add --force" in capsys.readouterr().err
    assert Path("run.toml").read_text() == "mine"
    assert init("--model", model, "--data", source, "--force") == 0
    assert load("run.toml").data.source == source


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "rows.jsonl"], "--model missing, and there is no terminal to ask in"),
        ([], "--model and --data missing"),
        (["--model", "modle", "--data", "rows.jsonl"], "model.path='modle': no such file or directory"),
        (["--model", "{model}", "--data", "rosw.jsonl"], "no such files; did you mean rows.jsonl"),
        (["--model", "{model}", "--data", "pairs.jsonl"], "pairs.jsonl:1: is a preference (chosen, rejected)"),
        (["--model", "{model}", "--data", "rows.jsonl", "--out", "a/run.toml"], "there is no directory a"),
        (["--model", "{model}", "--data", "rows.jsonl", "--out", "run.txt"], "must end in .toml"),
        (["--model", "{model}", "--data", "rows.jsonl", "--seq-len", "500000"], "longer than all of data.source"),
        (
            ["--model", "{model}", "--data", "rows.jsonl", "--task", "tagging"],
            "tagging: must be one of causal-lm",
        ),
        (["--model", "{model}", "--data", "rows.jsonl", "--task", "sequence-classification"], "rows need label"),
        (["--model", "{model}", "--data", "rows.jsonl", "--task", "masked-lm"], "has no mask_token"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    model: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write("rows.jsonl", ROWS["text"])
    write("pairs.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"})
    assert init(*(word.replace("{model}", str(model)) for word in words)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(Path().glob("*.toml"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_asked_until_the_answers_can_be_used(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write("rows.jsonl", ROWS["messages"])
    monkeypatch.setattr(sys, "stdin", Terminal(f"modle\n{model}\nrosw.jsonl\n{source}\ntagging\n\n0\n"))
    assert init() == 0
    asked = capsys.readouterr()
    assert "no such file or directory" in asked.err
    assert "did you mean rows.jsonl" in asked.err
    assert "--task tagging: must be one of" in asked.err
    assert "[causal-lm]" in asked.out
    assert load("run.toml").model.path == str(model)
    assert load("run.toml").lora.r == 0
