"""The training loop on JAX: one process has all devices of its machine."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import shardwise.jax as swj
from shardwise.errors import UserError
from shardwise.fsdp.strategy import dtype_name
from shardwise.hub import local
from shardwise.jax import models
from shardwise.jax.batches import put_batch
from shardwise.jax.checkpoint.leaves import random_streams
from shardwise.jax.checkpoint.saving import names_of
from shardwise.jax.trees import parts_of
from shardwise.policy.kinds import KINDS
from shardwise.tables import format_bytes
from shardwise.train.config.schedule import LearningRateSchedule
from shardwise.train.config.schema import Config
from shardwise.train.config.shared_keys import shared_keys
from shardwise.train.data.batches import Batches, EvaluationBatches, Share, load_datasets
from shardwise.train.data.micro_batch import MicroBatch
from shardwise.train.data.model_files import fetch
from shardwise.train.data.tokenizer import Tokenizer, files_of, in_words, sources_in_words
from shardwise.train.on_jax.checkpoints import Checkpoints
from shardwise.train.on_jax.model import builder_of, bytes_per_device, bytes_whole, check_logits, loss_of, optimizer_of
from shardwise.train.on_jax.processes import RunProcesses, axes_of, started
from shardwise.train.on_jax.supported import REMAT, check_supported
from shardwise.train.output.console import RunConsole
from shardwise.train.output.push import push_final
from shardwise.train.process.interruption import Interrupted, Interruption
from shardwise.train.report.page import leave_report
from shardwise.train.run import preflight
from shardwise.train.run.checkpoints import Resumed, why_finished
from shardwise.train.run.directory import RunDirectory
from shardwise.train.run.facts import Facts
from shardwise.train.run.launches import EVALUATIONS, EXPORT, SAVES, STEPS, LaunchLog
from shardwise.train.run.metrics import MetricsWriter, StepMetrics, open_writer
from shardwise.train.run.run_lock import claimed
from shardwise.train.run.sample import TEMPERATURE, Sample, lengths


def run(config: Config) -> None:
    """Train as `config` says and write `runs/<name>/`. Every process must call this.

    Raises UserError as the torch engine's `run` does, and ConfigError for settings that have no counterpart in JAX.
    """
    check_supported(config)
    processes, devices = started(config)
    ranks = config.parallel.model_copy(update={"ranks": len(devices)})
    with processes.together("the run cannot start"):
        config = preflight.check(config.model_copy(update={"parallel": ranks}), 0)
    processes.work(lambda: fetch(config, weights=True, say=print if processes.is_first else lambda line: None))
    processes.agree(str(shared_keys(config)), "processes have different configurations: give all of them the same one")
    directory = RunDirectory(config.run_directory)
    with RunConsole(config.train.steps, config.log.every, quiet=not processes.is_first) as console:
        done = processes.on_first(lambda: why_finished(directory, config))
        if done:
            console.say(done)
            return
        console.say(
            f"starting {len(devices)} {devices[0].platform} devices, {config.train.steps} steps: {directory.path}"
        )
        with ExitStack() as claim:
            with processes.together("the run cannot start"):
                if processes.is_first:
                    claim.enter_context(claimed(directory.path, console.say))
            Trainer(config, processes, devices, console).run(directory)
            processes.work(lambda: push_final(config, console.say) if processes.is_first else None)


class TakenStep(NamedTuple):
    """A step that is queued on the devices but may not have run yet."""

    step: int
    start_s: float
    """Start of the step, in seconds of `time.perf_counter`."""
    metrics: Mapping[str, jax.Array]


class Trainer:
    """Everything that a run needs, built in this order: data, mesh, model, optimizer. Every process builds one."""

    def __init__(self, config: Config, processes: RunProcesses, devices: list[Any], console: RunConsole) -> None:
        """config: already fitted to the number of devices (`Config.for_ranks`)."""
        self.launches = LaunchLog(console.say)
        self.config, self.processes, self.console = config, processes, console
        train = config.train
        assert train.global_batch is not None, "Config.for_ranks fills it in"
        console.doing("reading the data")
        with processes.together("the data cannot be read"):
            self.data = load_datasets(config.data)
        processes.agree(str(self.data), "processes read different data: give all of them the same files")
        self.global_batch = train.global_batch
        self.devices = devices
        own_rows = train.micro_batch * len(devices) // processes.world_size
        self.share = Share(processes.rank, processes.world_size, own_rows)
        self.batches = Batches(self.data.train, self.share, self.global_batch, config.data.seed)
        self.held_out = EvaluationBatches(self.data.held_out, self.share)
        self.first_step = self.taken = 0
        self.evaluates_first = train.eval_every > 0

        dp_shard, dp_replicate = axes_of(config, len(devices))
        self.mesh = swj.mesh(dp_shard, dp_replicate=dp_replicate, devices=devices)
        processes.connect(self.mesh)
        with processes.together("the model cannot be built"):
            self.init = swj.init(builder_of(config, self.data.tokenizer), self.mesh)
            abstract = self.init.abstract()
            check_logits(abstract, config, self.data.tokenizer.vocab_size)
            self.names = names_of(abstract)
            files = _files_of(self.data.tokenizer, console)
        self.checkpoints = Checkpoints(
            RunDirectory(config.run_directory).checkpoints, config.checkpoint, processes, names=self.names, files=files
        )
        saved = processes.on_first(self.checkpoints.peek)
        self.compute_dtype = self._compute_dtype(saved)
        dtype = (
            None if self.compute_dtype == config.model.dtype else dtype_name(self.compute_dtype, "parallel.param_dtype")
        )
        self.step = swj.train_step(
            loss_of,
            optimizer_of(train, self.names, parts_of(abstract).params),
            self.mesh,
            accumulation=self.global_batch // (train.micro_batch * len(devices)),
            clip=train.clip or None,
            compute_dtype=dtype,
            remat=REMAT[train.activation_checkpointing],
            seed=train.seed,
        )
        self.like = self.step.init(abstract)
        self.schedule = LearningRateSchedule.of(train)
        self.unread: deque[TakenStep] = deque()
        self.last_read_s = -math.inf
        self.step_times_s: list[float] = []
        self.interruption = Interruption()
        self.memory: dict[str, int | None] = {}
        self._evaluated_nll = jax.jit(partial(_nll, dtype))
        resumes = processes.on_first(lambda: self.checkpoints.has_any)
        console.say(sources_in_words(config, in_words(config.data.tokenizer, self.data.tokenizer), resumes))

    def _compute_dtype(self, saved: Mapping[str, Any] | None) -> str:
        """Return "fp32" or "bf16": the configuration's dtype, else the checkpoint's, else the one that suits the
        devices."""
        named = self.config.parallel.param_dtype or (saved or {}).get("param_dtype")
        if named is not None:
            return str(named)
        on_accelerators = self.devices[0].platform != "cpu"
        return "bf16" if on_accelerators and self.config.model.dtype == "fp32" else self.config.model.dtype

    def run(self, directory: RunDirectory) -> None:
        """Train, evaluate, export the model and print a summary. Every process must call this.

        On a signal, all processes end after the same step and save it if checkpoints are on.

        Raises UserError if the loss or the gradient norm is not finite, KeyboardInterrupt if the run was interrupted.
        """
        train = self.config.train
        state = self._first_state()
        self.memory = dict.fromkeys(KINDS) | {
            "param_shards": bytes_per_device(state.params),
            "optimizer": bytes_per_device(state.opt_state),
        }
        footprint = (bytes_per_device((state.params, state.opt_state)), bytes_whole((state.params, state.opt_state)))
        with self.interruption.heard(), self.checkpoints.finished(), ExitStack() as stack:
            with self.processes.together("the run directory cannot be written"):
                writer = None
                if self.processes.is_first:
                    opened = open_writer(directory, self.config, self.first_step, self.console.say)
                    writer = stack.enter_context(opened)
                    kind = self.devices[0].device_kind
                    self.launches.open(directory.launches, self.first_step, len(self.devices), kind)
            stack.callback(lambda: self.launches.write(self.taken))
            if self.evaluates_first and not self._evaluate(self.first_step, state, writer):
                self._leave(self.first_step)
            for step in range(self.first_step, train.steps):
                state = self._take(step, state)
                self.taken = step + 1
                state = self._after(self.taken, state, writer)
        with self.launches.spending(EXPORT):
            self._end(directory, state, footprint)
        if self.processes.is_first:
            self.launches.write(self.taken)
            leave_report(directory, Facts, self.console.say)

    def _first_state(self) -> Any:
        """Return the state that training begins with: from a checkpoint, from pretrained weights, or initialised at
        random. It is sharded from the beginning."""
        train = self.config.train
        self.console.doing("building the model")
        found = self.checkpoints.resume(self.like)
        if found is not None:
            state, resumed = found
            self._go_on(resumed)
            return state
        weights = self.config.model.pretrained
        if weights is None:
            return self.step.init(self.init(jax.random.key(train.seed)))
        like = self.init.abstract()
        if random_streams(like):  # files of weights contain no random streams
            like = self.init(jax.random.key(train.seed))
        return self.step.init(swj.checkpoint.load_pretrained(local(weights), like, self.names))

    def _go_on(self, resumed: Resumed) -> None:
        data = self.config.data
        with resumed.in_data(data):
            self.batches = Batches(self.data.train, self.share, self.global_batch, data.seed, resumed.position)
        self.first_step = self.taken = resumed.step
        self.evaluates_first = resumed.extra.get("evaluated") is False
        for path in resumed.set_aside:
            self.console.say(f"a newer checkpoint is damaged and has been set aside: {path}")
        self.console.say(f"resuming from {resumed.path}: step {resumed.step + 1} is next")

    def _take(self, step: int, state: Any) -> Any:
        """Take one optimizer step on the whole global batch and append it to `unread`. Returns the new state."""
        start_s = time.perf_counter()
        state, metrics = self.step(state, _arrays(self.batches.batch(step - self.first_step)))
        self.unread.append(TakenStep(step + 1, start_s, metrics))
        self.interruption.agreed = self.processes.any(self.interruption.asked)
        return state

    def _after(self, taken: int, state: Any, writer: MetricsWriter | None) -> Any:
        """Do what is due after `taken` steps: report, evaluate, save a checkpoint, end an interrupted run."""
        train, last = self.config.train, taken == self.config.train.steps
        evaluates = last or (train.eval_every > 0 and taken % train.eval_every == 0)
        saves = self.checkpoints.is_due(taken) or (self.interruption.agreed and self.checkpoints.are_on and not last)
        late = self.devices[0].platform != "cpu" and not (evaluates or saves or self.interruption.agreed)
        self._report(writer, 1 if late else 0)
        with self.launches.spending(EVALUATIONS):
            evaluated = self._evaluate(taken, state, writer) if evaluates else True
        if saves:
            if writer is not None:
                writer.flush()
            position = self.batches.position(taken - self.first_step)
            extra = {"evaluated": evaluated, "param_dtype": self.compute_dtype}
            with self.launches.spending(SAVES):
                self.checkpoints.save(taken, state, position, extra)
            self.launches.write(taken)
        if self.interruption.agreed and not last:
            self._leave(taken)
        return state

    def _report(self, writer: MetricsWriter | None, left: int) -> None:
        """Read, write and print all unread steps except the last `left` ones."""
        while len(self.unread) > left:
            metrics = self._read(self.unread.popleft())
            if writer is not None:
                writer.step(metrics)
            self.launches.keep_up(metrics.step)
            self.console.step(metrics)

    def _read(self, taken: TakenStep) -> StepMetrics:
        """Wait for a step's results and return its metrics. Raises UserError if loss or gradient norm is not finite."""
        loss, grad_norm = float(taken.metrics["loss"]), float(taken.metrics["grad_norm"])
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise UserError(
                f"step {taken.step}: loss {loss:g}, gradient norm {grad_norm:g}: training has diverged; "
                f"lower train.lr ({self.config.train.lr:g}), raise train.warmup_steps or set train.clip"
            )
        now_s = time.perf_counter()
        elapsed_s = now_s - max(taken.start_s, self.last_read_s)
        self.last_read_s = now_s
        self.step_times_s.append(elapsed_s)
        self.launches.add(STEPS, elapsed_s)
        tokens = self.global_batch * self.config.data.seq_len
        return StepMetrics(
            step=taken.step,
            loss=loss,
            lr=self.schedule(taken.step - 1),
            grad_norm=grad_norm,
            tokens=tokens,
            tokens_per_s=tokens / elapsed_s,
            step_time_s=elapsed_s,
            memory=self.memory,
            world_size=len(self.devices),
        )

    def _evaluate(self, step: int, state: Any, writer: MetricsWriter | None) -> bool:
        """Evaluate on the held-out rows, if there are any. Returns False if the evaluation was interrupted."""
        if not self.held_out:
            return True
        self.console.doing(f"evaluating on {len(self.data.held_out):,} rows")
        nll = tokens = 0.0
        for batch in self.held_out:
            with jax.set_mesh(self.mesh):
                found = self._evaluated_nll(state, put_batch(_arrays((batch,)), self.mesh))
            nll, tokens = nll + float(found[0]), tokens + float(found[1])
            self.interruption.agreed = self.processes.any(self.interruption.asked)
            if self.interruption.agreed:
                self.console.say(f"step {step}: the evaluation was interrupted")
                return False
        self.console.evaluated(step, nll / tokens)
        if writer is not None:
            writer.evaluation(step, {"loss": nll / tokens, "tokens": self.data.held_out.target_tokens})
        return True

    def _leave(self, step: int) -> NoReturn:
        """End the interrupted run after `step` steps: finish the last save, then raise `Interrupted`."""
        self.checkpoints.finish()
        saved = self.checkpoints.path(step) if self.checkpoints.are_on else None
        self.console.interrupted(step, self.first_step, saved)
        raise Interrupted

    def _end(self, directory: RunDirectory, state: Any, footprint: tuple[int, int]) -> None:
        """Write `final/`, print a sample, and print what each device held."""
        self.console.doing(f"writing {directory.final}")
        model = state.model()
        taken = max(self.first_step, self.config.train.steps)
        swj.checkpoint.save(
            directory.final, model, taken, names=self.names, files=self.checkpoints.files, overwrite=True
        )
        if hasattr(model, "empty_cache"):
            self.console.sample(self._sample(model))
        own, whole = (format_bytes(size) for size in footprint)
        took = f"; median step {statistics.median(self.step_times_s):.3f} s, measured" if self.step_times_s else ""
        self.console.say(
            f"{len(self.devices)} devices: each holds {own} of parameters and optimizer state; with data "
            f"parallelism alone, {whole}{took}"
        )
        self.console.say(f"done: {directory.final}")

    def _sample(self, model: Any) -> Sample:
        rows = self.data.sample
        prompt_tokens, new_tokens = lengths(rows.is_target[0])
        with jax.set_mesh(self.mesh):
            ids = models.generate(
                model,
                rows.ids[:1, :prompt_tokens],
                new_tokens,
                temperature=TEMPERATURE,
                end_id=self.data.tokenizer.end_id,
                key=jax.random.key(self.config.train.seed),
            )
        return Sample.of(ids[0].tolist(), prompt_tokens, self.data.tokenizer)


def _nll(dtype: str | None, state: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Return the summed loss of a batch and the number of its targets, computed in the dtype of a training step."""

    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(dtype) if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    model = replace(state, params=jax.tree.map(cast, state.params)).model()
    if isinstance(model, nnx.Module):
        model.eval()
    return loss_of(model, batch, None)


def _arrays(batches: tuple[MicroBatch, ...]) -> dict[str, np.ndarray[Any, Any]]:
    """Return this process's rows of a step as the arrays that `loss_of` takes."""
    parts = [(batch.inputs["input_ids"], batch.labels) for batch in batches]
    ids, labels = (np.concatenate(arrays).astype(np.int32) for arrays in zip(*parts, strict=True))
    return {"ids": ids, "labels": labels}


def _files_of(tokenizer: Tokenizer, console: RunConsole) -> dict[str, bytes]:
    """Return the tokenizer's files, to store beside the model; none, with a note, if transformers, which writes them,
    is not installed."""
    try:
        return files_of(tokenizer)
    except ModuleNotFoundError as error:
        console.say(f"{error.name} is not installed, so the tokenizer is not saved beside the model")
        return {}
