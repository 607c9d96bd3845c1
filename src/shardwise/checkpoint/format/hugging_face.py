"""The weights in a Hugging Face directory: `model.safetensors`, or the files that its index names and no others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from shardwise.checkpoint.format import manifest, tensor_files, training_json
from shardwise.checkpoint.format.safetensors_layout import TensorFile
from shardwise.checkpoint.format.tensor_files import TensorFiles
from shardwise.checkpoint.io.storage import Directory
from shardwise.errors import CheckpointError
from shardwise.hub import INDEX as INDEX
from shardwise.hub import SINGLE as SINGLE


def weights_of(directory: Directory) -> TensorFiles:
    """Return the files, each with the tensors that are to be read from it. Only their headers are read.

    Raises CheckpointError: there are neither such files nor an index; a file is missing, damaged or lacks a tensor that
    the index promises; two files have the same tensor and the index does not say which to read; or the directory is a
    checkpoint that was never committed.
    """
    refuse_uncommitted(directory)
    promised = {} if directory.has(SINGLE) else _promised(directory)
    layouts = {}
    for name in sorted(set(promised.values())) or [SINGLE]:
        path = f"{directory}/{name}"
        try:
            with manifest.reading(path), directory.open(name) as source:
                layouts[name] = tensor_files.read_layout(path, source, directory.size(name))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing" + (f"; {INDEX} names it" if promised else "")) from None
    return TensorFiles("model", _chosen(directory, layouts, promised))


def refuse_uncommitted(directory: Directory) -> None:
    """Raise CheckpointError if the directory has files of `sw.checkpoint.save` but no manifest, which comes last."""
    names = directory.names()
    if manifest.NAME in names:
        return
    for name in names:
        if name == training_json.NAME or (tensor_files.stem_of(name) == "optimizer" and name.endswith(".safetensors")):
            raise CheckpointError(
                f"{directory} has {name} but no {manifest.NAME}, so it is not a committed checkpoint: its files "
                "may belong to an unfinished save or copy"
            )


def _promised(directory: Directory) -> dict[str, str]:
    """Return the file of each tensor in the index, by its plain name. Raises CheckpointError for any other index, or
    none."""
    path = f"{directory}/{INDEX}"
    try:
        with manifest.reading(path):
            promised = dict(json.loads(directory.read(INDEX))["weight_map"])
    except (FileNotFoundError, NotADirectoryError):
        found = f"has neither {SINGLE} nor {INDEX}" if directory.names() else "is not a directory, or is empty"
        raise CheckpointError(f"{directory} {found}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    if not promised:
        raise CheckpointError(f"{path} names no files")
    for name in promised.values():
        if not isinstance(name, str) or set(name) & set("/\\\0") or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path} names {name!r}, which is not a safetensors file beside it")
    return promised


def _chosen(
    directory: Directory, layouts: Mapping[str, TensorFile], promised: Mapping[str, str]
) -> dict[str, TensorFile]:
    """Assign each tensor to one file; the index decides between several. Raises CheckpointError if it does not, or if
    it names a tensor that is missing."""
    holders: dict[str, list[str]] = {}
    for file, layout in layouts.items():
        for name in layout.tensors:
            holders.setdefault(name, []).append(file)
    for name, file in promised.items():
        if name not in holders:
            raise CheckpointError(f"{directory}/{file} has no tensor {name!r}, but {INDEX} lists it there")
    for name, files in holders.items():
        if len(files) > 1 and promised.get(name) not in files:
            raise CheckpointError(
                f"{directory} has {name!r} in {files[0]} and {files[1]}, and {INDEX} does not say which one to "
                "read: check that both belong to one model"
            )
    owner = {name: files[0] if len(files) == 1 else promised[name] for name, files in holders.items()}
    return {
        file: replace(layout, tensors={name: tensor for name, tensor in layout.tensors.items() if owner[name] == file})
        for file, layout in layouts.items()
    }
