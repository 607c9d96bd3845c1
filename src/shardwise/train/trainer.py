"""The training loop that every rank runs."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise import device_tools, hub
from shardwise.checkpoint.memory import NoRoomError
from shardwise.checkpoint.pretrained import blank_for
from shardwise.errors import ConfigError, NotOnPiecesError, UserError
from shardwise.hub import local, shown
from shardwise.model_tools.activation_checkpointing import checkpoint_units
from shardwise.model_tools.memory import replicated
from shardwise.modules.deferred_init.materialize import init_on_device, skip_init
from shardwise.modules.deferred_init.progress import log_to
from shardwise.plan.models.transformers_models import quiet_transformers
from shardwise.policy.kinds import KINDS
from shardwise.registry import registered
from shardwise.tables import format_bytes
from shardwise.train.answering import Answering
from shardwise.train.build import auto, compute_dtype, rank_consistency
from shardwise.train.build.lora import base_digest, start_heads
from shardwise.train.build.models import build_model
from shardwise.train.build.optimizer import align_of, build_optimizer, is_own, needs_whole_parameters, set_lr
from shardwise.train.build.sharding import compile_blocks, needs_loss_scaling, shard_model
from shardwise.train.config.schedule import LearningRateSchedule
from shardwise.train.config.schema import ANSWER_METRICS, Config
from shardwise.train.data.batches import Batches, EvaluationBatches, Share
from shardwise.train.data.data_checks import check_axes
from shardwise.train.data.micro_batch import MicroBatch
from shardwise.train.data.model_files import fetch, names_of, settled, with_names
from shardwise.train.data.order import Position
from shardwise.train.data.tokenizer import files_of, sources_in_words
from shardwise.train.document_mask import check_keeps_apart
from shardwise.train.loss import DeviceBatch, LossFunction, RecentLosses, StepWeights, evaluate
from shardwise.train.nonfinite import where_it_began
from shardwise.train.output.checkpoints import Checkpoints
from shardwise.train.output.console import Footprint, RunConsole, compared_with_ddp
from shardwise.train.output.export import Form, export
from shardwise.train.output.out_of_memory import explained
from shardwise.train.output.push import push_final
from shardwise.train.output.run_report import device_words, facts_of
from shardwise.train.process.interruption import Interrupted, Interruption
from shardwise.train.process.ranks import Ranks, started
from shardwise.train.report.page import leave_report
from shardwise.train.run.best import LOSS, Best
from shardwise.train.run.checkpoints import Resumed, why_finished
from shardwise.train.run.directory import RunDirectory
from shardwise.train.run.launches import EVALUATIONS, EXPORT, SAVES, STEPS, LaunchLog
from shardwise.train.run.metrics import MetricsWriter, StepMetrics, open_writer
from shardwise.train.run.preflight import check_supported
from shardwise.train.run.rollbacks import IN_A_ROW, Rollback, Rollbacks
from shardwise.train.run.run_lock import claimed
from shardwise.train.tasks.loading import load_task
from shardwise.train.tasks.objectives import NextToken
from shardwise.train.tasks.task import Task

_PLANS_FROM_S = 60.0
"""Seconds of steps from which on a run is compared with its plan, which takes a few."""
_IN_FORM = {
    Form.WHOLE: "",
    Form.MERGED: ", with the adapter merged in",
    Form.ADAPTER: ", the adapter for PEFT; `shardwise convert` merges it",
}


SEAM = "trainer"
"""Functions that are asked first for the class of a run's `Trainer`: (config) -> type[Trainer] | None."""


def run(config: Config) -> None:
    """Train as `config` says and write `runs/<name>/`. Every rank must call this, under torchrun or alone.

    For a finished run this only prints that it is finished, unless `train.steps` has grown: then training continues
    from the newest checkpoint. A run whose directory another launch is writing to is refused.

    Raises:
        UserError: something in the configuration cannot be done, or the loss or gradient norm stopped being finite.
            Every rank raises.
    """
    check_supported(config)
    with started(config.parallel.ranks_per_batch, config.parallel.tp) as ranks:
        config = config.for_ranks(ranks.world_size)
        directory = RunDirectory(config.run_directory)
        done = ranks.on_first(lambda: why_finished(directory, config))
        if not done:
            config = _with_files(config, ranks)  # before the live display, which progress bars would disturb
            check_axes(config.model, config.parallel.tp, config.parallel.cp)  # by now it is known which task it is
        with RunConsole(config.train.steps, config.log.every, quiet=not ranks.is_first) as console:
            if done:
                console.say(done)
                return
            with ExitStack() as claim:
                with ranks.together():
                    if ranks.is_first:
                        claim.enter_context(claimed(directory.path, console.say))
                kinds: list[type[Trainer]] = [kind for choose in registered(SEAM) if (kind := choose(config))]
                next(iter(kinds), Trainer)(config, ranks, console).run(directory)
            ranks.work(lambda: push_final(config, console.say) if ranks.is_first else None)


def _with_files(config: Config, ranks: Ranks) -> Config:
    """Return the settled configuration, after fetching what it names on a hub: rank 0 pins the names, and the first
    rank of each machine downloads, while the others wait without a timeout. Every rank must call this."""
    saved = Checkpoints(RunDirectory(config.run_directory).checkpoints, config.checkpoint, ranks)
    needs_weights = config.lora.r > 0 or not ranks.on_first(lambda: saved.has_any)
    ranks.work(lambda: settled(config) if ranks.is_first else None)
    given = ranks.all_gather_object(names_of(config))
    for rank, names in enumerate(given):
        rank_consistency.check_equal(given[0], names, rank)
    named = with_names(config, ranks.on_first(lambda: names_of(settled(config))))  # from the cache

    def task() -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            fetch(named, needs_weights, say=print if ranks.is_first else hub.say_nothing)

    ranks.work(task)
    return named


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A step whose kernels are queued on the device but may not have run yet. The fields are as in `StepMetrics`."""

    step: int
    start_s: float
    """Start of the step, in seconds of `time.perf_counter`."""
    lr: float
    tokens: int
    targets: int
    """Number of targets of the step over all ranks."""
    nll: Callable[[], float]
    """Waits for the device and returns this rank's negative log-likelihood, summed over its targets."""
    grad_norm: Callable[[], float | None]
    """Waits for the device and returns the gradient norm; None where backward has taken the step."""
    memory: Mapping[str, int | None]
    batches: Sequence[MicroBatch]
    """What this rank computed."""
    limit: float
    """The loss above which the step was not taken."""
    after: Position
    """Position of the data after it."""


class Trainer:
    """Everything that a run needs, built in this order: data, model, shards, optimizer. Every rank builds one."""

    batches_from = 0
    """Number of steps taken before those that `batches` are of."""
    copies = True
    """Whether there is room for copies in memory, as far as is known."""
    goes_back: Callable[[TakenStep, float, str], bool]
    """`_go_back` in this run, for a bad step, its loss, and why it is bad."""

    def __init__(self, config: Config, ranks: Ranks, console: RunConsole) -> None:
        """
        Args:
            config: already fitted to the number of ranks (`Config.for_ranks`).
        """
        self.launches = LaunchLog(console.say)
        quiet_transformers()
        self.config = config
        self.ranks = ranks
        self.console = console
        train = config.train
        assert train.global_batch is not None, "Config.for_ranks fills it in"
        self.task = self._read_data()
        self.share = Share(ranks.data_rank, ranks.data_ranks, train.micro_batch)
        self.batches = Batches(self.task.train, self.share, train.global_batch, config.data.seed)
        self.first_step = 0
        """Number of steps taken before this launch resumed the run."""
        self.taken = 0
        """Number of steps taken so far."""
        self.best = Best(train.best_by)
        self.evaluates_first = train.eval_every > 0
        """Whether to evaluate the model before the first step."""
        self.held_out = EvaluationBatches(self.task.held_out, self.share)
        self.saved = saved = Checkpoints.of(config, ranks, console.say)
        self.config, self.outlook = self._settled(saved)
        self.resumes = ranks.on_first(lambda: saved.has_any)
        """Whether the model's values will be loaded from a checkpoint."""
        console.say(sources_in_words(self.config, self.task.reads, self.resumes))
        if ranks.crosses_hosts:
            console.say(
                f"parallel.tp={ranks.per_slice}: ranks of one tensor-parallel group are on different hosts, for whose "
                f"network every layer waits; choose one that divides the {ranks.per_host} ranks of a host"
            )
        console.doing("building the model")
        torch.manual_seed(train.seed)  # the same on every rank: all build the same weights
        model = build_model(config.model, self.task.shape, config.lora)
        self.loss_function = LossFunction(model, self.task.objective if ranks.slices == 1 else NextToken(shifted=True))
        self.model = self._shard(model)
        checkpoint_units(self.model, train.activation_checkpointing)
        if train.compile:
            compile_blocks(self.model)
        self._seed_dropout()
        self.optimizer, self.scaler = self._optimizer()
        self.answering = None if config.eval.generate is None else Answering(self.config, self.task, self.model, ranks)
        """Evaluates by generation."""
        self.schedule = LearningRateSchedule.of(train)
        self.unread: deque[TakenStep] = deque()
        """Steps whose loss and gradient norm have not been read from the device yet, oldest first."""
        self.last_read_s = -math.inf
        """Time at which a step's results were last read, in seconds of `time.perf_counter`."""
        self.step_times_s: list[float] = []
        self.stopped = torch.zeros((), device=ranks.device)
        """1 from the step that ends the run on, so that steps queued before it is read are not taken either; else 0."""
        self.recent, self.rollbacks = RecentLosses(train.skip_spikes_above), Rollbacks(train.roll_back)
        self.skipped_steps = 0
        """Number of steps that left weights and optimizer state as they were, since the beginning of the run."""
        self.interruption = Interruption()

    def _read_data(self) -> Task:
        """Return the task with its data, and say what the data is. Every rank must call this."""
        self.console.doing("reading the data")
        with self.ranks.together():
            task = load_task(self.config)
        rank_consistency.check(self.config, task, self.ranks)
        self.console.unit = "tokens" if task.shape.vocab_size else "rows"
        for line in task.says:
            self.console.say(line)
        return task

    def _settled(self, saved: Checkpoints) -> tuple[Config, auto.Outlook | None]:
        """Return the configuration with the compute dtype and the strategy that it leaves open, and the plan that chose
        the strategy, if one did. Every rank must call this."""
        ranks, config = self.ranks, self.config
        config, words = ranks.on_first(lambda: compute_dtype.settle(config, ranks.device, saved.peek()))
        if words:
            self.console.say(words)
        config, outlook = auto.settle(config, self.task.shape, ranks)
        if outlook is not None:
            self.console.say(outlook.words)
        return config, outlook

    def _seed_dropout(self) -> None:
        """Seed this rank's draws: as those of the ranks that work on the same tokens, unlike all others'."""
        torch.manual_seed(self.config.train.seed + 1 + self.ranks.rank // self.ranks.per_slice)

    def _optimizer(self) -> tuple[torch.optim.Optimizer, sw.GradScaler]:
        """Return the optimizer, and the scaler of losses that it needs in fp16."""
        train = self.config.train
        optimizer = build_optimizer(self.model, train)
        if train.optimizer_in_backward:
            sw.optimizer_in_backward(self.model, optimizer, clip=train.clip_units or None)
        scales = needs_loss_scaling(self.config.parallel)
        return optimizer, sw.GradScaler(self.ranks.device.type, enabled=scales)

    def _shard(self, model: nn.Module) -> nn.Module:
        """Shard the model and load its weights, of which each rank reads only its own bytes. Parameters that the
        weights or a checkpoint will overwrite are not initialised. Every rank must call this."""
        self._check_saves()
        weights = None if self.config.model.pretrained is None else local(self.config.model.pretrained)
        saved_whole = self.resumes and not self.config.lora.r  # with LoRA, a checkpoint holds only the adapter
        with ExitStack() as stack:
            stack.enter_context(log_to(self.console.say))
            if self.config.model.init == "device":
                stack.enter_context(init_on_device())
            if saved_whole:
                stack.enter_context(skip_init([fqn for fqn, _ in model.named_parameters()]))
            elif weights is not None:
                with self.ranks.together():  # sharding is collective: if one rank lacks the directory, all must stop
                    stack.enter_context(blank_for(weights, model))
            config = self.config
            align = align_of(config.train)
            sharded = shard_model(model, config.parallel, self.ranks, config.offload, config.lora, align)
        if saved_whole or weights is None:
            return sharded
        report = sw.checkpoint.load_pretrained(weights, sharded)
        if self.config.lora.r and self.task.shape.labels:
            start_heads(sharded)
        name = shown(self.config.model.pretrained or "")
        staged_bytes = report.peak_staged_bytes
        held = f", and held at most {format_bytes(staged_bytes)} besides" if staged_bytes else " straight into"
        self.console.say(
            f"{name}: each rank read its own {format_bytes(report.read_bytes)} of weights{held} its shards"
        )
        return sharded

    def _check_saves(self) -> None:
        offload = self.config.offload
        elsewhere = next((key for key in ("params", "optimizer") if getattr(offload, key) == "cpu"), None)
        saves = self.config.checkpoint
        asked = next((key for key in ("asynchronous", "memory_every") if getattr(saves, key)), None)
        if elsewhere is not None and asked is not None and device_tools.has_memory(self.ranks.device):
            raise ConfigError(
                f'checkpoint.{asked} with offload.{elsewhere} = "cpu": the next step would overwrite what '
                f"is being saved; leave checkpoint.{asked} out"
            )

    def run(self, directory: RunDirectory) -> None:
        """Train, evaluate, export the model and print a summary. Every rank must call this.

        On a first signal, all ranks end after the same step and save it if checkpoints are on. A second signal ends
        this rank at once.

        Raises:
            UserError: the loss or the gradient norm is not finite and `train.on_nonfinite` is "stop".
            KeyboardInterrupt: the run was interrupted. If all ranks end together, this is an `Interrupted`.
        """
        train = self.config.train
        checkpoints = self._checkpoints()
        resumed = checkpoints.resume(self.model, self.optimizer)
        if self.resumes and resumed is None:
            raise ConfigError(
                f"the checkpoints in {directory.checkpoints} were removed while the run started: start it again"
            )
        self._go_on(resumed)
        self._check_documents()
        device_tools.reset_peak(self.ranks.device)  # the peak must not include memory used to build the model
        with self.interruption.heard(), checkpoints.finished(self.model), ExitStack() as stack:
            with self.ranks.together():
                writer = None
                if self.ranks.is_first:
                    opened = open_writer(directory, self.config, self.first_step, self.console.say)
                    writer = stack.enter_context(opened)
                    device = device_words(self.ranks.device)
                    self.launches.open(directory.launches, self.first_step, self.ranks.world_size, device)
            stack.callback(lambda: self.launches.write(self.taken))
            self.goes_back = partial(self._go_back, checkpoints, directory, writer)
            if self.evaluates_first:
                with self.launches.spending(EVALUATIONS):
                    self._evaluate(self.first_step, writer, directory)
                if self.interruption.agreed:
                    self._leave(checkpoints, self.first_step)
            while self.taken < train.steps and not self.best.ends(train.patience):
                self._explained_step(self.taken)
                self.taken += 1
                taken = self.taken
                last = taken == train.steps
                evaluates = last or (train.eval_every > 0 and taken % train.eval_every == 0)
                is_saved = checkpoints.is_due(taken) or checkpoints.is_copied(taken)
                read_all = evaluates or is_saved or self.interruption.agreed
                if self._report(writer, 1 if self.reads_late and not read_all else 0):
                    continue
                with self.launches.spending(EVALUATIONS):
                    evaluated = self._evaluate(taken, writer, directory) if evaluates else True
                stops = self.best.ends(train.patience)
                ends_here = (self.interruption.agreed and not last) or stops
                self._keep(checkpoints, writer, evaluated, ends_here)
                if self.interruption.agreed and not (last or stops):
                    self._leave(checkpoints, taken)
        self._end(checkpoints, directory)

    def _keep(self, checkpoints: Checkpoints, writer: MetricsWriter | None, evaluated: bool, ends_here: bool) -> None:
        """Save the state, or else copy it to memory, if either is due. Every rank must call this.

        A copy is made only where no save is: its `best` then names a checkpoint that is on disk, and a run that must
        end soon saves at once.

        Args:
            evaluated: as in `_save`.
            ends_here: whether this step is the launch's last one, but not the run's.
        """
        taken, is_best = self.taken, self.config.checkpoint.keep_best and self.best.step == self.taken
        saves = checkpoints.is_due(taken) or is_best or (ends_here and checkpoints.are_on)
        copies = checkpoints.is_copied(taken) or (ends_here and checkpoints.memory is not None)
        if not (saves or (copies and self.copies)):
            return
        if writer is not None:
            writer.flush()
        with self.launches.spending(SAVES):
            try:
                self._save(checkpoints.save if saves else checkpoints.copy, taken, evaluated)
            except NoRoomError as error:
                if not self.first_step:
                    raise
                self.copies = False  # it may go on with fewer hosts, of which each has more to hold
                self.console.say(f"{error}; the run goes on without more copies")
        self.launches.write(taken)

    def _end(self, checkpoints: Checkpoints, directory: RunDirectory) -> None:
        """Write `final/`, print the summary and write the report. Every rank must call this."""
        steps = self.config.train.steps
        if self.taken < steps:
            self.console.say(
                f"stopped after step {self.taken} of {steps}: {self.best.waited} evaluations in a row were not "
                f"better than the best, {self.best}"
            )
        memory = self.ranks.all_gather_object(dict(sw.memory(self.model).peak))
        footprint = compared_with_ddp(memory, replicated(self.model))
        self.console.doing(f"writing {directory.final}")
        with self.launches.spending(EXPORT):
            step = self._load_best(checkpoints)
            export(self.model, self.task.processor, directory, self.ranks, step, self.form)
        checkpoints.forget_copies()
        self._sum_up(directory, footprint)
        if self.ranks.is_first:
            self.launches.write(self.taken)
            leave_report(directory, lambda: facts_of(self.model, memory, self._planned()), self.console.say)

    def _planned(self) -> auto.Outlook | None:
        """Return the plan of this run; None for a run so short that a plan would take longer. Not collective."""
        if self.outlook is None and sum(self.step_times_s) > _PLANS_FROM_S:
            self.console.doing("planning the run, to compare")
            with suppress(UserError):
                return auto.outlook_of(self.config, self.task.shape, self.ranks)
        return self.outlook

    def _check_documents(self) -> None:
        """Check that the model keeps documents apart if it is to. Every rank must call this."""
        if self.config.data.document_mask:
            in_16_bits = self.config.parallel.param_dtype in {"bf16", "fp16"}
            rows, shape = self.config.train.micro_batch, self.task.shape
            check_keeps_apart(self.model, self.loss_function, self.ranks, rows, shape, in_16_bits)

    def _load_best(self, checkpoints: Checkpoints) -> int:
        """Load the weights of the best checkpoint if `final/` is written from it. Return the steps that the model has
        taken. Every rank must call this."""
        best = self.best.step
        if not self.config.checkpoint.keep_best or best is None or best == self.taken:
            return self.taken
        sw.checkpoint.load(checkpoints.path(best), self.model)
        self.console.say(f"the best evaluation found {self.best}: these are the weights that are written")
        return best

    def _checkpoints(self) -> Checkpoints:
        """Return the run's checkpoints. Each stores the processor beside the model, as `final/` does. Every rank must
        call this."""
        files: dict[str, bytes] = {}
        with self.ranks.together():
            if self.ranks.is_first and self.config.checkpoint.every:
                files = files_of(self.task.processor)
        base = self.ranks.on_first(lambda: base_digest(self.config))
        best = self.best if self.config.checkpoint.keep_best else None
        return replace(self.saved, files=files, base=base, best=best)

    def _go_on(self, resumed: Resumed | None) -> None:
        """Restore the position in the data, the step count and the loss scale from a loaded checkpoint, if any."""
        if resumed is None:
            return
        train = self.config.train
        with resumed.in_data(self.config.data):
            self._restore(resumed, resumed.position)
        self.first_step = resumed.step
        self.rollbacks.restore(resumed.extra.get("rollbacks", []))
        self.evaluates_first = resumed.extra.get("evaluated") is False
        if resumed.extra.get("ranks_per_slice", 1) != self.ranks.per_slice:
            self._seed_dropout()  # the random states that were loaded are those of other tokens
        for path in resumed.set_aside:
            self.console.say(f"a newer checkpoint is damaged and has been set aside: {path}")
        if resumed.step < train.steps:
            self.console.say(f"resuming from {resumed.path}: step {resumed.step + 1} is next")
        else:
            self.console.say(
                f"{resumed.path} has {resumed.step} steps and train.steps={train.steps}: nothing is left to train"
            )
        if resumed.changed:
            self.console.say(
                "settings changed since the checkpoint; the configuration's values are used: "
                f"{'; '.join(resumed.changed)}"
            )

    def _restore(self, loaded: Resumed, position: Position) -> None:
        """Take over a loaded checkpoint's step and what belongs to it, and go on at a position in the data."""
        train = self.config.train
        assert train.global_batch is not None
        self.batches = Batches(self.task.train, self.share, train.global_batch, self.config.data.seed, position)
        self.batches_from = self.taken = loaded.step
        stored = Best.of(train.best_by, loaded.extra.get("best"))
        for name in ("step", "value", "mark", "waited"):
            setattr(self.best, name, getattr(stored, name))
        if loaded.extra.get("scaler"):
            self.scaler.load_state_dict(loaded.extra["scaler"])
        self.skipped_steps = loaded.extra.get("skipped_steps", 0)
        self.recent.losses.clear()
        self.recent.losses.extend((number, loss) for number, loss in loaded.extra.get("recent_losses", ()))

    def _go_back(
        self,
        checkpoints: Checkpoints,
        directory: RunDirectory,
        writer: MetricsWriter | None,
        bad: TakenStep,
        loss: float,
        words: str,
    ) -> bool:
        """Go back to the newest checkpoint that is old enough, and on from there with the data after a bad step. Return
        False if there is none: then that step alone is to be left out. Every rank must call this.

        The checkpoint is saved again with the new position in the data, so that a run that is resumed from it leaves
        the same data out. A run that is killed before that meets the same step again, and goes back again.

        Raises:
            UserError: the run has gone back too often in a row. Every rank raises.
        """
        back, count = self.rollbacks.back, self.rollbacks.next_in_a_row(bad.step)
        if count > IN_A_ROW:
            raise UserError(
                f"{words}; the run has gone back {IN_A_ROW} times in a row and comes to such steps again: lower "
                f"train.lr ({self.config.train.lr:g}), look at the data, or leave train.roll_back={back} out to skip "
                "these steps one by one"
            )
        checkpoints.finish(self.model)
        to = checkpoints.back_to(bad.step - back)
        if to is None:
            self.console.say(f"step {bad.step}: no checkpoint is {back} steps older, so the run does not go back")
            return False
        self.unread.clear()
        self._restore(checkpoints.load(checkpoints.path(to), self.model, self.optimizer), bad.after)
        assert self.config.train.global_batch is not None
        left_out = (bad.step - to) * self.config.train.global_batch
        self.rollbacks.all.append(Rollback(bad.step, loss if math.isfinite(loss) else None, to, left_out, count))
        with self.ranks.together():
            if writer is not None:
                with writer.closed():
                    directory.go_back(to, self.rollbacks.to_json())
        self._save(partial(checkpoints.save, overwrite=True), to, evaluated=True)
        checkpoints.drop_copies()
        self.console.say(
            f"{words}: the run goes back to step {to} and leaves out the {left_out:,} sequences since then (rollback "
            f"{len(self.rollbacks.all)})"
        )
        return True

    def _save(self, save: Callable[..., None], step: int, evaluated: bool) -> None:
        """
        Args:
            save: `Checkpoints.save` or `Checkpoints.copy`.
            evaluated: False if the evaluation after this step was interrupted; a resumed run then begins with it.
        """
        position = self.batches.position(step - self.batches_from)
        extra = {
            "scaler": self.scaler.state_dict(),
            "evaluated": evaluated,
            "skipped_steps": self.skipped_steps,
            "recent_losses": [[*each] for each in self.recent.losses],
            "best": self.best.to_json(),
            "rollbacks": self.rollbacks.to_json(),
            "param_dtype": self.config.parallel.param_dtype,
            "ranks_per_slice": self.ranks.per_slice,
        }
        save(step, self.model, self.optimizer, position, extra)

    def _leave(self, checkpoints: Checkpoints, step: int) -> NoReturn:
        """End the interrupted run after `step` steps: finish the last save, then raise `Interrupted`. Every rank must
        call this."""
        checkpoints.finish(self.model)
        copies = None if checkpoints.memory is None or not self.copies else checkpoints.memory.path
        saved = checkpoints.path(step) if checkpoints.are_on else copies
        self.console.interrupted(step, self.first_step, saved)
        raise Interrupted

    @property
    def reads_late(self) -> bool:
        """Whether a step's results are read while the device works on the next step, so that the device never idles.
        On a CPU all work is done when the step returns, so there they are read at once."""
        return self.ranks.device.type != "cpu"

    def _report(self, writer: MetricsWriter | None, left: int) -> bool:
        """Read, write and print all unread steps except the last `left` ones. Return whether the run went back to a
        checkpoint instead, because a step is to be left out. Every rank must call this.

        Raises:
            UserError: the loss or gradient norm of a step is not finite and ends the run. Every rank raises.
        """
        while len(self.unread) > left:
            taken = self.unread.popleft()
            loss = self.ranks.sum([taken.nll() * self.ranks.counts])[0] / taken.targets
            grad_norm = taken.grad_norm()
            words = self._left_out(taken, loss, grad_norm)
            if words and self.rollbacks.back and self.goes_back(taken, loss, words):
                return True
            metrics = self._metrics(taken, loss, grad_norm, words)
            if writer is not None:
                writer.step(metrics)
            self.launches.keep_up(metrics.step)
            self.console.step(metrics)
        return False

    def _metrics(self, taken: TakenStep, loss: float, grad_norm: float | None, left_out: str | None) -> StepMetrics:
        """Return a step's metrics, and say if it was left out. `left_out`: as `_left_out` returns it."""
        self.recent.add(taken.step, loss)
        self.skipped_steps += left_out is not None
        if left_out:
            self.console.say(f"{left_out}: the step is skipped ({self.skipped_steps} so far)")
        now_s = time.perf_counter()
        elapsed_s = now_s - max(taken.start_s, self.last_read_s)  # it may have started before the previous one ended
        self.last_read_s = now_s
        self.step_times_s.append(elapsed_s)
        self.launches.add(STEPS, elapsed_s)
        return StepMetrics(
            step=taken.step,
            loss=loss,
            lr=taken.lr,
            grad_norm=grad_norm,
            tokens=taken.tokens,
            tokens_per_s=taken.tokens / elapsed_s,
            step_time_s=elapsed_s,
            memory=taken.memory,
            world_size=self.ranks.world_size,
            skipped_steps=self.skipped_steps,
            rollbacks=len(self.rollbacks.all),
        )

    def _explained_step(self, step: int) -> None:
        """Take a step; if it runs out of memory, raise an error that lists bytes by kind and ways out."""
        try:
            self.step(step)
        except torch.OutOfMemoryError as error:
            raise explained(error, step + 1, self.config, self.task.shape, self.model, self.ranks) from error

    def step(self, step: int) -> None:
        """Take one optimizer step on the whole global batch and append it to `unread`. Every rank must call this.

        Gradients are reduced during each micro-batch's backward, so no full-size gradients are held between
        micro-batches; `sw.no_sync` would use that memory to send fewer bytes.

        If the loss or the gradient norm is not finite, weights and optimizer state stay as they are. The learning rate
        and the data go on.

        Nothing here waits for the device, with two exceptions. An optimizer that cannot skip a step on the device waits
        to learn whether the loss and the gradient norm are finite; AdamW as one fused kernel can. And a model's forward
        may wait: transformers models check there whether a row holds packed sequences.

        Args:
            step: counted from 0.
        """
        start_s = time.perf_counter()
        own_slice = self.ranks.own_slice, self.ranks.slices
        batches = [batch.sliced(*own_slice) for batch in self.batches.batch(step - self.batches_from)]
        own = [self.ranks.counts * sum(getattr(batch, kind) for batch in batches) for kind in ("targets", "size")]
        targets, tokens = (int(count) for count in self.ranks.sum(own, np.int64))
        lr = self.schedule(step)
        set_lr(self.optimizer, lr)
        nll = self._accumulate(batches, StepWeights(targets, len(batches), self.ranks.token_ranks))
        self.scaler.unscale_(self.optimizer)
        grad_norm = self._clip()
        limit = self.recent.limit(step + 1)
        skips = self._not_finite(nll, grad_norm)
        if limit < math.inf:
            skips = torch.maximum(skips, self._is_above(nll, limit * targets))
        self._update(skips)
        self.optimizer.zero_grad()
        self.interruption.agreed = self.ranks.count(self.interruption.asked) > 0
        peak = sw.memory(self.model).peak
        self.unread.append(
            TakenStep(
                step=step + 1,
                start_s=start_s,
                lr=lr,
                tokens=tokens,
                targets=targets,
                nll=device_tools.fetched(nll),
                grad_norm=(lambda: None) if grad_norm is None else device_tools.fetched(grad_norm),
                memory={kind: peak.get(kind) for kind in KINDS},
                batches=batches,
                limit=limit,
                after=self.batches.position(step + 1 - self.batches_from),
            )
        )

    def _clip(self) -> Tensor | None:
        """Clip the gradients and return their norm before that (0-d, global). None where backward has taken the step,
        because then no global norm exists."""
        if self.config.train.optimizer_in_backward:
            return None
        return sw.clip_grad_norm_(self.model, self.config.train.clip or math.inf)

    def _not_finite(self, nll: Tensor, grad_norm: Tensor | None) -> Tensor:
        """Return 1 if the step must not be taken, because a rank's loss or the gradient norm is not finite or the run
        is about to end; else 0. Waits for no device. Every rank must call this.

        Args:
            nll: this rank's summed negative log-likelihood, 0-d.
            grad_norm: 0-d, global; None where backward has taken the step.

        Returns:
            0-d fp32 on this rank's device, equal on all ranks.
        """
        ends = torch.isfinite(nll).logical_not().float()
        if self.ranks.world_size > 1:
            dist.all_reduce(ends, dist.ReduceOp.MAX)
        skips = ends
        if grad_norm is not None:
            skips = torch.maximum(ends, torch.isfinite(grad_norm).logical_not().to(ends))
        if self.config.train.on_nonfinite == "stop":
            self.stopped = torch.maximum(self.stopped, ends if self.scaler.is_enabled() else skips)
            skips = torch.maximum(skips, self.stopped)
        return skips

    def _is_above(self, nll: Tensor, most: float) -> Tensor:
        """Return 1 (0-d fp32) if the sum of all ranks' negative log-likelihoods is above a limit, else 0. Every rank
        must call this."""
        total = nll * self.ranks.counts
        if self.ranks.world_size > 1:
            dist.all_reduce(total)
        return (total > most).float()

    def _update(self, skips: Tensor) -> None:
        """Take the optimizer's step unless `skips` (0-d fp32) is 1. Every rank must call this."""
        try:
            self._step_optimizer(skips)
        except NotOnPiecesError as error:
            if not is_own(self.config.train):
                raise
            raise ConfigError(needs_whole_parameters(self.config.train, error)) from error

    def _step_optimizer(self, skips: Tensor) -> None:
        optimizer = self.optimizer
        if self.scaler.is_enabled():
            self.scaler.note_found(optimizer, skips)
            self.scaler.step(optimizer)
            self.scaler.update()
        elif getattr(optimizer, "_step_supports_amp_scaling", False):  # by torch's protocol between scaler and kernel
            optimizer.found_inf = skips  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        elif self.config.train.optimizer_in_backward or not skips.item():
            optimizer.step()

    def _accumulate(self, batches: Sequence[MicroBatch], weights: StepWeights) -> Tensor:
        """Run forward and backward of every micro-batch; return this rank's summed negative log-likelihood (0-d
        fp32)."""
        nll = torch.zeros((), device=self.ranks.device)
        for batch in batches:
            loss = self.loss_function(self.model, DeviceBatch.of(batch, self.ranks.device))
            self.scaler.scale(weights.scale(loss)).backward()
            nll += loss.nll_sum.detach()
        return nll

    def _left_out(self, taken: TakenStep, loss: float, grad_norm: float | None) -> str | None:
        """Return in words why a step was not taken: its loss or gradient norm is not finite, or its loss is a spike;
        None if it was taken. Raise UserError if that ends the run, as `train.on_nonfinite` says. Both numbers are
        global, so all ranks decide alike.

        With a loss scaler, an infinite gradient norm ends no run: the scaler skips such steps while it looks for its
        scale, for which there are no words (""). Where backward takes the steps, the step has been taken by now.
        """
        norm_is_finite = grad_norm is None or math.isfinite(grad_norm)
        if math.isfinite(loss) and norm_is_finite:
            if loss <= taken.limit:
                return None
            return (
                f"step {taken.step}: loss {loss:.4f} is above {taken.limit:.4f}, {self.recent.ratio:g} times the "
                "median of the last steps"
            )
        train, step = self.config.train, taken.step
        found = f"step {step}: loss {loss:g}" + ("" if grad_norm is None else f", gradient norm {grad_norm:g}")
        searching = self.scaler.is_enabled() and math.isfinite(loss)
        if train.on_nonfinite == "stop" and not searching:
            kept = "" if train.optimizer_in_backward else f"; weights and optimizer state are those of step {step - 1}"
            skip = "" if train.optimizer_in_backward else ', or skip such steps with train.on_nonfinite = "skip"'
            where = "" if train.optimizer_in_backward else f"; {self._where_it_began(taken)}"
            raise UserError(
                f"{found}: training has diverged{where}; lower train.lr ({train.lr:g}), raise train.warmup_steps or "
                f"set train.clip{skip}{kept}"
            )
        return "" if searching else found

    def _where_it_began(self, taken: TakenStep) -> str:
        """Compute a step that was not taken again, and return where its numbers stop being finite. Every rank must call
        this."""
        self.console.doing("looking for the first number that is not finite")
        weights = StepWeights(taken.targets, len(taken.batches), self.ranks.token_ranks)
        runs = [partial(self._accumulate, [batch], weights) for batch in taken.batches]
        found = where_it_began(self.model, runs, self.ranks)
        self.optimizer.zero_grad()
        return found

    def _evaluate(self, step: int, writer: MetricsWriter | None, directory: RunDirectory) -> bool:
        """Evaluate on the held-out rows and by generation, as far as there are any. Returns False if the evaluation was
        interrupted."""
        found: dict[str, float] = {}
        if self.held_out:
            self.console.doing(f"evaluating on {len(self.task.held_out):,} rows")
            of_rows = evaluate(self.model, self.loss_function, self.held_out, self.ranks, self.interruption)
            if of_rows is None:
                return self._evaluates_no_more(step)
            self.console.evaluated(step, of_rows.loss, of_rows.metrics)
            found = {LOSS: of_rows.loss, self.task.objective.counts: of_rows.targets, **of_rows.metrics}
        if self.answering is not None and self.answering.is_due(step):
            self.console.doing(f"answering {len(self.answering):,} prompts")
            answers = self.answering.answer(self.interruption)
            if answers is None:
                return self._evaluates_no_more(step)
            file = self.ranks.on_first(lambda: directory.write_answers(step, answers.rows))
            self.console.answered(step, len(answers.rows), answers.metrics, file)
            found |= {"answers": len(answers.rows), **answers.metrics}
        if step and (self.best.by in found or (self.held_out and self.best.by not in ANSWER_METRICS)):
            self.best.add(step, found, self.config.train.min_delta)
        if writer is not None and found:
            writer.evaluation(step, found)
        return True

    def _evaluates_no_more(self, step: int) -> bool:
        self.console.say(f"step {step}: the evaluation was interrupted")
        return False

    @property
    def form(self) -> Form:
        """Form in which `final/` is written. An adapter is written alone only if its base are pretrained weights, which
        others have too, and the base has the head; otherwise it is merged into the base."""
        if not self.config.lora.r:
            return Form.WHOLE
        is_complete = self.config.model.pretrained is not None and not self.task.shape.labels
        return Form.ADAPTER if is_complete else Form.MERGED

    def _sum_up(self, directory: RunDirectory, footprint: Footprint) -> None:
        """Print a sample and the summary table. Every rank must call this, because generating is collective."""
        sample = None if self.task.sample is None else self.task.sample(self.model, self.ranks)
        if sample is not None:
            self.console.sample(sample)
        step_time_s = statistics.median(self.step_times_s) if self.step_times_s else None  # no steps were left to take
        self.console.summary(self.config.parallel.strategy, self.ranks.world_size, footprint, step_time_s)
        memory = sw.memory(self.model)
        self.console.offloaded("in host memory", memory.host)
        self.console.offloaded("on disk", memory.disk)
        if self.outlook is not None and step_time_s is not None:
            self.console.beside_plan(self.outlook, memory.peak, step_time_s)
        self.console.say(f"done: {directory.final}{_IN_FORM[self.form]}")
