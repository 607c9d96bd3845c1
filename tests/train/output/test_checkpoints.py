"""Runs that stop and resume: bit-exactly with the same number of ranks, in the same order of data with another."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.checkpoint.publish import commit
from shardwise.errors import CheckpointError, ConfigError, PeerError
from shardwise.train import trainer
from shardwise.train.config.files import load
from shardwise.train.config.schema import CheckpointConfig
from shardwise.train.data.order import Position
from shardwise.train.output.checkpoints import Checkpoints
from shardwise.train.process.ranks import Ranks
from shardwise.train.trainer import Trainer
from tests.checkpoint.rig import away, fail_in_thread, held
from tests.ranks import RankPools
from tests.tiny import GPT2

TINY = f"""{GPT2}
[train]
steps = 6
micro_batch = 2
global_batch = 4
lr = 1e-2
eval_every = 2
"""


class Killed(Exception):
    """Raised in the middle of a step."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(12):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"the {i} quick brown foxes jump. " * (1 + i % 5))
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)


def run_here(folder: str, stop_at: int | None, *overrides: str) -> None:
    """Train in a folder. `stop_at`: the step, counted from 0, in which the run dies."""
    original, before = Trainer.step, Path.cwd()

    def step(self: Trainer, number: int) -> Any:
        if number == stop_at:
            raise Killed
        return original(self, number)

    os.chdir(folder)
    Trainer.step = step  # type: ignore[method-assign]
    try:
        trainer.run(load("tiny.toml", overrides))
    except Killed:
        pass
    finally:
        Trainer.step = original  # type: ignore[method-assign]
        os.chdir(before)


def losses(name: str, file: str = "metrics") -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in Path(f"runs/{name}/{file}.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def kept(name: str) -> list[str]:
    return sorted(path.name for path in Path(f"runs/{name}/checkpoints").iterdir())


def test_two_ranks_go_on_bit_exactly_and_one_rank_in_the_same_order(ranks: RankPools) -> None:
    here = str(Path.cwd())
    ranks(2).run(run_here, here, None, "log.name=whole", timeout_s=120)
    for name in ("two", "one"):
        ranks(2).run(run_here, here, 5, f"log.name={name}", "checkpoint.every=1", timeout_s=120)
        assert kept(name) == ["step-000004", "step-000005"]  # keep = 2
    Path("runs/two/checkpoints/step-000006.partial").mkdir()
    damaged = Path("runs/two/checkpoints/step-000005/model.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    ranks(2).run(run_here, here, None, "log.name=two", "checkpoint.every=3", timeout_s=120)
    assert losses("two") == losses("whole")
    assert losses("two", "evaluations") == losses("whole", "evaluations")
    run_here(here, None, "log.name=one")
    assert [step for step, _ in losses("one")] == [1, 2, 3, 4, 5, 6]
    assert losses("one")[-1][1] == pytest.approx(losses("whole")[-1][1], rel=0.05)  # its dropout is another


def test_asynchronous_saves_go_on_alike_and_are_there_at_the_end(ranks: RankPools) -> None:
    here, options = str(Path.cwd()), ("checkpoint.every=1", "checkpoint.asynchronous=true")
    ranks(2).run(run_here, here, None, "log.name=whole", timeout_s=120)
    ranks(2).run(run_here, here, 5, "log.name=two", *options, timeout_s=120)
    assert kept("two") == ["step-000004", "step-000005"]  # the failure waited for the last one
    ranks(2).run(run_here, here, None, "log.name=two", *options, timeout_s=120)
    assert kept("two") == ["step-000005", "step-000006"]
    assert losses("two") == losses("whole")
    sw.checkpoint.verify("runs/two/checkpoints/step-000006")


def test_names_that_a_run_does_not_give_are_left_alone(tmp_path: Path) -> None:
    model = sw.shard(torch.nn.Linear(3, 3))
    sw.checkpoint.save(tmp_path / "c/step-1", model, step=1)
    config = CheckpointConfig(every=1, keep=1)
    checkpoints = Checkpoints(tmp_path / "c", config, Ranks(0, 1, torch.device("cpu")))
    for step in (2, 3):
        checkpoints.save(step, model, torch.optim.AdamW(model.parameters()), Position(0, 0, 0), {})
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step-000003", "step-1"]
    assert checkpoints.committed() == [3]


def test_the_last_good_checkpoint_stays_while_a_newer_one_is_written(tmp_path: Path) -> None:
    model = sw.shard(torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    config = CheckpointConfig(every=1, keep=1, asynchronous=True)
    checkpoints = Checkpoints(tmp_path / "c", config, Ranks(0, 1, torch.device("cpu")))
    with held() as opened, checkpoints.finished(model):
        for step in (1, 2, 3):
            opened.clear()
            checkpoints.save(step, model, optimizer, Position(0, 0, 0), {})
            there = sorted(path.name for path in (tmp_path / "c").iterdir())
            before = [f"step-{step - 1:06d}"] if step > 1 else []
            assert there == [*before, f"step-{step:06d}.partial"]
            opened.set()
            sw.checkpoint.wait(model)
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-000003"]


def test_any_steps_directory_is_a_model_and_a_tokenizer_for_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    run_here(".", None, "checkpoint.every=3", "log.name=a")
    for path in (Path("runs/a/checkpoints/step-000003"), Path("runs/a/checkpoints/step-000006")):
        sw.checkpoint.verify(path)
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        assert tokenizer.decode(tokenizer.encode("naïve foxes")) == "naïve foxes"
        assert max(tokenizer.encode("naïve foxes")) < model.config.vocab_size
        final = {file.name: file.read_bytes() for file in Path("runs/a/final").iterdir() if "token" in file.name}
        assert {"tokenizer.json", "tokenizer_config.json"} <= final.keys()
        assert final == {name: (path / name).read_bytes() for name in final}
    weights = transformers.AutoModelForCausalLM.from_pretrained("runs/a/final").state_dict()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_what_fails_in_the_background_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_thread(monkeypatch, "fsync", 12)
    with pytest.raises(CheckpointError, match=r"asynchronous save of .*step-00000\d failed: .*No space left"):
        run_here(".", None, "checkpoint.every=1", "checkpoint.asynchronous=true")
    monkeypatch.undo()
    assert not Path("runs/tiny/final").exists()


def interrupt(folder: str, rank: int, *overrides: str) -> str:
    """Train in a folder; only `rank` receives a signal, in its third step. Returns what the first rank printed."""
    original, before = Trainer.step, Path.cwd()

    def step(self: Trainer, number: int) -> Any:
        if number == 2 and self.ranks.rank == rank:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, number)

    os.chdir(folder)
    Trainer.step = step  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(KeyboardInterrupt):
            trainer.run(load("tiny.toml", overrides))
    finally:
        Trainer.step = original  # type: ignore[method-assign]
        os.chdir(before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return said.getvalue()


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_one_rank_that_is_interrupted_ends_all_after_the_same_step(
    asynchronous: str, ranks: RankPools, tmp_path: Path
) -> None:
    options = ("checkpoint.every=2", f"checkpoint.asynchronous={asynchronous}")
    said, _ = ranks(2).run(interrupt, str(tmp_path), 1, *options, timeout_s=120)
    assert "interrupted after step 3: saved as runs/tiny/checkpoints/step-000003" in said
    assert [step for step, _ in losses("tiny")] == [1, 2, 3]
    assert kept("tiny") == ["step-000002", "step-000003"]
    sw.checkpoint.verify("runs/tiny/checkpoints/step-000003")


def test_nothing_is_saved_where_checkpoints_are_off(ranks: RankPools, tmp_path: Path) -> None:
    said, _ = ranks(2).run(interrupt, str(tmp_path), 0, timeout_s=120)
    assert "interrupted after step 3; checkpoint.every=0, so nothing was saved" in said
    assert not Path("runs/tiny/checkpoints").exists()


def test_a_run_goes_on_from_a_url() -> None:
    run_here(".", 3, "checkpoint.every=3")
    run_here(".", None, "log.name=other", f"checkpoint.resume=file://{Path.cwd()}/runs/tiny/checkpoints/step-000003")
    assert [step for step, _ in losses("other")] == [4, 5, 6]


def test_checkpoints_that_are_in_the_way_are_an_error() -> None:
    run_here(".", 2, "checkpoint.every=1")
    with pytest.raises(ConfigError, match=r'"never", but .* has 2 checkpoints'):
        run_here(".", None, "checkpoint.resume=never")
    with pytest.raises(
        ConfigError, match=r"saved with other data or another data\.seed: data\.seed was 0 and is now 3"
    ):
        run_here(".", None, "data.seed=3")
    rows = r"\d+ rows \(digest \w+\)"
    said = rf"the checkpoint's data had {rows}, the data now has {rows} \(data\.source='texts/1\*\.txt'"
    with pytest.raises(ConfigError, match=said):
        run_here(".", None, "data.source=texts/1*.txt")
    for path in Path("runs/tiny/checkpoints").iterdir():
        (path / "training.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"none of the 2 checkpoints .* is intact"):
        run_here(".", None)


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")


def test_a_damaged_checkpoint_is_set_aside_and_its_step_saved_again() -> None:
    run_here(".", None, "log.name=whole")
    run_here(".", 5, "checkpoint.every=1")
    damage(Path("runs/tiny/checkpoints/step-000005/optimizer.safetensors"))
    run_here(".", None, "checkpoint.every=1", "checkpoint.keep=3")
    assert losses("tiny") == losses("whole")
    assert kept("tiny") == ["step-000004", "step-000005", "step-000005.damaged", "step-000006"]
    assert sw.checkpoint.latest("runs/tiny") == Path("runs/tiny/checkpoints/step-000006")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_left(number: int, ranks: RankPools) -> None:
    here = str(Path.cwd())
    run_here(".", 3, "checkpoint.every=1")
    ranks(2).run(refuse_where_away, here, number)
    assert kept("tiny") == ["step-000002", "step-000003"]
    run_here(".", None, "checkpoint.every=1")
    assert [step for step, _ in losses("tiny")] == [1, 2, 3, 4, 5, 6]


def refuse_where_away(folder: str, number: int) -> None:
    """Run while the newest checkpoint cannot be read: both ranks must raise an error that says so."""
    with pytest.MonkeyPatch.context() as patch:
        away(patch, "step-000003/model.safetensors", number)
        said = rf"step-000003/model\.safetensors cannot be read: {os.strerror(number)}: .* or move .*step-000003 away"
        with pytest.raises(CheckpointError, match=said):
            run_here(folder, None)


@pytest.mark.parametrize(
    ("function", "said"),
    [("remove", "old checkpoints cannot be removed"), ("set_aside", "a damaged checkpoint cannot be set aside")],
)
def test_what_the_first_rank_cannot_tidy_up_is_raised_on_all(function: str, said: str, ranks: RankPools) -> None:
    run_here(".", 3, "checkpoint.every=1")
    damage(Path("runs/tiny/checkpoints/step-000003/optimizer.safetensors"))
    ranks(2).run(fail_to_tidy_up, str(Path.cwd()), function, said, timeout_s=30)


def fail_to_tidy_up(folder: str, function: str, said: str) -> None:
    def fails(path: Path) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, function, fails)
        with pytest.raises(CheckpointError, match=rf"{said}: .*Permission denied") as caught:
            run_here(folder, None, "checkpoint.every=1", "checkpoint.keep=1")
    assert str(caught.value).startswith("rank 0 failed: ") == (dist.get_rank() == 1)


def test_a_run_that_cannot_be_exported_fails_on_all_ranks(ranks: RankPools) -> None:
    ranks(2).run(fail_to_export, str(Path.cwd()), timeout_s=30)
    assert not Path("runs/tiny/final").exists()


def fail_to_export(folder: str) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "begin", fails)
        with pytest.raises(CheckpointError, match=r"runs/tiny/final cannot be written: .*No space left") as caught:
            run_here(folder, None, "train.steps=1")
    assert isinstance(caught.value, PeerError) == (dist.get_rank() == 1)


def test_a_changed_setting_of_the_optimizer_holds_and_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    run_here(".", 3, "checkpoint.every=3")
    capsys.readouterr()
    run_here(".", None, "checkpoint.every=3", "train.weight_decay=0.7", "train.betas=[0.5, 0.6]")
    said = "are used: train.betas was [0.9, 0.95] and is now [0.5, 0.6]; train.weight_decay was 0.1 and is now 0.7\n"
    assert said in capsys.readouterr().out
    saved = json.loads(Path("runs/tiny/checkpoints/step-000006/training.json").read_text())["optimizer"]["groups"]
    assert [(group["weight_decay"], group["betas"]) for group in saved] == [(0.7, [0.5, 0.6]), (0.0, [0.5, 0.6])]


def test_a_run_that_has_more_steps_than_are_asked_for_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    run_here(".", 5, "checkpoint.every=5")
    capsys.readouterr()
    run_here(".", None, "train.steps=4")
    printed = capsys.readouterr().out
    assert "step-000005 has 5 steps and train.steps=4: nothing is left to train" in printed
    assert "median step" not in printed
    assert json.loads(Path("runs/tiny/final/training.json").read_text())["step"] == 5


def test_an_interrupted_evaluation_comes_first_when_the_run_goes_on() -> None:
    run_here(".", None, "log.name=whole")
    original = trainer.evaluate

    def evaluate(*arguments: Any) -> float | None:
        if len(losses("tiny", "evaluations")) == 1:  # the second one
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "evaluate", evaluate)
        with pytest.raises(KeyboardInterrupt):
            run_here(".", None, "checkpoint.every=100")
    assert kept("tiny") == ["step-000002"]
    assert [step for step, _ in losses("tiny", "evaluations")] == [0]
    run_here(".", None)
    assert losses("tiny") == losses("whole")
    assert losses("tiny", "evaluations") == losses("whole", "evaluations")


def test_a_checkpoint_that_is_named_is_verified() -> None:
    run_here(".", 3, "checkpoint.every=1")
    named = Path("runs/tiny/checkpoints/step-000003").rename("mine")
    run_here(".", 4, "log.name=other", "checkpoint.every=1", f"checkpoint.resume={named}")
    assert kept("other") == ["step-000004"]
    damage(named / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mine/model\.safetensors is damaged: bytes"):
        run_here(".", None, "log.name=third", f"checkpoint.resume={named}")
    with pytest.raises(CheckpointError, match="mime does not exist"):
        run_here(".", None, "log.name=third", "checkpoint.resume=mime")


def test_a_checkpoint_that_is_named_may_not_be_older_than_the_runs_own() -> None:
    run_here(".", 3, "checkpoint.every=1")
    older = "runs/tiny/checkpoints/step-000002"
    with pytest.raises(ConfigError, match=r"step-000002' is at step 2, but the run has .*step-000003: leave"):
        run_here(".", None, "checkpoint.every=1", f"checkpoint.resume={older}")
    assert kept("tiny") == ["step-000002", "step-000003"]
