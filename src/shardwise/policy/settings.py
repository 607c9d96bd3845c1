"""The settings of a run, described once: those of `sw.shard`, and those that plans and configurations add.

Each field of the classes below is one setting, with its type, default and `Setting`. Derived from them are the
arguments of `sw.plan.forecast`, the keys of a training configuration, the options of `shardwise plan`, the translation
of each into the others, `ShardwisePlugin`, what the backend "jax" refuses, and the table in docs/settings.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shardwise.errors import ConfigError, PlanError
from shardwise.fsdp.strategy import LEAST_SLOTS, Precision, Strategy
from shardwise.policy.adapters import Adapters
from shardwise.policy.checks import check_choice, check_count, checked_align, checked_precision, checked_resharding
from shardwise.policy.offload import Offload
from shardwise.policy.places import Places
from shardwise.policy.precision import precision_of, words_of_precision
from shardwise.policy.recomputation import Recomputation
from shardwise.policy.strategies import OTHER_NAMES, strategy_of
from shardwise.policy.words import numbers_of, reshardings_of, units_of, words_of
from shardwise.registry import registered

OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-bf16", "adamw-8bit", "adam", "sgd", "momentum", "muon")
"""Optimizers with fused kernels, except "adamw-foreach": torch's default on GPUs, which needs a temporary of every
tensor's size. "adamw-bf16", "adamw-8bit": `sw.optim.AdamWBF16` and `AdamW8bit`, with a half and a quarter of the state,
in torch's plain kernels. "muon": whole hidden matrices on their owners, AdamW for the rest."""
ATTENTIONS = ("sdpa", "eager")
"""Fused, as the device's kernel saves it; materialised."""
LOSSES = ("model", "fused", "chunked")
"""The model's own loss; log-softmax and its gradient in the logits' dtype, fused; logits of some tokens at a time."""
ENGINES = ("shardwise", "fsdp2")
"""Engines whose buffers and prefetching can be forecast; others attach at the seam `ENGINE_MODELS`."""
ENGINE_MODELS = "models of other engines"
"""The seam at which models of engines attach: a `plan.simulate.other_engines.model.EngineModel` each."""
OTHER_ENGINES = ("fsdp1", "deepspeed")
OTHER_ENGINES_WORDS = "models of fsdp1 and deepspeed score the planner in benchmarks/plans of the source tree"
SEQ_LEN = 2048
"""The default number of tokens of a sequence."""
AUTO = "auto"
"""In configurations: a plan before the run chooses the value."""

_METADATA = "setting"


@dataclass(frozen=True, slots=True)
class Setting:
    """How one setting is documented, checked, and written in files and on command lines."""

    help: str
    """What it is, in one or two sentences that fit a configuration, a command line and a table."""
    unset: str = ""
    """What None, its default, means."""
    plain: Any = None
    """The type of its value in a configuration, without None; None if it is not a single value there, or is not there
    at all."""
    key: str = ""
    """The key with the same value in a training configuration, such as "parallel.slots"; "" if there is none."""
    choices: tuple[str, ...] = ()
    """Its possible values; () if they are not a few words."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Its values by other names that are taken for them."""
    can_be_auto: bool = False
    """Whether a configuration may leave it to a plan, by `AUTO`."""
    least: int | None = None
    """The least whole number that it can be."""
    check: Callable[[Any], Any] | None = None
    """Return its value in a `Job` from what Python programs give, or raise ConfigError. None: by `choices`, `least` or
    the type of the default."""
    read: Callable[[list[str]], Any] | None = None
    """Return its values, one or a list of several, from the words of an option, which commas separate. Raises
    UserError, or ValueError if a word is no whole number. None: the words or the whole numbers themselves."""
    is_text: bool = False
    """Whether the option's text is the value as it is, because commas are inside it."""
    usual: str = ""
    """What `shardwise plan` takes if the option is left out, if that is not the default."""
    name: str = ""
    default: Any = None

    @property
    def is_flag(self) -> bool:
        """Whether it is either on or off, by default off."""
        return self.default is False

    @property
    def option(self) -> str:
        """The option of `shardwise plan` for it."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def otherwise(self) -> str:
        """What it is if it is left out, in words."""
        return self.unset or words(self.default)

    def checked(self, value: Any) -> Any:
        """Return a value given in Python as a `Job` has it. Raises ConfigError."""
        if self.check is not None:
            return self.check(value)
        if value is None and self.default is None:
            return None
        if self.choices:
            check_choice(self.name, value, self.choices, or_none=self.default is None)
        elif self.least is not None:
            check_count(self.name, value, self.least)
        elif self.is_flag and not isinstance(value, bool):
            raise ConfigError(f"{self.name}={value!r}: must be True or False")
        return value

    def values(self, given: str | bool | None) -> Any:
        """Return the values that an option of `shardwise plan` names: one, several in a list, or None if the search
        chooses. Raises UserError."""
        if not isinstance(given, str) or self.is_text:
            return given
        found = words_of(self.option, given)
        read = self.read or (numbers_of if self.least is not None else list)
        try:
            return None if found is None else read(found)
        except ValueError:
            raise PlanError(
                f"{self.option} {given}: must be whole numbers of at least 1, separated by commas, or search"
            ) from None


def setting(default: Any, help: str, **more: Any) -> Any:  # noqa: A002 - as in argparse and typer
    """Return a field of a dataclass with its `Setting`."""
    return field(default=default, metadata={_METADATA: Setting(help, **more)})


def settings_of(kind: type) -> dict[str, Setting]:
    """Return the settings that a class describes, its base classes' included, by name."""
    return {
        one.name: replace(one.metadata[_METADATA], name=one.name, default=one.default)
        for one in fields(kind)
        if _METADATA in one.metadata
    }


def words(value: Any) -> str:
    """Return a setting's value as it is written on a command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, Strategy):
        return value.value
    if isinstance(value, Precision):
        return words_of_precision(value)
    if isinstance(value, Places | Adapters):
        return value.words
    return str(value).lower() if isinstance(value, bool | int) else ",".join(sorted(value))


def values_in(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of a run that a configuration gives, by name, as a `Job` takes them: those with a key of
    their own, without those that it leaves to a plan, and without an optimizer that is the user's own function.

    Args:
        tree: the configuration's sections with their keys, some of which may be missing.
    """
    found = {name: tree.get(section, {}).get(key) for name, (section, key) in _KEYS.items()}
    return {
        name: frozenset(value) if isinstance(value, list) else value
        for name, value in found.items()
        if value is not None and value != AUTO and not (name == "optimizer" and ":" in value)
    }


def tree_of(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the keys of a configuration, by section, for settings of a run that have a key of their own; other values
    are left out."""
    tree: dict[str, dict[str, Any]] = {}
    for name, (section, key) in _KEYS.items():
        value = values.get(name)
        if isinstance(value, Strategy):
            value = value.value
        tree.setdefault(section, {})[key] = list(value) if isinstance(value, tuple) else value
    return tree


def _checked_mode(value: str) -> str:
    Recomputation.parse(value)
    return value


@dataclass(frozen=True)
class ShardSettings:
    """What `sw.shard` takes and what can also be planned and written in words."""

    strategy: Strategy | str = setting(
        Strategy.FULL_SHARD,
        f"Which of parameters, gradients and optimizer state are sharded: {', '.join(one.value for one in Strategy)}. "
        f"{', '.join(OTHER_NAMES)} are other names; auto in a configuration = the fastest that is forecast to fit.",
        plain=str,
        key="parallel.strategy",
        choices=tuple(member.value for member in Strategy),
        others=OTHER_NAMES,
        can_be_auto=True,
        check=strategy_of,
        read=lambda found: list(dict.fromkeys(strategy_of(word).value for word in found)),
        usual="searched",
    )
    units: Any = setting(
        None,
        "What is gathered together: names of the module classes that are units, or the least number of parameters of a "
        "unit.",
        unset="the model's blocks, large embeddings and heads alone",
        plain=list[str] | int,
        key="parallel.units",
        least=1,
        check=lambda value: value,
        read=units_of,
    )
    precision: Precision | None = setting(
        None,
        "The dtypes of compute, of gradients' reduction and of what the optimizer updates: bf16, fp16, fp32, "
        "bf16-true, or param/reduce/master.",
        unset="everything as stored",
        check=checked_precision,
        read=lambda found: [precision_of(word) for word in found],
        usual="bf16",
    )
    reshard_after_forward: bool | int | None = setting(
        None,
        "Whether gathered parameters are freed after forward; a number = they are resharded to that many ranks.",
        unset="as the strategy does",
        plain=bool | int,
        key="parallel.reshard_after_forward",
        least=1,
        check=checked_resharding,
        read=reshardings_of,
    )
    slots: int = setting(
        3,
        "Buffers for gathered units per size class, which limit how far gathering runs ahead.",
        plain=int,
        key="parallel.slots",
        least=LEAST_SLOTS,
    )
    offload: Offload | None = setting(
        None,
        "What is kept on the host or on disk between uses, and where the optimizer steps: some of params=PLACE, "
        "optimizer=PLACE, gradients=cpu and step=cpu, separated by commas; PLACE is cpu or nvme.",
        unset="everything is on the device",
        check=Places.of,
        is_text=True,
    )


@dataclass(frozen=True)
class ShardArguments(ShardSettings):
    """What `sw.shard` takes besides the model."""

    mesh: Any = setting(
        None,
        "The axes, a torch `DeviceMesh`: shard, or (replicate, shard); or those of `sw.mesh`, by name.",
        unset="all ranks; for hybrid strategies one shard group per host",
    )
    ignored: Iterable[Any] = setting(
        (), "Parameters that are left alone: neither moved, sharded nor reduced.", unset="none"
    )
    align: int | None = setting(
        None,
        "Every rank's piece of a parameter begins at a multiple of this many elements.",
        unset="anywhere",
        check=checked_align,
    )
    tp_plan: Any = setting(
        None,
        "How matrices are cut over the mesh's axis tp: auto (a transformers model's plan), or styles by module names.",
        unset="not cut",
    )


def _checked_engine(value: Any) -> str:
    """Return the name of an engine. Raises ConfigError for one of which there is no model."""
    if value in ENGINES:
        return str(value)
    known = dict.fromkeys((*ENGINES, *(model.name for model in registered(ENGINE_MODELS))))
    if value in OTHER_ENGINES and value not in known:
        raise ConfigError(f"engine={value!r}: must be one of {', '.join(known)}; {OTHER_ENGINES_WORDS}")
    check_choice("engine", value, tuple(known))
    return str(value)


@dataclass(frozen=True)
class RunSettings(ShardSettings):
    """The settings of a run that a plan takes, without its machines."""

    shard_group: int | None = setting(
        None,
        "Ranks that share one copy of the model, for the hybrid strategies.",
        unset="the ranks of one host",
        plain=int,
        key="parallel.shard_group",
        least=1,
        usual="searched",
    )
    cp: int = setting(
        1,
        "Ranks that share each sequence: each computes a slice of it, and parameters are sharded over them, too "
        "(context parallelism).",
        plain=int,
        key="parallel.cp",
        least=1,
    )
    tp: int = setting(
        1,
        "Consecutive ranks that share each matrix product, and the same batches (tensor parallelism).",
        plain=int,
        key="parallel.tp",
        least=1,
    )
    ep: int = setting(
        1,
        "Consecutive ranks that divide the experts of a mixture among them, and send tokens to one another; each still "
        "has batches of its own (expert parallelism).",
        plain=int,
        key="parallel.ep",
        least=1,
    )
    seq_len: int = setting(SEQ_LEN, "Tokens per sequence.", key="data.seq_len", least=1)
    micro_batch: int = setting(
        1, "Sequences (or images) that a rank computes at once.", key="train.micro_batch", least=1, usual="searched"
    )
    accumulation: int = setting(1, "Micro-batches per step.", least=1, usual="1, or from --global-batch")
    activation_checkpointing: str = setting(
        "none",
        "What is recomputed in backward: none, full (each block), selective-ops (cheap operations only), every-N (one "
        "block in N) or offload (each block, with its input kept in host memory).",
        key="train.activation_checkpointing",
        check=_checked_mode,
        usual="searched, except offload",
    )
    compile: bool = setting(
        False,
        "Compile blocks; then a partitioner instead of autograd chooses the saved tensors.",
        key="train.compile",
    )
    optimizer: str = setting("adamw", f"{', '.join(OPTIMIZERS)}.", key="train.optimizer", choices=OPTIMIZERS)
    attention: str = setting("sdpa", "sdpa (fused, as the device's kernel saves it) or eager.", choices=ATTENTIONS)
    loss: str = setting("model", "model (its own), fused or chunked.", choices=LOSSES)
    engine: str = setting("shardwise", f"{' or '.join(ENGINES)}.", check=_checked_engine)
    lora: Adapters | None = setting(
        None,
        "Rank of PEFT's adapters, in fp32, beside a frozen base, or r=16 and some of targets=q_proj+v_proj, "
        "dropout=0.1, dtype=fp32 (of the base).",
        unset="none: all weights are trained",
        check=Adapters.of,
        is_text=True,
    )
    optimizer_in_backward: bool = setting(
        False,
        "Take each unit's step in backward: only one unit's gradients are held at a time, and the norm of all "
        "gradients cannot be clipped.",
        key="train.optimizer_in_backward",
    )


SHARD, RUN, ARGUMENTS = settings_of(ShardSettings), settings_of(RunSettings), settings_of(ShardArguments)
"""The settings by name: of `sw.shard` and a plan both, of a plan, of `sw.shard`."""
_KEYS = {name: one.key.split(".") for name, one in RUN.items() if one.key}
