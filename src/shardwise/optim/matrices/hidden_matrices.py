"""Tells hidden matrices from embeddings, heads and vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter, sharded_of
from shardwise.fsdp.unit import Unit
from shardwise.modules.linear_weights import HEADS

Hidden = Callable[[str, Tensor], bool]
"""Whether a parameter, given by its fqn and itself (with its global shape), is a hidden matrix."""


@dataclass(slots=True)
class NamedParamGroup:
    """A parameter group as the user gave it: (name, parameter) pairs and the group's options."""

    members: list[tuple[str, Tensor]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


def named_groups(params: nn.Module | Iterable[Any]) -> list[NamedParamGroup]:
    """Return the parameter groups with names, of a model or of anything that a torch optimizer takes.

    Raises UsageError for a parameter without a name: one that is neither sharded nor given with its name.
    """
    given: list[Any] = list(params.named_parameters()) if isinstance(params, nn.Module) else list(params)
    if given and isinstance(given[0], dict):
        return [
            NamedParamGroup(
                [_named(item) for item in group["params"]], {k: v for k, v in group.items() if k != "params"}
            )
            for group in given
        ]
    return [NamedParamGroup([_named(item) for item in given])]


def _named(item: Any) -> tuple[str, Tensor]:
    name, parameter = item if isinstance(item, tuple) else (None, item)
    parameter = sharded_of(parameter) or parameter  # after sw.unshard modules hold unsharded ones
    if isinstance(parameter, ShardedParameter):
        return parameter.fqn, parameter
    if name is None:
        raise UsageError(
            f"a parameter of shape {tuple(parameter.shape)} that is not sharded has no name, which whole_matrix needs "
            "to tell embeddings and heads from hidden matrices: pass the model, or model.named_parameters()"
        )
    return name, parameter


def hidden_matrices(model: nn.Module | None, groups: Iterable[NamedParamGroup], hidden: Hidden | None) -> set[int]:
    """Return the ids of the parameters that are hidden matrices.

    A matrix is hidden unless a module that holds it is an embedding, it has as many rows as an embedding (a head over
    the same vocabulary), or the module that holds it has a head's name. Where the modules are unknown (plain parameters
    given by name), a matrix is an embedding if a part of its module's name contains "emb" or is "wte" or "wpe".
    Vectors, stacks of matrices, convolutions and matrices of one element are not hidden matrices. If `hidden` is given,
    it decides instead.

    Raises UsageError if `hidden` chooses a parameter that is not a matrix.
    """
    members = [member for group in groups for member in group.members]
    if hidden is not None:
        chosen = [(fqn, parameter) for fqn, parameter in members if hidden(fqn, parameter)]
        for fqn, parameter in chosen:
            if not _is_matrix(parameter):
                raise UsageError(f"hidden= chose {fqn!r} {tuple(parameter.shape)}, which is not a matrix")
        return {id(parameter) for _, parameter in chosen}
    held_by = _modules_of_plain(model)
    embeddings = {id(p) for fqn, p in members if _is_embedding(fqn, p, held_by.get(id(p), []))}
    vocabularies = {p.shape[0] for _, p in members if id(p) in embeddings}
    return {
        id(p)
        for fqn, p in members
        if _is_matrix(p) and id(p) not in embeddings and p.shape[0] not in vocabularies and not _is_head(fqn)
    }


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.ndim == 2 and parameter.numel() > 1


def _is_head(fqn: str) -> bool:
    return bool(HEADS & set(fqn.split(".")[:-1]))


def _is_embedding(fqn: str, parameter: Tensor, modules: list[nn.Module]) -> bool:
    if isinstance(parameter, ShardedParameter) and isinstance(parameter.unit, Unit):
        modules = _modules_of(parameter, parameter.unit)
    if modules:
        return any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in modules)
    words = fqn.split(".")[:-1]
    return parameter.ndim == 2 and any("emb" in word or word in {"wte", "wpe"} for word in words)


def _modules_of(parameter: ShardedParameter, unit: Unit) -> list[nn.Module]:
    for group in unit.groups:
        for sharded, sites in zip(group.sharded, group.sites, strict=True):
            if sharded is parameter:
                return [site.module for site in sites]
    return []


def _modules_of_plain(model: nn.Module | None) -> dict[int, list[nn.Module]]:
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules() if model is not None else ():
        for parameter in module._parameters.values():
            found.setdefault(id(parameter), []).append(module)
    return found
