"""MODEL, in all its forms."""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import HubError, PlanError
from shardwise.plan.dry_run.recording import Kernel
from shardwise.plan.models.source import resolve, shapes
from shardwise.train.config.files import _toml_value
from tests.hub.cached import put

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}

OWN = """
import torch
x = 3
built = torch.nn.Linear(2, 2)
def wide(width, *more, bias, kind=None): ...
def make(width=2, *more, **rest): return torch.nn.Linear(width, width)
"""


def built(model: object, attention: str = "sdpa") -> nn.Module:
    with torch.device("meta"):
        return resolve(model).builder(attention)()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(shapes()))
def test_a_packaged_shape_has_the_parameters_that_its_source_counts(name: str) -> None:
    shape = shapes()[name]
    assert shape.source.startswith("https://")
    model = built(name)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == pytest.approx(shape.parameters, rel=0.003 if shape.parameters % 1_000_000 == 0 else 0)
    assert model.training


def test_issue_names_are_there() -> None:
    wanted = (
        "llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3-405b gpt-3-175b mixtral-8x7b mixtral-8x22b"
    )
    assert set(wanted.split()) | {"vit-l-16", "vit-h-14", "vit-g-14"} <= shapes().keys()


def test_a_directory_a_file_a_dict_and_a_factory_are_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**TINY, "torch_dtype": "bfloat16", "transformers_version": "4.0"})
    )
    own = {key: value for key, value in TINY.items() if key != "model_type"}
    (tmp_path / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"def make():\n    return LlamaForCausalLM(LlamaConfig(**{own}))\n"
    )
    monkeypatch.chdir(tmp_path)
    models = [built(form) for form in (".", "config.json", tmp_path, TINY, "own:make")]
    assert len({tuple((n, p.shape, p.dtype) for n, p in model.named_parameters()) for model in models}) == 1
    sections = [resolve(form).model_section() for form in ("config.json", TINY, "own:make")]  # type: ignore[arg-type]
    assert sections == [{"path": "config.json"}, {"config": TINY}, {"factory": "own:make"}]
    with pytest.raises(PlanError, match="give the model as module:function"):
        resolve(lambda: models[0]).model_section()


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "llama-3-405b", "mixtral-8x7b", "vit-l-16"])
def test_a_shape_goes_into_a_training_configuration(name: str) -> None:
    section = resolve(name).model_section()["config"]
    assert tomllib.loads(tomli(section)) == section
    again = built(section)
    assert [p.shape for p in again.parameters()] == [p.shape for p in built(name).parameters()]
    for key in ("rope_theta", "rope_scaling"):
        assert key not in section
    if section["model_type"] == "llama":
        assert again.config.rope_parameters == built(name).config.rope_parameters  # type: ignore[union-attr]


def tomli(section: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {_toml_value(value)}" for key, value in section.items())


def test_attention_reaches_the_model() -> None:
    assert built(TINY, "eager").config._attn_implementation == "eager"  # type: ignore[union-attr]
    assert built(TINY).config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    with pytest.raises(PlanError, match=r"attention='flash': must be one of sdpa, eager"):
        resolve(TINY).builder("flash")


def test_a_configuration_without_architectures_gets_the_head_of_its_kind() -> None:
    vit = {
        "model_type": "vit",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    assert type(built(vit)).__name__ == "ViTForImageClassification"
    assert type(built({**TINY, "architectures": ["LlamaModel"]})).__name__ == "LlamaModel"


T5 = {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 320}
WHISPER = {
    "model_type": "whisper", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 320, "pad_token_id": 0,
    "max_source_positions": 50,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"), [(T5, "T5ForConditionalGeneration"), (WHISPER, "WhisperForConditionalGeneration")]
)
def test_what_has_an_encoder_is_built_and_run_with_it(config: dict[str, Any], name: str) -> None:
    model = built(config)
    assert type(model).__name__ == name
    planned = sw.plan.forecast(config, gpus_per_node=2, seq_len=16)
    assert planned.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert any("encoder" in event.module for event in planned.recording.events if isinstance(event, Kernel))


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("llama-3-8bb", "MODEL 'llama-3-8bb' was not found; did you mean llama-3-8b"),
        ("nothing-like-it", "was not found; the packaged shapes are gpt-3-175b, .* give a config.json"),
        ("confg.json", "MODEL 'confg.json' was not found; did you mean config.json"),
        ("empty", "'empty' is a directory without a config.json"),
        ("broken.json", "broken.json is not JSON"),
        ("run.toml", "run.toml is not JSON: .*; to plan with the settings of a run, use --from"),
        ("x" * 256, "MODEL 'x*' was not found"),
        ("config.json", 'has no "model_type"'),
        ({"model_type": "lama"}, "model_type 'lama' is unknown to transformers; did you mean llama"),
        ({"hidden_size": 3}, 'needs a "model_type"'),
        ("nowhere:make", "'nowhere:make': nowhere cannot be imported: No module named 'nowhere'"),
        ("torch.nn:Linaer", "torch.nn has no Linaer; did you mean Linear"),
        ("broken:make", "'broken:make': broken cannot be imported: ZeroDivisionError: division by zero"),
        ("leaving:make", "'leaving:make': leaving cannot be imported: SystemExit: 3"),
        ("own:x", "MODEL 'own:x' is of type int, not a function: name a function that builds the model"),
        ("own:built", "MODEL 'own:built' is of type Linear, not a function: name a function that builds the model"),
        ("own:wide", r"MODEL 'own:wide' needs arguments \(width, bias\): name a function that needs none"),
        (nn.Linear(2, 2), "is a Linear that is already built"),
    ],
)
def test_what_is_no_model_is_one_line(
    model: object, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)")
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "run.toml").write_text("[train]")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PlanError, match=line) as caught:
        resolve(model)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert "did you mean empty" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({**TINY, "num_hidden_layers": -1}, "invalid llama configuration: num_hidden_layers=-1 is less than 0"),
        ({**TINY, "num_hidden_layers": "three"}, "transformers cannot build this llama: "),
        ("builtins:dict", "'builtins:dict' returned a dict, not a torch.nn.Module"),
    ],
)
def test_what_cannot_be_built_says_so_when_it_is(model: object, line: str) -> None:
    with pytest.raises(PlanError, match=line):
        built(model)


def test_arguments_that_may_be_left_out_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lax.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert isinstance(built("lax:make"), nn.Linear)


def test_positions() -> None:
    assert resolve("gpt2").positions == 1024
    assert resolve("llama-3-8b").positions == 8192
    assert resolve("vit-l-16").positions is None
    assert resolve("torch.nn:Identity").positions is None
    assert resolve({"model_type": "xlnet"}).positions is None  # transformers says -1: any


def test_a_name_of_a_hub_is_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without weights in the cache: a plan needs none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").write_text(json.dumps(TINY))
    pinned = put(tmp_path / "made", "org/tiny", tmp_path / "cache", monkeypatch)
    for name in ("org/tiny", pinned):
        source = resolve(name)
        assert (source.title, source.path, source.config) == (name, name, TINY)
    with pytest.raises(HubError, match=r"^MODEL 'org/other': no such file or directory here, and org/other is not"):
        resolve("org/other")
    (tmp_path / "org" / "tiny").mkdir(parents=True)  # a path wins
    with pytest.raises(PlanError, match=r"MODEL 'org/tiny' is a directory without a config\.json"):
        resolve("org/tiny")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "README.md").touch()
    put(tmp_path / "bare", "org/bare", tmp_path / "cache", monkeypatch)
    with pytest.raises(HubError, match=r"^MODEL 'org/bare': org/bare has no config\.json"):
        resolve("org/bare")
