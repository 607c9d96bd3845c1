"""The contents of a checkpoint of any kind, and whether it is whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwise import hub
from shardwise.checkpoint.format import manifest, training_json
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.safetensors_layout import ITEM_BYTES, StoredTensor
from shardwise.checkpoint.format.tensor_files import ADAPTER_CONFIG
from shardwise.checkpoint.interchange.convert import read
from shardwise.checkpoint.interchange.kinds import ADAPTER_WEIGHTS, Kind, kind_of
from shardwise.checkpoint.io.storage import Location, directory_of, is_url
from shardwise.checkpoint.publish import commit
from shardwise.checkpoint.ranks import save_thread
from shardwise.errors import CheckpointError, UnreadableError

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors of one module, including those of its submodules."""

    prefix: str
    tensors: tuple[StoredTensor, ...]

    @property
    def numel(self) -> int:
        """Elements of all its tensors."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def form(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Names without the prefix, dtypes and shapes: equal for modules that only their prefixes tell apart."""
        skip = len(self.prefix)
        return tuple((tensor.name[skip:], tensor.dtype, tensor.shape) for tensor in self.tensors)


@dataclass(frozen=True)
class Inspection:
    """The result of inspecting one checkpoint."""

    location: str
    kind: Kind
    files: dict[str, int]
    """Bytes of each file, by name."""
    damage: tuple[str, ...]
    """The faults that the checks found; empty if there are none."""
    checked: str
    """Which checks were made, in words."""
    model: tuple[ModuleTensors, ...] = ()
    optimizer: dict[str, Any] | None = None
    """The optimizer's groups and state by fqn, in the form of `training.json`."""
    optimizer_bytes: int = 0
    step: int | None = None
    saved_by: int = 0
    """Number of ranks that saved it; 0 if unknown."""
    version: str | None = None
    """Version of the shardwise that wrote it."""
    extra: dict[str, Any] | None = None
    left_out: tuple[str, ...] = field(default=())
    """Names of contents that no other kind has a place for."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A directory that a save did not finish: not a checkpoint."""

    location: str
    files: dict[str, int]


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """One checkpoint directory of a run."""

    name: str
    step: int | None
    """Its step; None if it is not a checkpoint."""
    nbytes: int
    saved_by: int
    damage: tuple[str, ...]
    """Faults that sizes and the manifest show."""
    state: str
    """"committed", "partial" or "damaged"."""


@dataclass(frozen=True, slots=True)
class InspectedRun:
    """A run's directory and its checkpoints, sorted by name."""

    location: str
    checkpoints: tuple[RunCheckpoint, ...]
    has_final: bool


def inspect(
    location: Location, quick: bool = False, progress: Progress | None = None
) -> Inspection | Partial | InspectedRun:
    """Inspect a checkpoint of any kind, a partial one, or a run's checkpoints. No communication.

    Args:
        location: a path, the URL of a checkpoint, or a name on a hub ("org/name", "org/name@revision"), of which only
            the list of files and the headers of the weights are fetched.
        quick: compare sizes and read headers, but compute no checksums.
        progress: called with the number of bytes whose checksum was computed so far, and the number of all bytes.

    Raises CheckpointError, saying what is there instead, if there is nothing of the kind; UnreadableError if storage
    does not answer; HubError if a hub does not have it or cannot be reached. Damage does not raise: it is in the
    result.
    """
    save_thread.wait()
    with manifest.reading(location):
        return _inspect(location, quick, progress)


def _inspect(location: Location, quick: bool, progress: Progress | None) -> Inspection | Partial | InspectedRun:
    name = hub.hub_name(location)
    if name is not None:
        return _of_hub(name, repr(location))
    path = Path(location)
    if not is_url(location) and path.is_dir():
        if path.suffix == commit.PARTIAL:
            return Partial(str(path), _sizes(location))
        run = _run(path)
        if run is not None:
            return run
    kind = kind_of(location)
    found = {}
    damage: list[str] = []
    try:
        found = _found(location, kind)
    except UnreadableError:
        raise
    except (CheckpointError, FileNotFoundError, NotADirectoryError) as error:
        damage.append(str(error))
    checked = "headers and sizes checked" if kind.is_own else "headers and sizes checked; this kind has no checksums"
    if kind.is_own:
        checked = checked if quick else "every byte checked"
        more = [str(error) for error in manifest.damage(location, quick, progress)]
        damage = more or damage  # they say more than the error of `read`
    return Inspection(str(location), kind, _sizes(location), tuple(damage), checked, **found)


def _of_hub(name: hub.HubName, where: str) -> Inspection:
    """Inspect a model on a hub by its list of files and the headers of its weights."""
    listed = hub.listing(name, where)
    adapter = {ADAPTER_CONFIG, ADAPTER_WEIGHTS} <= listed.files.keys()
    paths = [ADAPTER_WEIGHTS] if adapter else hub.weight_files(listed, where)
    folder = hub.cached(listed, paths)
    if folder is not None:
        found = _inspect(str(folder), True, None)
        assert isinstance(found, Inspection)
        return replace(found, location=str(listed.name), files=dict(listed.files))
    tensors = []
    for path, header in hub.headers(listed, paths, where).items():
        for key, tensor in header.tensors.items():
            if tensor.dtype not in ITEM_BYTES:
                raise CheckpointError(f"{where}: {path} has {key!r} in the unknown dtype {tensor.dtype}")
            tensors.append(StoredTensor(key, tensor.dtype, tuple(tensor.shape)))
    checked = "headers read; no weights downloaded"
    kind = Kind.ADAPTER if adapter else Kind.HUGGING_FACE
    return Inspection(str(listed.name), kind, dict(listed.files), (), checked, groups(tensors))


def _found(location: Location, kind: Kind) -> dict[str, Any]:
    """Return the other fields of an `Inspection`. Raises CheckpointError if the checkpoint cannot be read."""
    contents = read(location, kind)
    found: dict[str, Any] = {
        "model": groups([tensor.stored(name) for name, tensor in contents.model.items()]),
        "optimizer": contents.optimizer,
        "optimizer_bytes": sum(tensor.nbytes for tensor in contents.state.values()),
        "step": contents.step or None,
        "extra": contents.extra,
        "left_out": contents.left_out,
    }
    if kind.is_own:
        training = training_json.read(Contents.of(location))
        found.update(step=training["step"], saved_by=training["world_size"], version=training["shardwise"])
    return found


def groups(tensors: list[StoredTensor]) -> tuple[ModuleTensors, ...]:
    """Group tensors by module: up to and including the first number of a name, or else all but its last part; in order
    of appearance."""
    found: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        parts = tensor.name.split(".")[:-1]
        number = next((at for at, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
        found.setdefault(".".join(parts[: number + 1]), []).append(tensor)
    return tuple(
        ModuleTensors(prefix, tuple(sorted(members, key=lambda t: t.name))) for prefix, members in found.items()
    )


def _sizes(location: Location) -> dict[str, int]:
    if not is_url(location) and Path(location).is_file():
        return {Path(location).name: Path(location).stat().st_size}
    directory = directory_of(location)
    return {name: directory.size(name) for name in directory.names() if directory.has(name)}


def _run(path: Path) -> InspectedRun | None:
    """Return the checkpoints of a run's directory or of its `checkpoints`; None if it is neither."""
    if directory_of(path).has(manifest.NAME):
        return None
    inner = path / commit.CHECKPOINTS if (path / commit.CHECKPOINTS).is_dir() else path
    names = [entry for entry in sorted(inner.iterdir()) if entry.is_dir() and entry.name.startswith("step-")]
    has_final = (path / commit.FINAL).is_dir()
    has_begun = has_final or (path / "metrics.jsonl").is_file()
    if not (names or (has_begun and (path / "config.toml").is_file())):
        return None
    return InspectedRun(str(path), tuple(_run_checkpoint(entry) for entry in names), has_final)


def _run_checkpoint(path: Path) -> RunCheckpoint:
    nbytes = sum(_sizes(path).values())
    for suffix in (commit.PARTIAL, commit.DAMAGED):
        if path.suffix == suffix:
            return RunCheckpoint(path.name, None, nbytes, 0, (), suffix[1:])
    try:
        damage = [str(error) for error in manifest.damage(path, quick=True)]
        training = training_json.read(Contents.of(path))
        return RunCheckpoint(path.name, training["step"], nbytes, training["world_size"], tuple(damage), "committed")
    except UnreadableError:
        raise
    except CheckpointError as error:
        return RunCheckpoint(path.name, None, nbytes, 0, (str(error),), "damaged")
