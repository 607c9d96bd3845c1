"""Dry runs of one rank of any world: the real engine on fake tensors, with collectives that only record their calls."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

from shardwise.engine.checked import CheckedEngine
from shardwise.engine.extensions.backward_steps import backward_steps
from shardwise.engine.extensions.secondary_shards import secondary_pieces
from shardwise.engine.lookup import require_engine
from shardwise.engine.setup.shard import shard
from shardwise.errors import PlanError, UserError, one_line
from shardwise.fsdp.parameter_group import ParameterState
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.fsdp.slots import Slot, storage_key
from shardwise.fsdp.unit import Unit
from shardwise.model_tools.activation_checkpointing import blocks_of, checkpoint_units
from shardwise.model_tools.classes import classes_named
from shardwise.optim.adamw_8bit import AdamW8bit
from shardwise.optim.adamw_bf16 import AdamWBF16
from shardwise.optim.adamw_pieces import AdamWInPieces
from shardwise.optim.in_backward import optimizer_in_backward
from shardwise.optim.whole_matrix import whole_matrix
from shardwise.plan.dry_run.fake_tensors import FakeTensors
from shardwise.plan.dry_run.forward import TrainingForward
from shardwise.plan.dry_run.gpu_kernels import device_kernels, full_sequences, package_kernels
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.model_axes import (
    Axes,
    cut_evenly_by,
    divide,
    experts_divided_by,
    model_axes,
    sliced_evenly_by,
)
from shardwise.plan.dry_run.recorder import Recorder
from shardwise.plan.dry_run.recording import Facts, Recording, StepPhase
from shardwise.plan.dry_run.smaller_units import smaller_units
from shardwise.plan.dry_run.traced_collectives import traced_mesh
from shardwise.plan.dry_run.traced_copies import TracedCopies
from shardwise.policy.settings import SHARD

_MAX_NORM = 1.0
_BATCH_SEQUENCE_WIDTH = 3
"""The number of dims of the hidden states that blocks of transformers are given."""


def record(builder: Callable[[], nn.Module], job: Job, rank: int = 0) -> Recording:
    """Record the events of one steady-state step of one rank, from the engine that will train, with all blocks.

    Nothing is computed and no process group is needed: this process plays one rank. The time and memory that this takes
    depend on the number of operations, not on sizes.

    Args:
        builder: builds the model; called on the meta device, under fake tensors.
        job: the run.
        rank: the rank whose step is recorded, below job.world_size. All ranks hold the same number of bytes.

    Raises:
        PlanError: the model cannot run on fake tensors, or gives no loss.
        ConfigError, LayoutError: as `sw.shard`.
    """
    if not 0 <= rank < job.world_size:
        raise PlanError(f"rank={rank}: must be a rank from 0 to {job.world_size - 1}")
    recorder = Recorder()
    with (
        _without_collection(),
        model_axes(job, rank, recorder) as axes,
        FakeTensors(allow_non_fake_inputs=True),
        device_kernels(job),
        _explained(),
    ):
        with recorder:
            model = _built(builder)
            run = _DryRun(model, job, rank, recorder, axes)
            with ExitStack() as stack:
                stack.enter_context(recorder.following(model, run.blocks))
                stack.enter_context(full_sequences())
                kernels = stack.enter_context(package_kernels(model, job))
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                run.step()
                recorder.start(_kinds(run.engine, model, run.optimizer))
                run.step()
            events = recorder.stop()
        facts = replace(run.facts(), package_kernels=", ".join(sorted(kernels)))
        del run, model
    return Recording(job, facts, events, rank)


def _built(builder: Callable[[], nn.Module]) -> nn.Module:
    """Build the model on the meta device. If its constructor reads values of tensors, it is run without fake tensors,
    and the real tensors that it creates are replaced by fake ones."""
    try:
        with torch.device("meta"):
            return builder()
    except (DynamicOutputShapeException, DataDependentOutputException):
        with unset_fake_temporarily(), torch.device("meta"):
            model = builder()
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.device.type != "meta":
                fake = torch.empty_like(tensor)
                held: Any = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                (module._parameters if isinstance(tensor, nn.Parameter) else module._buffers)[name] = held
    return model


class _DryRun:
    """A sharded model with its optimizer, ready for steps."""

    def __init__(self, model: nn.Module, job: Job, rank: int, recorder: Recorder, axes: Axes) -> None:
        self.job = job
        self.recorder = recorder
        self.feed = TrainingForward(model, job)
        divide(model, axes, recorder)
        units = _units(job, model)
        # Adapters of a plan have classes of their own, which the user's model does not have.
        self.smaller_units = smaller_units(model, units) if job.lora is None else ()
        arguments = {name: getattr(job, name) for name in SHARD}
        arguments |= {
            "mesh": traced_mesh(recorder, rank, job),
            "units": units,
            "offload": None,  # `plan.offload` adds its memory and its copies
            "align": AdamW8bit.BLOCK_NUMEL if job.optimizer == "adamw-8bit" else None,
        }
        self.model = shard(model, **arguments)
        self.engine = require_engine(model)
        checkpoint_units(model, job.activation_checkpointing, None if job.on_cpu else TracedCopies(recorder))
        self.optimizer = _optimizer(model, job.optimizer)
        if isinstance(self.optimizer, AdamWInPieces):
            _follow_pieces(self.optimizer, job, recorder)
        if job.optimizer_in_backward:
            optimizer_in_backward(model, self.optimizer)
        self.blocks = _blocks(self.engine)
        self.unused = 0
        _trace_engine(self.engine, recorder)

    def step(self) -> None:
        for _ in range(self.job.accumulation):
            self.micro_batch()
        self.update()

    def micro_batch(self) -> None:
        self.recorder.stage = StepPhase.FORWARD
        inputs = self.feed.inputs()
        with self.job.around_forward(self.engine):
            loss = self.feed.loss(self.model, inputs)
        if self.job.accumulation > 1:
            loss = loss / self.job.accumulation
        self.recorder.stage = StepPhase.BACKWARD
        loss.backward()

    def update(self) -> None:
        self.recorder.stage = StepPhase.OPTIMIZER
        if not self.job.optimizer_in_backward:
            trainable = (p for p in self.model.parameters() if p.requires_grad)
            self.unused = sum(p.numel() for p in trainable if p.grad is None)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_NORM, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def facts(self) -> Facts:
        """Return facts about the model. Call it after a step."""
        args, kwargs = self.recorder.first_block_inputs or ((), {})
        shape: tuple[int, ...] = next((tuple(arg.shape) for arg in args if isinstance(arg, Tensor)), ())
        units = self.engine.units
        parameters = list(self.model.parameters())
        secondary = secondary_pieces(self.engine)
        sequence = shape[1] if len(shape) == _BATCH_SEQUENCE_WIDTH else self.job.seq_len
        if sequence in {
            self.job.slice_len,
            -(-self.job.slice_len // self.job.tp),
        }:  # between blocks, a tensor axis cuts it
            sequence = self.job.seq_len
        return Facts(
            name=type(self.model).__name__,
            params=sum(p.numel() for p in parameters),
            trainable=sum(p.numel() for p in parameters if p.requires_grad),
            layers=len(self.blocks),
            width=shape[-1] if shape else 0,
            embeddings=_embeddings(self.model),
            sequence=sequence,
            unit_bytes={unit.fqn: unit.parameters.unsharded_bytes for unit in units},
            unit_reduce_bytes={unit.fqn: unit.gradients.reduce_bytes for unit in units},
            unit_shard_bytes={
                unit.fqn: unit.parameters.shard_bytes + sum(piece.nbytes for piece in secondary.get(unit, ()))
                for unit in units
            },
            unit_trained_bytes={unit.fqn: _trained_bytes(unit) for unit in units},
            kept_bytes=self._kept(args, kwargs),
            unused=self.unused,
            smaller_units=self.smaller_units,
            cut_evenly_by=cut_evenly_by(self.model),
            sliced_evenly_by=sliced_evenly_by(self.model),
            experts_divided_by=experts_divided_by(self.model, self.job),
        )

    def _kept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
        """Return `Facts.kept_bytes`. Empty if whole blocks recompute, which save only their inputs, compiled or not;
        and for blocks that communicate, whose saved tensors are taken to be those of eager mode."""
        whole = self.job.recomputation.every and not self.job.recomputation.selective
        if not self.job.compile or whole or not self.blocks or not (args or kwargs) or self.job.ranks_of_code > 1:
            return {}
        from shardwise.plan.dry_run.compilation import kept_bytes  # imports torch's compiler

        fqns = {id(unit.module): unit.fqn for unit in self.engine.units}
        dtype = next(group.dtypes.compute for unit in self.engine.units for group in unit.groups)
        nbytes = kept_bytes(self.blocks[0], args, kwargs, dtype, self.job.recomputation.selective)
        return {fqns[id(block)]: nbytes for block in self.blocks}


def _optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Build the optimizer as the trainer does: no weight decay for parameters of fewer than two dims."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: Any = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name == "muon":
        return whole_matrix(torch.optim.Muon, groups, adjust_lr_fn="match_rms_adamw", adamw={"fused": True})
    if name == "adamw-bf16":
        return AdamWBF16(groups)
    if name == "adamw-8bit":
        return AdamW8bit(groups)
    if name == "adamw-foreach":
        return torch.optim.AdamW(groups, foreach=True)
    if name in {"sgd", "momentum"}:
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9 if name == "momentum" else 0.0, fused=True)
    return (torch.optim.Adam if name == "adam" else torch.optim.AdamW)(groups, fused=True)


def _follow_pieces(optimizer: AdamWInPieces, job: Job, recorder: Recorder) -> None:
    """Let an optimizer of many kernels update as many elements at a time as the job's device would, and give its events
    the names of the parameters that it updates."""
    if not job.on_cpu:
        optimizer.cpu_chunk_numel = optimizer.chunk_numel
    if job.optimizer_in_backward:
        return
    update: Any = optimizer._update

    def named(parameter: Any, *args: Any) -> None:
        with recorder.within(parameter.fqn):
            update(parameter, *args)

    optimizer.__dict__["_update"] = named


def _blocks(engine: CheckedEngine) -> list[nn.Module]:
    """Return the blocks: the units of the most common class among units with submodules. Of an encoder and a decoder
    with as many blocks, the decoder's."""
    modules = [unit.module for unit in blocks_of(engine.units)]
    counts = Counter(type(module) for module in reversed(modules))
    return [module for module in modules if type(module) is counts.most_common(1)[0][0]]


def _embeddings(model: nn.Module) -> int:
    """Return the number of elements of embeddings that are not tied to another module."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    others = (module for module in model.modules() if not isinstance(module, nn.Embedding))
    elsewhere = {id(p) for module in others for p in module._parameters.values()}
    return sum({id(t.weight): t.weight.numel() for t in tables if id(t.weight) not in elsewhere}.values())


def _trace_engine(engine: CheckedEngine, recorder: Recorder) -> None:
    """Make units report to the recorder, and let it find the unit of a slot."""
    for unit in engine.units:
        _listen(unit, recorder)
    slots: dict[int, Slot[Unit]] = {}

    def unit_of(memory: Tensor) -> str | None:
        key = storage_key(memory)
        if key not in slots:
            slots.clear()
            for slot in (*engine.unsharder.all_slots, *engine.reducer.slots.all):
                slots[slot.key] = slot
        known = slots.get(key)
        return known.holder.fqn if known is not None and known.holder is not None else None

    recorder.find_units_with(unit_of)
    steps = backward_steps(engine)
    if steps is not None:
        steps.watch(partial(_watched, recorder))


def _trained_bytes(unit: Unit) -> int:
    return sum(group.shard_bytes for group in unit.groups if group.trainable)


def _listen(unit: Unit, recorder: Recorder) -> None:
    def moved(old: ParameterState, new: ParameterState) -> None:
        if new is ParameterState.IN_USE:
            recorder.mark("gather", unit.fqn)
        elif old is ParameterState.IN_USE:
            recorder.mark("release", unit.fqn)

    unit.parameters.observe(moved)
    unit.gradients.observe(lambda grad: recorder.gradient(grad, unit.fqn))


@contextmanager
def _watched(recorder: Recorder, unit: Unit) -> Iterator[None]:
    """Inside, the optimizer steps a unit in backward."""
    gradients = (group.gradients.flat for group in unit.groups)
    with recorder.stepping(unit.fqn, [flat for flat in gradients if flat is not None]):
        yield


def _units(job: Job, model: nn.Module) -> Any:
    """Return the units in the form that `shard` takes: classes of the model instead of their names."""
    names = job.units_by_name
    return job.units if names is None else classes_named(model, names, "units")


def _kinds(engine: CheckedEngine, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Return the kind of each storage that the engine, the optimizer or the model's buffers hold, as in `sw.memory`."""
    kinds: dict[int, str] = {}

    def put(kind: str, tensors: Iterator[Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is not None:
                kinds.setdefault(storage_key(tensor), kind)

    groups = [group for unit in engine.units for group in unit.groups]
    put("param_shards", (group.shard for group in groups))
    put("param_shards", (piece for pieces in secondary_pieces(engine).values() for piece in pieces))
    put("gathered_slots", (slot.buffer.bytes for slot in engine.unsharder.all_slots))
    put("grad_shards", (group.gradients.flat for group in groups))
    put("reduce_slots", (slot.buffer.bytes for slot in engine.reducer.slots.all))
    state = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
    put("optimizer", (value.local if isinstance(value, ShardedParameter) else value for value in state))
    put("buffers", iter(model.buffers()))
    return kinds


@contextmanager
def _without_collection() -> Iterator[None]:
    """Inside, storages are freed when their last reference is gone, not when the garbage collector runs. Existing
    objects are frozen, that is hidden from it: `sw.shard` searches all objects that the collector tracks."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    hides = not gc.get_freeze_count()
    if hides:
        gc.freeze()
    try:
        yield
    finally:
        if hides:
            gc.unfreeze()
        gc.enable()


@contextmanager
def _explained() -> Iterator[None]:
    """Turn errors of model code that cannot run on fake tensors into a PlanError of one line."""
    try:
        yield
    except UserError:
        raise
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise PlanError(
            f"the model's code depends on values of tensors ({one_line(error)}), which a dry run does not have; "
            "give it a path with fixed shapes, or plan a model without such code"
        ) from error
    except UnsupportedOperatorException as error:
        raise PlanError(f"the model cannot be run dry: {one_line(error)} has no shape function") from error
    except Exception as error:
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        raise PlanError(f"the model cannot be run dry: {one_line(error, with_type=True)}{notes}") from error
