"""Which parameters are weights of linear layers: most of a language model's bytes, and usable when kept in few bits."""

from __future__ import annotations

from torch import nn

from shardwise.modules.adapters import base_names

HEADS = frozenset({"lm_head", "head", "output", "output_layer", "embed_out", "classifier", "score", "unembed"})
"""Names of modules that turn the last hidden state into logits."""
_STACK_NDIM = 3


def linear_weights(model: nn.Module) -> set[int]:
    """Return the ids of the base's parameters that are matrices of linear layers, or stacks of them (experts).

    Excludes embeddings and parameters tied to them, heads (`HEADS`, or what a transformers model returns as its output
    embeddings), convolutions, other matrices, and parameters of PEFT's adapters.
    """
    base = set(base_names(model, {fqn: fqn for fqn, _ in model.named_parameters(remove_duplicate=False)}).values())
    heads = _output_embeddings(model)
    found: set[int] = set()
    others: set[int] = set()
    for fqn, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            path = f"{fqn}.{name}" if fqn else name
            is_head = id(module) in heads or not HEADS.isdisjoint(path.split(".")[:-1])
            fits = path in base and not is_head and _is_linear(module, parameter)
            (found if fits else others).add(id(parameter))
    return found - others


def _is_linear(module: nn.Module, parameter: nn.Parameter) -> bool:
    if parameter.ndim == _STACK_NDIM:
        return not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
    return parameter.ndim == 2 and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")  # of GPT-2


def _output_embeddings(model: nn.Module) -> set[int]:
    found: set[int] = set()
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        if callable(getter):
            try:
                found.add(id(getter()))
            except (NotImplementedError, AttributeError):  # models without one
                continue
    return found
