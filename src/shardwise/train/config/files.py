"""Reading and writing a configuration as a TOML file, and errors about the files that it names.

`load` reads a file and applies `key=value` overrides; `dump_toml` writes a configuration back.
"""

import datetime
import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardwise.errors import ConfigError
from shardwise.policy.strategies import OTHER_NAMES
from shardwise.suggest import did_you_mean
from shardwise.toml_text import toml_text
from shardwise.train.config.schema import Config, Section, SourceConfig

_RECIPES = Path(__file__).parents[2] / "recipes"


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration.

    Args:
        path: a TOML file, or the name of one of the package's recipes, such as "quickstart".
        overrides: `section.key=value` strings, applied in order. A value is parsed as TOML; if that fails, it is a
            string.

    Raises:
        ConfigError: the file is missing or not TOML, or a key or value is wrong; the message names it.
    """
    path = Path(path)
    tree = _read(recipe_named(path) or path)
    for override in overrides:
        _apply(tree, override)
    log = tree.setdefault("log", {})
    if isinstance(log, dict):
        log.setdefault("name", path.stem)
    return config_of(tree, path)


def config_of(tree: Mapping[str, Any], where: object) -> Config:
    """Return the configuration with these keys, by section. Raises ConfigError, which begins with `where`, if a key or
    value is wrong."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explain(error)}") from None


def dump_toml(config: Config) -> str:
    """Return the configuration as TOML text; loading that text gives an equal configuration. Unset keys are left
    out."""
    replaced = {"data": {"source"}} if config.data.sources is not None else None
    return toml_text(config.model_dump(exclude_none=True, exclude=replaced))


@contextmanager
def reading(key: str, path: object) -> Iterator[None]:
    """Turn an OSError about the path that `key` names, or about a path below it, into a ConfigError that names the
    key."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None or str(error.filename) == str(path) else f"{error.filename} "
        raise ConfigError(f"{key}={str(path)!r}: {where}cannot be read: {error.strerror or error}") from None


def recipe_named(path: Path) -> Path | None:
    """Return the file of the recipe that a path is the name of; None if it is none, or there is such a file."""
    if len(path.parts) > 1 or path.is_file():
        return None
    recipe = _RECIPES / f"{path}.toml"
    return recipe if recipe.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = ", ".join(sorted(recipe.stem for recipe in _RECIPES.glob("*.toml")))
        raise ConfigError(f"no configuration file at {path}; recipes are {names}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in the tree."""
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} must have the form section.key=value, such as train.lr=1e-4")
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
    """Return the TOML value that the text spells, or else the text itself. A bare date stays text, because it is meant
    as a name, not a time."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if len(parsed) > 1 or isinstance(parsed["value"], datetime.date | datetime.time):
        return text
    return parsed["value"]


def _explain(error: ValidationError) -> str:
    """Return one line about the first mistake, with the number of further mistakes."""
    details = error.errors(include_url=False)
    unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
    first = (unknown or details)[0]  # a mistyped required key is both missing and unknown: report the typo
    names = {tuple(_field_path(detail["loc"])) for detail in details}
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{_explain_one(first, details)}{more}"


def _explain_one(detail: ErrorDetails, details: Sequence[ErrorDetails]) -> str:
    if detail["loc"][:2] == ("data", "sources") and len(detail["loc"]) > 3:
        return _of_source(int(detail["loc"][2]), str(detail["loc"][3]), detail)
    name = _field_path(detail["loc"])
    if detail["type"] == "extra_forbidden":
        return _unknown(name)
    label = ".".join(name)
    if detail["type"] == "missing":
        return f"{label} is required" if len(detail["loc"]) == len(name) else f"{label} has too few items"
    if detail["type"] == "value_error":
        return f"{f'[{label}] ' if label else ''}{detail['ctx']['error']}"
    # A union gives one error per member: name all of them.
    reasons = dict.fromkeys(_reason(other) for other in details if _field_path(other["loc"]) == name)
    if name == ["parallel", "strategy"]:
        others = (f"{theirs} ({ours})" for theirs, ours in OTHER_NAMES.items())
        reasons[f"another name for one of them: {', '.join(others)}"] = None
    return f"{label} = {detail['input']!r}: {', or '.join(reasons)}"


def _of_source(index: int, key: str, detail: ErrorDetails) -> str:
    """Return the message about a key of one of several sources of data."""
    where = f"data.sources, number {index + 1}"
    if detail["type"] == "missing":
        return f"{where}: {key} is required"
    if detail["type"] != "extra_forbidden":
        return f"{where}: {key} = {detail['input']!r}: {_reason(detail)}"
    known = SourceConfig.model_fields
    hint = did_you_mean(key, known) or f"; it may have {', '.join(known)}"
    return f"{where}: unknown key {key}{hint}"


def _reason(detail: ErrorDetails) -> str:
    if detail["type"] == "literal_error":
        return f"must be {detail['ctx']['expected']}"
    if detail["type"] == "string_pattern_mismatch":
        return _PATTERNS_IN_WORDS[str(detail["loc"][-1])]
    if detail["type"] == "tuple_type":
        return "must be a list"
    if detail["type"] in ("too_long", "too_short"):
        return f"must have {detail['ctx'].get('max_length', detail['ctx'].get('min_length'))} items"
    reason = detail["msg"].replace("Input should be ", "must be ").replace("String should have ", "must have ")
    reason = reason.replace("must be a valid ", "must be a ")
    return reason.replace("a integer", "an integer")


def _field_path(location: Sequence[str | int]) -> list[str]:
    """Return the section and key of an error's location. What pydantic appends are members of unions, not keys."""
    keys = [str(part) for part in location]
    return keys[:2]


_PATTERNS_IN_WORDS = {
    "activation_checkpointing": "must be 'none', 'full', 'selective-ops', 'every-N' (N is 1 or more) or 'offload'",
    "optimizer": "must be 'adamw', 'adamw-bf16', 'adamw-8bit', 'muon' or module:function",
    "name": "must be the name of a directory, without / and \\",
    "push_to": "must be the name of a repository of a hub, such as 'org/name'",
}
"""What a key's pattern requires, in words, by key."""
_OTHERS_NAMES = {
    "lora.rank": "lora.r",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "num_train_steps": "train.steps",
    "max_iters": "train.steps",
    "batch_size": "train.micro_batch",
    "micro_batch_size": "train.micro_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "global_batch_size": "train.global_batch",
    "train_batch_size": "train.global_batch",
    "gradient_accumulation_steps": "train.global_batch",
    "max_grad_norm": "train.clip",
    "grad_clip": "train.clip",
    "gradient_clipping": "train.clip",
    "gradient_checkpointing": "train.activation_checkpointing",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "warmup": "train.warmup_steps",
    "optim": "train.optimizer",
    "torch_compile": "train.compile",
    "eval_steps": "train.eval_every",
    "save_steps": "checkpoint.every",
    "save_every": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "logging_steps": "log.every",
    "output_dir": "log.directory",
    "run_name": "log.name",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "block_size": "data.seq_len",
    "context_length": "data.seq_len",
    "dataset": "data.source",
    "model_name_or_path": "model.path",
    "dataset_name": "data.source",
    "dataset_config_name": "data.subset",
    "hub_model_id": "hub.push_to",
    "mixed_precision": "parallel.param_dtype",
    "bf16": "parallel.param_dtype",
    "fp16": "parallel.param_dtype",
    "precision": "parallel.param_dtype",
    "sharding_strategy": "parallel.strategy",
    "nproc_per_node": "parallel.ranks",
    "num_processes": "parallel.ranks",
    "world_size": "parallel.ranks",
}
"""Our key for each name that other trainers use."""


def _unknown(keys: Sequence[str]) -> str:
    """Return the message for a key that does not exist, with the most similar existing key."""
    known = list(_known_names())
    name = " ".join(".".join(keys).split())
    if len(keys) == 1:
        sections = list(Config.model_fields)
        near = difflib.get_close_matches(name, sections, n=1)
        theirs = [_OTHERS_NAMES[name]] if name in _OTHERS_NAMES else []
        keys_so_called = [one for one in known if one.endswith(f".{name}")]
        suggestions = theirs or keys_so_called or [f"[{section}]" for section in near]
        message = f"unknown section [{name}]"
        fallback = f"the sections are {', '.join(sections)}"
    else:
        within = [dotted for dotted in known if dotted.startswith(f"{keys[0]}.")]
        elsewhere = [dotted for dotted in known if dotted.endswith(f".{keys[-1]}")]
        theirs = [_OTHERS_NAMES[key] for key in (name, keys[-1]) if key in _OTHERS_NAMES]
        suggestions = elsewhere or theirs or _nearest(name, within) or ([] if within else _nearest(name, known))
        message = f"unknown key {name}"
        fallback = f"[{keys[0]}] has {', '.join(dotted.partition('.')[2] for dotted in within)}"
    return f"{message}; did you mean {suggestions[0]}?" if suggestions else f"{message}; {fallback}"


def _nearest(name: str, candidates: Sequence[str]) -> list[str]:
    """Return the candidate whose last part is most similar to the last part of `name`, if any is similar."""
    by_key = {dotted.rpartition(".")[2]: dotted for dotted in candidates}
    near = difflib.get_close_matches(name.rpartition(".")[2], list(by_key), n=1)
    return [by_key[key] for key in near]


def _known_names() -> Iterator[str]:
    """Yield every `section.key`."""
    for section, field in Config.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, Section)
        for key in kind.model_fields:
            yield f"{section}.{key}"
