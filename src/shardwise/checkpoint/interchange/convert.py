"""`convert`: from any kind of checkpoint to any other, in one process, one tensor of it in memory at a time."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.interchange.checkpoint_contents import CheckpointContents
from shardwise.checkpoint.interchange.dcp_files import read_dcp, write_dcp
from shardwise.checkpoint.interchange.kinds import Kind, is_adapter, kind_of, target_kind
from shardwise.checkpoint.interchange.merging import read_adapter, read_merged
from shardwise.checkpoint.interchange.nested import parse
from shardwise.checkpoint.interchange.safetensors_files import (
    configuration_of,
    read_checkpoint,
    read_hugging_face,
    write_checkpoint,
    write_hugging_face,
)
from shardwise.checkpoint.interchange.torch_files import read_pt, write_pt
from shardwise.checkpoint.io.storage import Location, is_url
from shardwise.checkpoint.publish.consolidation import consolidate
from shardwise.checkpoint.ranks import save_thread
from shardwise.errors import CheckpointError, UsageError
from shardwise.suggest import nearest_path


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion."""

    source: Kind
    target: Kind
    tensors: int
    """Number of the model's tensors."""
    nbytes: int
    """Bytes of all tensors."""
    optimizer_parameters: int | None
    """Number of parameters that have optimizer state; None without an optimizer."""
    step: int
    left_out: tuple[str, ...]
    """Names of the source's contents that the target has no place for."""


def convert(  # noqa: PLR0913 - options of a command
    source: Location,
    target: str | os.PathLike[str],
    to: str | None = None,
    *,
    flat: bool = False,
    model_only: bool = False,
    files_from: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> Converted:
    """Write a checkpoint as another kind. No communication: one process, no process group.

    Args:
        source: a checkpoint of `sw.checkpoint.save` (or its URL), a torch DCP directory, a `.pt` file or a Hugging Face
            directory: told apart by their files. A checkpoint that was saved to a URL is consolidated into ordinary
            files. A LoRA adapter of PEFT's (a directory with `adapter_model.safetensors`) is merged into its base.
            Pickles are read with `weights_only=True`, DCP's metadata through an allow-list.
        target: must not exist. It appears complete, or not at all.
        to: "shardwise", "dcp", "pt" or "hf". None: "pt" if the target's name ends like a torch file's, "hf" for an
            adapter, otherwise "shardwise"; for a checkpoint of shardwise that is ordinary files already, it must then
            be given.
        flat: for "dcp": put the model's tensors at the top level, as torchtitan has them, and not below "model".
        model_only: leave the optimizer out.
        files_from: a directory whose configuration and tokenizer files are copied to the target, for sources without
            them.
        base: for an adapter: the Hugging Face directory of its base, or its name on a hub, which is then downloaded to
            the cache; None = the one that its configuration names.
        max_file_bytes: for "shardwise" and "hf": most bytes of tensors in one file.

    Tensors keep the names that the source has for them. Optimizer state is matched by fqn; state that is known by
    position only is refused. Learning rate schedules and the like go into `extra` if JSON can hold them.

    Raises:
        CheckpointError: the source is not a checkpoint, is damaged, or holds what does not belong there; the target
            exists or cannot be written; `files_from` is not a directory. HubError: the base is a name of a hub that
            cannot be fetched. UnreadableError: the source cannot be read.
            UsageError: the target is a URL.
    """
    save_thread.wait()
    if is_url(target):
        raise UsageError(
            f"{os.fspath(target)} is a URL, but a conversion writes only to a path: convert to a path, and copy it "
            "from there"
        )
    end = Path(os.path.abspath(target))  # noqa: PTH100 - not through links
    with manifest.reading(source):
        kind = kind_of(source)
        if kind is Kind.SHARDWISE and is_adapter(Path(source)):
            kind = Kind.ADAPTER  # a checkpoint of an adapter
        goal = target_kind(kind, end, to)
        if kind is Kind.ADAPTER:
            contents = read_merged(Path(source), None if base is None else os.fspath(base))
        else:
            _refuse_base(source, base)
            contents = read(source, kind, model_only)
    if files_from is not None:
        contents = dataclasses.replace(contents, files=_given_files(Path(files_from)))
    try:
        if kind is Kind.PARTS and goal is Kind.SHARDWISE and not model_only:
            consolidate(Contents.of(source), end)
        else:
            _write(contents, end, goal, flat, max_file_bytes)
    except OSError as error:
        raise CheckpointError(f"{end} cannot be written: {error}") from error
    return _summary(contents, kind, goal)


def read(source: Location, kind: Kind, model_only: bool = False) -> CheckpointContents:
    """Return everything in a checkpoint of a known kind; tensors stay in their files. Raises CheckpointError."""
    path = Path(source)
    if kind.is_own:
        contents = read_checkpoint(source)
    elif kind is Kind.HUGGING_FACE:
        contents = read_hugging_face(path)
    elif kind is Kind.ADAPTER:
        contents = read_adapter(path)
    else:
        try:
            values, refused = read_dcp(path) if kind is Kind.DCP else (read_pt(path), {})
            contents = parse(values, refused, not model_only)
        except CheckpointError as error:
            raise error if str(source) in str(error) else CheckpointError(f"{source}: {error}") from None
    return dataclasses.replace(contents, optimizer=None) if model_only else contents


def _refuse_base(source: Location, base: object) -> None:
    if base is not None:
        raise CheckpointError(
            f"{source} is not a PEFT adapter, and only those are merged into a base: leave --base {base} out"
        )


def _given_files(directory: Path) -> dict[str, bytes]:
    with manifest.reading(directory):
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory}, whose files are to be copied, is not a directory{nearest_path(directory)}"
            )
        return configuration_of(directory)


def _write(contents: CheckpointContents, target: Path, kind: Kind, flat: bool, max_file_bytes: int) -> None:
    if kind is Kind.DCP:
        write_dcp(contents, target, flat)
    elif kind is Kind.PT:
        write_pt(contents, target)
    elif kind is Kind.SHARDWISE:
        write_checkpoint(contents, target, max_file_bytes)
    else:
        write_hugging_face(contents, target, max_file_bytes)


def _summary(contents: CheckpointContents, source: Kind, target: Kind) -> Converted:
    with_optimizer = contents.optimizer is not None and target is not Kind.HUGGING_FACE
    kept = [contents.model, contents.state] if with_optimizer else [contents.model]
    lost = ("the optimizer",) if contents.optimizer is not None and not with_optimizer else ()
    return Converted(
        source,
        target,
        len(contents.model),
        sum(tensor.nbytes for tensors in kept for tensor in tensors.values()),
        sum(bool(state) for state in contents.optimizer["state"].values())
        if contents.optimizer is not None and with_optimizer
        else None,
        contents.step,
        (*contents.left_out, *lost),
    )
