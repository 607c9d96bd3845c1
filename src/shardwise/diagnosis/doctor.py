"""`doctor`: looks at machines, links, a model and each strategy, and says what is wrong."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise import accelerators, device_tools
from shardwise.comm.together import OverGroups
from shardwise.diagnosis.environment import check_machines
from shardwise.diagnosis.links import check_links
from shardwise.diagnosis.result import Checks, Diagnosis, attempt
from shardwise.diagnosis.strategies import check_strategy
from shardwise.diagnosis.subject import (
    Loss,
    Step,
    Subject,
    default_loss,
    default_optimizer,
    default_targets,
    random_states,
    restore,
    step_of,
)
from shardwise.diagnosis.unsharded import refer
from shardwise.diagnosis.whole_model import check_data, check_model, check_runs, check_token_weights, whole_model
from shardwise.engine.setup.shard import shard as shard_model
from shardwise.errors import UsageError
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.torch_collectives import collectives_for
from shardwise.policy.strategies import strategy_of
from shardwise.tables import format_bytes
from shardwise.together import Together

_COPIES = 12
"""Bytes that a diagnosis takes on each rank, over those of the parameters: values, gradients and AdamW's state, of the
whole model and of the sharded one, and copies to compare with."""


def doctor(  # noqa: PLR0913 - one for each thing that a user may have
    build_model: Callable[[], nn.Module] | None = None,
    batch_fn: Callable[[int, int], Any] | None = None,
    *,
    loss_fn: Loss | None = None,
    build_optimizer: Callable[[nn.Module], Optimizer] = default_optimizer,
    step: Step | None = None,
    shard: Callable[[nn.Module, str], nn.Module] = shard_model,
    strategies: Sequence[str] = ("full_shard",),
    targets: Callable[[Any], int | None] = default_targets,
    steps: int = 3,
    expected: Sequence[str] = (),
    directory: str | Path | None = None,
    ranks_per_batch: int = 1,
    say: Callable[[str], object] | None = None,
) -> Diagnosis:
    """Find out whether these machines are fit to train, and whether this model trains sharded as it does whole. Every
    rank must call this; a process alone may, without a process group.

    It trains the model for a few steps twice, whole on each rank and sharded, so the model must fit on one rank, about
    twelve times: give a small one of the same kind (fewer layers). Nothing of the caller's changes, and random states
    are restored.

    Args:
        build_model: returns a new model, on any device, the meta device included. None: only look at the machines.
        batch_fn: (rank, step) -> the batch of any rank at any step, from 0 on; called in every process for itself and
            for another rank, to compare. What `loss_fn` or `step` takes; tensors in it are moved to the device.
        loss_fn: (model, batch) -> 0-d loss, of which `backward` is called. Default: the model is called with the batch
            (a mapping as keywords, a list or tuple as arguments), and returns the loss or has it as `.loss`.
        build_optimizer: (model) -> a torch optimizer; called for the whole model and for the sharded one.
        step: (model, optimizer, batch) -> anything: a training step of yours with all that it does, from the forward to
            `optimizer.step()`, instead of `loss_fn`. It should return the loss, or a mapping with "loss" and, if it
            clips, "grad_norm". It is also called with the model that is not sharded, whose gradients are averaged over
            ranks at the end of each backward.
        shard: (model, strategy) -> the sharded model; for arguments of `sw.shard` beside the strategy.
        strategies: those to compare with the whole model, by their names.
        targets: (batch) -> how many targets its loss is a mean over, or None. Default: labels other than -100.
        steps: how many to compare; a checkpoint then takes one more.
        expected: findings that are meant to be so: patterns of "CHECK:FQN", as the messages say.
        directory: on a file system that all ranks see, for a checkpoint that is removed again. Default: a temporary one
            if all ranks are on one host.
        ranks_per_batch: how many consecutive ranks work on the same batch, where `shard` cuts layers (tp) or sequences
            (cp). `batch_fn` gives them the same batch, and a step its loss over all ranks.
        say: called on rank 0 with what is being done, in a few words.

    Returns:
        The checks, the same on every rank. A model or a step that raises is a failed check.

    Raises:
        UsageError: only one of `build_model` and `batch_fn` is given, or both `loss_fn` and `step`; `steps` is less
            than 1; `directory` does not exist. ConfigError: a strategy is unknown.
    """
    if (build_model is None) != (batch_fn is None):
        raise UsageError("sw.doctor: give both build_model and batch_fn, or neither to look only at the machines")
    if step is not None and loss_fn is not None:
        raise UsageError("sw.doctor: give loss_fn or step, not both: a step computes its loss itself")
    if steps < 1:
        raise UsageError(f"sw.doctor: steps={steps} must be at least 1")
    if directory is not None and not Path(directory).is_dir():
        raise UsageError(
            f"sw.doctor: directory={str(directory)!r} is no directory here: make it, where all ranks see it"
        )
    size = dist.get_world_size() if dist.is_initialized() else 1
    if ranks_per_batch < 1 or size % ranks_per_batch:
        raise UsageError(f"sw.doctor: ranks_per_batch={ranks_per_batch} must divide the {size} ranks")
    names = [strategy_of(strategy).value for strategy in strategies]
    group = dist.group.WORLD if dist.is_initialized() else None
    device = accelerators.of_group(group)
    control, collectives = collectives_for(group, device), collectives_for(group, device)
    try:
        checks = Checks(OverGroups([control]), collectives.abandon, expected)
        tell = say if say is not None and collectives.rank == 0 else lambda _: None
        tell("looking at the machines")
        hosts = [facts.host for facts in check_machines(checks, device, Path(directory or tempfile.gettempdir()))]
        tell("measuring the links between ranks")
        check_links(checks, collectives, hosts)
        if build_model is None or batch_fn is None:
            return checks.diagnosis
        subject = Subject(
            build_model=build_model,
            batch_fn=batch_fn,
            step=step or step_of(loss_fn or default_loss),
            build_optimizer=build_optimizer,
            shard=shard,
            targets=targets,
            say=tell,
            device=device,
            rank=collectives.rank,
            world_size=collectives.world_size,
            steps=steps,
            per_batch=ranks_per_batch,
            states=random_states(device),
        )
        try:
            with _shared(checks.ranks, directory, len(set(hosts)) == 1) as shared:
                _check_numerics(checks, subject, collectives, names, shared)
        finally:
            restore(device, subject.states)
        return checks.diagnosis
    finally:
        collectives.close()
        control.close()


def _check_numerics(
    checks: Checks, subject: Subject, collectives: Collectives, strategies: Sequence[str], directory: Path | None
) -> None:
    if not (built := attempt(checks, "model", lambda: [subject.build()])):
        return
    nbytes = _COPIES * sum(parameter.numel() * parameter.element_size() for parameter in built.pop().parameters())
    least = min(checks.ranks.all_gather_object(_room(subject.device)))
    if nbytes > least:
        has = f"a diagnosis takes {format_bytes(nbytes)} on each rank, and there are {format_bytes(least)}"
        checks.skip("numerics", f"{has}: give a smaller model of the same kind, with fewer layers")
        return
    is_own = check_data(checks, subject)
    if is_own is None:
        return
    whole = attempt(checks, "model", lambda: whole_model(checks, subject, collectives, strategies[0]))
    if whole is None:
        return
    check_model(checks, subject, whole)
    subject.say("training it whole")
    reference = attempt(checks, "unsharded", lambda: refer(whole, subject))
    if reference is None:
        return
    reference.repeats = check_runs(checks, subject, whole)
    if is_own:
        check_token_weights(checks, subject, whole)
    else:
        checks.skip("token weights", "batches are not each rank's own: see data")
    for strategy in strategies:
        subject.say(f"training it with {strategy}")
        checks.strategy = strategy
        check_strategy(checks, subject, whole, reference, strategy, directory)


def _room(device: torch.device) -> int:
    """Return the memory that a rank of this host may use, in bytes."""
    if device.type == "cpu":
        return device_tools.free_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return device_tools.total_bytes(device)


@contextmanager
def _shared(ranks: Together, directory: str | Path | None, on_one_host: bool) -> Iterator[Path | None]:
    """Make a directory that all ranks see, and remove it at the end; None if there is no place for one."""
    if directory is None and not on_one_host:
        yield None
        return
    made: list[tempfile.TemporaryDirectory[str]] = []

    def make() -> str:
        made.append(tempfile.TemporaryDirectory(prefix="shardwise-doctor-", dir=directory))
        return made[0].name

    yield Path(ranks.on_first(make))
    ranks.any(False)  # all have read it
    for one in made:
        one.cleanup()
