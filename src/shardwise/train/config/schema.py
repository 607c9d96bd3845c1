"""The configuration of a run: one TOML file, validated before anything is started.

`load` reads a file and applies `key=value` overrides; `Config.for_ranks` fits the result to a number of ranks;
`dump_toml` writes it back. Paths in a configuration are relative to the working directory.
"""

import datetime
import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from shardwise.errors import ConfigError, MeshError
from shardwise.suggest import divisors

StrategyName = Literal[
    "no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2"
]
DtypeName = Literal["fp32", "bf16", "fp16"]
HYBRID_STRATEGIES: frozenset[StrategyName] = frozenset({"hybrid_shard", "hybrid_shard_zero2"})

# TOML has no null: the word "none" unsets an optional key, which an override needs.
NoneWord = BeforeValidator(lambda value: None if value == "none" else value)


class Section(BaseModel):
    """What every section shares: frozen, no unknown keys, no silent conversions (the text "3" is not the number 3)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


class ModelConfig(Section):
    """`[model]`: what is trained. Exactly one of `path`, `config` and `factory` says so."""

    path: Annotated[str | None, NoneWord] = None
    """A Hugging Face directory, or a `config.json`."""
    config: Annotated[dict[str, Any] | None, NoneWord] = None
    """A transformers configuration written inline; `model_type` is required."""
    factory: Annotated[str | None, NoneWord] = None
    """`module:function`, called without arguments; returns an `nn.Module`."""
    weights: Annotated[str | None, NoneWord] = None
    """A Hugging Face directory to start from; none = random initialisation."""
    dtype: DtypeName = "fp32"
    """The dtype in which the parameters are stored and updated (the master copy)."""
    init: Literal["meta", "cpu"] = "meta"
    """Where the model is built: "meta" never holds the whole model on a rank, "cpu" builds it whole on each."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("path", "config", "factory") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"give exactly one of path, config and factory; found {found}")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError('config needs a model_type, such as model_type = "llama"')
        if self.factory is not None and not all(self.factory.partition(":")):
            raise ValueError(f"factory must read module:function, not {self.factory!r}")
        return self


class DataConfig(Section):
    """`[data]`: the text, and how it becomes sequences."""

    source: Annotated[str, Field(min_length=1)] = "builtin:python-stdlib"
    """"builtin:python-stdlib" (the interpreter's own sources), a file, a directory or a glob."""
    format: Annotated[Literal["text", "jsonl", "parquet"] | None, NoneWord] = None
    """How the files are read; none = by suffix. Rows of jsonl and parquet files give their `text` field."""
    tokenizer: str = "bytes"
    """"bytes" (256 byte values and one end-of-text token, in a vocabulary of 320) or a directory with a tokenizer."""
    seq_len: PositiveInt = 512
    """Tokens per sequence."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """The part of the documents kept for evaluation; 0 = none."""
    seed: NonNegativeInt = 0
    """Decides the order of the data."""


class TrainConfig(Section):
    """`[train]`: the loop and the optimizer."""

    steps: PositiveInt
    """Optimizer steps in the whole run."""
    micro_batch: PositiveInt = 1
    """Sequences per rank and forward."""
    global_batch: Annotated[PositiveInt | None, NoneWord] = None
    """Sequences per step over all ranks; none = micro_batch x ranks. The number of micro-batches follows."""
    optimizer: Literal["adamw"] = "adamw"
    """The optimizer, one of torch's."""
    lr: PositiveFloat = 3e-4
    """The learning rate at its highest."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's term in the denominator."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, for parameters of two or more dimensions."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """The way the learning rate falls after warm-up to `lr * min_lr_ratio`; "constant" stays at `lr`."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to `lr`. A run may be shorter."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The last learning rate over the highest."""
    clip: NonNegativeFloat = 1.0
    """The largest global gradient norm; 0 = no clipping."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations; 0 = after the last step only."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides the initial weights and dropout."""
    activation_checkpointing: Annotated[str, Field(pattern=r"^(none|full|selective-ops|every-[1-9]\d*)$")] = "none"
    """"none", "full" (each block), "selective-ops" (cheap operations only) or "every-N" (one block in N)."""
    compile: bool = False
    """Compile each unit with torch.compile."""


class ParallelConfig(Section):
    """`[parallel]`: how the model is sharded, over how many ranks."""

    ranks: Annotated[Literal["auto"] | PositiveInt, Field(union_mode="left_to_right")] = "auto"
    """Ranks on this machine; "auto" = all GPUs, else 2 CPU ranks. Under torchrun its own number counts."""
    strategy: Literal[StrategyName, "auto"] = "full_shard"
    """Which of parameters, gradients and optimizer state are sharded; "auto" = the fastest that is forecast to fit."""
    shard_group: Annotated[PositiveInt | None, NoneWord] = None
    """Ranks that share one copy of the model, for the hybrid strategies; none = the ranks of one host."""
    reshard_after_forward: Annotated[bool | PositiveInt | None, NoneWord] = None
    """Free gathered parameters after forward; a number = re-shard to so many ranks; none = the strategy's."""
    slots: PositiveInt = 3
    """Buffers for gathered units per size class: the limit of how far gathering runs ahead."""
    units: Annotated[PositiveInt | list[str] | None, NoneWord] = None
    """Names of module classes that are units, or the smallest number of parameters of one; none = automatic."""
    param_dtype: Annotated[DtypeName | None, NoneWord] = None
    """The dtype of forward and backward, and of gathered parameters; none = `model.dtype`."""
    reduce_dtype: DtypeName = "fp32"
    """The dtype in which gradients are summed over the ranks."""
    hardware: Annotated[str | None, NoneWord] = None
    """What plans take a rank's device for: a packaged name or a hardware file; none = the device that it has."""


class CheckpointConfig(Section):
    """`[checkpoint]`: saving and resuming."""

    every: NonNegativeInt = 0
    """Steps between checkpoints; 0 = none."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    asynchronous: bool = False
    """Copy to host memory and write while training goes on."""
    resume: str = "auto"
    """"auto" (the run's newest good checkpoint), "never", or a checkpoint's directory or URL."""


class LogConfig(Section):
    """`[log]`: where a run writes what it did."""

    directory: str = "runs"
    """The directory that holds the runs."""
    name: Annotated[str, Field(pattern=r"^[^/\\\x00]+$")]
    """The run's own directory; the configuration file's name without its suffix where not given."""
    every: PositiveInt = 1
    """Steps between lines on the terminal; `metrics.jsonl` has every step."""
    tensorboard: bool = False
    """Write TensorBoard files as well."""

    @model_validator(mode="after")
    def _name_is_a_directory(self) -> Self:
        if self.name in (".", ".."):
            raise ValueError(f"name {self.name!r} is not a directory of its own")
        return self


class Config(Section):
    """A whole run. Frozen: `for_ranks` returns a new one."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig

    @property
    def run_directory(self) -> Path:
        """`<log.directory>/<log.name>`."""
        return Path(self.log.directory) / self.log.name

    def for_ranks(self, world_size: int) -> Self:
        """Fit this configuration to a number of ranks: `ranks` and `global_batch` become plain numbers.

        Args:
            world_size: ranks of the whole run, over all hosts.

        Raises:
            MeshError: `shard_group` or `reshard_after_forward` does not fit the ranks or the strategy.
            ConfigError: `global_batch` is not a whole number of micro-batches on every rank.
        """
        _check_groups(self.parallel, world_size)
        one_pass = self.train.micro_batch * world_size
        global_batch = self.train.global_batch or one_pass
        if global_batch % one_pass:
            raise ConfigError(
                f"train.global_batch={global_batch} is not a multiple of train.micro_batch x ranks "
                f"= {self.train.micro_batch} x {world_size} = {one_pass}"
            )
        return self.model_copy(
            update={
                "train": self.train.model_copy(update={"global_batch": global_batch}),
                "parallel": self.parallel.model_copy(update={"ranks": world_size}),
            }
        )


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration.

    Args:
        path: a TOML file.
        overrides: `section.key=value` strings, applied in order. A value is read as TOML; what is not TOML is a string.

    Raises:
        ConfigError: the file is missing or not TOML, or a key or value is wrong; the message names it.
    """
    path = Path(path)
    tree = _read(path)
    for override in overrides:
        _apply(tree, override)
    log = tree.setdefault("log", {})
    if isinstance(log, dict):
        log.setdefault("name", path.stem)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, path)) from None


def dump_toml(config: Config) -> str:
    """The configuration as TOML text; `load` of it gives an equal one. Keys that are unset are left out."""
    return "\n".join(_table_lines(config.model_dump(exclude_none=True), ())).lstrip() + "\n"


def _check_groups(parallel: ParallelConfig, world_size: int) -> None:
    group = parallel.shard_group
    if group is not None:
        if world_size % group:
            raise MeshError(
                f"parallel.shard_group={group} does not divide the {world_size} ranks; "
                f"use one of {divisors(world_size)} or another number of ranks"
            )
        expected = 1 if parallel.strategy == "no_shard" else world_size
        if parallel.strategy not in {*HYBRID_STRATEGIES, "auto"} and group != expected:
            raise MeshError(
                f"parallel.shard_group={group} needs a hybrid strategy (hybrid_shard or hybrid_shard_zero2); "
                f"{parallel.strategy} always uses {expected} of {world_size} ranks"
            )
    smaller = parallel.reshard_after_forward
    whole = group or world_size
    if smaller is not None and not isinstance(smaller, bool) and whole % smaller:
        raise MeshError(
            f"parallel.reshard_after_forward={smaller} does not divide the shard group of {whole} ranks; "
            f"use one of {divisors(whole)}, true or false"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {path}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in the tree."""
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} does not read section.key=value, such as train.lr=1e-4")
    if len(keys) == 1:
        wrong = f"{dotted} is a section; set one of its keys" if dotted in Config.model_fields else _unknown(keys)
        raise ConfigError(f"override {override!r}: {wrong}")
    for depth, key in enumerate(keys[:-1]):
        child = tree.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(keys[: depth + 1])} is a value, not a table")
        tree = child
    tree[keys[-1]] = _parse_value(text.strip())


def _parse_value(text: str) -> Any:
    """The TOML value that the text spells, else the text itself. A bare date is text: it is a name, not a time."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if len(parsed) > 1 or isinstance(parsed["value"], datetime.date | datetime.time):
        return text
    return parsed["value"]


def _explain(error: ValidationError, path: Path) -> str:
    """One line for the first thing that is wrong, and how many more there are."""
    details = error.errors(include_url=False)
    unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
    first = (unknown or details)[0]  # a mistyped required key is both missing and unknown: name the typing mistake
    names = {tuple(_field_path(detail["loc"])) for detail in details}
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{path}: {_explain_one(first, details)}{more}"


def _explain_one(detail: ErrorDetails, details: Sequence[ErrorDetails]) -> str:
    name = _field_path(detail["loc"])
    if detail["type"] == "extra_forbidden":
        return _unknown(name)
    label = ".".join(name)
    if detail["type"] == "missing":
        return f"{label} is required" if len(detail["loc"]) == len(name) else f"{label} has too few items"
    if detail["type"] == "value_error":
        return f"[{label}] {detail['ctx']['error']}"
    # A union fails once per member: say them all.
    reasons = dict.fromkeys(_reason(other) for other in details if _field_path(other["loc"]) == name)
    return f"{label} = {detail['input']!r}: {', or '.join(reasons)}"


def _reason(detail: ErrorDetails) -> str:
    if detail["type"] == "literal_error":
        return f"must be {detail['ctx']['expected']}"
    if detail["type"] == "string_pattern_mismatch":
        return f"must match {detail['ctx']['pattern']}"
    if detail["type"] in ("too_long", "too_short"):
        return f"must have {detail['ctx'].get('max_length', detail['ctx'].get('min_length'))} items"
    reason = detail["msg"].replace("Input should be ", "must be ").replace("String should have ", "must have ")
    reason = reason.replace("must be a valid ", "must be a ")
    return reason.replace("a integer", "an integer")


def _field_path(location: Sequence[str | int]) -> list[str]:
    """The keys of an error's place: pydantic adds the members of unions, which are no keys."""
    keys = [str(part) for part in location]
    return keys[:2]


def _unknown(keys: Sequence[str]) -> str:
    """The message for a key that does not exist, with the nearest one that does."""
    known = list(_known_names())
    name = ".".join(keys)
    if len(keys) == 1:
        sections = list(Config.model_fields)
        near = difflib.get_close_matches(name, sections, n=1)
        suggestions = [f"[{near[0]}]"] if near else [dotted for dotted in known if dotted.endswith(f".{name}")]
        message = f"unknown section [{name}]"
        fallback = f"the sections are {', '.join(sections)}"
    else:
        within = [dotted for dotted in known if dotted.startswith(f"{keys[0]}.")]
        elsewhere = [dotted for dotted in known if dotted.endswith(f".{keys[-1]}")]
        suggestions = elsewhere or _nearest(name, within) or _nearest(name, known)
        message = f"unknown key {name}"
        fallback = f"[{keys[0]}] has {', '.join(dotted.partition('.')[2] for dotted in within)}"
    return f"{message}; did you mean {suggestions[0]}?" if suggestions else f"{message}; {fallback}"


def _nearest(name: str, candidates: Sequence[str]) -> list[str]:
    """The candidate whose last part is most like the last part of the name, if any is."""
    by_key = {dotted.rpartition(".")[2]: dotted for dotted in candidates}
    near = difflib.get_close_matches(name.rpartition(".")[2], list(by_key), n=1)
    return [by_key[key] for key in near]


def _known_names() -> Iterator[str]:
    """Every `section.key`."""
    for section, field in Config.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, Section)
        for key in kind.model_fields:
            yield f"{section}.{key}"


def _table_lines(table: Mapping[str, Any], keys: Sequence[str]) -> Iterator[str]:
    """A table's own values first, then its tables: TOML reads what follows a header as part of it."""
    if keys:
        yield ""
        yield f"[{'.'.join(map(_toml_key, keys))}]"
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{_toml_key(key)} = {_toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _table_lines(value, (*keys, key))


def _toml_key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "_").isidentifier()
    return key if bare else _toml_value(key)


def _toml_value(value: object) -> str:
    if isinstance(value, str):  # TOML's escapes are JSON's, except that it wants DEL escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # repr of a float reads back as the same float
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    raise TypeError(f"TOML cannot hold a {type(value).__name__}: {value!r}")
