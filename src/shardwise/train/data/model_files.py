"""The files that `[model]` and `[data]` name: found, or fetched from a hub, before any rank needs them. No torch.

`settled` decides what a configuration leaves open: the commit of a hub's name, the task, and the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from shardwise import hub
from shardwise.errors import ConfigError, HubError
from shardwise.suggest import nearest_path
from shardwise.train.config.files import reading
from shardwise.train.config.schema import RANDOM, UNSET, Config, ModelConfig
from shardwise.train.config.tasks import DEFAULT, TaskName, task_for
from shardwise.train.data.hub_rows import prepare
from shardwise.train.data.tokenizer import BUILTIN_TOKENIZERS, BYTES

_MANIFEST = "manifest.json"
"""`checkpoint.format.manifest.NAME`: a cached plan is to import neither that nor numpy."""
_ASK_FOR_RANDOM = f'set model.weights = "{RANDOM}" to train from random numbers'


def settled(config: Config) -> Config:
    """Return the configuration with names of a hub pinned to the commits that they name now, and with a task and a
    tokenizer.

    Configurations and tokenizers are fetched from the hub if they are not in the cache, weights and data sets are not.
    A settled configuration stays as it is, and costs no request.

    Raises:
        ConfigError: a file or directory does not exist; a model has no weights, or no tokenizer beside its weights.
        HubError: a name of a hub has no such files, or they cannot be fetched.
    """
    model, data = config.model, config.data
    found = {"path": _found("model.path", model.path), "weights": model.weights}
    if model.pretrained is not None and model.pretrained != model.directory:
        found["weights"] = _found("model.weights", model.weights)
    model = model.model_copy(update=found)
    if model.pretrained is not None:
        _check_weights(model, model.pretrained)
    model = model.model_copy(update={"task": model.task or _task(model)})
    tokenizer = data.tokenizer
    if tokenizer is None:
        tokenizer = BYTES if model.task == "image-classification" else _own_tokenizer(model)
    elif tokenizer != BYTES and tokenizer not in BUILTIN_TOKENIZERS:
        tokenizer = _found("data.tokenizer", tokenizer)
    sources = [_pinned_rows(one.source) for one in data.each_source]
    data = data.with_sources(sources).model_copy(update={"tokenizer": tokenizer})
    return config.model_copy(update={"model": model, "data": data})


def _pinned_rows(source: str) -> str:
    """Return a value of `data.source`; a hub's data set with its commit."""
    rows = hub.hub_name(source)
    if rows is None or rows.is_pinned:
        return source
    return str(hub.listing(rows, f"data.source={source!r}", "dataset").name)


_NAMES = ("model.path", "model.weights", "model.task", "data.tokenizer")
"""The keys that `settled` may change, besides `_SOURCES`."""
_SOURCES = "data.source"


def names_of(config: Config) -> dict[str, str | None]:
    """Return the names that a configuration gives of models, tokenizers and data, by key; of several sources of data,
    with the source's number after the key."""
    sections = {"model": config.model, "data": config.data}
    names = {key: getattr(sections[key.partition(".")[0]], key.partition(".")[2]) for key in _NAMES}
    sources = [one.source for one in config.data.each_source]
    if len(sources) == 1:
        return {**names, _SOURCES: sources[0]}
    return {**names, **{f"{_SOURCES} {number}": source for number, source in enumerate(sources, 1)}}


def with_names(config: Config, names: Mapping[str, str | None]) -> Config:
    """Return the configuration with other names, as from `names_of`."""
    model, data = (
        {key.partition(".")[2]: names[key] for key in _NAMES if key.startswith(section)}
        for section in ("model.", "data.")
    )
    sources = [name for key, name in names.items() if key.startswith(_SOURCES) and name is not None]
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "data": config.data.with_sources(sources).model_copy(update=data),
        }
    )


def fetch(config: Config, weights: bool, say: Callable[[str], None]) -> None:
    """Fetch everything that a settled configuration names on a hub. One process of a machine is to call this; the
    others then find it in the cache.

    Args:
        weights: whether the model's weights are needed. A run that resumes from whole checkpoints needs none.
        say: takes a line about each download.

    Raises:
        HubError: something cannot be fetched, or the disk has no room for it.
    """
    model, data = config.model, config.data
    named = {"model.path": model.path, "data.tokenizer": data.tokenizer}
    for key, name in named.items():
        if name is not None:
            hub.fetch(name, f"{key}={name!r}")
    if model.pretrained is not None:
        key = "model.path" if model.pretrained == model.directory else "model.weights"
        hub.fetch(model.pretrained, f"{key}={model.pretrained!r}", weights=weights, say=say)
    for one in data.each_source:
        rows = hub.hub_name(one.source)
        if rows is not None:
            prepare(rows, one.subset, one.split, say)


def has_weights(name: str) -> bool:
    """Return whether a directory, or a name of a hub, has safetensors files that can be loaded. Raises HubError if the
    hub cannot be asked."""
    found = hub.hub_name(name)
    if found is None:
        return any((Path(name) / file).is_file() for file in (hub.SINGLE, hub.INDEX, _MANIFEST))
    return not {hub.SINGLE, hub.INDEX}.isdisjoint(hub.listing(found, repr(name)).files)


def model_section(name: str) -> dict[str, str]:
    """Return the keys of `[model]` that name a model. Raises HubError if it is named on a hub that cannot be asked."""
    directory = ModelConfig(path=name).directory
    assert directory is not None
    return {"path": name} if has_weights(directory) else {"path": name, "weights": RANDOM}


def _found(key: str, name: str | None) -> str | None:
    """Return a path that exists, or a name pinned to a commit whose configuration is in the cache. None if None."""
    if name is None:
        return None
    if hub.hub_name(name) is not None:
        pinned = hub.pinned(name, f"{key}={name!r}")
        hub.fetch(pinned, f"{key}={name!r}")
        return pinned
    path = Path(name)
    with reading(key, name):
        is_there = path.exists()
    if is_there:
        return name
    if name == UNSET:
        raise ConfigError(f"{key} is not set: set it to the model, such as {key}=models/my-model")
    hint = nearest_path(path) or "; a model on a hub is named org/name"
    raise ConfigError(f"{key}={name!r}: no such file or directory{hint}")


def _check_weights(model: ModelConfig, name: str) -> None:
    key, said = ("model.path", model.path) if name == model.directory else ("model.weights", name)
    where = f"{key}={said!r}"
    found = hub.hub_name(name)
    if found is not None:
        try:
            hub.weight_files(hub.listing(found, where), where)
        except HubError as error:
            raise HubError(f"{error}; or {_ASK_FOR_RANDOM}") from None
        return
    with reading(key, name):
        if has_weights(name):
            return
        pickles = sorted(path.name for path in Path(name).glob("*.bin"))
    if pickles:
        raise ConfigError(
            f"{where} has its weights only as pickles ({pickles[0]}), which are not loaded: convert it once with "
            f"transformers' from_pretrained(...) and save_pretrained(another directory), or {_ASK_FOR_RANDOM}"
        )
    raise ConfigError(
        f"{where} has no weights ({hub.SINGLE} or {hub.INDEX}): name a model that has them with model.weights, or "
        f"{_ASK_FOR_RANDOM}"
    )


def _task(model: ModelConfig) -> TaskName:
    """Return the task that the model's configuration is made for. A file that cannot be read is reported by what builds
    the model."""
    if model.path is None:
        return task_for(model.config or {})
    path = hub.local(model.path)
    try:
        found = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return DEFAULT
    return task_for(found) if isinstance(found, dict) else DEFAULT


def _own_tokenizer(model: ModelConfig) -> str:
    """Return the directory or name of the model's own tokenizer; "bytes" for a model without `path`, and for one that
    starts from random weights and has none. Raises ConfigError if a pretrained one has none."""
    if model.path is None:
        return BYTES
    for name in (model.directory, model.pretrained):
        if name is not None and hub.has_tokenizer(hub.local(name)):
            return name
    if model.pretrained is not None:
        raise ConfigError(
            f"{model.pretrained} has weights but no tokenizer (no {hub.TOKENIZER_FILES[0]} or the like): set "
            f'data.tokenizer to the tokenizer that belongs to them, or to "{BYTES}"'
        )
    return BYTES
