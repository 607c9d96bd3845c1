"""A loss or gradient norm that is not finite: it is found before the step, which every rank then leaves out."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint import latest
from shardwise.errors import ConfigError, UserError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.train import trainer
from shardwise.train.config.files import load
from shardwise.train.data.batches import Batches
from shardwise.train.loss import RecentLosses
from tests.engine.tensor.rig import forget_meshes
from tests.ranks import RankPools
from tests.train.rig import furnish, read, train

LAST = -1
"""The last rank."""
SKIP = "train.on_nonfinite=skip"
SHORT = ("train.eval_every=0", "data.eval_fraction=0", "train.schedule=constant")
Snapshot = dict[str, Tensor]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def snapshot(run: trainer.Trainer) -> Snapshot:
    """Return copies of this rank's weights and optimizer state."""
    held: dict[str, Tensor] = dict(run.model.named_parameters())
    names = {id(parameter): name for name, parameter in held.items()}
    for parameter, state in run.optimizer.state.items():
        held |= {f"{names[id(parameter)]}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return {k: (v.local if isinstance(v, ShardedParameter) else v).detach().clone() for k, v in held.items()}


def same(one: Snapshot, other: Snapshot) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


class Watched:
    """What a run that is poisoned at one step does with its weights and optimizer state."""

    def __init__(self) -> None:
        self.states: list[Snapshot] = []
        """Before the first step, and after each."""
        self.run: trainer.Trainer | None = None

    @property
    def unchanged(self) -> list[int]:
        """The steps that changed nothing, counted from 1."""
        return [i for i in range(1, len(self.states)) if same(self.states[i - 1], self.states[i])]


@contextmanager
def poisoned(what: str, step: int, rank: int = 0) -> Iterator[Watched]:
    """Make the loss NaN, or a number of the reduced gradients infinite, on one rank in one step (counted from 1)."""
    now, watched = [0], Watched()
    take, accumulate, update = trainer.Trainer.step, trainer.Trainer._accumulate, trainer.Trainer._update

    def taken(self: trainer.Trainer, number: int) -> None:
        now[0] = number + 1
        take(self, number)

    def accumulated(self: trainer.Trainer, *args: Any) -> Tensor:
        nll = accumulate(self, *args)
        if now[0] != step or self.ranks.rank != rank % self.ranks.world_size:
            return nll
        if what == "loss":
            return nll * math.nan
        gradients = (p.grad for p in self.model.parameters() if isinstance(p.grad, ShardedParameter))
        next(g.local for g in gradients if g.local.numel()).view(-1)[0] = math.inf
        return nll

    def updated(self: trainer.Trainer, skips: Tensor) -> None:
        watched.run = self
        if not watched.states:
            watched.states.append(snapshot(self))
        update(self, skips)
        watched.states.append(snapshot(self))

    with (
        mock.patch.object(trainer.Trainer, "step", taken),
        mock.patch.object(trainer.Trainer, "_accumulate", accumulated),
        mock.patch.object(trainer.Trainer, "_update", updated),
    ):
        yield watched


def skip_here(folder: Path, what: str, *overrides: str) -> tuple[list[int], str]:
    """Train with step 3 poisoned on the last rank. Returns the steps that changed nothing on this rank, and what it
    printed."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed), poisoned(what, 3, LAST) as watched:
        trainer.run(load("tiny.toml", [SKIP, *SHORT, *overrides]))
    return watched.unchanged, printed.getvalue()


def stop_here(folder: Path, what: str) -> tuple[int, bool, str]:
    """As `skip_here`, but the run stops. Returns how many steps were begun, whether the state at the end is that after
    two, and the error."""
    with contextlib.chdir(folder), poisoned(what, 3, LAST) as watched, pytest.raises(UserError) as error:
        trainer.run(load("tiny.toml", [*SHORT, "checkpoint.every=1"]))
    assert watched.run is not None
    return len(watched.states) - 1, same(snapshot(watched.run), watched.states[2]), str(error.value)


@pytest.mark.parametrize("what", ["loss", "gradients"])
def test_a_skipped_step_leaves_weights_and_state_of_all_ranks(folder: Path, ranks: RankPools, what: str) -> None:
    results = ranks(2).run(skip_here, folder, what, timeout_s=120)
    assert [unchanged for unchanged, _ in results] == [[3], [3]]
    loss = "loss nan" if what == "loss" else "loss "
    assert any(
        line.startswith(f"step 3: {loss}") and "is skipped (1 so far)" in line for line in results[0][1].split("\n")
    )
    rows = read("runs/tiny/metrics.jsonl")
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert [row["loss"] is None for row in rows] == [what == "loss" and step == 3 for step in range(1, 7)]
    assert [row["grad_norm"] is None for row in rows] == [what == "gradients" and step == 3 for step in range(1, 7)]


@pytest.mark.parametrize("what", ["loss", "gradients"])
def test_a_run_stops_before_the_step_is_taken(folder: Path, ranks: RankPools, what: str) -> None:
    for begun, kept, error in ranks(2).run(stop_here, folder, what, timeout_s=120):
        assert begun == 3
        assert kept
        assert error.startswith("step 3: loss nan" if what == "loss" else "step 3: loss ")
        assert "gradient norm inf" in error or what == "loss"
        assert "training has diverged; " in error
        assert "; lower train.lr (0.01)" in error
        assert (
            "all activations and gradients are finite" if what == "loss" else "it began in the sum over ranks and"
        ) in error
        assert error.endswith('train.on_nonfinite = "skip"; weights and optimizer state are those of step 2')
    newest = latest("runs/tiny")
    assert newest is not None
    assert newest.name == "step-000002"
    assert [row["step"] for row in read("runs/tiny/metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("what", ["loss", "gradients"])
@pytest.mark.parametrize("override", ["train.clip=0.5", "train.clip=0"])
def test_on_a_device_no_step_waits_and_none_is_taken_after_the_bad_one(folder: Path, what: str, override: str) -> None:
    """The host learns of step 3 when step 4 is queued: neither is taken."""
    with poisoned(what, 3) as watched, pytest.raises(UserError, match="step 3"):
        train(folder, *SHORT, override)
    assert watched.run is not None
    assert watched.unchanged == [3, 4]
    assert same(snapshot(watched.run), watched.states[2])


@pytest.mark.parametrize("what", ["loss", "gradients"])
@pytest.mark.parametrize(
    "overrides",
    [
        ("train.optimizer=adamw-bf16",),
        ("train.optimizer=adamw-8bit",),
        ("train.optimizer=muon",),
        ("parallel.param_dtype=fp16",),
        ("offload.optimizer=nvme", "offload.params=nvme", "offload.path=."),
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_optimizer_can_leave_out_a_step(folder: Path, what: str, overrides: tuple[str, ...]) -> None:
    assert skip_here(folder, what, *overrides)[0] == [3]


def test_a_run_that_skipped_a_step_resumes_as_if_it_had_not_ended(folder: Path) -> None:
    skip_here(folder, "loss", "log.name=whole")
    skip_here(folder, "loss", "log.name=parts", "train.steps=4", "checkpoint.every=4")
    trainer.run(load("tiny.toml", [SKIP, *SHORT, "log.name=parts"]))
    whole, parts = (
        [
            {key: value for key, value in row.items() if "_s" not in key[-4:]}
            for row in read(f"runs/{name}/metrics.jsonl")
        ]
        for name in ("whole", "parts")
    )
    assert parts == whole
    assert parts[-1]["skipped_steps"] == 1
    weights = [Path(f"runs/{name}/final/model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]


def test_the_learning_rate_goes_on_over_a_skipped_step(folder: Path) -> None:
    skip_here(folder, "loss", "train.schedule=linear")
    lrs = [row["lr"] for row in read("runs/tiny/metrics.jsonl")]
    assert lrs == sorted(set(lrs), reverse=True)


def test_a_loss_in_fp16_that_is_not_finite_still_ends_the_run(folder: Path) -> None:
    with poisoned("loss", 3) as watched, pytest.raises(UserError, match="step 3: loss nan"):
        trainer.run(load("tiny.toml", [*SHORT, "parallel.param_dtype=fp16"]))
    assert watched.unchanged == [3]


def test_skipping_needs_a_norm() -> None:
    with pytest.raises(ConfigError, match="steps are taken before it is known whether all gradients are finite"):
        load("tiny.toml", [SKIP, "train.optimizer_in_backward=true", "train.clip=0", "train.global_batch=2"])


Plant = Callable[[torch.nn.Module], None]


def nan_in(place: str, model: torch.nn.Module) -> None:
    """Make the output of a module NaN from its fifth call on, the first of the second or third step."""
    calls = [0]

    def hook(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
        calls[0] += 1
        return output * math.nan if calls[0] >= 5 else output

    model.get_submodule(place).register_forward_hook(hook)


def nan_in_input(place: str, model: torch.nn.Module) -> None:
    """Make what a module is given NaN, between it and the modules that ended before."""
    model.get_submodule(place).register_forward_pre_hook(lambda module, args: (args[0] * math.nan,))


def nan_in_backward(place: str, model: torch.nn.Module) -> None:
    """Make the gradient of the output of a module NaN."""

    def hook(module: torch.nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: grad * math.nan)

    model.get_submodule(place).register_forward_hook(hook)


def nan_in_weights(place: str, model: torch.nn.Module) -> None:
    """Make the first number of the piece of a parameter that the rank holds NaN."""
    held: Any = model.get_parameter(place)
    held.local.view(-1)[0] = math.nan


def diverge_here(folder: Path, plant: Plant, at: int, *overrides: str) -> str:
    """Train with a NaN planted in the sharded model of one rank. Returns the error."""
    shard = trainer.Trainer._shard

    def sharded(self: trainer.Trainer, model: torch.nn.Module) -> torch.nn.Module:
        found = shard(self, model)
        if self.ranks.rank == at:
            plant(found)
        return found

    forget_meshes()
    with (
        contextlib.chdir(folder),
        mock.patch.object(trainer.Trainer, "_shard", sharded),
        pytest.raises(UserError) as error,
    ):
        trainer.run(load("tiny.toml", [*SHORT, *overrides]))
    return str(error.value)


@pytest.mark.parametrize("place", ["model.layers.1.mlp.down_proj", "model.layers.0"])
def test_the_first_module_with_a_number_that_is_not_finite_is_named(folder: Path, ranks: RankPools, place: str) -> None:
    for error in ranks(2).run(diverge_here, folder, partial(nan_in, place), 1, timeout_s=120):
        assert f"it began in the output of {place}, micro-batch 1, rank 1" in error


@pytest.mark.parametrize("at", [0, 1])
def test_the_rank_whose_backward_had_it_is_named_and_not_one_that_holds_the_sum(
    folder: Path, ranks: RankPools, at: int
) -> None:
    plant = partial(nan_in_backward, "model.layers.1.mlp.up_proj")
    for error in ranks(2).run(diverge_here, folder, plant, at, timeout_s=120):
        assert f"it began in the gradient of model.layers.1.mlp.up_proj.weight, micro-batch 1, rank {at}" in error


MLP = "model.layers.1.mlp"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("plant", "words"),
    [
        # Column-wise: the other ranks of the axis have it from the sum in down_proj, the next module but two.
        (partial(nan_in, f"{MLP}.up_proj"), f"the output of {MLP}.up_proj"),
        # Row-wise: all ranks of the axis have it in the output of the same module.
        (partial(nan_in_input, f"{MLP}.down_proj"), f"what {MLP}.down_proj was given"),
        (partial(nan_in_weights, f"{MLP}.down_proj.weight"), f"the weights: {MLP}.down_proj.weight"),
        # The gradient of up_proj's input is summed over the axis.
        (partial(nan_in_backward, f"{MLP}.up_proj"), f"the gradient of {MLP}.up_proj.weight"),
    ],
    ids=["columns", "rows", "weights", "backward"],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_rank_of_a_tensor_axis_that_had_it_first_is_named(
    folder: Path, ranks: RankPools, world_size: int, plant: Any, words: str
) -> None:
    at = world_size - 1
    of_weights = plant.func is nan_in_weights
    named = 1 if of_weights else at  # whole parts are gathered on ranks 1 and 3
    for error in ranks(world_size).run(diverge_here, folder, plant, at, "parallel.tp=2", timeout_s=120):
        assert f"it began in {words}, micro-batch 1, rank {named}" in error


def spike_here(folder: Path, *overrides: str) -> tuple[list[int], str]:
    """Train for 14 steps, the eleventh with a loss ten times as high on the last of two ranks."""
    now, accumulate, take, unchanged = [0], trainer.Trainer._accumulate, trainer.Trainer.step, list[int]()

    def taken(self: trainer.Trainer, number: int) -> None:
        now[0] = number + 1
        before = snapshot(self)
        take(self, number)
        if same(before, snapshot(self)):
            unchanged.append(number + 1)

    def accumulated(self: trainer.Trainer, *args: Any) -> Tensor:
        nll = accumulate(self, *args)
        return nll * 10 if now[0] == 11 and self.ranks.rank == self.ranks.world_size - 1 else nll

    printed = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        mock.patch.object(trainer.Trainer, "step", taken),
        mock.patch.object(trainer.Trainer, "_accumulate", accumulated),
    ):
        trainer.run(load("tiny.toml", ["train.steps=14", "train.skip_spikes_above=1.5", *SHORT, *overrides]))
    return unchanged, printed.getvalue()


def test_a_loss_far_above_the_last_ones_is_not_trained_on(folder: Path, ranks: RankPools) -> None:
    results = ranks(2).run(spike_here, folder, timeout_s=120)
    assert [unchanged for unchanged, _ in results] == [[11], [11]]
    assert "1.5 times the median of the last steps: the step is skipped (1 so far)" in results[0][1]
    assert [row["skipped_steps"] for row in read("runs/tiny/metrics.jsonl")] == [0] * 10 + [1] * 4


def test_a_resumed_run_knows_the_losses_before_a_spike(folder: Path) -> None:
    whole, _ = spike_here(folder, "log.name=whole")
    spike_here(folder, "log.name=parts", "train.steps=10", "checkpoint.every=10")
    parts, printed = spike_here(folder, "log.name=parts")
    assert whole == parts == [11]
    assert "resuming" in printed
    weights = [Path(f"runs/{name}/final/model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]


BACK = ("train.steps=14", "train.skip_spikes_above=1.5", "train.roll_back=3", "checkpoint.every=4", *SHORT)
BAD = 10
"""The step, counted from 0, whose batch is bad in a run that draws all data in order."""


@contextmanager
def bad_batch(without: bool = False, late: bool = False) -> Iterator[None]:
    """Make the loss of the sequences that are drawn in step `BAD` ten times as high on the last rank.

    without: draw neither them nor those of the two steps before, but what comes after. late: read steps late."""
    draw, accumulate, is_bad = Batches.batch, trainer.Trainer._accumulate, [False]

    def drawn(self: Batches, step: int) -> Any:
        number = self._samples.first // self._global_batch + step
        is_bad[0] = number == BAD
        return draw(self, step + 3 if without and number >= 8 else step)

    def accumulated(self: trainer.Trainer, *args: Any) -> Tensor:
        nll = accumulate(self, *args)
        return nll * 10 if is_bad[0] and not without and self.ranks.rank == self.ranks.world_size - 1 else nll

    with (
        mock.patch.object(Batches, "batch", drawn),
        mock.patch.object(trainer.Trainer, "_accumulate", accumulated),
        mock.patch.object(trainer.Trainer, "reads_late", late),
    ):
        yield


def go_back_here(folder: Path, name: str, *overrides: str, without: bool = False, late: bool = False) -> str:
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed), bad_batch(without, late):
        trainer.run(load("tiny.toml", [*BACK, f"log.name={name}", *overrides]))
    return printed.getvalue()


def outcome(name: str) -> tuple[list[Any], bytes]:
    """Return what a run's steps found, and its weights."""
    rows = [
        [row[key] for key in ("step", "loss", "lr", "grad_norm", "tokens")]
        for row in read(f"runs/{name}/metrics.jsonl")
    ]
    return rows, Path(f"runs/{name}/final/model.safetensors").read_bytes()


def test_a_run_that_goes_back_is_one_that_never_had_the_data_in_between(folder: Path, ranks: RankPools) -> None:
    said, _ = ranks(2).run(go_back_here, folder, "back", timeout_s=120)
    ranks(2).run(partial(go_back_here, without=True), folder, "without", timeout_s=120)
    assert "step 11: loss " in said
    assert "the run goes back to step 8 and leaves out the 24 sequences since then (rollback 1)" in said
    assert outcome("back") == outcome("without")
    assert [row["rollbacks"] for row in read("runs/back/metrics.jsonl")] == [0] * 8 + [1] * 6
    [line] = read("runs/back/rollbacks.jsonl")
    assert (line["step"], line["to"], line["sequences"], line["in_a_row"]) == (11, 8, 24, 1)
    assert line["loss"] > 1.5 * read("runs/back/metrics.jsonl")[-1]["loss"]


@pytest.mark.parametrize("killed", ["before the save", "after the save"])
def test_a_run_that_is_killed_as_it_goes_back_resumes_without_the_data(
    folder: Path, killed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_back_here(folder, "whole")
    save = trainer.Trainer._save

    def kill(self: trainer.Trainer, how: Any, *args: Any, **kwargs: Any) -> None:
        overwrite = isinstance(how, partial)
        if not overwrite or killed == "after the save":
            save(self, how, *args, **kwargs)
        if overwrite:
            raise MemoryError("killed")

    monkeypatch.setattr(trainer.Trainer, "_save", kill)
    with pytest.raises(MemoryError, match="killed"):
        go_back_here(folder, "parts")
    monkeypatch.setattr(trainer.Trainer, "_save", save)
    said = go_back_here(folder, "parts")
    assert ("the run goes back" in said) == (killed == "before the save")
    assert outcome("parts") == outcome("whole")
    assert len(read("runs/parts/rollbacks.jsonl")) == 1


def test_a_run_goes_back_when_the_next_step_is_queued_already(folder: Path) -> None:
    go_back_here(folder, "at once")
    assert "goes back to step 8" in go_back_here(folder, "late", late=True)
    assert outcome("late") == outcome("at once")


def test_a_run_that_goes_back_again_and_again_ends(folder: Path) -> None:
    accumulate = trainer.Trainer._accumulate

    def accumulated(self: trainer.Trainer, *args: Any) -> Tensor:
        return accumulate(self, *args) * (math.nan if self.rollbacks.all or self.taken == 9 else 1)

    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        mock.patch.object(trainer.Trainer, "_accumulate", accumulated),
        pytest.raises(UserError, match=r"step 5: loss nan.*gone back 5 times in a row .* leave train\.roll_back=2 out"),
    ):
        trainer.run(load("tiny.toml", [*BACK, SKIP, "train.roll_back=2"]))
    back = [(one["step"], one["to"], one["loss"]) for one in read("runs/tiny/rollbacks.jsonl")]
    assert back == [(10, 8, None), (9, 4, None), *[(6, 4, None)] * 3]
    assert printed.getvalue().count("step 5: no checkpoint is 2 steps older, so the run does not go back") == 3
    newest = latest("runs/tiny")
    assert newest is not None
    assert newest.name == "step-000004"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.roll_back=3"], "roll_back = 3 has no effect without skip_spikes_above or on_nonfinite"),
        (["train.roll_back=3", SKIP], "train.roll_back = 3 goes back to a checkpoint: set checkpoint.every"),
        (["train.roll_back=6", SKIP, "checkpoint.every=4"], "the oldest may be 5 steps old"),
        (["train.roll_back=2", SKIP, "checkpoint.every=4", "checkpoint.keep_best=true"], "leave one of them out"),
    ],
)
def test_a_run_that_could_not_go_back_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("tiny.toml", overrides)


@pytest.mark.parametrize("value", ["1", "0.5", "-2"])
def test_a_limit_below_the_median_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="skip_spikes_above"):
        load("tiny.toml", [f"train.skip_spikes_above={value}"])


def test_losses_that_stay_high_are_trained_on_again() -> None:
    recent, skipped = RecentLosses(2.0), 0
    for step in range(1, 101):
        loss = 1.0 if step <= 40 else 2.5
        skipped += loss > recent.limit(step)
        recent.add(step, loss)
    assert skipped == 17
    for step in range(101, 140):
        recent.add(step, -1.0)
    assert recent.limit(140) == math.inf
