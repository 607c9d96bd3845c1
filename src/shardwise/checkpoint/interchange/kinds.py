"""Kinds of checkpoints, told apart by their files."""

from __future__ import annotations

import enum
from pathlib import Path

from shardwise.checkpoint.format import hugging_face, manifest, tensor_files
from shardwise.checkpoint.interchange import dcp_metadata
from shardwise.checkpoint.io.storage import LocalDirectory, Location, directory_of, is_url
from shardwise.checkpoint.publish import commit
from shardwise.errors import CheckpointError

PT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
ADAPTER_WEIGHTS = f"{tensor_files.ADAPTER}.safetensors"
_PICKLE = b"\x80"
_ZIP = b"PK\x03\x04"
"""First bytes of a file of torch.save; before torch 1.6 it was a pickle."""


class Kind(enum.Enum):
    """The kind of a checkpoint. The value is its name for `--to`, if it can be written."""

    SHARDWISE = "shardwise"
    """A committed checkpoint of `sw.checkpoint.save`."""
    PARTS = "parts"
    """A committed checkpoint on storage without ranged writes: files of each rank, to be joined."""
    DCP = "dcp"
    """A directory of torch.distributed.checkpoint."""
    PT = "pt"
    """A file of torch.save with full tensors."""
    HUGGING_FACE = "hf"
    """A directory of `model.safetensors`, or of files and their index, as `save_pretrained` writes it."""

    ADAPTER = "peft"
    """A directory of PEFT's. It is converted by merging it into its base."""

    @property
    def is_own(self) -> bool:
        """Whether `sw.checkpoint.save` wrote it."""
        return self in {Kind.SHARDWISE, Kind.PARTS}


def kind_of(location: Location) -> Kind:
    """Return the kind of the checkpoint at a path or URL. Raises CheckpointError, naming what is there instead."""
    if is_url(location):
        return _own(location)
    path = Path(location)
    if path.is_file():
        if path.suffix == ".safetensors":
            raise CheckpointError(f"{path} is one file of a checkpoint: give its directory, {path.parent}")
        if path.suffix in PT_SUFFIXES or _begins(path, _PICKLE) or _begins(path, _ZIP):
            return Kind.PT
        raise CheckpointError(f"{path} is not a checkpoint: it is neither a directory nor a file of torch.save")
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix == commit.PARTIAL:
        raise CheckpointError(f"{path} was left by an unfinished save: it is not a checkpoint")
    if (path / manifest.NAME).is_file():
        return _own(path)
    if (path / dcp_metadata.NAME).is_file() and _begins(path / dcp_metadata.NAME, _PICKLE):
        return Kind.DCP
    hugging_face.refuse_uncommitted(LocalDirectory(path))
    return _of_others(path)


def _of_others(path: Path) -> Kind:
    """Return the kind of a directory of ordinary safetensors files."""
    if (path / hugging_face.SINGLE).is_file() or (path / hugging_face.INDEX).is_file():
        return Kind.HUGGING_FACE
    if is_adapter(path):
        return Kind.ADAPTER
    raise CheckpointError(f"{path} {_instead(path)}")


def is_adapter(path: Path) -> bool:
    """Return whether a directory has an adapter in it, as PEFT writes it; a checkpoint of shardwise may have one."""
    return (path / tensor_files.ADAPTER_CONFIG).is_file() and (path / ADAPTER_WEIGHTS).is_file()


def _own(location: Location) -> Kind:
    return Kind.PARTS if manifest.read(directory_of(location)).joined else Kind.SHARDWISE


def _instead(path: Path) -> str:
    """Describe a directory that is not a checkpoint, and name the path to give instead."""
    if _has(path, "*.distcp"):
        return "has .distcp files but no .metadata: it was left by an unfinished DCP save"
    if _has(path, "shard-*.safetensors"):
        return "has files per rank: let HuggingFaceStorageWriter write them with enable_consolidation=True"
    single = next((file for suffix in PT_SUFFIXES for file in sorted(path.glob(f"*{suffix}"))), None)
    if _has(path, "*.safetensors"):
        return (
            f"has safetensors files, but neither {hugging_face.SINGLE} nor {hugging_face.INDEX}, so it is "
            "unknown whether they are complete and belong to one model"
        )
    if single is not None:
        return f"has no safetensors files; to convert {single.name}, give that file"
    newest = commit.latest(path)
    if newest is not None:
        return f"is the directory of a run: give one of its checkpoints, such as {newest}"
    return f"is not a checkpoint: it has no {manifest.NAME}, {dcp_metadata.NAME} or {hugging_face.SINGLE}"


def _has(directory: Path, pattern: str) -> bool:
    return next(directory.glob(pattern), None) is not None


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def target_kind(source: Kind, target: Path, asked: str | None) -> Kind:
    """Return the kind that a conversion writes. Raises CheckpointError if it is ambiguous or makes no sense."""
    if asked is not None:
        known = {kind.value: kind for kind in Kind if kind not in {Kind.PARTS, Kind.ADAPTER}}
        if asked not in known:
            raise CheckpointError(f"--to {asked}: must be one of {', '.join(known)}")
        kind = known[asked]
    elif target.suffix in PT_SUFFIXES:
        kind = Kind.PT
    elif source is Kind.ADAPTER:
        kind = Kind.HUGGING_FACE
    elif source is Kind.SHARDWISE:
        raise CheckpointError(f"the kind of {target} is not given: add --to dcp or --to hf, or name a .pt file")
    else:
        kind = Kind.SHARDWISE
    if kind is source:
        raise CheckpointError(f"the source already has that kind ({kind.value}): copy it instead")
    if kind is not Kind.PT and target.suffix in PT_SUFFIXES:
        raise CheckpointError(f"{target} names a file, but --to {kind.value} writes a directory")
    return kind
