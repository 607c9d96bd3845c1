"""Names of tensors in the files that transformers reads and writes, and how tensors are cut and stacked there.

Found by having transformers convert tensors without memory, in both directions: every tensor of the model then consists
of runs of elements of stored tensors, and a rename is the simplest case.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shardwise.checkpoint.names.copy_tracing import CopyTracer
from shardwise.checkpoint.names.index_map import Place
from shardwise.checkpoint.names.wrappers import unwrapped_name
from shardwise.errors import CheckpointError, UsageError, one_line
from shardwise.modules.adapters import adapter_names, base_names, base_of

Shape = tuple[int, ...]


def is_transformers(model: nn.Module) -> bool:
    """Return whether the model has transformers' `from_pretrained` and `save_pretrained`."""
    return all(hasattr(model, name) for name in ("save_pretrained", "from_pretrained", "config"))


# To files -------------------------------------------------------------------------------------------------------------


def stored_first(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the names of one tensor, beginning with the one that it is stored under.

    As transformers chooses: a name that the class declares as tied to another is not stored, unless no other is left.
    """
    if len(names) == 1 or not is_transformers(model):
        return list(names)
    patterns = [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]
    dropped: list[str] = []
    for name in sorted(names):
        if len(dropped) + 1 < len(names) and any(re.search(pattern, name) for pattern in patterns):
            dropped.append(name)
    return [*(name for name in names if name not in dropped), *dropped]


def places_to_write(model: nn.Module, shapes: Mapping[str, Shape]) -> dict[str, tuple[Place, ...]]:
    """Return where `save_pretrained` would put each tensor, given by name and global shape.

    Raises UsageError, naming it, for a tensor that transformers changes on its way to the file, or cuts so finely that
    no byte ranges are left.
    """
    if not is_transformers(model):
        return {name: (Place.whole(name, shape),) for name, shape in shapes.items()}
    # Cached: a model is saved many times, and one with many experts takes seconds to convert.
    asked = (dict(shapes), list(getattr(model, "_weight_conversions", None) or ()))
    known = _known.get(model)
    if known is None or known[0] != asked:
        known = _known[model] = (asked, _converted(model, shapes))
    return known[1]


_known: WeakKeyDictionary[nn.Module, tuple[Any, dict[str, tuple[Place, ...]]]] = WeakKeyDictionary()


def _converted(model: nn.Module, shapes: Mapping[str, Shape]) -> dict[str, tuple[Place, ...]]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # a version that converts nothing
        return {name: (Place.whole(name, shape),) for name, shape in shapes.items()}
    revert: Any = revert_weight_conversion
    places: dict[str, list[Place]] = {name: [] for name in shapes}
    with CopyTracer() as trace:
        probes = {name: trace.probe(name, shape) for name, shape in shapes.items()}
        try:
            converted: dict[str, Tensor] = revert(model, dict(probes))
        except Exception as error:
            raise _refused(model, next(iter(shapes)), error) from error
    for stored, tensor in converted.items():
        try:
            for origin in trace.origins(tensor):
                places[origin.name].append(Place(stored, tuple(tensor.shape), origin.runs.inverse()))
        except ValueError as error:
            raise _refused(model, stored, error) from error
    for name, found in places.items():
        if sum(place.runs.numel for place in found) != probes[name].numel():
            raise _refused(model, name, ValueError("it is not stored exactly once"))
        if not found:  # it has no elements
            found.append(Place.whole(name, shapes[name]))
    return {name: tuple(found) for name, found in places.items()}


def _refused(model: nn.Module, name: str, error: Exception) -> UsageError:
    return UsageError(
        f"transformers converts tensors of {type(model).__name__} when it writes its files, and {name!r} cannot "
        f"be written in place ({one_line(error, with_type=True)}): save sw.full_state_dict(model) with its "
        "save_pretrained"
    )


# From files -----------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """The tensors of a model that are in files, and where."""

    places: dict[str, tuple[Place, ...]] = field(default_factory=dict)
    """Places by the model's names."""
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Shapes that the files give them, by the model's names; not always the model's shapes."""
    unexpected: dict[str, str] = field(default_factory=dict)
    """Stored names that the model has no tensor for, each with the name that the tensor would have there."""


def find(model: nn.Module, shapes: Mapping[str, Shape], stored: Mapping[str, Shape]) -> Found:
    """Match stored tensors with a model's, as `from_pretrained` would: renamed, split and stacked. No communication.

    Args:
        shapes: global shapes of the model's tensors, by every name that its state_dict has for them.
        stored: shapes in the files, by name.

    Raises CheckpointError, naming it, for a tensor that transformers would compute from stored tensors, not copy.
    """
    if is_transformers(model):
        try:
            return _Conversion(model, shapes).run(stored)
        except ImportError:  # a version that converts nothing
            pass
    found = Found()
    for name, shape in stored.items():
        if name in shapes:
            found.places[name], found.shapes[name] = (Place.whole(name, shape),), shape
        else:
            found.unexpected[name] = name
    return found


def find_base(model: nn.Module, shapes: Mapping[str, Shape], stored: Mapping[str, Shape]) -> Found:
    """Like `find`, in files of the base model that adapters were put into. Without adapters it equals `find`."""
    ours = base_names(model, {name: name for name in shapes})
    found = find(base_of(model), {name: shapes[own] for name, own in ours.items()}, stored)
    return Found(
        {ours[name]: places for name, places in found.places.items()},
        {ours[name]: shape for name, shape in found.shapes.items()},
        found.unexpected,
    )


def find_adapter(model: nn.Module, shapes: Mapping[str, Shape], stored: Mapping[str, Shape]) -> Found:
    """Like `find`, in files of the model's adapter alone, as PEFT writes them."""
    names = {unwrapped_name(name): unwrapped_name(stored) for name, stored in adapter_names(model).items()}
    ours = {theirs: name for name, theirs in names.items() if name in shapes}
    found = Found(unexpected={name: name for name in stored if name not in ours})
    for name, own in ours.items():
        if name in stored:
            found.places[own], found.shapes[own] = (Place.whole(name, stored[name]),), stored[name]
    return found


class _Conversion:
    """transformers' conversion of files to one model: its renamings and its operations on tensors."""

    def __init__(self, model: Any, shapes: Mapping[str, Shape]) -> None:
        from transformers import conversion_mapping, core_model_loading

        library: Any = core_model_loading
        self._library = library
        self._model = model
        self._state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        transforms: Any = conversion_mapping.get_model_conversion_mapping(model)
        self._renamings = [item for item in transforms if isinstance(item, library.WeightRenaming)]
        self._converters = [item for item in transforms if isinstance(item, library.WeightConverter)]
        self._found = Found()

    def run(self, stored: Mapping[str, Shape]) -> Found:
        """Match all tensors of the files."""
        by_pattern = {pattern: item for item in self._converters for pattern in item.source_patterns}
        begun: dict[str, Any] = {}
        with CopyTracer() as trace:
            for name in sorted(stored, key=self._library.dot_natural_key):
                target, pattern = self._target(name)
                if target not in self._state or (pattern is None and target in self._found.places):
                    self._found.unexpected[name] = target
                elif pattern is None:
                    self._found.places[target] = (Place.whole(name, stored[name]),)
                    self._found.shapes[target] = stored[name]
                else:
                    if target not in begun:
                        begun[target] = copy.deepcopy(by_pattern[pattern])
                    begun[target].add_tensor(target, name, pattern, trace.probe(name, stored[name]))
            for target, converter in begun.items():
                self._convert(trace, target, converter, stored)
        return self._found

    def _target(self, name: str) -> tuple[str, str | None]:
        """Return a stored tensor's name in the model, and the pattern of the operation that makes the model's tensor,
        if any."""
        prefix = self._model.base_model_prefix
        rename = self._library.rename_source_key
        target, pattern = rename(name, self._renamings, self._converters, prefix, self._state)
        if target not in self._state and name in self._state:  # its name already, which looks like an old one
            target, pattern = rename(name, [], [], prefix, self._state)
        return target, pattern

    def _convert(self, trace: CopyTracer, target: str, converter: Any, stored: Mapping[str, Shape]) -> None:
        try:
            made = converter.convert(target, model=self._model, config=self._model.config)
            for name, tensors in made.items():
                tensor = tensors[0] if isinstance(tensors, list) else tensors
                places = [Place(part.name, stored[part.name], part.runs) for part in trace.origins(tensor)]
                self._found.places[name] = tuple(places)
                self._found.shapes[name] = tuple(tensor.shape)
        except Exception as error:
            raise CheckpointError(
                f"transformers computes {target!r} of {type(self._model).__name__} from what is stored, and its "
                f"bytes cannot be read in place ({one_line(error, with_type=True)}): load the model with "
                "from_pretrained before sw.shard"
            ) from error
