"""Recording how a model on the meta device would have been built for real."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import LayoutError, one_line
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.modules import adapters
from shardwise.modules.deferred_init.constructors import is_transformer, plain_constructor, transformer_again
from shardwise.modules.deferred_init.tape import Tape

Initialise = Callable[[nn.Module], object]


def record(model: nn.Module, tape: Tape) -> dict[int, Tensor]:
    """Record on the tape how a model would have been built. Returns the recorded tensors by the ids of the model's."""
    sites = list(sites_of(model))
    with tape.recording():
        blanks: dict[int, Tensor] = {}
        for site in sites:
            site.put(blanks.setdefault(id(site.tensor), _stand_in(site.tensor)))
        try:
            builder = _Builder(model, tape, {id(site.module) for site in sites if site.tensor.is_meta})
            builder.build(model, _by_reset)
            recorded: dict[int, Tensor] = {}
            for site in sites:
                current = site.current()
                if current is not None:
                    recorded.setdefault(id(site.tensor), current)
        finally:
            for site in sites:
                site.put(site.tensor)
    return recorded


class TensorSite(NamedTuple):
    """A place in a module that holds a tensor: a parameter, a buffer or, on the meta device, a plain attribute."""

    module: nn.Module
    kind: str
    name: str
    tensor: Tensor

    def _holder(self, module: nn.Module) -> dict[str, Any]:
        return module.__dict__[self.kind] if self.kind else module.__dict__

    def put(self, tensor: Tensor) -> None:
        self._holder(self.module)[self.name] = tensor

    def current(self) -> Tensor | None:
        return self.of(self.module)

    def of(self, module: nn.Module) -> Tensor | None:
        """Return the tensor at the same place in another module of the same class; None if there is none."""
        found = self._holder(module).get(self.name)
        return found if isinstance(found, Tensor) else None


def sites_of(model: nn.Module) -> Iterator[TensorSite]:
    """Yield the places of all parameters and buffers, and of plain attributes on the meta device."""
    for module in model.modules():
        yield from (site for site in all_sites_of(module) if site.kind or site.tensor.is_meta)


def all_sites_of(module: nn.Module) -> Iterator[TensorSite]:
    """Yield the places of all tensors that a module itself holds."""
    for kind in ("_parameters", "_buffers", ""):
        for name, value in list((module.__dict__[kind] if kind else module.__dict__).items()):
            if isinstance(value, Tensor):
                yield TensorSite(module, kind, name, value)


def _stand_in(tensor: Tensor) -> Tensor:
    """Return a recorded tensor for one of the model's: a copy, or empty if that is on the meta device or sharded."""
    if tensor.is_meta or isinstance(tensor, ShardedParameter):
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    else:
        fake = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
    fake.__dict__.update({k: v for k, v in tensor.__dict__.items() if isinstance(v, bool)})
    return fake


# Recording a build ------------------------------------------------------------------------------------------------


class _Builder:
    """Records how modules are constructed: by calling their constructor again if possible, else children first."""

    def __init__(self, model: nn.Module, tape: Tape, blank: set[int]) -> None:
        self._model = model
        self._tape = tape
        self._blank = blank
        """Ids of modules that hold meta tensors themselves. Other modules with tensors are left as they are."""
        self._initialised: set[int] = set()
        """Ids of recorded parameters that a module has initialised."""
        self._cloned: set[int] = set()
        """Ids of layers that are recorded as copies of another layer, and of those originals."""

    def build(
        self, module: nn.Module, initialise: Initialise, quiet: bool = False, before: Sequence[nn.Module] = ()
    ) -> None:
        """Record a module and all modules below it.

        Args:
            initialise: initialises one module's own tensors where no constructor can be called.
            quiet: do not warn again; a module around this one was warned of.
            before: its siblings that were recorded already.
        """
        if id(module) in self._cloned or not self._is_blank(module):
            return
        if (inner := adapters.wrapped_by(module)) is not None:
            self.build(inner, initialise, quiet)
            self._adapt(module)
        else:
            self._build_plain(module, initialise, quiet, before)

    def _build_plain(self, module: nn.Module, initialise: Initialise, quiet: bool, before: Sequence[nn.Module]) -> None:
        """Do `build` for a module that is not a PEFT wrapper."""
        if is_transformer(module):
            error = self._construct(module, partial(transformer_again, module))
            if error is None:
                for layer in adapters.layers_of(module).values():  # PEFT inserted these after construction
                    self._adapt(layer)
                return
            if not quiet:
                _warn(module, error)
            quiet = True
            initialise = module._init_weights  # type: ignore[assignment]
        elif initialise is _by_reset and self._construct_plain(module):
            return
        if isinstance(module, _CLONING):
            self._clone(module, initialise, before)
        children = list(module.children())
        for position, child in enumerate(children):
            self.build(child, initialise, quiet, children[:position])
        if id(module) in self._blank or not (module._parameters or module._buffers):
            self._initialise(module, initialise)

    def _construct(self, module: nn.Module, constructor: Callable[[], nn.Module]) -> Exception | None:
        """Record a call of the module's constructor. Returns the exception if it fails, else None."""
        try:
            with self._tape.attempt(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the original call gave these warnings
                _adopt(module, constructor())
        except Exception as error:  # a constructor may raise anything
            return error
        return None

    def _construct_plain(self, module: nn.Module) -> bool:
        """Record a constructor call, if its arguments are known and no parameter has values yet; else return False."""
        has_numbers = any(below._parameters and id(below) not in self._blank for below in module.modules())
        constructor = None if has_numbers else plain_constructor(module)
        return constructor is not None and self._construct(module, constructor) is None

    def _is_blank(self, module: nn.Module) -> bool:
        return any(id(below) in self._blank for below in module.modules())

    def _adapt(self, layer: nn.Module) -> None:
        """Record the adapters in one of PEFT's wrappers, whose inner module is already recorded."""
        inner = adapters.wrapped_by(layer)
        copies = adapters.saved_copies(layer)
        if inner is not None and copies:
            self._copy(inner, copies)
            return
        added = [child for child in layer.children() if child is not inner and self._is_blank(child)]
        for child in added:
            self.build(child, _by_reset)
        if added:
            self._initialise(layer, lambda layer: adapters.reset(layer, self._model))

    def _clone(self, module: nn.Module, initialise: Initialise, before: Sequence[nn.Module]) -> None:
        """Record the layers of a module that deep-copies a layer that it is given: only the original draws."""
        layers: list[nn.Module] = list(module.layers)  # type: ignore[arg-type]
        if not any(self._is_blank(layer) for layer in layers):
            return
        given = [other for other in before if type(other) is type(layers[0]) and _shapes(other) == _shapes(layers[0])]
        if given:
            warnings.warn(
                f"{type(module).__name__} was built on the meta device beside a {type(given[-1]).__name__} like its "
                "layers: they are assumed to be copies of it and get its initial values. If they are copies of "
                "another one, the values differ from those of an unsharded build",
                stacklevel=2,
            )
            original = given[-1]
        else:
            original = layers.pop(0)
            self.build(original, initialise)
        for layer in layers:
            if _shapes(layer) != _shapes(original):
                continue  # it was inserted later
            self._cloned.add(id(layer))
            self._copy(original, [layer])
        self._cloned.add(id(original))

    def _copy(self, original: nn.Module, copies: Sequence[nn.Module]) -> None:
        """Record modules as copies of one that is already recorded."""
        for copy in copies:
            for ours, theirs in zip(copy.modules(), original.modules(), strict=True):
                if id(ours) in self._blank:
                    _copy_tensors(theirs, ours)
                    self._initialised.update(map(id, ours._parameters.values()))

    def _initialise(self, module: nn.Module, initialise: Initialise) -> None:
        own = [site for site in all_sites_of(module) if site.kind == "_parameters"]
        # A module without children was initialised on construction, before its parameters could be tied to others.
        tied = [] if module._modules else [site for site in own if id(site.tensor) in self._initialised]
        for site in tied:
            site.put(nn.Parameter(torch.empty_like(site.tensor), requires_grad=site.tensor.requires_grad))
        try:
            with torch.no_grad(), self._tape.attempt():
                initialise(module)
        except Exception as error:
            raise LayoutError(
                f"{type(module).__name__} was built on the meta device and its initialisation cannot be recorded "
                f"({one_line(error, with_type=True)}): build the model on a real device"
            ) from error
        for site in tied:
            site.put(site.tensor)
        self._initialised.update(id(site.tensor) for site in own)


_CLONING = (nn.TransformerEncoder, nn.TransformerDecoder)
"""Classes whose `layers` are deep copies of the layer that they are given."""


@torch.no_grad()
def _copy_tensors(source: nn.Module, target: nn.Module) -> None:
    for site in list(all_sites_of(target)):
        value = site.of(source)
        if site.kind and value is not None:
            site.tensor.copy_(value)


def _adopt(module: nn.Module, built: nn.Module) -> None:
    """Replace a module's tensors, except adapters, by those of a module that was built again. Raises ValueError if
    their names or shapes differ."""
    ours, theirs = _shapes(module), _shapes(built)
    if ours != theirs:
        different = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        raise ValueError(f"its parameters or buffers changed after construction: {', '.join(different[:3])}")
    again = dict(built.named_modules(remove_duplicate=False))
    for prefix, below in adapters.base_modules(module).items():
        for site in list(all_sites_of(below)):
            tensor = site.of(again[prefix])
            if tensor is not None:
                site.put(tensor)


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of all parameters and buffers except those of adapters, by name."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.shape for name, tensor in adapters.base_names(model, dict(named)).items()}


def _by_reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()


def _warn(module: nn.Module, error: Exception) -> None:
    warnings.warn(
        f"{type(module).__name__} was built on the meta device and cannot be built again from its configuration "
        f"({one_line(error, with_type=True)}). Its modules are initialised one by one: the values are seeded and the "
        "same at any world size, but differ from those of an unsharded build",
        stacklevel=2,
    )
