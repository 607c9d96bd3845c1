"""Where a model to plan comes from: a packaged shape, a Hugging Face configuration, or code that builds one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from shardwise.errors import PlanError, one_line
from shardwise.plan.models.factory import load_factory
from shardwise.plan.models.sizes import check_sizes
from shardwise.suggest import did_you_mean, nearest_path

Builder = Callable[[], nn.Module]
ModelLike = str | Path | Mapping[str, Any] | Builder
"""What `sw.plan` takes for a model; see `resolve`."""

ATTENTION = ("sdpa", "eager")

# The head that training needs, for models whose configuration does not name their class, in order of preference.
_AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModel",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A well-known public model, kept as a data file: its transformers configuration and where that was published."""

    name: str
    title: str
    source: str
    """URL of the configuration, or of the paper with its table."""
    parameters: int
    """As its source counts them, which may be rounded."""
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be built, any number of times. One of `config` and `build` is set."""

    title: str
    """For people: a shape's title, a path, a class."""
    config: Mapping[str, Any] | None = None
    """A transformers configuration with its `model_type`."""
    build: Builder | None = None
    """Anything that returns an `nn.Module`."""
    path: str | None = None
    """A Hugging Face directory or `config.json` that `config` was read from."""
    factory: str | None = None
    """`module:function`, where `build` is that."""

    def builder(self, attention: str = "sdpa") -> Builder:
        """What builds the model, called under whatever device is current (the meta device, for a plan).

        Args:
            attention: "sdpa" (fused) or "eager" (scores materialised), where the model is transformers'. Code of the
                user's own does as it does.

        Raises:
            PlanError: when called, where transformers cannot build the configuration.
        """
        if attention not in ATTENTION:
            raise PlanError(
                f"attention={attention!r}: one of {', '.join(ATTENTION)}{did_you_mean(attention, ATTENTION)}"
            )
        if self.build is not None:
            return self.build
        assert self.config is not None
        config = self.config
        return lambda: _build_transformer(config, attention)

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model is made for. None: any, or only its code knows.

        Raises:
            PlanError: transformers cannot build the configuration.
        """
        if self.config is None:
            return None
        longest = getattr(_filled(self.config), "max_position_embeddings", None)
        return longest if isinstance(longest, int) and longest > 0 else None

    def model_section(self) -> dict[str, Any]:
        """The section `[model]` of a training configuration that names the same model.

        Raises:
            PlanError: a callable has no name that a configuration could hold.
        """
        if self.factory is not None:
            return {"factory": self.factory}
        if self.path is not None:
            return {"path": self.path}
        if self.config is None:
            raise PlanError(
                f"{self.title} is a callable, which a configuration cannot name: give the model as module:function"
            )
        return {"config": _as_transformers_has_it(self.config)}


def shapes() -> dict[str, Shape]:
    """The packaged shapes by name."""
    return dict(_shapes())


@cache
def _shapes() -> dict[str, Shape]:
    found = {}
    for entry in sorted((files("shardwise.plan.models") / "shapes").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".json"):
            name = entry.name.removesuffix(".json")
            found[name] = Shape(name=name, **json.loads(entry.read_text(encoding="utf-8")))
    return found


def resolve(model: ModelLike) -> ModelSource:
    """Find out what a model is; nothing is built yet.

    Args:
        model: a packaged shape's name ("llama-3-8b"); the path of a Hugging Face directory or `config.json`;
            "module:function", imported here, also from the working directory; a transformers configuration as a dict
            with its "model_type"; or a callable without arguments that returns an `nn.Module`.

    Raises:
        PlanError: it is none of these; the message names the nearest shape or file.
    """
    if isinstance(model, nn.Module):
        kind = type(model).__name__
        raise PlanError(
            f"the model is a {kind} that was built already: pass what builds it, such as lambda: {kind}(...), which "
            "planning calls on the meta device"
        )
    if isinstance(model, Mapping):
        return _from_config(dict(model))
    if callable(model):
        return ModelSource(title=getattr(model, "__qualname__", type(model).__name__), build=model)
    name = str(model)
    shape = _shapes().get(name.lower())
    if shape is not None:
        return ModelSource(title=shape.title, config=shape.config)
    path = Path(name)
    if os.path.exists(path):  # noqa: PTH110 - a name that is too long for a path is none
        return _from_path(path)
    if ":" in name and "/" not in name:
        return ModelSource(title=name, build=load_factory(name, f"MODEL {name!r}", PlanError), factory=name)
    hint = did_you_mean(name.lower(), _shapes()) or nearest_path(path)
    raise PlanError(
        f"MODEL {name!r} was not found{hint or '; the packaged shapes are ' + ', '.join(_shapes())}"
        + ("" if hint else "; or give a config.json, a Hugging Face directory or module:function")
    )


def quiet_transformers() -> None:
    """Keep transformers' progress bars and advice off a terminal that belongs to something else."""
    from transformers.utils import logging as transformers_logging

    hub: Any = transformers_logging  # untyped
    hub.disable_progress_bar()
    hub.set_verbosity_error()


def _from_config(config: dict[str, Any]) -> ModelSource:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise PlanError('the model\'s configuration needs a "model_type", such as "llama"')
    _check_model_type(model_type, "the model's configuration")
    return ModelSource(title=f"a {model_type} configuration", config=config)


def _from_path(path: Path) -> ModelSource:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"MODEL {str(path)!r} is a directory without a config.json{nearest_path(file)}") from None
    except OSError as error:
        raise PlanError(f"MODEL {str(path)!r}: {file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"MODEL {str(path)!r}: {file} is no JSON: {one_line(error)}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise PlanError(f'MODEL {str(path)!r}: {file} has no "model_type", so transformers cannot tell what it is')
    _check_model_type(config["model_type"], str(file))
    return ModelSource(title=str(path), config=config, path=str(path))


def _check_model_type(model_type: str, where: str) -> None:
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise PlanError(
            f"{where}: model_type {model_type!r} is unknown to transformers{did_you_mean(model_type, CONFIG_MAPPING)}; "
            "give code of your own as module:function"
        )


_NOT_THE_SHAPE = ("transformers_version", "dtype", "torch_dtype")
"""The dtype is the precision's to say, as in training."""


def _as_transformers_has_it(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says, under the names that the installed transformers has for it."""
    filled = _filled(config).to_diff_dict()
    renamed = {"rope_parameters"} if _ROTARY & config.keys() else set()
    said = [key for key in (*config, *renamed) if key not in _ROTARY and key not in _NOT_THE_SHAPE]
    values = {key: filled.get(key, config.get(key)) for key in said}
    return {key: value for key, value in values.items() if value is not None}


_ROTARY = {"rope_theta", "rope_scaling"}
"""What transformers 5 calls `rope_parameters`."""


def _filled(config: Mapping[str, Any]) -> Any:
    """The configuration as an object of transformers. Raises PlanError where it takes it for none."""
    from transformers import CONFIG_MAPPING

    values = json.loads(json.dumps(config))  # transformers takes nested tables for its own
    model_type = values.pop("model_type")
    check_sizes(model_type, SimpleNamespace(**values), PlanError)  # before transformers divides by them
    with _explained(model_type):
        filled = CONFIG_MAPPING[model_type](
            **{key: value for key, value in values.items() if key not in _NOT_THE_SHAPE}
        )
    check_sizes(model_type, filled, PlanError)
    return filled


def _build_transformer(config: Mapping[str, Any], attention: str) -> nn.Module:
    filled = _filled(config)
    if getattr(filled, "use_cache", None):
        filled.use_cache = False  # keys and values kept for generation are no part of a training step
    with _explained(config["model_type"]):
        model: nn.Module = _model_class(filled)(filled, attention)
    return model.train()


@contextmanager
def _explained(model_type: str) -> Iterator[None]:
    """What transformers says against a configuration, in one line."""
    try:
        yield
    except Exception as error:  # whatever its code makes of a value that it does not check
        if "scaled_dot_product_attention" in str(error):
            raise PlanError(
                f'{model_type} has no fused attention in transformers: plan it with attention "eager"'
            ) from error
        raise PlanError(f"transformers cannot build this {model_type}: {one_line(error, with_type=True)}") from error


def _model_class(config: Any) -> Callable[[Any, str], nn.Module]:
    """How to build a configuration: with the class that it names, else the first head that there is for its type."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if named is not None:
            return lambda filled, attention: named._from_config(filled, attn_implementation=attention)
    for name in _AUTO_CLASSES:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return lambda filled, attention: auto.from_config(filled, attn_implementation=attention)
    raise ValueError(f"it has no model for {type(config).__name__}")
