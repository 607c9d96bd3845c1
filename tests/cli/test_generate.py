"""`shardwise generate`, as its user calls it."""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shardwise import accelerators, device_tools
from shardwise.cli.app import run
from shardwise.cli.generate import _number_of_ranks
from shardwise.errors import UserError
from tests.generation.rig import save_llama

GREEDY = ("--no-do-sample", "--max-new-tokens", "6")
REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_llama(path, max_position_embeddings=128)
    return path


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)


def rows(name: str) -> list[Any]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def started(*arguments: object) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(REPO / "src"), str(REPO)])
    clean = {name: value for name, value in os.environ.items() if name not in {"OMP_NUM_THREADS", "RANK", "WORLD_SIZE"}}
    return subprocess.Popen(
        [sys.executable, "-c", "from shardwise.cli.main import main; main()", "generate", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**clean, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )


def write_prompts(number: int) -> None:
    lines = [json.dumps({"prompt": f"prompt {'x' * (index * 5 % 17)}", "id": index}) for index in range(number)]
    Path("p.jsonl").write_text("\n".join(lines))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("number", [1, 5])
def test_answers_do_not_depend_on_the_number_of_ranks(model: Path, number: int) -> None:
    """To the byte of the file, greedy and sampled."""
    write_prompts(number)
    for options in (GREEDY, ("--temperature", "1.5", "--seed", "3", "--max-new-tokens", "6")):
        for ranks in (1, 2, 3):
            arguments = ("--prompts", "p.jsonl", "--out", f"{ranks}.jsonl", "--batch-size", 2, "--ranks", ranks)
            process = started(model, *arguments, *options)
            out, err = process.communicate(timeout=240)
            assert (process.returncode, out) == (0, ""), err
            assert f"{ranks}.jsonl: {number} prompts, " in err
            assert "tokens/s" in err
        assert [row["id"] for row in rows("1.jsonl")] == list(range(number))
        assert Path("1.jsonl").read_bytes() == Path("2.jsonl").read_bytes() == Path("3.jsonl").read_bytes()
        for ranks in (1, 2, 3):
            Path(f"{ranks}.jsonl").unlink()


@pytest.mark.slow
@pytest.mark.ranks
def test_an_interrupt_ends_all_ranks_and_keeps_what_is_done(model: Path) -> None:
    write_prompts(40)
    arguments = ("--prompts", "p.jsonl", "--out", "o.jsonl", "--batch-size", 1, "--no-do-sample", "--ranks", 2)
    process = started(model, *arguments, "--max-new-tokens", 40)
    deadline = time.monotonic() + 120
    while not Path("o.jsonl").exists() or len(rows("o.jsonl")) < 4:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    done = rows("o.jsonl")
    assert 4 <= len(done) < 40
    process = started(model, *arguments, "--max-new-tokens", 40, "--resume")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert f"after {len(done)} that were there" in err
    assert rows("o.jsonl")[: len(done)] == done
    assert [row["id"] for row in rows("o.jsonl")] == list(range(40))


@pytest.mark.slow
@pytest.mark.ranks
def test_a_mistake_that_only_ranks_find_is_one_line(model: Path) -> None:
    process = started(model, "--prompt", "x" * 128, "--ranks", 2)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err == ("error: prompt 1 has 128 tokens, which leaves no room in the model's 128 positions: shorten it\n")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_conversation_of_several_turns_on_two_ranks(model: Path) -> None:
    arguments = ("--chat", "--system", "s", "--chat-template", "plain", *GREEDY)
    said = []
    for ranks in (1, 2):
        process = started(model, *arguments, "--ranks", ranks)
        out, err = process.communicate("a\n\nb\n", timeout=120)
        assert process.returncode == 0, err
        said.append(out)
    assert said[0] == said[1] != ""
    first = started(model, *arguments).communicate("a\n", timeout=120)[0]
    assert said[0].startswith(first)
    assert said[0] != first


def test_prompts_in_the_terminal(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(model), "--prompt", "ab", *GREEDY, "--out", "o.jsonl"]) == 0
    capsys.readouterr()
    completion = rows("o.jsonl")[0]["completion"]
    assert run(["generate", str(model), "--prompt", "ab", *GREEDY]) == 0
    assert capsys.readouterr().out == f"{completion}\n"
    assert run(["generate", str(model), "--prompt", "ab", "--prompt", "ab", *GREEDY]) == 0
    assert capsys.readouterr().out == f"> ab\n{completion}\n\n" * 2
    assert run(["generate", str(model), "--prompt", "ab", *GREEDY, "--num-beams", "2"]) == 0
    assert capsys.readouterr().out


def test_an_answer_appears_while_it_is_computed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = transformers.LlamaForCausalLM.forward
    passes: list[int] = []

    @functools.wraps(forward)  # its signature is looked at
    def counted(*given: Any, **named: Any) -> Any:
        passes.append(1)
        return forward(*given, **named)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", counted)
    shown: list[tuple[int, str]] = []

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            shown.append((len(passes), text))
            return super().write(text)

    (space,) = transformers.AutoTokenizer.from_pretrained(model).encode(" ", add_special_tokens=False)
    spaces = f"sequence_bias=[[[{space}], 5.0]]"  # a word is shown when it has ended
    sampled = ("--prompt", "ab", "--temperature", "2.0", "--seed", "1", "--max-new-tokens", "50", "--set", spaces)
    assert run(["generate", str(model), *sampled, "--out", "o.jsonl"]) == 0
    passes.clear()
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert run(["generate", str(model), *sampled]) == 0
    assert "".join(text for _, text in shown) == f"{rows('o.jsonl')[0]['completion']}\n"
    when = [number for number, text in shown if text.strip()]
    assert when[0] < len(passes) / 2
    assert len(set(when)) > 2


def test_how_many_ranks_share_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One where the weights fit in 0.8 of a device's memory, else all devices."""
    monkeypatch.setattr(accelerators, "accelerator", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(device_tools, "total_bytes", lambda device: 100)
    assert [_number_of_ranks(None, size, 4) for size in (80, 81, 320)] == [1, 4, 4]
    assert _number_of_ranks(2, 160, 4) == 2
    assert [_number_of_ranks(asked, 10**12, 0) for asked in (None, 3)] == [1, 3]
    with pytest.raises(UserError, match="--ranks 5: this machine has 4 devices"):
        _number_of_ranks(5, 10, 4)
    with pytest.raises(UserError, match=r"4 devices of this machine have room for .*: start it with torchrun"):
        _number_of_ranks(None, 321, 4)
    with pytest.raises(UserError, match="2 devices of this machine have room"):
        _number_of_ranks(2, 161, 4)


def test_conversations_in_a_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    Path("p.jsonl").write_text(json.dumps({"messages": said}))
    to = ["generate", str(model), *GREEDY]
    assert run([*to, "--chat-template", "plain", "--prompts", "p.jsonl", "--out", "o.jsonl"]) == 0
    (row,) = rows("o.jsonl")
    assert row["messages"] == said[:1]
    assert (row["reference"], row["finish_reason"]) == ("b", "length")
    Path("t.jinja").write_text("{{ '### user\\na\\n\\n### assistant\\n' }}")
    assert run([*to, "--chat-template", "t.jinja", "--prompt", "z", "--as-messages", "--out", "q.jsonl"]) == 0
    assert rows("q.jsonl")[0]["completion"] == row["completion"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    assert run([*to, "--chat-template", "plain", "--chat"]) == 0


MISTAKES: list[tuple[list[str], str]] = [
    ([], "nothing to answer: give --prompt TEXT, --prompts FILE or --chat"),
    (["--chat", "--prompt", "a"], "--prompt and --chat: give one of them"),
    (["--chat", "--out", "o.jsonl"], "--out is for --prompt and --prompts"),
    (["--prompt", "a", "--resume"], "--resume continues the file of --out"),
    (["--prompt", ""], "prompt 1 is empty"),
    (["--prompt", "a", "--out", "none/o.jsonl"], "there is no directory none"),
    (["--prompt", "a", "--out", "there.jsonl"], "--out there.jsonl exists: add --resume to continue it"),
    (
        ["--prompt", "a", "--set", "temprature=1"],
        "'temprature' is no option of transformers'",
    ),
    (["--prompt", "a", "--set", "top_p"], "--set top_p: must be NAME=VALUE"),
    (["--prompt", "a", "--top-k", "3", "--set", "top_k=4"], "top_k is given twice"),
    (["--prompt", "a", "--temperature", "0"], "temperature=0.0"),
    (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens=0"),
    (["--prompt", "a", "--dtype", "fp12"], "--dtype"),
    (["--prompt", "a", "--chat-template", "none.jinja"], "--chat-template none.jinja: must be a Jinja file"),
    (["--prompt", "a", "--as-messages"], "is a conversation, and the tokenizer has no chat template"),
    (["--prompt", "a", "--base", "x"], "is not a PEFT adapter"),
    (["--prompt", "a", "--tokenizer", "."], "no tokenizer there"),
    (["--prompts", "none.txt"], "--prompts none.txt: no such file"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_mistakes(model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    Path("there.jsonl").write_text("")
    assert run(["generate", str(model), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1
