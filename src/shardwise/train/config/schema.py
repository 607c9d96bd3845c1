"""The configuration of a run: its sections and keys, their defaults and their checks.

`config.files.load` reads one from a TOML file; `Config.for_ranks` fits it to a number of ranks.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    create_model,
    model_validator,
)

from shardwise.errors import ConfigError, MeshError
from shardwise.fsdp.strategy import Strategy
from shardwise.policy.offload import PLACES
from shardwise.policy.places import Places
from shardwise.policy.settings import AUTO, RUN, Setting, words
from shardwise.suggest import divisors
from shardwise.train.config.tasks import DEFAULT, TaskName

DtypeName = Literal["fp32", "bf16", "fp16"]
HYBRID_STRATEGIES = frozenset(one.value for one in Strategy if one.sharded and one.replicated)

_MOST_TOKENS = 2**31
"""Largest number of tokens of one step on one rank, which holds all of them in memory at once."""
UNSET = "unset"
"""Value of `data.source` and `model.path` in generated configurations: only the user knows the right one."""

ANSWER_METRICS = ("exact_match", "token_f1")
"""Metrics of evaluation by generation."""

PATH, RANDOM = "path", "random"
"""Values of `model.weights`."""

# TOML has no null, but an override must be able to unset an optional key: the word "none" does.
NoneWord = BeforeValidator(lambda value: None if value == "none" else value)


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent conversions (the text "3" is not the number 3)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


def _key(setting: Setting) -> tuple[Any, Any]:
    """Return the type and the field of the key with a setting's value."""
    kinds = get_args(setting.plain) if isinstance(setting.plain, UnionType) else (setting.plain,)
    if setting.choices:
        kinds = (Literal[*setting.choices, *([AUTO] if setting.can_be_auto else [])],)
    if setting.least is not None:
        kinds = tuple(Annotated[int, Field(ge=setting.least)] if kind is int else kind for kind in kinds)
    kind: Any = reduce(or_, kinds)
    if setting.others:
        kind = Annotated[kind, BeforeValidator(lambda given: setting.others.get(str(given), given))]
    if setting.default is None:
        kind = Annotated[kind | None, NoneWord]
    help_ = f"{setting.help} none = {setting.unset}." if setting.unset else setting.help
    default = words(setting.default) if setting.choices else setting.default
    return kind, Field(default, description=help_)


def _section(name: str) -> Any:
    """Return a section with the keys that the settings of a run have there."""
    found = {one.key.split(".")[1]: _key(one) for one in RUN.values() if one.plain and one.key.startswith(f"{name}.")}
    keys: Any = found
    return create_model(f"_{name}", __base__=Section, **keys)


class ModelConfig(Section):
    """`[model]`: the model to train, given by exactly one of `path`, `config` and `factory`."""

    path: Annotated[str | None, NoneWord] = None
    """A Hugging Face directory, its `config.json`, or a name on a hub: "org/name" or "org/name@revision". Its weights
    and its tokenizer are used unless `weights` and `data.tokenizer` say otherwise. An existing path wins over a
    name."""
    config: Annotated[dict[str, Any] | None, NoneWord] = None
    """A transformers configuration written inline; `model_type` is required."""
    factory: Annotated[str | None, NoneWord] = None
    """`module:function`, called without arguments; returns an `nn.Module`."""
    weights: Annotated[str, Field(min_length=1)] = PATH
    """The weights to start from: "path" (those of `path`; with `config` or `factory` random ones), "random", or another
    Hugging Face directory or name on a hub."""
    task: Annotated[TaskName | None, NoneWord] = None
    """What the model learns: it decides the head, the rows, the loss and the metrics. none = what the class in the
    `architectures` of the model's `config.json` is for; without one, "causal-lm"."""
    freeze: list[str] = []
    """Names of parameters that are not trained, with the wildcards * and ?, such as "vision_tower.*". Each must match
    some."""
    dtype: DtypeName = "fp32"
    """The dtype in which the parameters are stored and updated (the master copy)."""
    init: Literal["meta", "device", "cpu"] = "meta"
    """How parameters are initialised. "meta": drawn on the CPU one unit at a time, with the same values as an unsharded
    model; every rank draws all of them. "device": each rank draws only what it keeps, on its device; other values from
    the same distributions, within seconds. "cpu": every rank builds the whole model."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("path", "config", "factory") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"give exactly one of path, config and factory; found {found}")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError('config needs a model_type, such as model_type = "llama"')
        if self.factory is not None and not all(self.factory.partition(":")):
            raise ValueError(f"factory must have the form module:function, not {self.factory!r}")
        return self

    @property
    def pretrained(self) -> str | None:
        """The directory or name whose weights the model starts from; None = random ones."""
        if self.weights == RANDOM:
            return None
        return self.directory if self.weights == PATH else self.weights

    @property
    def directory(self) -> str | None:
        """`path` as a directory or name, even if it is the `config.json` in it; None without a `path`."""
        if self.path is None or not self.path.endswith(".json"):
            return self.path
        return str(Path(self.path).parent)


class LoraConfig(Section):
    """`[lora]`: low-rank adapters beside frozen weights. Only the adapters are trained, in fp32, and saved. Needs
    PEFT."""

    r: NonNegativeInt = 0
    """The rank of the adapters; 0 = none, and every weight is trained."""
    alpha: PositiveFloat = 16.0
    """The output of an adapter is scaled by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The dropout probability of an adapter's inputs in training."""
    targets: Annotated[list[str] | None, NoneWord] = None
    """Names of the linear layers that get adapters, such as "q_proj"; none = all except the head."""
    base: Annotated[Literal["nf4", "int8"] | None, NoneWord] = None
    """The format in which frozen weights of linear layers, except the head, are stored and gathered: 4 or 8 bits, with
    one scale for every 64 weights; none = `model.dtype`."""

    @model_validator(mode="after")
    def _has_rank(self) -> Self:
        given = [key for key in ("alpha", "dropout", "targets", "base") if key in self.model_fields_set]
        if given and "r" not in self.model_fields_set:
            raise ValueError(f"{given[0]} is given but r is not: set r, such as r = 16, or leave the section out")
        return self


class _Source(Section):
    """Where rows come from."""

    split: Annotated[str | None, Field(min_length=1), NoneWord] = None
    """The split of a hub's data set, or of a saved one; none = "train"."""
    subset: Annotated[str | None, Field(min_length=1), NoneWord] = None
    """The subset of a hub's data set (its configuration); none = its only one, or its default."""
    format: Annotated[Literal["text", "jsonl", "parquet", "arrow", "csv", "tsv"] | None, NoneWord] = None
    """The format of the files; none = by suffix. Rows of tables have `text`, or `messages`, or `conversations`
    (ShareGPT), or `instruction` and `output` (Alpaca), or `prompt` and `completion`."""


class SourceConfig(_Source):
    """`[[data.sources]]`: one of several sources."""

    source: Annotated[str, Field(min_length=1)]
    """As `data.source`."""
    weight: PositiveFloat = 1.0
    """This source's share of the sequences that are trained on, relative to the other sources' weights. A source that
    is drawn from more often than it has sequences is repeated, each time in another order."""


class DataConfig(_Source):
    """`[data]`: the text, and how it becomes sequences."""

    source: Annotated[str, Field(min_length=1)] = "builtin:python-stdlib"
    """"builtin:stories" (short stories that a grammar makes up), "builtin:python-stdlib" (the interpreter's own
    sources), a file, a directory, a glob, a directory that `save_to_disk` of `datasets` wrote, or a data set on a hub:
    "org/name" or "org/name@revision". "unset": the user must set it before training starts."""
    sources: Annotated[list[SourceConfig] | None, Field(min_length=1), NoneWord] = None
    """Several sources, each a table `[[data.sources]]`; instead of `source` and the keys that belong to it."""
    tokenizer: Annotated[str | None, Field(min_length=1), NoneWord] = None
    """A directory with a tokenizer, a name on a hub, "bytes" (256 byte values and one end-of-text token, in a
    vocabulary of 320), or "builtin:stories" (for that source: 1,536 ids, a token for each of its words); none = the
    model's own, and "bytes" for a model that starts from random weights and has none."""
    seq_len: PositiveInt = 512
    """Tokens per sequence."""
    document_mask: bool = False
    """Keep the documents that share a sequence apart: tokens attend only to those of their own document, and positions
    begin anew with each. Needs a model of transformers, or one that takes such `position_ids`."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """The fraction of the documents held out for evaluation; 0 = none."""
    seed: NonNegativeInt = 0
    """The seed of the order of the data."""
    streaming: bool = False
    """Read and tokenize the data block by block while training, instead of all of it before: for data that is larger
    than memory. Rows are held out of the first block of each source."""
    block_mib: PositiveInt = 16
    """With `streaming`, the size of a block in MiB. Each rank has two blocks of each source in memory, as token
    ids."""

    @model_validator(mode="after")
    def _streams_in_blocks(self) -> Self:
        if self.block_mib != type(self).model_fields["block_mib"].default and not self.streaming:
            raise ValueError(f"block_mib = {self.block_mib} has no effect without streaming: set streaming = true")
        return self

    @model_validator(mode="after")
    def _source_or_sources(self) -> Self:
        if self.sources is not None:
            given = [key for key in ("source", "split", "subset", "format") if key in self.model_fields_set]
            if given:
                raise ValueError(f"{given[0]} and sources are both given: give {given[0]} to one of the sources")
        return self

    @property
    def each_source(self) -> tuple[SourceConfig, ...]:
        """The sources: those of `sources`, or the single one."""
        if self.sources is not None:
            return tuple(self.sources)
        return (SourceConfig(source=self.source, split=self.split, subset=self.subset, format=self.format),)

    @property
    def named(self) -> str:
        """The sources in words."""
        return ", ".join(one.source for one in self.each_source)

    def with_sources(self, names: Sequence[str]) -> Self:
        """Return this section with other names for its sources, in the order of `each_source`."""
        if self.sources is None:
            return self.model_copy(update={"source": names[0]})
        pairs = zip(self.sources, names, strict=True)
        return self.model_copy(update={"sources": [one.model_copy(update={"source": name}) for one, name in pairs]})


class TrainConfig(Section):
    """`[train]`: the loop and the optimizer."""

    steps: PositiveInt
    """Optimizer steps in the whole run."""
    micro_batch: PositiveInt = 1
    """Sequences per rank and forward."""
    global_batch: Annotated[PositiveInt | None, NoneWord] = None
    """Sequences per step over all ranks; none = micro_batch x ranks. The number of micro-batches follows."""
    optimizer: Annotated[str, Field(pattern=r"^(adamw|adamw-bf16|adamw-8bit|muon|[\w.]+:\w+)$")] = "adamw"
    """The optimizer. "adamw": torch's. "adamw-bf16": state in bf16 with stochastic rounding, four bytes per parameter
    instead of eight; where `model.dtype` is "bf16", parameters are rounded stochastically too. "adamw-8bit": two bytes
    per parameter, in blocks of 8-bit codes. "muon": Muon for hidden matrices, its updates scaled to the size of
    AdamW's, so that `lr` and `weight_decay` mean the same; AdamW for embeddings, heads and vectors. "module:function":
    your own, called with the parameter groups (matrices with `weight_decay`, vectors without) and this section; returns
    a torch optimizer. Its groups' learning rates follow the schedule, each in proportion to `lr`. Plans assume AdamW's
    state."""
    lr: PositiveFloat = 3e-4
    """The learning rate at its highest."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's decay rate of its momentum."""
    eps: PositiveFloat = 1e-8
    """AdamW's term in the denominator."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, for parameters of two or more dimensions."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls to `lr * min_lr_ratio` after warm-up; "constant" stays at `lr`."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to `lr`. May be more than `steps`."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The ratio of the last learning rate to the highest."""
    clip: NonNegativeFloat = 1.0
    """The largest global gradient norm; 0 = no clipping."""
    optimizer_in_backward: bool = False
    """Take each unit's step as soon as its gradient is reduced, so that only one unit's gradient exists at a time.
    Requires `clip = 0`, one micro-batch per step and no fp16; no gradient norm is reported."""
    clip_units: NonNegativeFloat = 0.0
    """The largest gradient norm of each unit by itself, with `optimizer_in_backward`; 0 = no clipping."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What happens if the loss or the gradient norm is not finite. It is found before the optimizer's step, which is
    then not taken: "stop" ends the run; "skip" goes on with the next batch, and counts the step in `metrics.jsonl`."""
    skip_spikes_above: Annotated[float, Field(ge=0)] = 0.0
    """Leave a step out, with its batch, if its loss is above this many times the median loss of the last 32 steps;
    0 = off. It is found before the optimizer's step, and counted in `metrics.jsonl`."""
    roll_back: NonNegativeInt = 0
    """Where `skip_spikes_above` or `on_nonfinite = "skip"` would leave a step out, go back instead to the newest
    checkpoint that is at least this many steps old, and go on from there with the data after that step: what was drawn
    in between is left out. 0 = leave out that step alone. A run that would go back a sixth time in a row ends."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations; 0 = after the last step only."""
    best_by: Annotated[str, Field(min_length=1)] = "loss"
    """What makes one evaluation better than another, for `patience` and `checkpoint.keep_best`: a lower held-out
    "loss", or a higher metric of the task, such as "accuracy" or "f1", or of answers, "exact_match" or "token_f1"."""
    patience: NonNegativeInt = 0
    """Stop after this many evaluations in a row that are not better; 0 = train all steps."""
    min_delta: NonNegativeFloat = 0.0
    """How much better an evaluation must be to count for `patience`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The seed of the initial weights and of dropout."""
    activation_checkpointing: Annotated[str, Field(pattern=r"^(none|full|selective-ops|every-[1-9]\d*|offload)$")] = (
        "none"
    )
    """"none", "full" (each block), "selective-ops" (cheap operations only), "every-N" (one block in N) or "offload"
    (each block, with its input kept in host memory)."""
    compile: bool = False
    """Compile each unit with torch.compile."""

    @model_validator(mode="after")
    def _clips_what_it_can(self) -> Self:
        if self.optimizer_in_backward and self.clip:
            raise ValueError(
                f"optimizer_in_backward with clip = {self.clip:g}: the norm of all gradients is known only after "
                "the last gradient, when the first ones are already freed; set clip = 0, and clip_units to clip "
                "each unit by its own norm"
            )
        if self.clip_units and not self.optimizer_in_backward:
            raise ValueError(
                "clip_units needs optimizer_in_backward = true; without it, use clip, which has the norm of all "
                "gradients"
            )
        if self.optimizer_in_backward and self.on_nonfinite == "skip":
            raise ValueError(
                'on_nonfinite = "skip" with optimizer_in_backward: steps are taken before it is known whether all '
                "gradients are finite; leave one of them out"
            )
        if 0 < self.skip_spikes_above <= 1:
            raise ValueError(f"skip_spikes_above = {self.skip_spikes_above:g} would skip most steps: set it above 1")
        if self.optimizer_in_backward and self.skip_spikes_above:
            raise ValueError(
                "skip_spikes_above with optimizer_in_backward: steps are taken before the loss of all ranks is known; "
                "leave one of them out"
            )
        if self.roll_back and not self.skip_spikes_above and self.on_nonfinite != "skip":
            raise ValueError(
                f'roll_back = {self.roll_back} has no effect without skip_spikes_above or on_nonfinite = "skip", which '
                "say what is a bad step: set one of them"
            )
        return self

    @model_validator(mode="after")
    def _evaluates_to_stop(self) -> Self:
        if self.patience and not self.eval_every:
            raise ValueError(f"patience = {self.patience} counts evaluations: set eval_every as well")
        if self.min_delta and not self.patience:
            raise ValueError(f"min_delta = {self.min_delta:g} has no effect without patience: set it as well")
        if self.best_by == "perplexity":
            raise ValueError('best_by = "perplexity" means the same as "loss", which is to be low: set "loss"')
        return self

    @model_validator(mode="after")
    def _has_momentum_where_it_counts(self) -> Self:
        if (
            self.optimizer != "muon"
            and ":" not in self.optimizer
            and self.momentum != type(self).model_fields["momentum"].default
        ):
            raise ValueError(
                f'momentum = {self.momentum:g} has no effect with optimizer = "{self.optimizer}", which has '
                'betas: leave it out, or set optimizer = "muon"'
            )
        return self


class EvalConfig(Section):
    """`[eval]`: evaluation by generation. The model answers the prompts of a file, and its answers are compared with
    those that are right. For the tasks "causal-lm" and "seq2seq-lm"."""

    generate: Annotated[str | None, Field(min_length=1), NoneWord] = None
    """The prompts and their right answers: a file, a directory or a glob, with rows like those that are trained on.
    none = no evaluation by generation."""
    every: PositiveInt = 1
    """Evaluations (`train.eval_every`) from one that generates to the next; the one after the last step always does."""
    max_new_tokens: PositiveInt = 128
    """Greatest length of an answer, in tokens."""
    micro_batch: PositiveInt = 8
    """Prompts that a rank answers at once."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The seed of the sampling, where `options` ask for it."""
    options: dict[str, Any] = {}
    """Further options of transformers' `GenerationConfig` by name, such as num_beams; without any of sampling, answers
    are greedy."""

    @model_validator(mode="after")
    def _has_prompts(self) -> Self:
        fields = type(self).model_fields
        given = [name for name, field in fields.items() if getattr(self, name) != field.default]
        if given and self.generate is None:
            raise ValueError(
                f"{given[0]} is given but generate is not: name a file of prompts and answers, or leave the section out"
            )
        if "max_new_tokens" in self.options:
            raise ValueError("options has max_new_tokens, which is a key of the section itself: move it there")
        return self


class ParallelConfig(_section("parallel")):  # type: ignore[misc]  # made from the settings
    """`[parallel]`: how the model is sharded, and over how many ranks."""

    backend: Literal["torch", "jax"] = "torch"
    """The framework that trains. "torch": one process per rank. "jax" (needs the extra `jax`): a rank is a device, and
    one process has all devices of a machine."""
    ranks: Annotated[Literal["auto"] | PositiveInt, Field(union_mode="left_to_right")] = "auto"
    """Ranks on this machine; "auto" = all GPUs, else 2 CPU ranks (8 with JAX). Under torchrun, torchrun's number is
    used."""
    dp_replicate: PositiveInt = 1
    """Copies of the model, for the hybrid strategies: says the same as `shard_group`. 1 = what `shard_group` leaves."""
    param_dtype: Annotated[DtypeName | None, NoneWord] = None
    """The dtype of forward and backward, and of gathered parameters. none = the checkpoint's if a run is resumed; else
    bf16 if `model.dtype` is "fp32" and the accelerator computes in bf16; else `model.dtype`."""
    reduce_dtype: DtypeName = "fp32"
    """The dtype in which gradients are summed over the ranks."""
    hardware: Annotated[str | None, NoneWord] = None
    """The device that plans assume for a rank: a packaged name or a hardware file; none = the rank's real device."""

    @model_validator(mode="before")
    @classmethod
    def _takes_the_name_of_the_axis(cls, given: Any) -> Any:
        """Take `dp_shard`, as `sw.mesh` names it, for `shard_group`."""
        if not isinstance(given, Mapping) or "dp_shard" not in given:
            return given
        keys = dict(given)
        group = keys.pop("dp_shard")
        if keys.setdefault("shard_group", group) != group:
            raise ValueError(f"dp_shard = {group} and shard_group = {keys['shard_group']} mean the same: give one")
        return keys

    @property
    def axes_of_a_batch(self) -> dict[str, int]:
        """Sizes, by name, of the axes whose ranks work on the same batch, without those of one rank."""
        return {name: size for name in ("cp", "tp") if (size := getattr(self, name)) > 1}

    @property
    def ranks_per_batch(self) -> int:
        """The number of consecutive ranks that work on the same batch."""
        return int(self.cp * self.tp)

    def data_ranks(self, world_size: int) -> int:
        """Return the number of different batches that so many ranks work on at once: of copies x shards."""
        return world_size // self.ranks_per_batch


class CheckpointConfig(Section):
    """`[checkpoint]`: saving and resuming."""

    every: NonNegativeInt = 0
    """Steps between checkpoints; 0 = none."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_best: bool = False
    """Save after each evaluation that is the best so far (`train.best_by`), keep that checkpoint beside the newest ones
    as `checkpoints/best`, and write `final/` from it."""
    asynchronous: bool = False
    """Copy checkpoints to host memory and write them while training continues."""
    memory_every: NonNegativeInt = 0
    """Steps between copies of the state in the memory of its host and of the next host, from which the run resumes when
    ranks or a host were lost; 0 = none."""
    resume: str = "auto"
    """"auto" (the run's newest good checkpoint), "never", or a checkpoint's directory or URL."""

    @model_validator(mode="after")
    def _resumes_from_memory(self) -> Self:
        if self.memory_every and self.resume != "auto":
            raise ValueError(
                f'memory_every = {self.memory_every} with resume = "{self.resume}": ranks that start again would not '
                'resume from memory; set resume = "auto", or leave memory_every out'
            )
        return self


class OffloadConfig(Section):
    """`[offload]`: what is kept on the host or on disk instead of on the device."""

    params: Annotated[Literal["cpu", "nvme"] | None, NoneWord] = None
    """Where shards are kept: none = on the device; "cpu" = in host memory, which on CPU ranks is the same; "nvme" = on
    disk."""
    optimizer: Annotated[Literal["cpu", "nvme"] | None, NoneWord] = None
    """Where the optimizer state is kept: none = beside the shards; "cpu" = in host memory; "nvme" = on disk."""
    gradients: Annotated[Literal["cpu"] | None, NoneWord] = None
    """Where reduced gradients are kept until the step: none = on the device; "cpu" = in host memory."""
    step: Annotated[Literal["cpu"] | None, NoneWord] = None
    """Which processor takes the optimizer's step: none = the device; "cpu" = the host, which needs `optimizer`."""
    path: Annotated[str | None, NoneWord] = None
    """Directory on a local disk for "nvme". Nothing is left in it."""
    ring_mib: Annotated[PositiveInt | None, NoneWord] = None
    """Size in MiB of the device buffer through which offloaded optimizer state is loaded for the step and written back;
    none = four times the largest parameter's state, at least 64."""

    @model_validator(mode="after")
    def _has_a_path(self) -> Self:
        if self.on_disk is not None and self.path is None:
            raise ValueError(f'{self.on_disk} = "nvme" needs path: set it to a directory on a local disk')
        return self

    @model_validator(mode="after")
    def _has_something_in_its_ring(self) -> Self:
        if self.ring_mib is not None and self.optimizer is None:
            raise ValueError(
                f"ring_mib = {self.ring_mib} has no effect without offload.optimizer, because only optimizer "
                'state goes through the ring: set optimizer = "cpu" or "nvme", or leave ring_mib out '
                "(ring_mib=none)"
            )
        return self

    @model_validator(mode="after")
    def _has_state_to_step_with(self) -> Self:
        if self.step is not None and self.optimizer is None:
            raise ValueError(
                f'step = "{self.step}" steps with state that is kept on the host: set optimizer = "cpu" or "nvme", or '
                "leave step out (step=none)"
            )
        return self

    @property
    def on_disk(self) -> str | None:
        """Key of something that is kept on disk, `params` before `optimizer`; None if nothing is."""
        return next((key for key in ("params", "optimizer") if getattr(self, key) == "nvme"), None)

    @property
    def places(self) -> Places | None:
        """The section in the form that plans use; None if everything is on the device."""
        ring_bytes = None if self.ring_mib is None else self.ring_mib * 2**20
        places = {name: getattr(self, name) for name in PLACES}
        return Places.of({**places, "ring_bytes": ring_bytes})


class HubConfig(Section):
    """`[hub]`: where the trained model is uploaded to."""

    push_to: Annotated[str | None, Field(pattern=r"^[\w.-]+/[\w.-]+$"), NoneWord] = None
    """The repository, "org/name", to which `final/` is uploaded with a model card at the end; it is created if it does
    not exist. none = no upload."""
    private: bool = True
    """Whether a repository that is created is private."""


class LogConfig(Section):
    """`[log]`: the run's directory and its logs."""

    directory: str = "runs"
    """The directory that holds the runs."""
    name: Annotated[str, Field(pattern=r"^[^/\\\x00]+$")]
    """The name of the run's own directory; by default the configuration file's name without its suffix."""
    every: PositiveInt = 1
    """Steps between lines on the terminal; `metrics.jsonl` has every step."""
    tensorboard: bool = False
    """Write TensorBoard files as well."""
    wandb: Annotated[str | None, Field(min_length=1), NoneWord] = None
    """Log to this project of Weights & Biases as well; a resumed run goes on in the same place. WANDB_MODE=offline in
    the environment needs no account. none = do not."""

    profile: NonNegativeInt = 0
    """Steps to profile, from the third of the launch on; 0 = none. Writes `profile/` in the run's directory: one trace
    of all ranks, and where the time goes."""

    @model_validator(mode="after")
    def _name_is_a_directory(self) -> Self:
        if self.name in (".", ".."):
            raise ValueError(f"name {self.name!r} must be the name of a directory of its own")
        return self


class Config(Section):
    """The configuration of a whole run. Frozen: `for_ranks` returns a new one."""

    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    offload: OffloadConfig = OffloadConfig()
    hub: HubConfig = HubConfig()
    log: LogConfig

    @model_validator(mode="after")
    def _evaluates_to_keep_the_best(self) -> Self:
        if self.checkpoint.keep_best and not (self.train.eval_every and self.checkpoint.every):
            raise ValueError("checkpoint.keep_best needs train.eval_every and checkpoint.every above 0: set both")
        return self

    @model_validator(mode="after")
    def _keeps_what_it_goes_back_to(self) -> Self:
        back, kept = self.train.roll_back, self.checkpoint
        if back and not kept.every:
            raise ValueError(f"train.roll_back = {back} goes back to a checkpoint: set checkpoint.every")
        if back > (most := kept.every * (kept.keep - 1) + 1):
            raise ValueError(
                f"train.roll_back = {back}: of the {kept.keep} newest checkpoints, one every {kept.every} steps, the "
                f"oldest may be {most} steps old; raise checkpoint.keep or checkpoint.every, or lower roll_back"
            )
        if back and kept.keep_best:
            raise ValueError(
                f"train.roll_back = {back} with checkpoint.keep_best: the best checkpoint may be among those that are "
                "left behind; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _generates_to_compare(self) -> Self:
        if self.train.best_by in ANSWER_METRICS and self.eval.generate is None:
            raise ValueError(
                f'train.best_by = "{self.train.best_by}" is found by generation: set eval.generate as well'
            )
        return self

    @model_validator(mode="after")
    def _saves_from_disk_at_once(self) -> Self:
        if self.offload.on_disk is not None and self.checkpoint.asynchronous:
            raise ValueError(
                f'checkpoint.asynchronous with offload.{self.offload.on_disk} = "nvme": host memory cannot hold '
                "a copy of everything that is on disk; set checkpoint.asynchronous = false"
            )
        return self

    @model_validator(mode="after")
    def _scales_no_loss_in_backward(self) -> Self:
        if self.train.optimizer_in_backward and self.parallel.param_dtype == "fp16":
            raise ValueError(
                'train.optimizer_in_backward with parallel.param_dtype = "fp16", which scales the loss: steps '
                'are taken before it is known whether gradients overflowed; use "bf16"'
            )
        return self

    @model_validator(mode="after")
    def _has_axes_with_what_can_be(self) -> Self:
        parallel, train = self.parallel, self.train
        places = [f"offload.{kind}" for kind in PLACES if getattr(self.offload, kind) is not None]
        with_neither = {'parallel.backend = "jax"': parallel.backend == "jax"}
        with_tp = {
            **dict.fromkeys(places, True),
            f'train.optimizer = "{train.optimizer}"': train.optimizer == "adamw-8bit",
            f'lora.base = "{self.lora.base}"': self.lora.base is not None,
        }
        with_cp = {f'model.task = "{self.model.task}"': self.model.task not in {None, DEFAULT}}
        with_ep = {**with_tp, f"parallel.tp = {parallel.tp}": parallel.tp > 1}
        for axis, found in (("tp", with_tp), ("cp", with_cp), ("ep", with_ep)):
            size = getattr(parallel, axis)
            wrong = next((setting for setting, asked in {**found, **with_neither}.items() if asked), None)
            if size > 1 and wrong is not None:
                raise ValueError(f"parallel.{axis} = {size} does not work with {wrong} yet: leave one of them out")
        return self

    @property
    def run_directory(self) -> Path:
        """`<log.directory>/<log.name>`."""
        return Path(self.log.directory) / self.log.name

    def for_ranks(self, world_size: int) -> Self:
        """Return this configuration fitted to a number of ranks: `ranks` and `global_batch` become plain numbers.

        Args:
            world_size: ranks of the whole run, over all hosts.

        Raises:
            MeshError: `shard_group` or `reshard_after_forward` does not fit the ranks or the strategy.
            ConfigError: `global_batch` is not a whole number of micro-batches on every rank, is more than one of them
                with `optimizer_in_backward`, or has too many tokens for a rank.
        """
        parallel = _fitted(self.parallel, world_size)
        data_ranks = parallel.data_ranks(world_size)
        one_pass = self.train.micro_batch * data_ranks
        global_batch = self.train.global_batch or one_pass
        if global_batch % one_pass:
            raise ConfigError(
                f"train.global_batch={global_batch} is not a multiple of train.micro_batch x ranks{_over(parallel)} "
                f"= {self.train.micro_batch} x {data_ranks} = {one_pass}"
            )
        tokens = global_batch // data_ranks * self.data.seq_len
        if tokens > _MOST_TOKENS:
            raise ConfigError(
                f"{tokens:.3g} tokens per step on each rank (train.global_batch={global_batch} / {data_ranks} "
                f"ranks x data.seq_len={self.data.seq_len}) are more than the {_MOST_TOKENS} supported; lower "
                "train.micro_batch or global_batch"
            )
        if self.train.optimizer_in_backward and global_batch != one_pass:
            raise ConfigError(
                f"train.optimizer_in_backward with train.global_batch={global_batch}: each backward takes a "
                f"step, so gradients of {global_batch // one_pass} micro-batches cannot be added; set "
                f"train.micro_batch={global_batch // data_ranks}"
            )
        return self.model_copy(
            update={
                "train": self.train.model_copy(update={"global_batch": global_batch}),
                "parallel": parallel.model_copy(update={"ranks": world_size}),
            }
        )


def _over(parallel: ParallelConfig) -> str:
    """Return what the number of ranks is divided by to get the number of data ranks, in words."""
    return "".join(f" / {axis}" for axis in parallel.axes_of_a_batch)


def _fitted(parallel: ParallelConfig, world_size: int) -> ParallelConfig:
    """Return the section with the shard group that follows from the copies. Raises MeshError if sizes do not fit the
    ranks or the strategy."""
    if world_size % parallel.ranks_per_batch:
        asked = " x ".join(f"{axis}={size}" for axis, size in parallel.axes_of_a_batch.items())
        raise MeshError(
            f"parallel.{asked} does not divide the {world_size} ranks; use one of {divisors(world_size)} or "
            "another number of ranks"
        )
    copies, group, data_ranks = parallel.dp_replicate, parallel.shard_group, parallel.data_ranks(world_size)
    if copies > 1:
        if data_ranks % copies or group not in {None, data_ranks // copies}:
            sizes = {"dp_replicate": copies, "shard_group": group, "cp": parallel.cp, "tp": parallel.tp}
            asked = " x ".join(f"{name}={size}" for name, size in sizes.items() if size not in {None, 1})
            way = "be" if group else "divide"
            raise MeshError(f"parallel.{asked}: the product must {way} the number of ranks, {world_size}")
        if parallel.strategy not in {*HYBRID_STRATEGIES, AUTO, "no_shard"}:
            raise MeshError(
                f"parallel.dp_replicate={copies} needs a hybrid strategy (hybrid_shard or hybrid_shard_zero2), or "
                f"no_shard for {data_ranks} copies; {parallel.strategy} has one copy"
            )
        group = data_ranks // copies
        parallel = parallel.model_copy(update={"shard_group": group})
    _check_groups(parallel, data_ranks)
    return parallel


def _check_groups(parallel: ParallelConfig, data_ranks: int) -> None:
    group, ranks = parallel.shard_group, f"{data_ranks} ranks"
    if parallel.ranks_per_batch > 1:
        over = "".join(f" / {axis}={size}" for axis, size in parallel.axes_of_a_batch.items())
        ranks = f"{data_ranks} data ranks ({data_ranks * parallel.ranks_per_batch}{over})"
    if group is not None:
        if data_ranks % group:
            raise MeshError(
                f"parallel.shard_group={group} does not divide the {ranks}; "
                f"use one of {divisors(data_ranks)} or another number of ranks"
            )
        expected = 1 if parallel.strategy == "no_shard" else data_ranks
        if parallel.strategy not in {*HYBRID_STRATEGIES, AUTO} and group != expected:
            raise MeshError(
                f"parallel.shard_group={group} needs a hybrid strategy (hybrid_shard or hybrid_shard_zero2); "
                f"{parallel.strategy} always uses {expected} of {ranks}"
            )
    smaller = parallel.reshard_after_forward
    whole = (group or data_ranks) * parallel.cp
    if whole % parallel.ep:
        raise MeshError(
            f"parallel.ep={parallel.ep} does not divide the shard group of {whole} ranks; use one of {divisors(whole)}"
        )
    if parallel.ep > 1 and smaller is not None and not isinstance(smaller, bool):
        raise MeshError(f"parallel.reshard_after_forward={smaller} beside parallel.ep={parallel.ep}: use true or false")
    if smaller is not None and not isinstance(smaller, bool) and whole % smaller:
        raise MeshError(
            f"parallel.reshard_after_forward={smaller} does not divide the shard group of {whole} ranks; "
            f"use one of {divisors(whole)}, true or false"
        )
