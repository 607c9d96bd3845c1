"""`shardwise push` and `[hub] push_to`: a trained model to a hub, with a model card. No torch."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardwise import hub
from shardwise.checkpoint.format import manifest, names_json, training_json
from shardwise.checkpoint.format.tensor_files import ADAPTER, ADAPTER_CONFIG, MODEL
from shardwise.errors import CheckpointError, HubError
from shardwise.suggest import nearest_path
from shardwise.train.config.schema import Config
from shardwise.train.config.tasks import DEFAULT, KINDS, TaskName, task_for
from shardwise.train.run.directory import RunDirectory

CARD = "README.md"
_OWN = (manifest.NAME, training_json.NAME, names_json.NAME)
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_TEXTS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_SETTINGS = {
    "train": ("steps", "global_batch", "optimizer", "lr", "schedule", "warmup_steps", "weight_decay", "clip", "seed"),
    "data": ("source", "subset", "split", "seq_len", "tokenizer"),
    "lora": ("r", "alpha", "dropout", "targets", "base"),
    "parallel": ("ranks", "strategy", "param_dtype"),
}
"""Keys of the run's configuration that the card lists."""


def push(checkpoint: Path, name: str, private: bool = True) -> str:
    """Upload a model and its card. Returns the address of the repository.

    Args:
        checkpoint: a run's directory (its `final/`), a checkpoint, or any Hugging Face directory. The optimizer and the
            state of training stay here. A `README.md` in it is taken as the card.
        name: "org/name".
        private: whether a repository that is created is private.

    Raises:
        CheckpointError: there is no model that transformers or PEFT could load, or it is damaged.
        HubError: it cannot be uploaded.
    """
    final = RunDirectory(checkpoint).final
    directory = final if final.is_dir() else checkpoint
    files = _files(directory)
    contents: dict[str, Path | bytes] = dict(files)
    if CARD not in files:
        contents[CARD] = card(directory, name).encode()
    return hub.upload(name, contents, private, f"{directory.name} of a run of shardwise {version('shardwise')}")


def push_final(config: Config, say: Callable[[str], None]) -> None:
    """Upload a finished run's model to `hub.push_to`, if that is set. Raises HubError, which says how to try again."""
    name = config.hub.push_to
    if name is None:
        return
    say(f"uploading {RunDirectory(config.run_directory).final} to {name}")
    try:
        say(f"uploaded: {push(config.run_directory, name, config.hub.private)}")
    except HubError as error:
        again = f"shardwise push {config.run_directory} {name}"
        raise HubError(f"{error}; the run is finished, and `{again}` uploads it") from error


def _files(directory: Path) -> dict[str, Path]:
    """Return the files of a model by name. Raises CheckpointError if a directory has none, or a damaged one."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory{nearest_path(directory)}")
    adapter = _is_adapter(directory)
    if not adapter and not any((directory / name).is_file() for name in (hub.SINGLE, hub.INDEX)):
        raise CheckpointError(
            f"{directory} has no {hub.SINGLE} and no {hub.INDEX}, so nobody could load it from a hub: if it is a "
            f"checkpoint of another kind, convert it first (shardwise convert {directory} TARGET --to hf)"
        )
    if (directory / manifest.NAME).is_file():
        for fault in manifest.damage(directory, quick=True):
            raise CheckpointError(f"{fault}; it is not uploaded")
    stem = ADAPTER if adapter else MODEL
    found = {path.name: path for path in sorted(directory.iterdir()) if path.is_file() and path.name not in _OWN}
    is_of_index = set(_shards(directory))
    return {
        name: path
        for name, path in found.items()
        if name == CARD
        or name in is_of_index
        or (name.startswith(stem) and name.endswith(_WEIGHTS))
        or (name.endswith(_TEXTS) and not name.endswith(_WEIGHTS))
    }


def _is_adapter(directory: Path) -> bool:
    return all((directory / name).is_file() for name in (ADAPTER_CONFIG, f"{ADAPTER}.safetensors"))


def _shards(directory: Path) -> list[str]:
    try:
        return list(json.loads((directory / hub.INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def card(directory: Path, name: str) -> str:
    """Return a model card in Markdown: the base, the data, the settings, the losses and how to load the model.

    directory: of the model; what the run's own directory says about the run is included.
    """
    places = (directory.parent, directory.parent.parent)
    run = next((place for place in places if (place / "config.toml").is_file()), None)
    config = {} if run is None else tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    adapter = _is_adapter(directory)
    base = _base(directory, config, adapter)
    data = config.get("data", {})
    sources = [one["source"] for one in data.get("sources", [data]) if "source" in one]
    task = _task(directory, config)
    sections = [_head(base, sources, adapter, (directory / "config.json").exists(), task), f"# {name}", ""]
    what = "A LoRA adapter" if adapter else "A model"
    sections.append(f"{what} trained with shardwise {version('shardwise')}, from {base or 'random weights'}.")
    if sources:
        sections.append(f"Data: {', '.join(f'`{source}`' for source in sources)}.")
    sections += [
        *_settings(config),
        *([] if run is None else _losses(run)),
        *_loading(directory, name, (base or "the base") if adapter else None, task),
    ]
    return "\n".join(sections) + "\n"


def _base(directory: Path, config: Mapping[str, Any], adapter: bool) -> str | None:
    """Return the name of the model that training started from; None for random weights, or if it is not known."""
    if adapter:
        read = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        return read.get("base_model_name_or_path") or None
    model = config.get("model", {})
    weights = model.get("weights", "path")
    return None if weights == "random" else model.get("path") if weights == "path" else str(weights)


def _task(directory: Path, config: Mapping[str, Any]) -> TaskName:
    """Return the task that a model was trained for: the run's, or else that of its class."""
    task: TaskName | None = config.get("model", {}).get("task")
    if task is not None or not (directory / "config.json").exists():
        return task or DEFAULT
    return task_for(json.loads((directory / "config.json").read_text(encoding="utf-8")))


def _head(base: str | None, sources: Sequence[str], adapter: bool, is_transformers: bool, task: TaskName) -> str:
    """Return the metadata that the hub reads."""
    found: dict[str, str] = {}
    model = None if base is None else hub.hub_name(base)
    named = [name for source in sources if (name := hub.hub_name(source)) is not None]
    if model is not None:
        found["base_model"] = model.repository
        found["base_model_relation"] = "adapter" if adapter else "finetune"
    if named:
        found["datasets"] = f"[{', '.join(name.repository for name in named)}]"
    if adapter or is_transformers:
        found["library_name"] = "peft" if adapter else "transformers"
        found["pipeline_tag"] = KINDS[task].pipeline
    found["tags"] = "[shardwise]"
    return "\n".join(["---", *(f"{key}: {value}" for key, value in found.items()), "---", ""])


_READERS = {"processor_config.json": "AutoProcessor", "preprocessor_config.json": "AutoImageProcessor"}
"""transformers' Auto class of what reads pictures, by its file; the first that is there counts."""
_OF_PEFT = frozenset({"causal-lm", "seq2seq-lm"})
"""Tasks whose models and adapters PEFT loads in one call."""


def _settings(config: Mapping[str, Any]) -> list[str]:
    rows = [
        f"| `{section}.{key}` | `{config[section][key]}` |"
        for section, keys in _SETTINGS.items()
        if not (section == "lora" and not config.get("lora", {}).get("r"))
        for key in keys
        if key in config.get(section, {})
    ]
    return ["", "## Settings", "", "| key | value |", "|---|---|", *rows] if rows else []


def _losses(run: Path) -> list[str]:
    directory = RunDirectory(run)
    steps, held_out = _lines(directory.metrics), _lines(directory.evaluations)
    rows = [f"| {line['step']} | {line['loss']:.4f} | training |" for line in (*steps[:1], *steps[1:][-1:])]
    rows += [f"| {line['step']} | {line['loss']:.4f} | held out{_metrics(line)} |" for line in held_out]
    if not rows:
        return []
    return ["", "## Losses", "", "In nats per target.", "", "| step | loss | on |", "|---|---|---|", *rows]


def _metrics(line: Mapping[str, Any]) -> str:
    """Return the metrics of an evaluation in words; empty without any."""
    found = {name: value for name, value in line.items() if name != "loss" and isinstance(value, float)}
    return f" ({', '.join(f'{name} {value:.4g}' for name, value in found.items())})" if found else ""


def _lines(log: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def _loading(directory: Path, name: str, base: str | None, task: TaskName) -> list[str]:
    """Return how to load a model. base: that of an adapter."""
    auto, adapter = KINDS[task].auto, base is not None
    if adapter and task in _OF_PEFT:
        whole = auto.replace("Auto", "AutoPeft", 1)
        lines = [f"from peft import {whole}", "", f'model = {whole}.from_pretrained("{name}")']
    elif adapter:
        lines = ["from peft import PeftModel", f"from transformers import {auto}", ""]
        lines.append(f'model = PeftModel.from_pretrained({auto}.from_pretrained("{base}"), "{name}")')
    elif (directory / "config.json").exists():
        reader = next((reader for file, reader in _READERS.items() if (directory / file).exists()), "AutoTokenizer")
        imports = ", ".join(sorted([auto, reader]))
        lines = [f"from transformers import {imports}", "", f'model = {auto}.from_pretrained("{name}")']
        if reader != "AutoTokenizer":
            lines.append(f'processor = {reader}.from_pretrained("{name}")')
            return ["", "## How to load it", "", "```python", *lines, "```"]
    else:
        lines = ["from huggingface_hub import hf_hub_download", "from safetensors.torch import load_file", ""]
        lines.append(f'state = load_file(hf_hub_download("{name}", "{hub.SINGLE}"))')
    if (directory / "tokenizer_config.json").exists():
        if adapter:
            lines.insert(1, "from transformers import AutoTokenizer")
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{name}")')
    return ["", "## How to load it", "", "```python", *lines, "```"]
