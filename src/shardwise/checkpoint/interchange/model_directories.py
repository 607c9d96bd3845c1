"""CHECKPOINT, as commands take it: the directories of a model of transformers, of a run, an adapter or a hub's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise import hub
from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.tensor_files import ADAPTER_CONFIG
from shardwise.checkpoint.interchange.kinds import Kind, is_adapter, kind_of
from shardwise.checkpoint.interchange.merging import find_base, read_config
from shardwise.checkpoint.io.storage import is_url
from shardwise.checkpoint.publish import commit
from shardwise.errors import CheckpointError

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class ModelDirectories:
    """Directories of this machine in which a model of transformers is."""

    weights: Path
    """Has `config.json` and the weights of the whole model, or of the adapter's base."""
    adapter: Path | None
    """A PEFT adapter for those weights."""

    @property
    def tokenizer(self) -> Path | None:
        """The directory with the tokenizer: the adapter's own comes first. None if there is none."""
        return next((path for path in (self.adapter, self.weights) if path and hub.has_tokenizer(path)), None)


def find_model(
    checkpoint: str, base: str | None = None, *, weights: bool = True, say: Callable[[str], None] = hub.say_nothing
) -> ModelDirectories:
    """Return the directories of a checkpoint, after downloading what is named on a hub. No communication.

    Args:
        checkpoint: `final/`, a step's directory, a run (its `final/`, else its newest checkpoint), a PEFT adapter, any
            Hugging Face directory, or "org/name[@revision]" on a hub.
        base: of an adapter, instead of the one that its configuration names: a directory or a hub's name.
        weights: False downloads only configurations and tokenizers, and adapters.
        say: takes the line about a download.

    Raises:
        CheckpointError, HubError: there is no such model, it has no `config.json`, or its weights cannot be read by
            byte range.
    """
    path = _local(checkpoint) if hub.hub_name(checkpoint) is None else _fetched(checkpoint, weights, say)
    adapter = path if is_adapter(path) else None
    if adapter is None and base is not None:
        raise CheckpointError(
            f"{checkpoint} is not a PEFT adapter, and only those have a base: leave --base {base} out"
        )
    if adapter is not None:
        with manifest.reading(adapter):
            path = find_base(adapter, base, read_config(adapter), weights=weights)
    if not (path / CONFIG).is_file():
        raise CheckpointError(
            f"{path} has no {CONFIG}, so it is no model of transformers; if it is the checkpoint of one, copy its "
            f"{CONFIG} there"
        )
    return ModelDirectories(path, adapter)


def _fetched(name: str, weights: bool, say: Callable[[str], None]) -> Path:
    folder = hub.fetch(name, repr(name))
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file():
        return hub.fetch_adapter(name, repr(name))
    return hub.fetch(name, repr(name), weights=True, say=say) if weights else folder


def _local(text: str) -> Path:
    """Return the directory that a path means: itself, or that of a run's newest model."""
    if is_url(text):
        raise CheckpointError(f"{text} is a URL, and only local files are read here: copy the directory first")
    hub.check_there(text)
    path = Path(text)
    with manifest.reading(path):
        if not (path / CONFIG).is_file() and not is_adapter(path):
            path = _newest_of_run(path)
        kind = kind_of(path)
    if kind in {Kind.DCP, Kind.PT, Kind.PARTS}:
        raise CheckpointError(
            f"{text} has no model in files that can be read by byte range: convert it first (shardwise convert {text} "
            f"DIR --to hf --files-from MODEL, where MODEL has its {CONFIG} and tokenizer)"
        )
    return path


def _newest_of_run(path: Path) -> Path:
    """Return a run's `final/`, else its newest checkpoint; any other path as it is."""
    if (path / commit.FINAL).is_dir():
        return path / commit.FINAL
    newest = None if (path / manifest.NAME).is_file() else commit.latest(path)
    if newest is not None:
        return Path(newest)
    if (path / commit.CHECKPOINTS).is_dir():
        raise CheckpointError(f"{path} is a run without a checkpoint: there is no model in it yet")
    return path
