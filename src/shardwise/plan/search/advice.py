"""Advice where nothing fits: small changes to the question, the cheapest first, each answered by a forecast."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardwise.errors import ConfigError, UserError
from shardwise.fsdp.strategy import LEAST_SLOTS, Strategy
from shardwise.plan.dry_run.job import Job
from shardwise.plan.search.exploration import (
    Candidate,
    Evaluate,
    Outcome,
    available_bytes,
    judge,
    largest_micro_batch,
    needed_bytes,
)
from shardwise.plan.search.processes import Forecasters
from shardwise.plan.search.search import Effort, Question, space_of
from shardwise.plan.search.sweeps import least_job
from shardwise.plan.simulate.forecast import Forecast

MOST = 3
"""The most ways out that are looked for."""
_SAVES = 0.99
"""A change that does not suffice is combined with others if it leaves at most this part of the memory."""
_FORECAST_NUMEL = {"adamw-bf16": 2**33, "adamw-8bit": 2**31}
"""Optimizers with fewer bits of state, and the most elements of a rank for which they are proposed. They run dozens of
kernels for every few million elements, so that for more a forecast would take too long."""
_UNITS_SHARE = 0.1
"""Smaller units are proposed where slots take at least this part of the memory."""
_AXIS_RANKS = (2, 4, 8)
"""Sizes of a tensor, expert or context axis that are proposed."""
_A_NODE = 8
"""GPUs of a node that are added before nodes are."""
_TIMES = 3
"""How often the number of ranks is doubled."""


class Change(NamedTuple):
    """A change to a question."""

    arguments: Mapping[str, Any]
    """The arguments that it sets."""
    flags: str
    """The same for `shardwise plan`."""
    keys: str
    """The same as `shardwise train` takes it; "" if the trainer has no such setting."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes with which a model fits, and the best configuration then."""

    changes: tuple[Change, ...]
    forecast: Forecast

    @property
    def flags(self) -> str:
        """All changes for `shardwise plan`."""
        return " ".join(change.flags for change in self.changes)

    @property
    def keys(self) -> str:
        """All changes as `shardwise train` takes them, those without a key left out."""
        return " ".join(change.keys for change in self.changes if change.keys)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {"flags": self.flags, "keys": self.keys, "forecast": self.forecast.to_dict()}


def advise(question: Question, nearest: Job, forecasters: Forecasters) -> list[Advice]:
    """Return up to `MOST` ways to make a model fit, those that cost least first. Arguments as those of `ways_out`."""
    return [*itertools.islice(ways_out(question, nearest, forecasters), MOST)]


def ways_out(
    question: Question, nearest: Job, evaluate: Evaluate, usable: Callable[[Change], bool] = lambda change: True
) -> Iterator[Advice]:
    """Yield ways to make a model fit, those that cost least first, each as soon as it is found.

    Kinds of changes are tried in order. Of each kind, the mildest change that suffices is an answer: alone if it does,
    else together with as few as possible of those before it that did not suffice but saved memory.

    Args:
        question: one of which nothing fits. If it compares engines, there is no advice.
        nearest: the configuration nearest to fitting. Where the question has several values of a setting that is not
            searched, its value is kept.
        evaluate: makes the forecasts: of each change the leanest configuration, of each answer a quick search. A change
            whose forecast raises a UserError is ruled out.
        usable: whether a change may be made; others are not tried.
    """
    asked = _Asked(_pinned(question, nearest), evaluate)
    saving: list[Change] = []
    least = None if question.compare else asked.least([])
    if least is None:
        return
    for makes_slots_smaller, kind in _kinds(asked.question, least):
        if not makes_slots_smaller and _slots_bytes(least) > available_bytes(least, question.budget_bytes):
            break
        tried = asked.mildest([change for change in kind if usable(change)], saving, least)
        if tried is None:
            continue
        change, together = tried
        if asked.fits(together):
            yield asked.answer(asked.fewest(saving, change))
        else:
            saving, least = [*saving, change], together


def faster_with_axis(question: Question, best: Candidate, evaluate: Evaluate) -> Advice | None:
    """Return the tensor, expert or context axis with which the best configuration of a question is fastest, and its
    forecast, if that is faster and the question leaves the axis open. Tried are, with as many sequences in a step, a
    tensor axis and one of experts where the configuration waits for the network, and a context axis where it recomputes
    though its micro-batches are of one sequence: slices may fit without."""
    found = best.forecast
    if found is None or question.compare:
        return None
    job, given = found.job, question.arguments
    tried: list[tuple[Change, Job]] = []
    if best.limited_by == "network" and given.get("tp") is None:
        tried += [
            (_cut(size), replace(job, tp=size, micro_batch=size * job.micro_batch)) for size in tensor_ranks(found)
        ]
    elif job.recomputation.every and job.micro_batch == 1 and given.get(_RECOMPUTES) is None:
        tried += [(_slice(size), _without_recomputation(job, size)) for size in _open_context_ranks(question, found)]
    if best.limited_by == "network":
        tried += [(_spread(size), replace(job, ep=size)) for size in _open_expert_ranks(question, found)]
    fastest, speed = None, found.tokens_per_s_per_gpu
    for change, changed in tried:
        try:
            forecast = evaluate(changed)
        except UserError:  # nobody asked for it
            continue
        fits = judge(forecast, question.budget_bytes).outcome is Outcome.FITS
        if fits and forecast.tokens_per_s_per_gpu > speed:
            fastest, speed = Advice((change,), forecast), forecast.tokens_per_s_per_gpu
    return fastest


def _without_recomputation(job: Job, cp: int) -> Job:
    """Return a job with slices of as many sequences in a step, and no recomputation."""
    steps = 1 if job.optimizer_in_backward else cp * job.accumulation
    return replace(job, cp=cp, accumulation=steps, activation_checkpointing="none")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question, and forecasts of it with changes."""

    question: Question
    evaluate: Evaluate

    def least(self, changes: list[Change]) -> Forecast | None:
        """Return the forecast that needs the least memory; None if the model or other settings rule a change out."""
        arguments = dict(self.question.arguments)
        for change in changes:
            arguments |= change.arguments
        try:
            space = space_of(replace(self.question, arguments=arguments, effort=Effort.QUICK))
            return self.evaluate(least_job(space.sweeps))
        except UserError:
            return None

    def fits(self, forecast: Forecast | None) -> bool:
        """Whether there is a forecast and it fits."""
        return forecast is not None and judge(forecast, self.question.budget_bytes).outcome is Outcome.FITS

    def mildest(self, kind: list[Change], saving: list[Change], least: Forecast) -> tuple[Change, Forecast] | None:
        """Return the first change of a kind that suffices together with others, or else the one that saves most, and
        the forecast with it; None if no change saves anything.

        Args:
            kind: those that save least first.
            saving: the others.
            least: the forecast with the others alone.
        """
        best: tuple[Change, Forecast] | None = None
        for change in kind:
            together = self.least([*saving, change])
            if together is None:
                continue
            if self.fits(together):
                return change, together
            if needed_bytes(together) > _SAVES * needed_bytes(least):
                break  # more of the same saves hardly more
            if best is None or needed_bytes(together) < needed_bytes(best[1]):
                best = change, together
        return best

    def fewest(self, saving: list[Change], change: Change) -> list[Change]:
        """Return a change that fits together with some others, without those of them that it does not need; it does
        without the costliest if it can."""
        if self.fits(self.least([change])):
            return [change]
        needed = [*saving]
        for one in reversed(saving):
            without = [other for other in needed if other is not one]
            if self.fits(self.least([*without, change])):
                needed = without
        return [*needed, change]

    def answer(self, changes: list[Change]) -> Advice:
        """Return the advice of changes that fit, with the largest micro-batch if the question leaves that open. The
        faster of device and host updates offloaded optimizer state."""
        advice = [Advice(tuple(changes), self._with_largest_batch(changes))]
        places = advice[0].forecast.job.offload
        if places is not None and places.optimizer is not None and places.step is None:
            on_host = [*changes[:-1], _offload(f"{places.words},step=cpu")]
            if self.fits(self.least(on_host)):
                advice.append(Advice(tuple(on_host), self._with_largest_batch(on_host)))
        return max(advice, key=lambda one: one.forecast.tokens_per_s_per_gpu)

    def _with_largest_batch(self, changes: list[Change]) -> Forecast:
        least, question = self.least(changes), self.question
        assert least is not None
        if question.global_batch is not None or question.arguments.get("micro_batch") is not None:
            return least
        largest = largest_micro_batch(self.evaluate, least.job, question.budget_bytes)
        return least if largest is None else max(least, largest, key=lambda one: one.tokens_per_s_per_gpu)


def _pinned(question: Question, nearest: Job) -> Question:
    """Return the question with the nearest configuration's value of each setting that has several values and is not
    chosen by memory."""
    kept = {"strategy", "shard_group", "micro_batch", "activation_checkpointing", "accumulation"}
    several = {name for name, value in question.arguments.items() if isinstance(value, list | tuple)} - kept
    return replace(question, arguments={**question.arguments, **{name: [getattr(nearest, name)] for name in several}})


# The ladder -----------------------------------------------------------------------------------------------------------


def _kinds(question: Question, least: Forecast) -> Iterator[tuple[bool, list[Change]]]:
    """Yield the kinds of changes, those that cost least first; of each kind, those that save least first. With each,
    whether it or one after it makes slots smaller: if slots alone do not fit, no others help.

    Args:
        question: the question.
        least: its forecast that needs the least memory.
    """
    yield from ((True, kind) for kind in _leaner(question, least))
    yield from ((False, kind) for kind in _further(least))


def _slots_bytes(forecast: Forecast) -> int:
    """Return the bytes of what is gathered and of what is reduced at a time; of a strategy that keeps all parameters
    gathered, only the latter."""
    again = forecast.job.strategy.reshards_after_forward
    kinds = ["gathered_slots", "reduce_slots"] if again else ["reduce_slots"]
    return sum(forecast.memory.get(kind, 0) for kind in kinds)


def _leaner(question: Question, least: Forecast) -> Iterator[list[Change]]:
    """Yield kinds of changes of how a step is computed."""
    job = least.job
    if job.loss == "model":
        yield [_change(f"--loss {loss}", "", loss=loss) for loss in ("fused", "chunked")]
    yield [*_smaller_micro_batches(question, job)]
    yield [
        _change(f"--activation-checkpointing {mode}", f"train.{_RECOMPUTES}={mode}", **{_RECOMPUTES: mode})
        for mode in _more_recomputation(job)
    ]
    if job.engine_ranks > 1 and job.strategy is not Strategy.FULL_SHARD:
        full = {"strategy": "full_shard", "shard_group": None}
        yield [_change("--strategy full_shard", "parallel.strategy=full_shard", **full)]
    if job.slots > LEAST_SLOTS:
        yield [_change(f"--slots {LEAST_SLOTS}", f"parallel.slots={LEAST_SLOTS}", slots=LEAST_SLOTS)]
    if _slots_bytes(least) >= _UNITS_SHARE * needed_bytes(least):
        yield [_units(names, slots) for names, slots in least.recording.facts.smaller_units]
    yield [_spread(size) for size in _open_expert_ranks(question, least)]
    yield [_slice(size) for size in _open_context_ranks(question, least)]
    if question.arguments.get("tp") is None:
        yield [_cut(size) for size in tensor_ranks(least)]


def _further(least: Forecast) -> Iterator[list[Change]]:
    """Yield kinds of changes of when the optimizer steps, of what it keeps and where, of ranks and of sequences."""
    job = least.job
    if not job.optimizer_in_backward:
        keys = "train.optimizer_in_backward=true train.clip=0"
        yield [_change("--optimizer-in-backward", keys, optimizer_in_backward=True)]
    yield [*_fewer_bits(job, least.recording.facts.trainable // job.shard_ranks)]
    if not job.on_cpu:  # whose ranks share their memory
        yield [*_more_ranks(job)]
    if least.recording.facts.sequence == job.seq_len:
        lengths = filter(None, (job.seq_len // 2, job.seq_len // 4))
        yield [_change(f"--seq-len {length}", f"data.seq_len={length}", seq_len=length) for length in lengths]
    if job.offload is None:
        yield [
            _offload(words.format(place))
            for place in (["nvme"] if job.on_cpu else ["cpu", "nvme"])
            for words in ("optimizer={0}", "params={0},optimizer={0}", "params={0},optimizer={0},gradients=cpu")
        ]


def tensor_ranks(forecast: Forecast) -> list[int]:
    """Return the sizes of a tensor axis that are proposed for a job: more than its own, inside a node."""
    return _axis_ranks(forecast.job, "tp", forecast.recording.facts.cut_evenly_by)


def context_ranks(forecast: Forecast) -> list[int]:
    """Return the sizes of a context axis that are proposed for a job: more than its own, inside a node."""
    return _axis_ranks(forecast.job, "cp", forecast.recording.facts.sliced_evenly_by)


def _open_context_ranks(question: Question, forecast: Forecast) -> list[int]:
    return context_ranks(forecast) if question.arguments.get("cp") is None else []


def _open_expert_ranks(question: Question, forecast: Forecast) -> list[int]:
    evenly = forecast.recording.facts.experts_divided_by
    return _axis_ranks(forecast.job, "ep", evenly) if question.arguments.get("ep") is None else []


def _axis_ranks(job: Job, axis: str, evenly: int) -> list[int]:
    """Return the sizes that divide a number."""
    if job.on_cpu or job.compile:  # a compiled step's savings are not known for models that are cut or sliced
        return []
    own: int = getattr(job, axis)
    inside = job.gpus_per_node // (1 if axis == "ep" else job.ranks_per_batch // own)
    sizes = [size for size in _AXIS_RANKS if size > own and inside % size == 0 == evenly % size]
    return [size for size in sizes if _is_possible(job, **{axis: size})]


def _cut(size: int) -> Change:
    return _change(f"--tp {size}", f"parallel.tp={size}", tp=size)


def _slice(size: int) -> Change:
    return _change(f"--cp {size}", f"parallel.cp={size}", cp=size)


def _spread(size: int) -> Change:
    return _change(f"--ep {size}", f"parallel.ep={size}", ep=size)


def _is_possible(job: Job, **changes: Any) -> bool:
    try:
        replace(job, **changes)
    except ConfigError:
        return False
    return True


_RECOMPUTES = "activation_checkpointing"


def _change(flags: str, keys: str, **arguments: Any) -> Change:
    return Change(arguments, flags, keys)


def _smaller_micro_batches(question: Question, job: Job) -> Iterator[Change]:
    """Yield half the micro-batch and a single sequence, in steps of as many sequences as before."""
    for size in sorted({job.micro_batch // 2, 1} - {0, job.micro_batch}, reverse=True):
        steps, rest = divmod(job.accumulation * job.micro_batch, size)
        if not rest:
            accumulation = {} if question.global_batch is not None else {"accumulation": steps}
            flags = "".join(f" --accumulation {count}" for count in accumulation.values())
            keys = f"train.micro_batch={size} train.global_batch={steps * size * job.data_ranks}"
            yield _change(f"--micro-batch {size}{flags}", keys, micro_batch=size, **accumulation)


def _units(names: Sequence[str], slots: int) -> Change:
    """Return the change to units of these classes, and to the slots that they need if they are nested."""
    listed = json.dumps(list(names), separators=(",", ":"))
    flags, keys = f"--units {','.join(names)}", f"parallel.units='{listed}'"
    if slots == LEAST_SLOTS:
        return _change(flags, keys, units=frozenset(names))
    return _change(f"{flags} --slots {slots}", f"{keys} parallel.slots={slots}", units=frozenset(names), slots=slots)


def _more_recomputation(job: Job) -> tuple[str, ...]:
    """Return kinds of recomputation that keep less than the job's."""
    if job.activation_checkpointing == "offload":
        return ()
    on_host = () if job.on_cpu else ("offload",)
    return on_host if job.activation_checkpointing == "full" else ("full", *on_host)


def _fewer_bits(job: Job, own_numel: int) -> Iterator[Change]:
    """Yield changes to fewer bits: of the frozen model beside adapters, else of the optimizer's state.

    Args:
        job: the job.
        own_numel: the number of trained elements of a rank.
    """
    if job.lora is not None:
        for base in ("int8", "nf4"):
            precision = replace(job.precision, frozen=base)
            if job.precision.frozen is None or (job.precision.frozen, base) == ("int8", "nf4"):
                yield _change(f"--base {base}", f"lora.base={base}", precision=precision)
    elif job.optimizer in {"adamw", "adamw-foreach", "adam"}:
        for optimizer, most_numel in _FORECAST_NUMEL.items():
            if own_numel <= most_numel:
                yield _change(f"--optimizer {optimizer}", f"train.optimizer={optimizer}", optimizer=optimizer)


def _more_ranks(job: Job) -> Iterator[Change]:
    """Yield twice the ranks, and twice as many again: the GPUs of one node first, then nodes."""
    gpus, nodes = job.gpus_per_node, job.nodes
    for _ in range(_TIMES):
        if nodes == 1 and gpus < _A_NODE:
            gpus = min(_A_NODE, 2 * gpus)
        else:
            nodes *= 2
        more_gpus, more_nodes = gpus != job.gpus_per_node, nodes != job.nodes
        flags = [f"--gpus {gpus}"] * more_gpus + [f"--nodes {nodes}"] * more_nodes
        keys = [f"parallel.ranks={gpus}"] * more_gpus + [f"torchrun --nnodes={nodes}"] * more_nodes
        yield _change(" ".join(flags), " ".join(keys), gpus_per_node=gpus, nodes=nodes)


def _offload(words: str) -> Change:
    keys = " ".join(f"offload.{place}" for place in words.split(","))
    return _change(f"--offload {words}", keys + " offload.path=..." * ("nvme" in words), offload=words)
