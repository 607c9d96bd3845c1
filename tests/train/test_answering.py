"""Evaluation by generation: the same answers on any number of ranks, and a training that does not notice it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from shardwise.cli.app import run as command
from shardwise.errors import ConfigError, UserError
from shardwise.train.answering import Answering, compared
from shardwise.train.config.files import load
from shardwise.train.data.questions import read_questions
from shardwise.train.process.interruption import Interruption
from shardwise.train.trainer import Trainer
from tests.ranks import RankPools
from tests.train.tasks.rig import ALONE, lines, losses, train

LLAMA = """
[model.config]
model_type = "llama"
vocab_size = 320
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
attention_dropout = 0.2
initializer_range = 0.2
"""
T5 = """
[model]
task = "seq2seq-lm"
[model.config]
model_type = "t5"
vocab_size = 320
d_model = 32
d_ff = 64
d_kv = 16
num_layers = 2
num_heads = 2
initializer_factor = 3.0
[eval.options]
min_new_tokens = 4
"""
REST = """
[data]
source = "rows.jsonl"
seq_len = 48
eval_fraction = 0.2
[train]
steps = 4
micro_batch = 2
global_batch = 12
eval_every = 2
[eval]
generate = "asked.jsonl"
max_new_tokens = 6
micro_batch = 2
"""
WITHOUT = ("eval.generate=none", "eval.max_new_tokens=128", "eval.micro_batch=8")


def question(number: int) -> dict[str, Any]:
    turns = [("user", "count" + " on" * (number % 4)), ("assistant", f"{number} {number + 1}")]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(LLAMA + REST)
    write("rows.jsonl", [question(number) for number in range(30)])
    write("asked.jsonl", [question(number) for number in range(5)])


def answers(name: str, step: int) -> list[dict[str, Any]]:
    return lines(Path(f"runs/{name}/answers/step-{step:06d}.jsonl"))


@pytest.mark.parametrize("options", [(), ("eval.options.temperature=2.0",)], ids=["greedy", "sampled"])
def test_training_goes_on_as_without_it(options: tuple[str, ...], tmp_path: Path) -> None:
    train(str(tmp_path), *WITHOUT, "log.name=without")
    printed = train(str(tmp_path), *options, "log.name=with")
    assert losses(tmp_path / "runs/with") == losses(tmp_path / "runs/without")
    ours, theirs = (load_file(f"runs/{name}/final/model.safetensors") for name in ("with", "without"))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert [row["step"] for row in lines(tmp_path / "runs/with/evaluations.jsonl")] == [0, 2, 4]
    last = lines(tmp_path / "runs/with/evaluations.jsonl")[-1]
    found = answers("with", 4)
    assert last["answers"] == 5
    for name in ("exact_match", "token_f1"):
        assert last[name] == sum(row[name] for row in found) / 5
    assert [row["reference"] for row in found] == [f"{number} {number + 1}" for number in range(5)]
    assert found[1].keys() == {"messages", "reference", "completion", "finish_reason", "exact_match", "token_f1"}
    assert "step 4/4  5 answers  exact_match" in printed


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        (LLAMA, None),
        pytest.param(
            T5, [{"source": "a b " * (1 + n % 3), "target": f"{n}"} for n in range(30)], marks=pytest.mark.slow
        ),
    ],
    ids=["causal", "seq2seq"],
)
def test_answers_are_the_same_on_any_number_of_ranks(
    model: str, rows: list[dict[str, Any]] | None, tmp_path: Path, ranks: RankPools
) -> None:
    Path("run.toml").write_text(model + REST)
    if rows is not None:
        write("rows.jsonl", rows)
        write("asked.jsonl", rows[:5])
    for number in (1, 2, 3):  # three batches: one rank, then none has nothing to answer in the last round
        ranks(number).run(train, str(tmp_path), f"log.name=r{number}", "train.lr=1e-9", "train.steps=2")
    for step in (0, 2):
        one, two, three = (answers(f"r{number}", step) for number in (1, 2, 3))
        assert one == two == three
    assert any(row["completion"] for row in one)
    sampled = ("eval.options.do_sample=true", "train.eval_every=1", "train.steps=1", "train.lr=1e-9")
    for number in (1, 3):
        ranks(number).run(train, str(tmp_path), f"log.name=s{number}", *sampled)
    assert answers("s1", 0) == answers("s3", 0) != one


def test_it_decides_which_checkpoint_is_best_and_when_to_stop(tmp_path: Path) -> None:
    write("rows.jsonl", [question(3)] * 12)
    write("asked.jsonl", [question(3)])
    learning = (
        "train.lr=1e-2",
        "train.schedule=constant",
        "model.config.attention_dropout=0.0",
        "data.eval_fraction=0",
    )
    deciding = ("train.best_by=exact_match", "train.patience=2", "checkpoint.every=100", "checkpoint.keep_best=true")
    printed = train(str(tmp_path), *learning, *deciding, "train.steps=60", "train.eval_every=5")
    found = {row["step"]: row["exact_match"] for row in lines(tmp_path / "runs/run/evaluations.jsonl")}
    best = next(step for step, value in found.items() if value == 1)
    assert list(found)[-1] == best + 10
    assert f"stopped after step {best + 10} of 60" in printed
    assert Path("runs/run/checkpoints/best").resolve().name == f"step-{best:06d}"
    assert answers("run", best)[0]["completion"] == "3 4"
    assert command(["generate", "runs/run/final", "--prompt", "count on on on", "--as-messages"]) == 0


def test_some_evaluations_do_not_generate_and_the_last_one_does(tmp_path: Path) -> None:
    train(str(tmp_path), "eval.every=2", "train.steps=7")
    with_answers = [row["step"] for row in lines(tmp_path / "runs/run/evaluations.jsonl") if "answers" in row]
    assert with_answers == [0, 4, 7]
    assert sorted(path.name for path in Path("runs/run/answers").iterdir()) == [
        f"step-{step:06d}.jsonl" for step in with_answers
    ]


def test_answers_of_steps_that_are_taken_again_are_dropped(tmp_path: Path) -> None:
    train(str(tmp_path), "checkpoint.every=3", "train.schedule=constant")
    assert len(list(Path("runs/run/answers").iterdir())) == 3
    Path("runs/run/answers/step-000009.jsonl").write_text("{}\n")
    train(str(tmp_path), "checkpoint.every=3", "train.schedule=constant", "train.steps=6")
    assert sorted(path.stem for path in Path("runs/run/answers").iterdir()) == [
        f"step-{step:06d}" for step in (0, 2, 4, 6)
    ]


@pytest.mark.slow
def test_adapters_are_evaluated(tmp_path: Path, ranks: RankPools) -> None:
    pytest.importorskip("peft")
    write("rows.jsonl", [question(3)] * 12)
    write("asked.jsonl", [question(3)])
    lora = ("lora.r=8", "train.lr=3e-2", "train.schedule=constant", "train.steps=40", "train.eval_every=20")
    ranks(2).run(train, str(tmp_path), *lora, "model.config.attention_dropout=0.0")
    assert answers("run", 0)[0]["exact_match"] == 0
    assert answers("run", 40)[0]["exact_match"] == 1


def test_a_request_to_end_is_heard_between_batches() -> None:
    def answer(interruption: Interruption) -> Any:
        from shardwise.train.output.console import RunConsole

        config = load("run.toml", ["data.eval_fraction=0"]).for_ranks(1)
        trainer = Trainer(config, ALONE, RunConsole(1, quiet=True))
        assert isinstance(trainer.answering, Answering)
        return trainer.answering.answer(interruption)

    whole = answer(Interruption())
    assert whole is not None
    assert len(whole.rows) == 5
    asked = Interruption()
    asked.asked = True
    assert answer(asked) is None


@pytest.mark.parametrize(
    ("answer", "reference", "exact", "overlap"),
    [
        ("Paris", "Paris", 1, 1),
        (" Paris\n", "Paris", 1, 1),
        ("paris.", "Paris", 0, 1),
        ("It is Paris", "Paris", 0, 0.5),
        ("London", "Paris", 0, 0),
        ("", "Paris", 0, 0),
        ("", "", 1, 1),
        ("+", "-", 0, 0),
        ("a a b", "a b b", 0, 2 / 3),
    ],
)
def test_metrics_of_an_answer(answer: str, reference: str, exact: float, overlap: float) -> None:
    assert compared(answer, reference) == {"exact_match": exact, "token_f1": pytest.approx(overlap)}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "a", "completion": "b"}, "a"),
        ({"instruction": "a", "output": "b"}, [{"role": "user", "content": "a"}]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
            [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
        ),
    ],
)
def test_rows_are_asked_like_they_are_learnt(row: dict[str, Any], prompt: object) -> None:
    write("asked.jsonl", [row])
    (found,) = read_questions(load("run.toml"))
    assert (found.prompt, found.reference) == (prompt, "b")


@pytest.mark.parametrize(
    ("overrides", "row", "reason"),
    [
        (["eval.generate=askd.jsonl"], {}, "eval.generate='askd.jsonl': no such files; did you mean asked.jsonl"),
        (["eval.generate=org/rows"], {}, "eval.generate='org/rows': no such file; it takes files of this machine"),
        ([], {"text": "a"}, "asked.jsonl:1: is a text without an answer"),
        ([], {"chosen": "a", "rejected": "b"}, "asked.jsonl:1: is a preference"),
        ([], {"messages": [{"role": "assistant", "content": "a"}]}, "begins with its only reply"),
        (["model.task=masked-lm"], {}, "is for causal-lm and seq2seq-lm, not for masked-lm: leave it out"),
        (
            ["eval.options.temprature=1"],
            {},
            "'temprature' is no option of transformers' GenerationConfig; did you mean",
        ),
        ([*WITHOUT, "train.best_by=token_f1"], {}, 'best_by = "token_f1" is found by generation'),
        (["data.eval_fraction=0", "train.patience=1"], {}, "train.best_by='loss' with data.eval_fraction=0 leaves"),
        (
            ["eval.options.max_new_tokens=9"],
            {},
            "[eval] options has max_new_tokens, which is a key of the section itself",
        ),
        (["parallel.backend=jax"], {}, 'eval.generate = "asked.jsonl" is not supported with parallel.backend = "jax"'),
    ],
)
def test_mistakes_are_one_line(
    overrides: list[str], row: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write("asked.jsonl", [row or question(1)])
    assert command(["train", "run.toml", "parallel.ranks=1", *overrides]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.strip().count("\n") == 0
    assert not Path("runs/run/final").exists()


def test_keys_without_prompts_have_no_effect() -> None:
    Path("run.toml").write_text(LLAMA + REST.replace('generate = "asked.jsonl"\n', ""))
    with pytest.raises(ConfigError, match=re.escape("[eval] max_new_tokens is given but generate is not")):
        load("run.toml")


def test_a_model_that_does_not_generate_is_refused_before_training(tmp_path: Path) -> None:
    given = ("model.config=none", "model.factory=tests.train.test_answering:plain")
    with pytest.raises(UserError, match="does not generate"):
        train(str(tmp_path), *given)
    assert not (tmp_path / "runs/run/metrics.jsonl").exists()


def plain() -> Any:
    from torch import nn

    return nn.Sequential(nn.Embedding(320, 8), nn.Linear(8, 320))
