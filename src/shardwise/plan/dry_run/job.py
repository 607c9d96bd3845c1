"""A job to forecast: everything about a run but the model."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError, PlanError
from shardwise.fsdp.strategy import Precision, Strategy
from shardwise.plan.hardware.machines import Machines
from shardwise.plan.models.source import ModelSource
from shardwise.policy.places import Places
from shardwise.policy.precision import short_dtype_name
from shardwise.policy.recomputation import Recomputation
from shardwise.policy.settings import RUN, SEQ_LEN, RunSettings
from shardwise.suggest import did_you_mean, divisors

if TYPE_CHECKING:
    from shardwise.fsdp.engine import Engine

_AS_STORED = Precision()


@dataclass(frozen=True, slots=True)
class Job(RunSettings, Machines):
    """A run, one field per argument of `sw.plan.forecast`. Raises ConfigError for an invalid value."""

    strategy: Strategy = Strategy.FULL_SHARD
    """A `Strategy` or one of its names."""
    precision: Precision = _AS_STORED
    """As for `sw.shard`; None is the default."""
    offload: Places | None = None  # type: ignore[assignment]  # a plan needs no path
    """A `sw.Offload`, a mapping, or a string such as "params=cpu,optimizer=nvme". None: everything is on the device."""
    separate_reductions: bool = False
    """Whether reductions have a communicator of their own (`SHARDWISE_SEPARATE_REDUCTIONS=1`): then they and gathers do
    not queue behind one another, but share the links."""

    def __post_init__(self) -> None:
        for name, setting in RUN.items():
            object.__setattr__(self, name, setting.checked(getattr(self, name)))
        if self.units_by_name is not None:
            object.__setattr__(self, "units", self.units_by_name)
        object.__setattr__(self, "precision", self.precision or _AS_STORED)
        self._check_machines()
        self.hardware.check_computes(self.compute_dtype)
        self._check_values()
        if self.recomputation.offloads and self.engine != "shardwise":
            raise ConfigError(
                f"activation_checkpointing='offload' is forecast only for shardwise, not {self.engine}; use 'full'"
            )
        self._check_axes()
        self._check_shard_group()
        self._check_experts()
        self._check_resharding()

    @classmethod
    def of(cls, **arguments: Any) -> Job:
        """Return a job made from keyword arguments. Raises ConfigError for an unknown one, naming the nearest."""
        names = [known.name for known in fields(cls)]
        for name in arguments:
            if name not in names:
                raise ConfigError(
                    f"unknown argument {name!r}; the arguments are {', '.join(names)}{did_you_mean(name, names)}"
                )
        return cls(**arguments)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON: devices, classes and functions by their names."""
        plain: dict[str, Any] = {known.name: getattr(self, known.name) for known in fields(self)}
        for name in ("gpu", "interconnect"):
            plain[name] = None if plain[name] is None else str(getattr(plain[name], "name", plain[name]))
        plain["strategy"] = self.strategy.value
        plain["offload"] = None if self.offload is None else asdict(self.offload)
        plain["lora"] = None if self.lora is None else asdict(self.lora)
        plain["precision"] = {known.name: getattr(self.precision, known.name) for known in fields(self.precision)}
        if self.units is not None and not isinstance(self.units, int):
            classes = [self.units] if isinstance(self.units, type) or callable(self.units) else list(self.units)
            plain["units"] = sorted(getattr(chosen, "__name__", str(chosen)) for chosen in classes)
        return {**plain, "world_size": self.world_size, "mesh": self.mesh}

    @property
    def units_by_name(self) -> tuple[str, ...] | None:
        """The names of the classes that are units, sorted; None if `units` is anything but names of classes."""
        asked = [self.units] if isinstance(self.units, str) else self.units
        if not isinstance(asked, list | tuple | set | frozenset) or not asked:
            return None
        names = [name for name in asked if isinstance(name, str)]
        return tuple(sorted(names)) if len(names) == len(asked) else None

    @property
    def compute_dtype(self) -> str:
        """Short name of the dtype in which modules compute; "fp32" if parameters keep their stored dtype."""
        return short_dtype_name(self.precision.param or self.precision.master) or "fp32"

    def around_forward(self, engine: Engine) -> AbstractContextManager[None]:
        """Return the context of a forward in a dry run: none. Jobs of other engines may have one, such as autocast."""
        return nullcontext()

    @property
    def ranks_per_batch(self) -> int:
        """The number of consecutive ranks that work on the same batch."""
        return self.cp * self.tp

    @property
    def ranks_of_code(self) -> int:
        """The number of consecutive ranks within which the model's own code communicates: whole groups of the axes cp,
        tp and ep."""
        return math.lcm(self.ranks_per_batch, self.ep)

    @property
    def data_ranks(self) -> int:
        """The number of ranks with batches of their own."""
        return self.world_size // self.ranks_per_batch

    @property
    def engine_ranks(self) -> int:
        """The number of ranks that the engine shards and replicates over: those that share a sequence are among
        them."""
        return self.world_size // self.tp

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh's axes, by their names in `sw.mesh`."""
        shards = max(1, self.shard_ranks // self.cp)
        sizes = {"dp_replicate": self.data_ranks // shards, "dp_shard": shards, "cp": self.cp, "tp": self.tp}
        return {**sizes, "ep": self.ep}

    @property
    def shard_ranks(self) -> int:
        """The number of ranks that hold different slices of one copy: those of a shard group, times `cp`."""
        if not self.strategy.sharded:
            return 1
        if not self.strategy.replicated:
            return self.engine_ranks
        usual = max(1, self.gpus_per_node // self.ranks_per_batch)
        return (usual if self.shard_group is None else self.shard_group) * self.cp

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same slice of different copies."""
        return self.engine_ranks // self.shard_ranks

    @property
    def axes_of_a_batch(self) -> str:
        """The axes whose ranks work on the same batch, in words."""
        return _product(cp=self.cp, tp=self.tp)

    @property
    def axes_of_code(self) -> str:
        """The axes over which the model's own code communicates, in words."""
        return _product(cp=self.cp, tp=self.tp, ep=self.ep)

    @property
    def recomputation(self) -> Recomputation:
        """`activation_checkpointing`, parsed."""
        return Recomputation.parse(self.activation_checkpointing)

    @property
    def elsewhere(self) -> dict[str, str]:
        """Kinds of memory that are not on the device, and where they are: "cpu" or "nvme". For CPU ranks, whose device
        is the host, only "nvme"."""
        kinds: dict[str, str | None] = {}
        if self.offload is not None:
            kinds = {"param_shards": self.offload.params, "optimizer": self.offload.optimizer}
            if not self.optimizer_in_backward:  # then gradients are not kept
                kinds["grad_shards"] = self.offload.gradients
        return {kind: place for kind, place in kinds.items() if place == "nvme" or (place == "cpu" and not self.on_cpu)}

    @property
    def steps_on_host(self) -> bool:
        """Whether the host takes the optimizer's step for a device."""
        return self.offload is not None and self.offload.step == "cpu" and not self.on_cpu

    @property
    def tokens_per_rank(self) -> int:
        """The number of tokens of a rank's batches in one step, which are those of its group of `ranks_per_batch`."""
        return self.seq_len * self.micro_batch * self.accumulation

    @property
    def slice_len(self) -> int:
        """The number of tokens of a sequence that a rank computes, padding included."""
        return -(-self.seq_len // self.cp)

    def _check_values(self) -> None:
        if self.optimizer == "muon" and self.engine != "shardwise":
            raise ConfigError(
                f"optimizer='muon' is forecast only for shardwise, where each matrix has an owner, not {self.engine}"
            )
        self._check_offload()
        self._check_steps()
        if not isinstance(self.separate_reductions, bool):
            raise ConfigError(f"separate_reductions={self.separate_reductions!r}: must be True or False")

    def _check_offload(self) -> None:
        if self.offload is None:
            return
        words = f"offload={self.offload.words!r}"
        if self.engine != "shardwise":
            raise ConfigError(f"{words} is forecast only for shardwise, not {self.engine}")
        changes_nothing = "nvme" not in {self.offload.params, self.offload.optimizer} and self.on_cpu
        if self.optimizer == "muon" and not changes_nothing:
            raise ConfigError(
                f"{words} with optimizer='muon', which keeps the state of whole matrices with their owners: leave "
                "one out"
            )

    def _check_steps(self) -> None:
        if not self.optimizer_in_backward:
            return
        if self.engine != "shardwise":
            raise ConfigError(f"optimizer_in_backward=True is forecast only for shardwise, not {self.engine}")
        if self.optimizer == "muon":
            raise ConfigError(
                "optimizer_in_backward=True with optimizer='muon', which exchanges and updates whole matrices: "
                "leave one out"
            )
        if self.accumulation > 1:
            raise ConfigError(
                f"optimizer_in_backward=True with accumulation={self.accumulation}: each backward takes a step, "
                "so gradients of several micro-batches cannot be added; leave one out"
            )

    def _check_axes(self) -> None:
        if self.world_size % self.ranks_per_batch:
            raise ConfigError(
                f"{self.axes_of_a_batch} does not divide {self.world_size} ranks ({self.nodes} nodes of "
                f"{self.gpus_per_node}); use one of {divisors(self.world_size)}"
            )
        if self.cp > self.seq_len:
            raise ConfigError(f"cp={self.cp} is more than the {self.seq_len} tokens of a sequence")
        beside = {
            f"optimizer={self.optimizer!r}": self.optimizer == "adamw-8bit",
            f"loss={self.loss!r}": self.loss == "chunked",
            "offload": self.offload is not None,
            f"precision.frozen={self.precision.frozen!r}": self.precision.frozen is not None,
        }
        refused = [words for words, is_given in beside.items() if is_given]
        if self.tp > 1 and refused:
            raise ConfigError(f"tp={self.tp} with {refused[0]} is not supported: leave one of them out")

    def _check_experts(self) -> None:
        if self.ep == 1:
            return
        beside = {
            f"tp={self.tp}": self.tp > 1,
            f"engine={self.engine!r}": self.engine != "shardwise",
            f"optimizer={self.optimizer!r}": self.optimizer in {"adamw-8bit", "muon"},
            "offload": self.offload is not None,
            f"precision.frozen={self.precision.frozen!r}": self.precision.frozen is not None,
        }
        refused = [words for words, is_given in beside.items() if is_given]
        if refused:
            raise ConfigError(f"ep={self.ep} with {refused[0]} is not supported: leave one of them out")
        if self.shard_ranks % self.ep:
            raise ConfigError(
                f"ep={self.ep} does not divide the number of ranks that {self.strategy.value} shards over, "
                f"{self.shard_ranks}; use one of {divisors(self.shard_ranks)}"
            )

    def _check_shard_group(self) -> None:
        if self.shard_group is None:
            return
        if not (self.strategy.sharded and self.strategy.replicated):
            raise ConfigError(
                f"shard_group={self.shard_group} needs strategy='hybrid_shard' or 'hybrid_shard_zero2', not "
                f"{self.strategy.value!r}"
            )
        if self.data_ranks % self.shard_group:
            ranks = f"{self.world_size} ranks ({self.nodes} nodes of {self.gpus_per_node})"
            if self.ranks_per_batch > 1:
                ranks = f"{self.data_ranks} data ranks ({self.world_size} ranks in groups of {self.axes_of_a_batch})"
            raise ConfigError(
                f"shard_group={self.shard_group} does not divide {ranks}; use one of {divisors(self.data_ranks)}"
            )

    def _check_resharding(self) -> None:
        asked = self.reshard_after_forward
        if asked is None or isinstance(asked, bool):
            return
        ranks = self.shard_ranks
        if ranks % asked:
            whole, way = f"{ranks} ranks", f"use one of {divisors(ranks)}"
            if ranks == 1:
                whole, way = "1 rank", "leave it out"
            raise ConfigError(f"reshard_after_forward={asked} does not divide the shard group of {whole}; {way}")


def _product(**sizes: int) -> str:
    """Return the axes of more than one rank, in words."""
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)


def check_alone(job: Job) -> None:
    """Raise PlanError if a dry run of the job needs a process group of its own and this process has one."""
    dist = sys.modules.get("torch.distributed")  # if it is not imported, there is none
    if job.ranks_of_code > 1 and dist is not None and dist.is_available() and dist.is_initialized():
        raise PlanError(
            f"{job.axes_of_code}: a plan makes a process group of its own for this, but this process has one: plan "
            "before torch.distributed.init_process_group, or with shardwise plan"
        )


def suited_to(source: ModelSource, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with a sequence length that the model can compute, as in training, and with an attention that it
    supports.

    Args:
        source: the model.
        arguments: of a forecast or of a search: values, or lists of them.

    Returns:
        The same arguments. If `seq_len` was left out, it is the default, or the model's longest if that is shorter. If
        `attention` was left out and the model has no fused attention, it is "eager".

    Raises:
        PlanError: a `seq_len` in the arguments is more than the model's longest.
    """
    longest = source.positions
    asked = arguments.get("seq_len")
    for seq_len in asked if isinstance(asked, list | tuple) else (asked,):
        if longest is not None and isinstance(seq_len, int) and seq_len > longest:
            raise PlanError(
                f"seq_len={seq_len} is more than the model's max_position_embeddings={longest}; lower seq_len, "
                "or plan a config.json with a larger one"
            )
    suited = dict(arguments)
    if asked is None:
        suited["seq_len"] = SEQ_LEN if longest is None else min(SEQ_LEN, longest)
    if suited.get("attention") is None:
        suited["attention"] = source.attention
    return suited
