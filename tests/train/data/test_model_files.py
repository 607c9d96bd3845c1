"""What `[model] path` means: weights, tokenizer, and the errors where one of them is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError, HubError
from shardwise.train.config.schema import Config, LogConfig, ModelConfig, TrainConfig
from shardwise.train.data.model_files import has_weights, settled
from tests.hub.cached import put

TINY = {"model_type": "llama", "vocab_size": 2048}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with models: `whole` has everything, the others lack what their names say."""
    monkeypatch.chdir(tmp_path)
    for name, files in {
        "whole": ("config.json", "model.safetensors", "tokenizer.json"),
        "sharded": ("config.json", "model.safetensors.index.json", "tokenizer.model"),
        "no-tokenizer": ("config.json", "model.safetensors"),
        "no-weights": ("config.json", "tokenizer.json"),
        "no-anything": ("config.json",),
        "pickled": ("config.json", "pytorch_model.bin", "tokenizer.json"),
    }.items():
        Path(name).mkdir()
        for file in files:
            Path(name, file).write_text(json.dumps(TINY) if file == "config.json" else "")
    return tmp_path


def made(model: dict[str, Any], **data: Any) -> Config:
    sections: dict[str, Any] = {"model": model, "data": data, "train": {"steps": 1}, "log": {"name": "x"}}
    return Config.model_validate(sections)


@pytest.mark.parametrize(
    ("model", "data", "pretrained", "tokenizer"),
    [
        ({"path": "whole"}, {}, "whole", "whole"),
        ({"path": "sharded"}, {}, "sharded", "sharded"),
        ({"path": "whole/config.json"}, {}, "whole", "whole"),
        ({"path": "whole", "weights": "random"}, {}, None, "whole"),
        ({"path": "whole"}, {"tokenizer": "bytes"}, "whole", "bytes"),
        ({"path": "whole"}, {"tokenizer": "no-weights"}, "whole", "no-weights"),
        ({"path": "no-weights", "weights": "random"}, {}, None, "no-weights"),
        ({"path": "no-anything", "weights": "random"}, {}, None, "bytes"),
        ({"path": "no-anything", "weights": "whole"}, {}, "whole", "whole"),
        ({"path": "no-weights", "weights": "whole"}, {}, "whole", "no-weights"),
        ({"path": "no-tokenizer"}, {"tokenizer": "bytes"}, "no-tokenizer", "bytes"),
        ({"config": TINY}, {}, None, "bytes"),
        ({"config": TINY, "weights": "no-tokenizer"}, {}, "no-tokenizer", "bytes"),
        ({"factory": "a:b", "weights": "random"}, {}, None, "bytes"),
    ],
)
def test_weights_and_tokenizer_are_the_models_unless_said_otherwise(
    model: dict[str, Any], data: dict[str, Any], pretrained: str | None, tokenizer: str
) -> None:
    config = settled(made(model, **data))
    assert (config.model.pretrained, config.data.tokenizer) == (pretrained, tokenizer)
    assert settled(config) == config


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"path": "no-weights"},
            r"^model\.path='no-weights' has no weights \(model.safetensors or .*name a model that has them .*"
            r'set model\.weights = "random" to train from random numbers$',
        ),
        ({"path": "no-weights/config.json"}, r"^model\.path='no-weights/config.json' has no weights"),
        ({"path": "pickled"}, r"^model\.path='pickled' has its weights only as pickles \(pytorch_model.bin\)"),
        ({"path": "no-tokenizer"}, r"^no-tokenizer has weights but no tokenizer .*set data\.tokenizer to .*\"bytes\""),
        ({"path": "whole", "weights": "no-anything"}, r"^model\.weights='no-anything' has no weights"),
        (
            {"path": "whole", "weights": "gpt2"},
            r"^model\.weights='gpt2': no such .*; a model on a hub is named org/name",
        ),
        (
            {"config": TINY, "weights": "whale"},
            r"^model\.weights='whale': no such file or directory; did you mean whole",
        ),
        ({"path": "unset"}, r"^model\.path is not set"),
    ],
)
def test_what_is_missing_is_one_clear_error(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settled(made(model))


def test_a_name_of_a_hub_that_is_not_in_the_cache(folder: Path) -> None:
    """Tests set HF_HUB_OFFLINE."""
    (folder / "models").mkdir()
    (folder / "models" / "whole").symlink_to(folder / "whole")
    with pytest.raises(HubError, match=r"^model\.path='models/whale': no such file .*did you mean models/whole\? and"):
        settled(made({"path": "models/whale"}))
    with pytest.raises(HubError, match=r"^data\.source='org/rows': .* HF_HUB_OFFLINE=1 forbids to fetch it"):
        settled(made({"config": TINY}, source="org/rows"))


def test_sections_without_a_path_have_no_directory() -> None:
    assert ModelConfig(config=TINY).directory is None
    assert Config(model=ModelConfig(config=TINY), train=TrainConfig(steps=1), log=LogConfig(name="x")).hub.private
    assert has_weights("whole")
    assert not has_weights("pickled")


def test_a_name_of_a_hub_is_pinned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = put(folder / "whole", "org/whole", folder / "cache", monkeypatch)
    config = settled(made({"path": "org/whole"}))
    assert (config.model.path, config.model.pretrained, config.data.tokenizer) == (pinned, pinned, pinned)
    assert settled(config) == config
    assert settled(made({"path": "org/whole", "weights": "random"})).model.pretrained is None
    assert settled(made({"config": TINY}, tokenizer="org/whole")).data.tokenizer == pinned
    put(folder / "no-weights", "org/bare", folder / "cache", monkeypatch)
    with pytest.raises(HubError, match=r'^model\.path=.org/bare@.* or set model\.weights = "random"'):
        settled(made({"path": "org/bare"}))
    assert settled(made({"path": "org/bare", "weights": "org/whole"})).model.pretrained == pinned
