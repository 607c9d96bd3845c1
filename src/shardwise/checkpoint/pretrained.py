"""`load_pretrained`: a Hugging Face directory straight into shards."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.format import manifest, tensor_files
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.hugging_face import INDEX, SINGLE, weights_of
from shardwise.checkpoint.format.matching import Matched, check_ties, match, shown
from shardwise.checkpoint.format.model_state import give_extra_state
from shardwise.checkpoint.format.tensor_files import TensorFiles
from shardwise.checkpoint.io.storage import Directory, Location, check_location, directory_of
from shardwise.checkpoint.names.transformers_names import find_base, is_transformers
from shardwise.checkpoint.names.wrappers import unwrapped
from shardwise.checkpoint.ranks.agreement import fetched, wait_for_last_save
from shardwise.checkpoint.ranks.consensus import Peers
from shardwise.engine.lookup import engines_of
from shardwise.errors import CheckpointError
from shardwise.modules.adapters import base_names, base_of
from shardwise.modules.deferred_init.deferral import give_buffers
from shardwise.modules.deferred_init.materialize import skip_init

_DISAGREE = (
    "ranks disagree about what to load: call sw.checkpoint.load_pretrained on every rank with the same path and "
    "strict, where every rank finds the same files"
)
_POOLER = "pooler"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class Pretrained:
    """What `load_pretrained` read on this rank, and the names that did not fit."""

    missing: tuple[str, ...]
    """Names in the model that the directory lacks: left as they were initialised."""
    unexpected: tuple[str, ...]
    """Names only in the directory, as they are called there: not read."""
    wrong_shape: tuple[str, ...]
    """Names in both with different shapes, each with its two shapes: left as they were."""
    read_bytes: int
    """Bytes of tensors that this rank read."""
    peak_staged_bytes: int
    """Most host memory held for tensor data at one time, in addition to the shards themselves."""


@torch.no_grad()
def load_pretrained(path: Location, model: nn.Module, strict: bool = True) -> Pretrained:
    """Read the weights of a Hugging Face directory into a sharded model. Every rank must call this.

    Args:
        path: a directory or its URL, with `model.safetensors` or the files that `model.safetensors.index.json` names;
            written by `save_pretrained`, by `sw.checkpoint.save` or by any other program. Or a name on a hub,
            "org/name" or "org/name@revision": one rank of each machine downloads it into the cache, and the others
            wait, however long that takes.
        model: a sharded model, built on the meta device or not. Its parameters and buffers are overwritten, each cast
            to the dtype that the model keeps it in.
        strict: False loads what fits and reports the rest in the result, instead of raising.

    If the model has PEFT adapters, its base model is read and the adapters stay as they are.

    For a transformers model, names are accepted as its `from_pretrained` accepts them: old names, names with or without
    the base model's prefix, split and stacked tensors, either name of two tied tensors. What its class declares as not
    needed is neither missing nor unexpected. A directory that another class wrote may lack the head (with its pooler)
    or have another one: that is reported with a warning, and the head stays as it was initialised. Any other
    difference raises.

    Raises:
        CheckpointError: there is no such directory, it is damaged, it holds only pickles or quantized weights, tied
            weights differ, or names, shapes or kinds of numbers do not fit: the first are named, and how many more
            there are, before anything is overwritten. UsageError: an entry of the model's state_dict cannot be read
            into. MismatchError: ranks read files whose headers differ. HubError: a name of a hub has no such files, or
            they cannot be fetched. Every rank raises, whichever failed.

    Each rank reads the bytes of its own elements and no others: straight into place if dtypes agree, otherwise 32 MiB
    at a time.
    """
    check_location(path, "sw.checkpoint.load_pretrained(path, model)")
    model = unwrapped(model)
    engines = engines_of(model)
    peers = Peers(engines)
    give_buffers(model, engines[0].mesh.device)
    wait_for_last_save(peers)
    where = os.fspath(path)
    path = fetched(path, peers, _DISAGREE)
    with peers.together(f"{where} cannot be loaded"):
        weights = _Weights.at(path)
        matched = match(model, weights.files.tensors, find_base)
        matched.missing = list(base_names(model, dict.fromkeys(matched.missing)))
        heads = _excuse(base_of(model), weights, matched)
        if strict:
            matched.raise_differences(where, "strict=False loads what fits and reports the rest")
        matched.check_dtypes(where, weights.files.tensors)
        compared_bytes = check_ties(where, weights.opened, weights.files, matched)
    headers = [(name, file.nbytes, file.header) for name, file in weights.files.files.items()]
    peers.agree(f"{headers}|{weights.sums}|{strict}", _DISAGREE)
    if heads and peers.is_first:
        class_name = type(base_of(model)).__name__
        warnings.warn(f"{where} was written by another class than {class_name}: {heads}", stacklevel=3)
    with peers.together(f"{where} cannot be loaded"):
        for engine in engines:
            engine.reshard_all()
        read = tensor_files.read(weights.opened, weights.files, matched.wanted)  # cached for the next run
        give_extra_state(model, [piece for piece, _ in matched.wanted])
    return Pretrained(
        tuple(matched.missing),
        tuple(matched.unexpected),
        tuple(matched.wrong_shape),
        read.read_bytes,
        max(read.peak_staged_bytes, compared_bytes),
    )


@contextmanager
def blank_for(path: Location, model: nn.Module) -> Iterator[None]:
    """Inside the block, `sw.shard` of a model on the meta device does not initialise the tensors that
    `load_pretrained(path)` would overwrite.

        with blank_for(path, model):
            sw.shard(model)
        load_pretrained(path, model)

    Tensors that the directory lacks are initialised as usual. No communication. Raises CheckpointError as
    `load_pretrained` does for the directory itself.
    """
    named: dict[int, list[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            named.setdefault(id(value), []).append(name)
            shapes[name] = tuple(value.shape)
    stored = {name: tensor.shape for name, tensor in _Weights.at(path).files.tensors.items()}
    found = find_base(model, shapes, stored).shapes
    read = [names for names in named.values() if any(found.get(name) == shapes[name] for name in names)]
    with skip_init(name for names in read for name in names):
        yield


# The directory --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Weights:
    """A Hugging Face directory or a checkpoint, open for reading."""

    directory: Directory
    opened: Contents | Directory
    files: TensorFiles
    configuration: dict[str, Any]

    @property
    def sums(self) -> str:
        """The manifest of a checkpoint as text; empty for any other directory."""
        return str(self.opened.manifest) if isinstance(self.opened, Contents) else ""

    @classmethod
    def at(cls, path: Location) -> _Weights:
        """Open a directory. Raises CheckpointError if its weights cannot be read by byte range."""
        directory = directory_of(path)
        with manifest.reading(directory):
            configuration = _configuration(directory)
            _refuse_quantized(directory, configuration)
            if directory.has(manifest.NAME):  # a checkpoint of shardwise
                contents = Contents.of(path)
                return cls(directory, contents, tensor_files.find(contents, tensor_files.MODEL), configuration)
            _refuse_pickles(directory)
            return cls(directory, directory, weights_of(directory), configuration)


def _refuse_pickles(directory: Directory) -> None:
    if any(directory.has(name) for name in _PICKLES) and not any(directory.has(name) for name in (SINGLE, INDEX)):
        raise CheckpointError(
            f"{directory} has its weights in pickles (pytorch_model.bin), which cannot be read by range: convert "
            "it once with transformers' from_pretrained(...) and save_pretrained(another directory)"
        )


def _configuration(directory: Directory) -> dict[str, Any]:
    try:
        read = json.loads(directory.read("config.json"))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _refuse_quantized(directory: Directory, configuration: dict[str, Any]) -> None:
    method = configuration.get("quantization_config")
    if method:
        name = method.get("quant_method", "?") if isinstance(method, dict) else method
        raise CheckpointError(
            f"{directory} holds quantized weights ({name}), which cannot be trained: dequantize them once with "
            "transformers, and save_pretrained to another directory"
        )


# What fits ------------------------------------------------------------------------------------------------------------


def _excuse(model: nn.Module, weights: _Weights, matched: Matched) -> str:
    """Take names that may be missing or unexpected out of `matched`. Returns a warning about heads, or "".

    Names of heads stay in the result, but `strict` ignores them.
    """
    if not is_transformers(model):
        return ""
    declared = {
        kind: re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        for kind in ("missing", "unexpected")
        if (patterns := _ignorable(model, kind))
    }
    if "missing" in declared:
        matched.missing = [name for name in matched.missing if not declared["missing"].search(name)]
    if "unexpected" in declared:
        matched.unexpected = {
            name: target for name, target in matched.unexpected.items() if not declared["unexpected"].search(target)
        }
    if type(model).__name__ in (weights.configuration.get("architectures") or ()):
        return ""
    matched.excused = {
        *(name for name in matched.missing if not _in_base(model, name)),
        *(name for name, target in matched.unexpected.items() if not _in_base(model, target)),
    }
    heads = {
        "newly initialised": [name for name in matched.missing if name in matched.excused],
        "not used": [name for name in matched.unexpected if name in matched.excused],
    }
    return "; ".join(f"{what}: {shown(names)}" for what, names in heads.items() if names)


def _ignorable(model: nn.Module, kind: str) -> set[str]:
    """Return patterns of the names that the classes of the model and its submodules declare as not needed."""
    patterns: set[str] = set()
    for module in model.modules():
        patterns.update(getattr(module, f"_keys_to_ignore_on_load_{kind}", None) or ())
    if kind == "missing":
        return patterns | {f"^{re.escape(name)}$" for name in getattr(model, "_keys_to_ignore_on_save", None) or ()}
    buffers = [name for name, _ in model.named_buffers()]
    # Buffers that models used to store and now compute.
    for ending, pattern in (("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$")):
        if any(name.endswith(ending) for name in buffers):
            patterns.add(pattern)
    return patterns


def _in_base(model: Any, name: str) -> bool:
    """Return whether a name belongs to the base model that heads are put on. Its pooler counts as part of a head: only
    those classes build it whose heads read it."""
    prefix = model.base_model_prefix
    base = getattr(model, prefix, model) if prefix else model
    first = name.removeprefix(f"{prefix}.").split(".")[0]
    inside = base is not model and name.startswith(f"{prefix}.")
    return first != _POOLER and (inside or first in dict(base.named_children()))
