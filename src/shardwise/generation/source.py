"""What `shardwise generate` was given: a checkpoint, a run, an adapter with its base, a name on a hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise import hub
from shardwise.checkpoint import latest
from shardwise.checkpoint.format.tensor_files import ADAPTER_CONFIG
from shardwise.checkpoint.interchange.kinds import Kind, is_adapter, kind_of
from shardwise.checkpoint.interchange.merging import find_base, read_config
from shardwise.checkpoint.io.storage import is_url
from shardwise.errors import CheckpointError, ConfigError
from shardwise.suggest import nearest_path
from shardwise.train.data.model_files import TOKENIZER_FILES, has_tokenizer
from shardwise.train.run.directory import RunDirectory

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Source:
    """Directories of this machine that a model is read from."""

    weights: Path
    """Has `config.json` and the weights of the whole model, or of the base."""
    adapter: Path | None
    """A PEFT adapter for those weights."""
    tokenizer: Path
    chat_template: str | None = None
    """Replaces the tokenizer's own."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are stored, without the adapter's."""
        return sum(path.stat().st_size for path in self.weights.glob("model*.safetensors"))


def find_source(
    checkpoint: str,
    base: str | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    say: Callable[[str], None] = print,
) -> Source:
    """Return the directories of a checkpoint, after downloading what is named on a hub. No communication.

    Args:
        checkpoint: `final/`, a step's directory, a run (its `final/`, else its newest checkpoint), a PEFT adapter, any
            Hugging Face directory, or "org/name[@revision]" on a hub.
        base: of an adapter, instead of the one that its configuration names: a directory or a hub's name.
        tokenizer: a directory or a hub's name, instead of the tokenizer beside the weights or the adapter.
        chat_template: a Jinja template, instead of the tokenizer's.
        say: takes the line about a download.

    Raises:
        CheckpointError, HubError: there is no such model, or it is of a kind that cannot be read by ranges.
        ConfigError: it has no `config.json` or no tokenizer.
    """
    path = _fetched(checkpoint, say) if hub.hub_name(checkpoint) is not None else _found(checkpoint)
    adapter = path if is_adapter(path) else None
    if adapter is None and base is not None:
        raise CheckpointError(f"{checkpoint} is not a PEFT adapter, and only those have a base: leave --base out")
    weights = path if adapter is None else find_base(adapter, base, read_config(adapter))
    if not (weights / CONFIG).is_file():
        raise ConfigError(
            f"{weights} has no {CONFIG}: only models of transformers generate; if it is the checkpoint of one, copy "
            f"its {CONFIG} there"
        )
    return Source(weights, adapter, _tokenizer(tokenizer, path, weights), chat_template)


def _fetched(name: str, say: Callable[[str], None]) -> Path:
    folder = hub.fetch(name, repr(name))
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file():
        return hub.fetch_adapter(name, repr(name))
    return hub.fetch(name, repr(name), weights=True, say=say)


def _found(text: str) -> Path:
    if is_url(text):
        raise CheckpointError(f"{text} is a URL, and generation reads local files: copy the directory first")
    path = Path(text)
    if not path.exists():
        raise CheckpointError(
            f"{text}: no such directory{nearest_path(path) or '; a model on a hub is named org/name'}"
        )
    run = RunDirectory(path)
    if run.final.is_dir():
        return run.final
    if run.checkpoints.is_dir():
        newest = latest(path)
        if newest is None:
            raise CheckpointError(f"{text} is a run without a checkpoint: there is no model in it yet")
        return Path(newest)
    kind = kind_of(path)
    if kind in {Kind.DCP, Kind.PT}:
        raise CheckpointError(
            f"{text} has no model that ranks can read by ranges: convert it first (shardwise convert {text} TARGET "
            f"--to hf --files-from MODEL, where MODEL has its {CONFIG} and tokenizer)"
        )
    return path


def _tokenizer(given: str | None, path: Path, weights: Path) -> Path:
    if given is not None:
        folder = hub.fetch(given, f"--tokenizer {given}")
        if not has_tokenizer(folder):
            raise ConfigError(f"--tokenizer {given}: no tokenizer there ({TOKENIZER_FILES[0]} or the like)")
        return folder
    for folder in (path, weights):
        if has_tokenizer(folder):
            return folder
    raise ConfigError(
        f"{path} has no tokenizer ({TOKENIZER_FILES[0]} or the like): give the one that belongs to it with --tokenizer"
    )
