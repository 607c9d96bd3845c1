"""Where a model to plan comes from: a packaged shape, a Hugging Face configuration, or code that builds one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import PlanError, one_line
from shardwise.hub import fetch_config, hub_name
from shardwise.plan.models.transformers_models import (
    ConfigDescription,
    beyond_words,
    build_transformer,
    cached_description,
    check_model_type,
    described,
)
from shardwise.policy.settings import ATTENTIONS
from shardwise.suggest import did_you_mean, nearest_path

if TYPE_CHECKING:
    from torch import nn

Builder = Callable[[], "nn.Module"]
ModelLike = str | Path | Mapping[str, Any] | Builder
"""What `sw.plan` accepts as a model; see `resolve`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A well-known public model in a data file: its transformers configuration and where that was published."""

    name: str
    title: str
    source: str
    """URL of the configuration, or of the paper with its table."""
    published_params: str
    """The number of parameters as its publisher states it, which may be rounded: "8,030,261,248", "671B"."""
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be built, any number of times. One of `config` and `build` is set."""

    title: str
    """The model's name for users: a shape's title, a path, a class."""
    config: Mapping[str, Any] | None = None
    """A transformers configuration with its `model_type`."""
    build: Builder | None = None
    """Anything that returns an `nn.Module`."""
    path: str | None = None
    """A Hugging Face directory, `config.json` or name of a hub that `config` was read from."""
    factory: str | None = None
    """`module:function` if `build` calls that."""

    def builder(self, attention: str = "sdpa") -> Builder:
        """Return the function that builds the model, on the current default device (the meta device, for a plan).

        Args:
            attention: "sdpa" (fused) or "eager" (scores materialised), for a transformers configuration. User code
                ignores it.

        Raises:
            PlanError: an unknown attention; or, when the function is called, transformers cannot build the
                configuration.
        """
        if attention not in ATTENTIONS:
            raise PlanError(
                f"attention={attention!r}: must be one of {', '.join(ATTENTIONS)}{did_you_mean(attention, ATTENTIONS)}"
            )
        if self.build is not None:
            return self.build
        assert self.config is not None
        return partial(build_transformer, self.config, attention)

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model can compute. None: any, or only its code knows.

        Raises:
            PlanError: transformers cannot build the configuration.
        """
        return None if self.description is None or self.description.is_rotary else self.description.positions

    def beyond(self, seq_len: int) -> str | None:
        """Return a warning if sequences are longer than those that a model with rotary positions was made for, else
        None. Raises PlanError as `positions`."""
        known = None if self.description is None else self.description.positions
        if known is None or seq_len <= known:
            return None
        return beyond_words(f"seq_len={seq_len}", known)

    @property
    def attention(self) -> str:
        """The fastest attention that the model's code supports: "sdpa" (fused) or "eager". Raises PlanError as
        `positions`."""
        return "sdpa" if self.description is None else self.description.attention

    @property
    def description(self) -> ConfigDescription | None:
        """The description of `config`; None without one. Raises PlanError if transformers cannot build it."""
        return None if self.config is None else described(self.config)

    def model_section(self) -> dict[str, Any]:
        """Return the section `[model]` of a training configuration that names the same model.

        Raises:
            PlanError: a callable has no name that a configuration could hold.
        """
        if self.factory is not None:
            return {"factory": self.factory}
        if self.path is not None:
            return {"path": self.path}
        if self.description is None:
            raise PlanError(
                f"{self.title} is a callable, which a configuration cannot name: give the model as module:function"
            )
        return {"config": self.description.normalised}


@cache
def shapes() -> Mapping[str, Shape]:
    """Return the packaged shapes by name, those of a family one after another."""
    data = (files("shardwise.plan.models") / "shapes.json").read_text(encoding="utf-8")
    return {name: Shape(name=name, **facts) for name, facts in json.loads(data).items()}


def resolve(model: ModelLike) -> ModelSource:
    """Find the model that a user named; nothing is built yet.

    Args:
        model: a packaged shape's name ("llama-3-8b"); the path of a Hugging Face directory or `config.json`; a name
            on a hub ("org/name", "org/name@revision"), whose configuration is fetched; "module:function", imported
            here, also from the working directory; a transformers configuration as a dict with its "model_type"; or a
            callable without arguments that returns an `nn.Module`.

    Raises:
        PlanError: it is none of these; the message names the nearest shape or file.
        HubError: a name of a hub has no configuration, or it cannot be fetched.
    """
    if _is_built(model):
        kind = type(model).__name__
        raise PlanError(
            f"the model is a {kind} that is already built: pass a function that builds it, such as lambda: "
            f"{kind}(...); planning calls it on the meta device"
        )
    if isinstance(model, Mapping):
        return _from_config(dict(model))
    if callable(model):
        return ModelSource(title=getattr(model, "__qualname__", type(model).__name__), build=model)
    name = str(model)
    shape = shapes().get(name.lower())
    if shape is not None:
        return ModelSource(title=shape.title, config=shape.config)
    path = Path(name)
    if os.path.exists(path):  # noqa: PTH110 - a name that is too long for a path is none
        return _from_path(path, name)
    on_hub = hub_name(name)
    if on_hub is not None:
        return _from_path(fetch_config(on_hub, f"MODEL {name!r}"), name)
    if ":" in name and "/" not in name:
        from shardwise.plan.models.factory import load_factory

        return ModelSource(title=name, build=load_factory(name, f"MODEL {name!r}", PlanError), factory=name)
    hint = did_you_mean(name.lower(), shapes()) or nearest_path(path)
    way = (
        "; give a packaged shape (shardwise plan without a MODEL lists them), a config.json, a Hugging Face directory, "
        "a hub's org/name or module:function"
    )
    raise PlanError(f"MODEL {name!r} was not found{hint or way}")


def _from_config(config: dict[str, Any]) -> ModelSource:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise PlanError('the model\'s configuration needs a "model_type", such as "llama"')
    _check_known(config, "the model's configuration")
    return ModelSource(title=f"a {model_type} configuration", config=config)


def _from_path(path: Path, name: str) -> ModelSource:
    """Return the model of a directory or `config.json`, which the user has named as `name`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"MODEL {name!r} is a directory without a config.json{nearest_path(file)}") from None
    except OSError as error:
        raise PlanError(f"MODEL {name!r}: {file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        hint = (
            "; to plan with the settings of a run, use --from, and give its model as MODEL"
            if file.suffix == ".toml"
            else ""
        )
        raise PlanError(f"MODEL {name!r}: {file} is not JSON: {one_line(error)}{hint}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise PlanError(
            f'MODEL {name!r}: {file} has no "model_type", which transformers needs to know the kind of model'
        )
    _check_known(config, str(file))
    return ModelSource(title=name, config=config, path=name)


def _is_built(model: object) -> bool:
    torch = sys.modules.get("torch")  # if it is not imported, nothing is of its types
    return torch is not None and isinstance(model, torch.nn.Module)


def _check_known(config: Mapping[str, Any], where: str) -> None:
    """Raise PlanError for a type that transformers does not know."""
    if cached_description(config) is None:
        check_model_type(config["model_type"], where)
