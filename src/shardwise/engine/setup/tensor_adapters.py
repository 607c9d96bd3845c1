"""PEFT's LoRA beside tensor parallelism: which of an adapter's two matrices is cut, and how.

An adapter adds B(A(dropout(x))) to the output of a linear layer. Beside a column-wise layer, x is whole and B is cut by
outputs as the layer is; beside a row-wise one, x is cut and so is A, by inputs. The layer's own style on that one
matrix gives an output placed as the layer's, and gradients that are reduced once: the other matrix is whole on every
rank and gets a whole gradient, because the boundary between the two sums what is partial. Where activations are cut
along the sequence, the other matrix computes on sequence shards, and its gradient is summed as those of norms are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwise.errors import ConfigError
from shardwise.modules.adapters import is_of_parameter, saved_copies, wrapped_by


@contextmanager
def set_aside(model: nn.Module, plan: str) -> Iterator[dict[str, nn.Module]]:
    """A context in which the model is as it was before PEFT. Gives PEFT's wrappers by the names of what they wrap.
    `plan`: names the plan that is applied in it, in errors."""
    kept = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if wrapped_by(child) is not None
    ]
    wrappers = {name: child for name, child in model.named_modules() if wrapped_by(child) is not None}
    for name, wrapper in wrappers.items():
        if is_of_parameter(wrapper):
            raise ConfigError(
                f"{plan} beside PEFT's adapter of single parameters of {name!r} is not supported: adapt "
                "other modules, or leave the plan out"
            )
    try:
        for parent, name, child in kept:
            parent._modules[name] = wrapped_by(child)
        yield wrappers
    finally:
        for parent, name, child in kept:
            parent._modules[name] = child


def place(wrappers: Mapping[str, nn.Module], styles: Mapping[str, Any], mesh: DeviceMesh) -> list[nn.Module]:
    """Cut the adapters in PEFT's wrappers as the styles of the wrapped modules require. Every rank of the mesh must
    call this.

    Args:
        wrappers: by the names of what they wrap.
        styles: torch's or transformers', by names of modules.

    Returns:
        The dropouts of adapters whose inputs are whole, so that ranks must drop the same of them.

    Raises ConfigError for an adapter beside a style that it cannot follow.
    """
    whole: list[nn.Module] = []
    for name, wrapper in wrappers.items():
        style = styles.get(name)
        dropouts = [one for one in getattr(wrapper, "lora_dropout", {}).values() if not isinstance(one, nn.Identity)]
        if style is None:
            whole += dropouts
            continue
        for copy in saved_copies(wrapper):
            _apply(copy, style, mesh)
        if saved_copies(wrapper):
            continue
        placed = _placed(wrapper, style)
        if placed is None:
            raise ConfigError(
                f"tp_plan: PEFT's {_kind(wrapper)} cannot follow {name!r}, which is cut as "
                f"{style if isinstance(style, str) else _kind(style)}: leave {name.rpartition('.')[2]!r} out of the "
                "adapter's targets, or out of the plan"
            )
        for module, own in placed:
            _apply(module, own, mesh)
        if getattr(_object(style), "input_layouts", None) not in {Shard(-1), (Shard(-1),)}:
            whole += dropouts
    return whole


def _placed(wrapper: Any, style: Any) -> list[tuple[nn.Module, Any]] | None:
    """Return modules of the adapters and their styles; None if adapters of this kind cannot follow the style."""
    from peft.tuners.lora.layer import Embedding, Linear

    is_plain = isinstance(wrapper, (Linear, Embedding)) and not wrapper.lora_variant
    if is_plain and isinstance(wrapper, Embedding):
        return [] if _gives_whole(style) else None
    pair = _styles_of_both(style) if is_plain and isinstance(wrapper.base_layer, nn.Linear) else None
    if pair is None:
        return None
    both = zip((wrapper.lora_A, wrapper.lora_B), pair, strict=True)
    return [(module, own) for modules, own in both if own is not None for module in modules.values()]


def _styles_of_both(style: Any) -> tuple[Any, Any] | None:
    """Return the styles of A and of B beside a linear layer, None where there is none to apply; None if adapters cannot
    follow the layer's style."""
    found: tuple[Any, Any] | None = None
    if isinstance(style, ColwiseParallel):
        (before,) = style.input_layouts
        own = SequenceParallel(sequence_dim=before.dim) if isinstance(before, Shard) else _PlainInput()
        found = own, style
    elif isinstance(style, RowwiseParallel):
        (after,) = style.output_layouts
        if isinstance(after, Shard):
            found = style, SequenceParallel(sequence_dim=after.dim, use_local_output=style.use_local_output)
        elif style.use_local_output:
            found = style, None
    elif isinstance(style, str):
        theirs, given = _theirs(), _object(style)
        if isinstance(given, (theirs.ColwiseParallel, theirs.PackedColwiseParallel)):
            found = None, style
        elif isinstance(given, theirs.RowwiseParallel):
            found = style, None
        elif style == "replicate":
            found = None, None
    return found


class _PlainInput(ParallelStyle):
    """A module of plain parameters, whose inputs may be DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda module, inputs: tuple(map(_whole, inputs)))
        return module


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()


def _gives_whole(style: Any) -> bool:
    """Whether a module of this style returns whole plain tensors."""
    if isinstance(style, ParallelStyle):
        layouts, is_local = getattr(style, "output_layouts", ()), getattr(style, "use_local_output", False)
        return bool(is_local) and layouts == (Replicate(),)
    return style in {"embedding_rowwise", "embedding_colwise", "replicate"}


def _apply(module: nn.Module, style: Any, mesh: DeviceMesh) -> None:
    if isinstance(style, ParallelStyle):
        parallelize_module(module, mesh, style)
        return
    given = _object(style)
    for name in list(module._parameters):
        given.shard_param(module, name, mesh)
    given.install_forward(module, mesh)


def _object(style: Any) -> Any:
    """Return the style itself, or transformers' one of that name."""
    return _theirs().ALL_PARALLEL_STYLES[style] if isinstance(style, str) else style


def _theirs() -> Any:
    from transformers.distributed import tensor_parallel

    return tensor_parallel


def _kind(thing: object) -> str:
    return f"{type(thing).__module__.partition('.')[0]}.{type(thing).__name__}"
