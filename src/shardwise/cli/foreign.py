"""Configurations of other libraries, for `shardwise convert` and for `shardwise plan --from`, which also takes ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError, PlanError
from shardwise.foreign.files import SUFFIXES, read
from shardwise.foreign.settings import ForeignSettings
from shardwise.fsdp.strategy import Precision
from shardwise.policy.adapters import Adapters
from shardwise.policy.places import Places
from shardwise.policy.settings import RUN, values_in, words

if TYPE_CHECKING:
    from shardwise.cli.plan_options import Options
    from shardwise.plan.hardware.devices import Hardware
    from shardwise.train.config.schema import ModelConfig


_SHARDING = ("strategy", "shard_group", "reshard_after_forward")
_DISPLACES = {
    "global_batch": ("accumulation",),
    "accumulation": ("global_batch",),
    "strategy": _SHARDING,
    "compare": (*_SHARDING, "offload", "optimizer_in_backward"),
    "engine": ("offload", "optimizer_in_backward"),
}
"""For each option of the command line: the settings of the file that it overrides."""


def is_configuration(source: str) -> bool:
    """Return whether a name is that of another library's configuration file rather than of a checkpoint."""
    return Path(source).suffix.lower() in SUFFIXES and not Path(source).is_dir()


def convert(source: str, target: str | None, given: Mapping[str, object]) -> None:
    """Convert another library's configuration to ours. Differences are printed, and noted in the file's comments.

    Args:
        source: the file.
        target: the TOML file to write, which must not exist; None = standard output.
        given: the other options of `shardwise convert`, by name. They are for checkpoints, so none may be set.

    Raises ConfigError: such an option is set, the file is not such a configuration, or the target cannot be written.
    """
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name} is for checkpoints, but {source} is a configuration")
    from shardwise.train.build.from_foreign import configuration_of, notes

    settings = read(Path(source))
    text = configuration_of(settings, Path(source))
    if target is None:
        print(text, end="")
        return
    try:
        with Path(target).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{target} exists already: name another file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from None
    print(f"{target}: a shardwise configuration, from {settings.library}: {source}")
    print("\n".join(notes(settings)))


def with_settings(options: Options) -> Options:
    """Return the options of `shardwise plan`, filled in from the file of `--from`. Options that the command line sets,
    and what they override (`_DISPLACES`), are not taken from the file. Prints on standard error what was taken and what
    differs, since standard output may be JSON.

    Raises ConfigError: the file cannot be read, or trains on JAX. PlanError: it names an unknown device, or ranks that
    do not divide.
    """
    if options.foreign is None:
        return options
    library, differences = "shardwise", list[str]()
    if options.foreign.suffix.lower() == ".toml":
        found = _own(options.foreign, options.gpu)
    else:
        settings = read(options.foreign)
        library, found = settings.library, _found(settings, options.foreign)
        differences = [*settings.changes, *(f"no counterpart: {name}" for name in settings.without_equal)]
    usual = type(options)()
    displaced = {name for given, others in _DISPLACES.items() if getattr(options, given) is not None for name in others}
    taken: dict[str, Any] = {
        name: words(value) if name in RUN and value is not True else value
        for name, value in found.items()
        if value not in (None, False) and getattr(options, name) == getattr(usual, name) and name not in displaced
    }
    said = ", ".join(map(_said, taken.items())) or "nothing to plan with"
    print(f"{options.foreign} ({library}): {said}", *differences, sep="\n  ", file=sys.stderr)
    return replace(options, **taken)


def _own(path: Path, gpu: str | None) -> dict[str, Any]:
    """Return what a configuration of ours says about a run, by name of the option; None for what it leaves open.

    An inline model is included only if it sets `vocab_size` itself; otherwise its vocabulary would depend on the data.

    Args:
        path: the file.
        gpu: the device to plan for; None: the file's, or the default one. If the file leaves `param_dtype` open, the
            device decides it, as in training.
    """
    from shardwise.plan.hardware.devices import find_device
    from shardwise.plan.hardware.machines import USUAL_GPU
    from shardwise.train.config.files import load

    config = load(path)
    model, parallel, lora = config.model, config.parallel, config.lora
    if parallel.backend != "torch":
        raise ConfigError(
            f"{path}: parallel.backend = {parallel.backend!r} is planned only with shardwise plan --backend jax"
        )
    compute = parallel.param_dtype or _computed_in(model.dtype, find_device(gpu or parallel.hardware or USUAL_GPU))
    targets = None if lora.targets is None else tuple(lora.targets)
    return {
        "model": _model(model),
        "gpu": parallel.hardware,
        "gpus": parallel.ranks if isinstance(parallel.ranks, int) else None,
        "global_batch": config.train.global_batch,
        "precision": Precision(compute, parallel.reduce_dtype, "fp32" if lora.r else model.dtype),
        "lora": Adapters(lora.r, targets, lora.dropout, model.dtype) if lora.r else None,
        "base": lora.base,
        **values_in(config.model_dump()),
        "offload": config.offload.places,
    }


def _model(model: ModelConfig) -> Any:
    """Return MODEL for a section `[model]`: a name, or a configuration that names the class of the section's task; None
    for an inline model whose vocabulary is the data's."""
    from shardwise.hub import fetch_config, hub_name
    from shardwise.train.config.files import reading
    from shardwise.train.config.tasks import check_task, class_for, task_for

    if model.config is not None and "vocab_size" not in model.config and model.task != "image-classification":
        return None
    if model.task is None or model.factory is not None:
        return model.path or model.factory or model.config
    found: Mapping[str, Any] = model.config or {}
    if model.path is not None:
        name = hub_name(model.path)
        path = Path(model.path) if name is None else fetch_config(name, f"model.path={model.path!r}")
        file = path / "config.json" if path.is_dir() else path
        with reading("model.path", model.path):
            found = json.loads(file.read_text(encoding="utf-8"))
        if task_for(found) == model.task:
            return model.path
    check_task(model.task, str(found.get("model_type")))
    return {**found, "architectures": [class_for(model.task, str(found.get("model_type")))]}


def _computed_in(stored: str, device: Hardware) -> str | None:
    """Return the compute dtype of a new run on a device, as `train.build.compute_dtype` settles it; None is the one in
    which parameters are stored."""
    if device.kind == "cpu":
        return None
    return "bf16" if stored == "fp32" and "bf16" in device.peak_flops else stored


def _found(settings: ForeignSettings, source: Path) -> dict[str, Any]:
    nodes = settings.nodes or 1
    if settings.ranks is not None and settings.ranks % nodes:
        raise PlanError(f"{source}: num_processes={settings.ranks} is not a multiple of num_machines={nodes}")
    compute, reduce = settings.get("parallel.param_dtype"), settings.get("parallel.reduce_dtype")
    accumulation = settings.steps_accumulated
    places = {key: place for key, place in settings.tree["offload"].items() if key != "path"}
    return {
        **values_in(settings.tree),
        "precision": Precision(compute, reduce or "fp32", "fp32") if compute is not None else None,
        "accumulation": accumulation,
        "global_batch": settings.get("train.global_batch") if accumulation is None else None,
        "offload": Places.of(places),
        "gpus": settings.ranks // nodes if settings.ranks is not None else None,
        "nodes": settings.nodes,
    }


def _said(option: tuple[str, object]) -> str:
    name, value = option
    said = name.replace("_", "-")
    if value is True:
        return said
    return f"{said} {value.get('model_type', '')} configuration" if isinstance(value, Mapping) else f"{said} {value}"
