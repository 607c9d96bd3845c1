"""Whole runs, small enough for a few seconds: what they write, that they learn, and what they refuse."""

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import device_tools
from shardwise.errors import CheckpointError, ConfigError, UserError
from shardwise.modules.deferred_init import materialize
from shardwise.modules.deferred_init.memory import RealStorages
from shardwise.modules.deferred_init.progress import DrawingProgress
from shardwise.train import trainer
from shardwise.train.config.files import load, recipe_named
from shardwise.train.output.checkpoints import Checkpoints
from shardwise.train.report.run_log import RunLog
from tests.ranks import RankPools
from tests.train.rig import furnish, losses, read, run_alone, run_here

MEMORY_KINDS = {
    "param_shards", "gathered_slots", "grad_shards", "reduce_slots", "optimizer", "buffers", "activations",
    "temporaries", "other",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_a_run_writes_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_alone()
    rows = read("runs/tiny/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert set(row) == {
            "step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_time_s", "memory", "world_size",
            "skipped_steps", "rollbacks",
        }  # fmt: skip
        assert set(row["memory"]) == MEMORY_KINDS
        assert row["memory"]["activations"] is None  # not 0: nothing counts them on a CPU
        assert row["tokens"] == 8 * 32
    assert rows[0]["lr"] == 1e-2
    evaluations = read("runs/tiny/evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [0, 3, 6]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"] - 1
    assert load("runs/tiny/config.toml").train.global_batch == 8

    loaded = AutoModelForCausalLM.from_pretrained("runs/tiny/final")
    ids = torch.tensor([AutoTokenizer.from_pretrained("runs/tiny/final")("the quick brown foxes")["input_ids"]])
    with torch.no_grad():
        assert loaded(input_ids=ids, labels=ids).loss < evaluations[0]["loss"] - 1
    printed = capsys.readouterr().out
    assert "a sample" in printed
    assert "of DDP's bytes per rank" in printed
    assert re.search(r"^goodput \d+\.\d%: steps .* s, \d+\.\d%; setup ", printed, re.MULTILINE)

    assert printed.endswith("report: runs/tiny/report.html\n")
    run = RunLog.read(Path("runs/tiny"))
    assert [unit.name for unit in run.facts.units] == ["", "model.layers.0", "model.layers.1"]
    assert run.peak["optimizer"] == rows[-1]["memory"]["optimizer"]
    assert {"steps", "setup", "evaluations"} <= set(run.time_spent)
    assert run.launches[-1].step == 6


def test_steps_in_backward_train_as_ever_and_resume() -> None:
    batch = (
        "train.clip=0",
        "train.micro_batch=8",
        "train.global_batch=8",
        "train.schedule=constant",
        "checkpoint.every=2",
    )
    run_alone(*batch, "log.name=after")
    run_alone(*batch, "log.name=early", "train.optimizer_in_backward=true", "train.steps=4")
    run_alone(*batch, "log.name=early", "train.optimizer_in_backward=true")
    assert losses("early") == losses("after")
    assert {row["grad_norm"] for row in read("runs/early/metrics.jsonl")} == {None}
    assert {row["memory"]["grad_shards"] for row in read("runs/early/metrics.jsonl")} == {0}
    run_alone(*batch, "log.name=clipped", "train.optimizer_in_backward=true", "train.clip_units=0.01")
    assert losses("clipped")[-1] != losses("after")[-1]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), "the norm of all gradients is known only after the last"),
        (("train.clip=0", "parallel.param_dtype=fp16"), "which scales the loss"),
        (("train.clip=0",), r"gradients of 4 micro-batches cannot be added; set train.micro_batch=8"),
        (("train.optimizer_in_backward=false", "train.clip_units=1.0"), "clip_units needs"),
    ],
)
def test_what_steps_in_backward_cannot_do_is_refused_with_the_reason(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run_alone("train.optimizer_in_backward=true", *overrides)


def test_weights_and_resting_state_train_as_ever_and_go_on_without(tmp_path: Path) -> None:
    path = f"offload.path={tmp_path / 'states'}"
    disk = ("offload.params=nvme", "offload.optimizer=nvme", path, "offload.ring_mib=1")
    saving = ("train.schedule=constant", "checkpoint.every=2", "train.eval_every=0")
    run_alone(*saving, "log.name=memory")
    run_alone(*saving, *disk, "log.name=disk", "train.steps=4")
    assert {row["memory"]["optimizer"] < 2**20 + 1024 for row in read("runs/disk/metrics.jsonl")} == {True}
    run_alone(*saving, "log.name=disk", "train.steps=5")
    run_alone(*saving, *disk, "log.name=disk")
    assert losses("disk") == losses("memory")
    assert list((tmp_path / "states").iterdir()) == []


def test_the_recipe_of_offload_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_named(Path("offload"))
    assert recipe is not None
    small = ("model.config.num_hidden_layers=2", "model.config.hidden_size=64", "train.steps=2", "data.seq_len=32")
    text = (f'data.source="{recipe}"', "data.eval_fraction=0", f"log.directory={tmp_path}", "parallel.ranks=1")
    trainer.run(load(recipe, (*small, *text, f"offload.path={tmp_path / 'states'}")))
    assert list((tmp_path / "states").iterdir()) == []
    assert re.search(r"rank 0 also has .* on disk: param_shards .*, optimizer ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("offload.optimizer=nvme",), "needs path"),
        (("offload.params=nvme",), 'params = "nvme" needs path'),
        (("offload.params=nvme", "offload.path=x", "checkpoint.asynchronous=true"), "with offload.params"),
        (("offload.optimizer=nvme", "offload.path=x", "checkpoint.asynchronous=true"), "checkpoint.asynchronous with"),
        (("offload.ring=3",), "unknown key offload.ring; did you mean offload.ring_mib"),
    ],
)
def test_what_cannot_be_on_disk_is_refused_in_one_line(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        run_alone(*overrides)
    assert "\n" not in str(caught.value)


def test_an_asynchronous_save_of_what_the_host_keeps_for_a_device_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overrides = ("offload.optimizer=cpu", "checkpoint.asynchronous=true", "checkpoint.every=2")
    run_alone("log.name=host", *overrides)  # where it is the same memory
    monkeypatch.setattr(device_tools, "has_memory", lambda device: True)
    with pytest.raises(ConfigError, match=r'checkpoint.asynchronous with offload.optimizer = "cpu"'):
        run_alone("log.name=device", *overrides)


def test_the_peak_of_memory_is_reset_between_the_build_and_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    noted: list[tuple[Any, str]] = [
        (trainer, "build_optimizer"), (trainer.Trainer, "_go_on"), (device_tools, "reset_peak"),
        (trainer.Trainer, "step"),
    ]  # fmt: skip
    for owner, name in noted:
        monkeypatch.setattr(owner, name, noting(done, name, getattr(owner, name)))
    run_alone("train.steps=2")
    assert done == [*(name for _, name in noted), "step"]


def noting(done: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        done.append(name)
        return function(*args, **kwargs)

    return noted


def test_a_finished_run_says_so_and_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run_alone("train.steps=1", "train.eval_every=0")
    before = Path("runs/tiny/metrics.jsonl").read_text()
    capsys.readouterr()
    run_alone("train.steps=2", "train.eval_every=0")
    printed = capsys.readouterr().out
    assert "runs/tiny is finished" in printed
    assert "there is no checkpoint from which to continue to train.steps=2" in printed
    assert Path("runs/tiny/metrics.jsonl").read_text() == before


def test_a_finished_run_goes_on_when_it_is_given_more_steps(capsys: pytest.CaptureFixture[str]) -> None:
    same = ("train.schedule=constant", "checkpoint.every=2")
    run_alone("train.steps=3", *same)
    run_alone("train.steps=3", *same)
    assert (
        "is finished: the model is in runs/tiny/final; to train anew, set log.name; to continue, set train.steps "
        "above 3" in capsys.readouterr().out
    )
    run_alone("train.steps=6", *same)
    assert "resuming from runs/tiny/checkpoints/step-000002: step 3 is next" in capsys.readouterr().out
    run_alone("train.steps=6", "log.name=straight", *same)
    assert losses("tiny") == losses("straight")
    first, second = (Path(f"runs/{name}/final/model.safetensors").read_bytes() for name in ("tiny", "straight"))
    assert first == second


def test_a_run_says_when_most_of_its_tokens_are_padding(capsys: pytest.CaptureFixture[str]) -> None:
    said = "of their tokens are learnt, the rest is padding or prompts; all of them take time"
    run_alone("train.steps=1")
    assert said not in capsys.readouterr().out
    long = [
        "data.seq_len=8000",
        "data.eval_fraction=0",
        "train.eval_every=0",
        "train.micro_batch=1",
        "train.global_batch=1",
    ]
    run_alone("train.steps=1", "log.name=long", *long)
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_the_number_of_ranks_and_micro_batches_does_not_change_the_losses(ranks: RankPools, strategy: str) -> None:
    run_alone("log.name=alone", "train.micro_batch=8")
    overrides = ("log.name=two", f"parallel.strategy={strategy}")
    printed, from_second = ranks(2).run(run_here, str(Path.cwd()), overrides, timeout_s=120)
    assert losses("two") == pytest.approx(losses("alone"), rel=2e-4)
    assert read("runs/two/evaluations.jsonl")[-1]["loss"] == pytest.approx(
        read("runs/alone/evaluations.jsonl")[-1]["loss"], rel=1e-3
    )
    assert printed.count("held-out loss") == 3
    assert from_second == "", "rank 0 speaks for all"
    assert {row["world_size"] for row in read("runs/two/metrics.jsonl")} == {2}


@pytest.mark.parametrize("optimizer", ["muon", "adamw-8bit"])
def test_optimizers_go_on_exactly_and_at_another_number_of_ranks(ranks: RankPools, optimizer: str) -> None:
    overrides = (f"train.optimizer={optimizer}", "checkpoint.every=3")
    ranks(2).run(run_here, str(Path.cwd()), ("log.name=two", *overrides), timeout_s=120)
    expected = losses("two")
    assert expected[-1] < expected[0] - 0.5
    shutil.rmtree("runs/two/final")
    shutil.rmtree("runs/two/checkpoints/step-000006")
    shutil.copytree("runs/two", "runs/alone")
    ranks(2).run(run_here, str(Path.cwd()), ("log.name=two", *overrides), timeout_s=120)
    assert losses("two") == expected, "from step 3 on the same bits"
    run_alone("log.name=alone", *overrides)
    assert losses("alone") == pytest.approx(expected, rel=1e-3)
    assert json.loads(Path("runs/alone/final/training.json").read_text())["step"] == 6


def test_numbers_drawn_on_the_device_do_not_depend_on_the_ranks(ranks: RankPools) -> None:
    on_device = ("model.init=device", "train.micro_batch=8")
    run_alone("log.name=meta", "train.micro_batch=8")
    run_alone("log.name=alone", *on_device)
    ranks(2).run(run_here, str(Path.cwd()), ("log.name=two", "model.init=device"), timeout_s=120)
    assert losses("two") == pytest.approx(losses("alone"), rel=2e-4)
    assert losses("alone")[0] != losses("meta")[0]
    assert losses("alone")[-1] < losses("alone")[0] - 0.5


@pytest.mark.parametrize("mode", ["full", "selective-ops", "every-2", "every-3"])
def test_recomputation_does_not_change_the_losses(mode: str) -> None:
    run_alone("log.name=kept", "train.steps=3", "train.eval_every=0")
    run_alone("log.name=recomputed", "train.steps=3", "train.eval_every=0", f"train.activation_checkpointing={mode}")
    assert losses("recomputed") == losses("kept")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_learns_and_the_model_is_stored_in_its_own_dtype(dtype: str) -> None:
    from safetensors.torch import load_file

    run_alone(f"parallel.param_dtype={dtype}", "train.eval_every=0")
    assert losses("tiny")[-1] < losses("tiny")[0] - 0.5
    assert {tensor.dtype for tensor in load_file("runs/tiny/final/model.safetensors").values()} == {torch.float32}


def test_dropout_and_weights_follow_the_seed() -> None:
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        run_alone(f"log.name={name}", f"train.seed={seed}", "train.steps=2", "train.eval_every=0")
    assert losses("a") == losses("b") != losses("c")


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    with pytest.raises(UserError, match=r"step \d+: loss .*diverged; .*; lower train\.lr \(1e\+30\)"):
        run_alone("train.lr=1e30", "train.clip=0", "train.eval_every=0")
    assert not Path("runs/tiny/final").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dtype=fp16", 'set model.dtype="fp32" and parallel.param_dtype="fp16"'),
        ("train.global_batch=3", "global_batch=3 is not a multiple"),
        ("data.source=nowhere", "no such files"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_alone(override)
    assert not list(Path("runs").glob("*/[!.]*"))  # only the lock may be there


FROM_FINAL = ("model.config=none", "model.path=runs/tiny/final", "log.name=tuned")


def tune_here(folder: str) -> str:
    """Train from the weights in `final/`, where loading the whole model raises."""
    import transformers

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the whole model was loaded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "from_pretrained", refuse)
        return run_here(folder, FROM_FINAL)


def test_training_starts_from_the_weights_of_a_directory(ranks: RankPools) -> None:
    run_alone()
    learned = read("runs/tiny/evaluations.jsonl")
    printed, _ = ranks(2).run(tune_here, str(Path.cwd()), timeout_s=120)
    assert re.search(r"runs/tiny/final: each rank read its own [\d.]+ KiB of weights straight into its shards", printed)
    tuned = read("runs/tuned/evaluations.jsonl")
    assert tuned[0]["loss"] == pytest.approx(learned[-1]["loss"], rel=1e-6)
    assert tuned[-1]["loss"] < tuned[0]["loss"] < learned[0]["loss"]


@pytest.mark.parametrize("init", ["meta", "device"])
def test_nothing_is_drawn_that_weights_or_a_checkpoint_overwrite(init: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_alone("checkpoint.every=3", f"model.init={init}")
    Path("runs/tiny/checkpoints/step-000006").rename("later")
    shutil.rmtree("runs/tiny/final")
    before, draws = losses("tiny"), []
    run = RealStorages._run
    monkeypatch.setattr(
        RealStorages, "_run", lambda self, op, seed: (op.draw and draws.append(op), run(self, op, seed))
    )
    run_alone("checkpoint.every=3", f"model.init={init}")
    assert losses("tiny") == before
    run_alone(*FROM_FINAL, f"model.init={init}")
    assert draws == []
    run_alone("log.name=new", f"model.init={init}")
    assert draws != []


def test_a_run_whose_checkpoints_go_while_it_starts_is_no_run_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    run_alone("checkpoint.every=3")
    shutil.rmtree("runs/tiny/final")
    monkeypatch.setattr(Checkpoints, "resume", lambda *_: None)
    with pytest.raises(ConfigError, match="were removed while the run started"):
        run_alone("checkpoint.every=3")


def test_the_console_tells_of_long_drawing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(total_bytes: int) -> DrawingProgress:
        return DrawingProgress(total_bytes, itertools.count(0.0, 10.0).__next__)  # ten seconds a draw

    monkeypatch.setattr(materialize, "DrawingProgress", slow)
    run_alone("train.steps=1", "train.eval_every=0")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("initial values:")]
    assert "0.0 of 0.0 GB drawn on the CPU, about " in said[0]
    assert 'model.init = "device"' in said[0]
    assert "model.init" not in "".join(said[1:]), "once is enough"


def test_a_factory_that_draws_cannot_draw_on_the_device(tmp_path: Path) -> None:
    (tmp_path / "drawn_model.py").write_text("import torch\ndef build(): return torch.nn.Linear(3, 3)\n")
    with pytest.raises(ConfigError, match=r"drawn_model:build.*initialises its model itself"):
        run_alone("model.config=none", "model.factory=drawn_model:build", "model.init=device")


def test_weights_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"model.weights='pickles' has its weights only as pickles .*convert it once"):
        run_alone("model.weights=pickles")
    run_alone("train.steps=1", "train.eval_every=0", "log.name=tiny")
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: model\.layers\.2"):
        run_alone("model.weights=runs/tiny/final", "model.config.num_hidden_layers=3", "log.name=deeper")


def test_a_factory_with_its_own_loss(tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text(
        "import torch\n"
        "class Bigram(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(320, 320)\n"
        "    def forward(self, input_ids, labels):\n"
        "        logits = self.table(input_ids)[:, :-1].flatten(0, 1)\n"
        "        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())\n"
    )
    from safetensors.torch import load_file

    run_alone("model.config=none", "model.factory=own_model:Bigram", "parallel.units=none", "train.lr=0.3")
    assert losses("tiny")[-1] < losses("tiny")[0] - 1
    assert load_file("runs/tiny/final/model.safetensors")["table.weight"].shape == (320, 320)
    run_alone(
        "model.config=none", "model.factory=own_model:Bigram", "model.weights=runs/tiny/final", "parallel.units=none",
        "log.name=again",
    )  # fmt: skip
    assert losses("again")[0] < losses("tiny")[0] - 0.5


def test_the_loss_of_documents_kept_apart_is_that_of_each_alone() -> None:
    """The first step's loss, which is the mean over the targets of all documents."""
    from shardwise.train.build.models import TextShape, build_model
    from shardwise.train.tasks.objectives import next_token_nll

    examples = [{"prompt": f"{i} foxes", "completion": "jump" * (1 + i % 3)} for i in range(12)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in examples))
    data = ("data.source=rows.jsonl", "data.eval_fraction=0", "train.eval_every=0", "data.seq_len=48")
    run_alone(*data, "train.steps=1", "train.global_batch=5", "train.micro_batch=5", "data.document_mask=true")
    config = load("tiny.toml", [*data, "model.init=cpu"])
    torch.manual_seed(config.train.seed)
    model = build_model(config.model, TextShape(320, 256, 48))
    nll, targets = torch.zeros(()), 0
    with torch.no_grad():
        for one in examples:
            prompt, completion = (list(one[name].encode()) for name in ("prompt", "completion"))
            ids = torch.tensor([[*prompt, *completion, 256]])
            labels = ids.clone()
            labels[:, : len(prompt)] = -100
            nll += next_token_nll(model(input_ids=ids).logits, labels)
            targets += len(completion) + 1
    assert losses("tiny")[0] == pytest.approx(float(nll) / targets, rel=1e-5)
